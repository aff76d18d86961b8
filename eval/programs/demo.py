"""The main job on real input, in minutes on a laptop's CPU: ``make demo``.

Train a small Longhorn and, on the same tokens, transformers' Mamba2 of equal size; score both on
held-out files and on a recall task; time some steps of the Mamba2 on our kernels, too; write the
card; publish into a folder; load that folder in a fresh process, as a stranger would, and let it
write. After an interruption the same command goes on; finished stages are not repeated.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared import (
    guarded,
    place_of,
    require_same,
    say,
    score_once,
    split_once,
    table,
    train_once,
    whole_steps,
)

from ssmzoo.files import STDLIB, read_json, write_json

MODELS = {"longhorn": "longhorn-demo", "mamba2": "mamba2-demo"}
SPEEDS = "mamba2-speed.json"
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
    parser = argparse.ArgumentParser(prog="python eval/programs/demo.py", description=__doc__)
    parser.add_argument("--text", help="file or folder to train on (default: Python's own library)")
    parser.add_argument("--output", type=Path, default=Path("demo"), help="default: demo")
    parser.add_argument("--steps", help="training steps (default: the recipes')")
    options = parser.parse_args(arguments)
    return guarded(
        "demo", lambda: run_demo(options.text, options.output, whole_steps(options.steps))
    )


def run_demo(text: str | None, output: Path, steps: int | None) -> None:
    """Do the whole job, or go on with an earlier call's, and print the results."""
    from ssmzoo.training.checkpoint import locked

    begun = time.perf_counter()
    asked = {"text": place_of(text), "steps": steps}
    require_same("demo", output, asked)
    with locked(output):
        facts = output / "demo.json"
        if facts.exists() and "finished" in read_json(facts):
            say(results_of(output))
            say(f"\n{output} holds a finished demo, and nothing was done again;", end=" ")
            say(f"to start over: rm -r {output}\n{closing(output)}")
            return
        write_json(facts, asked)
        work(text, output, steps)
        write_json(facts, {**asked, "finished": True})
        say(results_of(output))
        minutes = (time.perf_counter() - begun) / 60
        say(f"\ndone in {minutes:.1f} minutes; everything lies in {output}:\n{closing(output)}")


def work(text: str | None, output: Path, steps: int | None) -> None:
    """Do the unfinished stages."""
    import ssmzoo.auto  # noqa: F401
    from ssmzoo.publishing.card import render_card
    from ssmzoo.publishing.hub import publish

    overrides = split_once([text or STDLIB], output)
    overrides.append("checkpoint.every=10")  # a demo that was interrupted goes on from there
    if steps is not None:
        overrides.append(f"train.steps={steps}")
    for name, recipe in MODELS.items():
        # the yardstick as transformers runs it
        train_once(name, recipe, output / name, stock=True, overrides=overrides)
        score_once(name, output / name, output, stock=True)
    if not (output / SPEEDS).exists():
        say("timing mamba2 on ssmzoo's kernels, too")
        write_json(output / SPEEDS, speeds_of(output / "mamba2"))
    model, published = output / "longhorn" / "model", output / "published"
    say("writing the card and publishing into a folder")
    results = [output / "results" / f"{name}.json" for name in MODELS]
    render_card(model, results=results, run_dir=output / "longhorn")
    publish(model, published)
    say("loading the publication in a fresh process")
    sample = subprocess.run(
        [sys.executable, "-P", "-c", LOAD, str(published.absolute()), PROMPT],
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
    from ssmzoo.environment.device import usable_device
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


def results_of(output: Path) -> str:
    """Return the scores and speeds of both models as a small table, and Mamba2's both ways."""
    lines = [table((name, output / name, output / "results" / f"{name}.json") for name in MODELS)]
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


if __name__ == "__main__":
    sys.exit(demo())
