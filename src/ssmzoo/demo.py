"""The main job on real input, in minutes on a laptop's CPU: ``make demo``.

Train a small Longhorn and, on the same tokens, transformers' Mamba2 of equal size; score both on
held-out files and on a recall task; write the card; publish into a folder; load that folder in a
fresh process and let it write.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HELD_OUT_BYTES = 120_000
PIECE = 4_000  # characters of a piece, where the user's text is one long document
SEED = 0
MODELS = {"longhorn": "longhorn-demo", "mamba2": "mamba2-demo"}
TASKS = ("ssmzoo_bits_per_byte", "ssmzoo_recall_text")
LOAD = """
import sys, torch, ssmzoo.auto
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
torch.manual_seed(0)
ids = tokenizer(prompt, return_tensors="pt").input_ids
out = model.generate(ids, max_new_tokens=160, do_sample=True, top_p=0.9, temperature=0.7)
sys.stdout.write(tokenizer.decode(out[0]))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ssmzoo.demo", description=__doc__)
    parser.add_argument("--text", help="file or folder to train on (default: Python's own library)")
    parser.add_argument("--output", type=Path, default=Path("demo"), help="default: demo")
    parser.add_argument("--steps", type=int, help="training steps (default: the recipes')")
    options = parser.parse_args(arguments)
    try:
        run(options.text, options.output, options.steps)
    except (ValueError, TypeError, LookupError, RuntimeError, OSError) as error:
        sys.stderr.write(f"demo: error: {error}\n")
        return 2
    return 0


def run(text: str | None, output: Path, steps: int | None) -> None:
    """Do the whole job and print what came of it."""
    import ssmzoo.auto  # noqa: F401
    from ssmzoo.card import render_card
    from ssmzoo.evaluate import evaluate
    from ssmzoo.hub import publish
    from ssmzoo.train import train

    begun = time.perf_counter()
    if output.exists():
        if not (output / "text").is_dir() and any(output.iterdir()):
            raise ValueError(f"{output} exists and is no earlier demo; choose another --output")
        shutil.rmtree(output)
    files, held_out = split_text(text, output / "text")
    say(f"text: {files} documents to train on, {held_out} held out, in {output / 'text'}")
    results: dict[str, Path] = {}
    for name, recipe in MODELS.items():
        say(f"training {name} (recipe {recipe})")
        overrides = [
            f"data.text={output / 'text' / 'train'}",
            f"data.validation=[{output / 'text' / 'held-out'}]",
        ]
        if steps is not None:
            overrides.append(f"train.steps={steps}")
        train(recipe, output_dir=output / name, overrides=overrides)
        say(f"scoring {name}")
        results[name] = evaluate(
            str(output / name / "model"),
            tasks=TASKS,
            text=output / "text" / "held-out",
            output_dir=output / "results",
            name=name,
            batch_size=16,
        )
    model = output / "longhorn" / "model"
    say("writing the card and publishing into a folder")
    render_card(model, results=list(results.values()), run_dir=output / "longhorn")
    publish(model, str(output / "published"))
    say("loading what was published in a fresh process")
    sample = subprocess.run(
        [sys.executable, "-c", LOAD, str(output / "published"), "def "],
        capture_output=True,
        text=True,
        check=False,
    )
    if sample.returncode:
        raise RuntimeError(f"the published folder does not load: {sample.stderr.strip()[-500:]}")
    say(f"\n{sample.stdout}\n")
    say(table(output, results))
    say(closing(output, time.perf_counter() - begun))


def split_text(text: str | None, target: Path) -> tuple[int, int]:
    """Write the documents to train on and those held out into two folders.

    Args:
        text: A file or folder, or None for the standard library's sources and documentation.
        target: Where ``train`` and ``held-out`` go.

    Returns:
        How many documents each holds.

    Raises:
        ValueError: No text, or too little of it.
    """
    from ssmzoo.documents import STDLIB, expand, read_files

    files = expand([text or STDLIB], "TEXT")
    documents = [content for _, content in read_files("text", files, "text", skip_binary=True)]
    if len(documents) < 20:
        documents = [piece for content in documents for piece in pieces(content)]
    random.Random(SEED).shuffle(documents)
    total = sum(map(len, documents))
    goal = min(HELD_OUT_BYTES, total // 10)
    held_out: list[str] = []
    while documents and sum(map(len, held_out)) < goal:
        held_out.append(documents.pop())
    if not held_out or not documents:
        raise ValueError(f"TEXT must hold some thousand characters at least, got {total}")
    for name, part in (("train", documents), ("held-out", held_out)):
        (target / name).mkdir(parents=True)
        for number, content in enumerate(part):
            (target / name / f"{number:05d}.txt").write_text(content, encoding="utf-8")
    return len(documents), len(held_out)


def pieces(content: str) -> list[str]:
    """Cut a long document at line ends into pieces of about ``PIECE`` characters."""
    cut, size = [[]], 0
    for line in content.splitlines(keepends=True):
        if size > PIECE:
            cut.append([])
            size = 0
        cut[-1].append(line)
        size += len(line)
    return ["".join(lines) for lines in cut if lines]


def table(output: Path, results: dict[str, Path]) -> str:
    """Return the scores and speeds of both models as a small table."""
    lines = [f"{'':10s} {'parameters':>11s} {'tokens/s':>9s} {'bits/byte':>10s} {'recall':>7s}"]
    for name, path in results.items():
        measured = json.loads(path.read_text())
        scores = {row["task"]: row["value"] for row in measured["results"]}
        speeds = [
            row["tokens_per_second"]
            for row in map(json.loads, (output / name / "metrics.jsonl").read_text().splitlines())
            if "tokens_per_second" in row
        ]
        lines.append(
            f"{name:10s} {measured['model']['parameters']:11,d} "
            f"{sorted(speeds)[len(speeds) // 2]:9,.0f} "
            f"{scores[TASKS[0]]:10.3f} {scores[TASKS[1]]:7.3f}"
        )
    return "\n".join(lines)


def closing(output: Path, seconds: float) -> str:
    """Return where everything lies and what to try next."""
    return f"""
done in {seconds / 60:.1f} minutes; everything lies in {output}:
  {output}/published           weights, configuration, tokenizer, card: what a Hub repository holds
  {output}/published/README.md the card; {output}/longhorn/loss.png the curve
  {output}/results             the scores as JSON

next:
  ssmzoo generate {output}/published "class "
  ssmzoo publish {output}/longhorn/model you/longhorn-demo --dry-run
  ssmzoo info longhorn
  make demo TEXT=path/to/your/text"""


def say(line: str) -> None:
    """Print a line at once; this module is a program, not a library."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
