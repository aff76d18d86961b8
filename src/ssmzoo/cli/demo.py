"""The main job on real input, in minutes on a laptop's CPU: ``make demo``.

Train a small Longhorn and, on the same tokens, transformers' Mamba2 of equal size; score both on
held-out files and on a recall task; time some steps of the Mamba2 on our kernels, too; write the
card; publish into a folder; load that folder in a fresh process, as a stranger would, and let it
write. What is done is not done again: the same command, given after an interruption, goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ssmzoo.environment.portable import without_credentials
from ssmzoo.files import read_json, write_folder, write_json

HELD_OUT_BYTES = 120_000
PIECE = 4_000  # characters of a piece, where the user's text is one long document
SEED = 0
MODELS = {"longhorn": "longhorn-demo", "mamba2": "mamba2-demo"}
SPEEDS = "mamba2-speed.json"
TASKS = ("ssmzoo_bits_per_byte", "ssmzoo_recall_text")
# after "def " alone so small a model often writes prose, or nothing but spaces
PROMPT = "import os\nimport sys\n\n\ndef "
LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
torch.manual_seed(0)
ids = tokenizer(prompt, return_tensors="pt").input_ids
out = model.generate(ids, max_new_tokens=160, do_sample=True, top_p=0.9, temperature=0.7)
sys.stdout.write(tokenizer.decode(out[0]))
"""


def demo(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ssmzoo.cli.demo", description=__doc__)
    parser.add_argument("--text", help="file or folder to train on (default: Python's own library)")
    parser.add_argument("--output", type=Path, default=Path("demo"), help="default: demo")
    parser.add_argument("--steps", type=int, help="training steps (default: the recipes')")
    options = parser.parse_args(arguments)
    try:
        run_demo(options.text, options.output, options.steps)
    except KeyboardInterrupt as error:
        sys.stderr.write("\ndemo: interrupted; the same command goes on from here\n")
        return getattr(error, "status", 130)  # a run that was told to stop knows by which signal
    except (ValueError, TypeError, LookupError, RuntimeError, OSError) as error:
        sys.stderr.write(f"demo: error: {without_credentials(' '.join(str(error).split()))}\n")
        return 2
    return 0


def run_demo(text: str | None, output: Path, steps: int | None) -> None:
    """Do the whole job, or what an earlier call left of it, and print what came of it."""
    from ssmzoo.training.checkpoint import locked

    begun = time.perf_counter()
    require_same(text, output, steps)
    with locked(output):
        asked = {"text": place_of(text), "steps": steps}
        facts = output / "demo.json"
        if facts.exists() and "finished" in read_json(facts):
            say(table(output))
            say(f"\n{output} holds a finished demo, and nothing was done again;", end=" ")
            say(f"to start over: rm -r {output}\n{closing(output)}")
            return
        write_json(facts, asked)
        work(text, output, steps)
        write_json(facts, {**asked, "finished": True})
        say(table(output))
        minutes = (time.perf_counter() - begun) / 60
        say(f"\ndone in {minutes:.1f} minutes; everything lies in {output}:\n{closing(output)}")


def require_same(text: str | None, output: Path, steps: int | None) -> None:
    """Fail if a folder holds anything but an earlier call's work on the same task.

    Raises:
        ValueError: It does.
    """
    if not output.is_dir() or {path.name for path in output.iterdir()} <= {".lock"}:
        return
    if not (output / "demo.json").exists():
        raise ValueError(f"{output} exists and holds no earlier demo; choose another --output")
    earlier = read_json(output / "demo.json")
    for name, now in (("text", place_of(text)), ("steps", steps)):
        before = earlier.get(name)
        if before != now:
            default = "the default"
            raise ValueError(
                f"{name.upper()} must stay as the demo in {output} began, {before or default}, got "
                f"{now or default}; start over with: rm -r {output}"
            )


def place_of(text: str | None) -> str | None:
    """Return which text is meant, from wherever it is asked for."""
    return None if text is None else str(Path(text).expanduser().absolute())


def work(text: str | None, output: Path, steps: int | None) -> None:
    """Do what is not done yet of the job."""
    import ssmzoo.auto  # noqa: F401
    from ssmzoo.environment.messages import without_reports
    from ssmzoo.evaluation.evaluate import evaluate
    from ssmzoo.publishing.card import render_card
    from ssmzoo.publishing.hub import publish
    from ssmzoo.training.run import train

    texts = output / "text"
    if not texts.exists():
        write_folder(texts, lambda folder: split_text(text, folder))
    files, held_out = (len(list((texts / name).iterdir())) for name in ("train", "held-out"))
    say(f"text: {files} documents to train on, {held_out} held out, in {texts}")
    overrides = [
        f"data.text={quoted(texts / 'train')}",
        f"data.validation=[{quoted(texts / 'held-out')}]",
        "checkpoint.every=10",  # a demo that was interrupted goes on from there
    ]
    if steps is not None:
        overrides.append(f"train.steps={steps}")
    for name, recipe in MODELS.items():
        folder = output / name
        # transformers tells which faster kernels its Mamba2 could have
        with without_reports():
            if is_trained(folder):
                say(f"{name} is trained")
            else:
                say(f"training {name} (recipe {recipe})")
                # the yardstick as transformers runs it
                train(recipe, output_dir=folder, resume=True, overrides=overrides, stock=True)
            if is_scored(output, name):
                say(f"{name} is scored")
            else:
                say(f"scoring {name}")
                evaluate(
                    folder / "model",
                    tasks=TASKS,
                    text=texts / "held-out",
                    output_dir=output / "results",
                    name=name,
                    batch_size=16,
                    stock=True,
                )
    if not (output / SPEEDS).exists():
        say("timing mamba2 on ssmzoo's kernels, too")
        write_json(output / SPEEDS, speeds_of(output / "mamba2"))
    model, published = output / "longhorn" / "model", output / "published"
    say("writing the card and publishing into a folder")
    results = [output / "results" / f"{name}.json" for name in MODELS]
    render_card(model, results=results, run_dir=output / "longhorn")
    publish(model, published)
    say("loading what was published in a fresh process")
    sample = subprocess.run(
        [sys.executable, "-c", LOAD, str(published.absolute()), PROMPT],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if sample.returncode:
        raise RuntimeError(f"the published folder does not load: {sample.stderr.strip()[-500:]}")
    say(f"\n{sample.stdout}\n")


def speeds_of(run: Path) -> dict[str, float]:
    """Return the tokens per second at which a run's model trains: stock, and on our kernels.

    Steps take turns, so that a slow moment of the machine hits both; the fastest of each counts.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from ssmzoo import accelerate
    from ssmzoo.environment.hardware import usable_device
    from ssmzoo.environment.messages import without_bars, without_reports
    from ssmzoo.recipe import load_recipe

    options, place = load_recipe(run / "recipe.yaml").train, usable_device(None)
    with without_reports(), without_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(run / "model")
    model.to(place).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    shape = (options.batch_size, options.seq_len or 1)
    ids = torch.randint(model.config.vocab_size, shape, device=place)

    def tokens_per_second() -> float:
        begun = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        return ids.numel() / (time.perf_counter() - begun)

    found: dict[str, list[float]] = {"stock": [], "kernels": []}
    for _ in range(3):  # the first to warm up
        with without_reports():
            found["stock"].append(tokens_per_second())
        with accelerate(model):
            found["kernels"].append(tokens_per_second())
    return {name: max(speeds[1:]) for name, speeds in found.items()}


def quoted(path: Path) -> str:
    """Return a path as YAML, whatever characters it has."""
    return json.dumps(str(path), ensure_ascii=False)


def is_trained(run: Path) -> bool:
    """Tell whether a run has come to its end."""
    return (run / "run.json").exists() and "finished" in read_json(run / "run.json")


def is_scored(output: Path, name: str) -> bool:
    """Tell whether a model's results file has all scores of its weights."""
    from ssmzoo.checkpoints.weights import weights_revision
    from ssmzoo.evaluation.results import read_results

    path = output / "results" / f"{name}.json"
    if not path.exists():
        return False
    results = read_results(path)
    ours = results["model"]["revision"] == weights_revision(output / name / "model")
    return ours and {score["task"] for score in results["results"]} >= set(TASKS)


def split_text(text: str | None, target: Path) -> None:
    """Write the documents to train on and those held out into two folders.

    Args:
        text: A file or folder, or None for the standard library's sources and documentation.
        target: Where ``train`` and ``held-out`` go.

    Raises:
        ValueError: No text, or too little of it.
    """
    from ssmzoo.data.documents import expand, read_files
    from ssmzoo.files import STDLIB

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


def table(output: Path) -> str:
    """Return the scores and speeds of both models as a small table, and Mamba2's both ways."""
    lines = [f"{'':10s} {'parameters':>11s} {'tokens/s':>9s} {'bits/byte':>10s} {'recall':>7s}"]
    for name in MODELS:
        measured = read_json(output / "results" / f"{name}.json")
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
    if (output / SPEEDS).exists():
        speeds = read_json(output / SPEEDS)
        lines.append(
            f"mamba2 trains at {speeds['stock']:,.0f} tokens/s on transformers' own code and at "
            f"{speeds['kernels']:,.0f} on ssmzoo's kernels, in turns"
        )
    return "\n".join(lines)


def closing(output: Path) -> str:
    """Return where everything lies and what to try next."""
    return f"""\
  {output}/published           weights, configuration, tokenizer, code, card: a Hub repository
  {output}/published/README.md the card; {output}/longhorn/loss.png the curve
  {output}/results             the scores as JSON

next, where .venv/bin is on the PATH (source .venv/bin/activate):
  ssmzoo generate {output}/published "class "
  ssmzoo publish {output}/longhorn/model you/longhorn-demo --dry-run
  ssmzoo info longhorn
  rm -r {output}; make demo TEXT=path/to/your/text"""


def say(line: str, end: str = "\n") -> None:
    """Print a line at once; this module is a program, not a library."""
    sys.stdout.write(f"{line}{end}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(demo())
