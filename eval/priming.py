"""Prime hybrids from a Transformer by several mixers, and compare them with the same from scratch.

    python eval/priming.py --teacher runs/llama-teacher/model --runs runs/priming
    python eval/priming.py --teacher ... --runs ... --only mixer=longhorn,layers=half

A cell is a mixer, the layers that it takes, how it starts and a seed: a line of
``eval/results/priming.csv``. Its start and its two runs are those of ``docs/prime.md``: 2 % of the
teacher's tokens align the new mixers, the rest trains everything; ``scratch`` trains the same model
from random weights on as many. Cells that are in the file are not run again.
"""

import argparse
import csv
import math
import sys
import time
from pathlib import Path

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import ssmzoo.auto  # noqa: F401
from ssmzoo.distillation.prime import prime
from ssmzoo.evaluation import evaluate
from ssmzoo.files import read_json, write_text
from ssmzoo.training.metrics import read_metrics
from ssmzoo.training.run import train

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "eval/results/priming.csv"
# by mixer: what --mixer takes, and its fields
MIXERS = {
    "gated-deltanet": ("linear_attention", {}),
    "mamba2": ("linear_attention:mamba2-130m", {}),
    "longhorn": ("longhorn", {"key_init_scale": 8.0, "query_init_scale": 0.1}),
    "bmojo-f": (
        "bmojo",
        {"mixer_types": "bmojo_f", "sliding_window": 64, "num_fading_tokens": 16, "expand": 1},
    ),
    "rtf": ("rtf", {"d_state": 32}),
    "coffee": ("coffee", {"output_filter": True}),
}
LAYERS, STARTS = ("half", "all"), ("copied", "drawn", "scratch")
CELL = ("mixer", "layers", "start", "seed")
SHARES = (0.02, 0.05, 0.1, 0.2)  # of the teacher's tokens
COLUMNS = (*CELL, *(f"bits_{share:.0%}" for share in SHARES), "teacher", "recall", "bits_8192")
COLUMNS += ("step_ms_1024", "step_ms_16384", "cache_bytes_16384", "seconds")
DATA = {"text": "python-stdlib", "validation": 0.05}
TRAIN = {"batch_size": 8, "seq_len": 512, "weight_decay": 0.1, "betas": [0.9, 0.95], "clip": 1.0}
LONG = 16 * TRAIN["seq_len"]
STEP = TRAIN["batch_size"] * TRAIN["seq_len"]


def run(folder, steps, model, lr, seed, align=None):
    """Train as a recipe says, or go on; return the run's folder."""
    recipe = {
        "model": model,
        "data": DATA,
        "train": {**TRAIN, "steps": steps, "lr": lr, "seed": seed, "warmup": 0.05},
        "eval": {"every": max(1, steps // 12), "batches": 32},
        "checkpoint": {"every": 100, "keep": 1},
        "log": {"every": 10},
    }
    if align is None:
        recipe["eval"]["lengths"] = [LONG]
    else:
        recipe["align"] = {"teacher": str(align)}
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_suffix(".yaml")
    write_text(path, yaml.safe_dump(recipe))
    if not (folder / "model").is_dir():
        train(path, output_dir=folder, resume=True)
    return folder


def bits(folder, before=0):
    """Return bits per byte by tokens read, of a run that began after ``before`` tokens."""
    lines = (line for line in read_metrics(folder / "metrics.jsonl") if "validation_loss" in line)
    return {before + x["tokens"]: x["validation_loss"] / math.log(2) for x in lines}


def made(cell, teacher, runs, tokens):
    """Return a cell's finished model, and its bits per byte by tokens."""
    mixer, fields = MIXERS[cell["mixer"]]
    place, seed = runs / "-".join(map(str, cell.values())), cell["seed"]
    start = place / "start"
    if not (start / "config.json").exists():
        kind = "drawn" if cell["start"] == "scratch" else cell["start"]
        prime(str(teacher), mixer, cell["layers"], start, fields=fields, start=kind, seed=seed)
    short, whole = (max(1, round(tokens * share / STEP)) for share in (SHARES[0], SHARES[-1]))
    if cell["start"] == "scratch":
        config = AutoConfig.from_pretrained(start).to_diff_dict()
        config = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
        config = {k: v for k, v in config.items() if k not in ("dtype", "transformers_version")}
        done = run(place / "tune", whole, {"family": "hybrid", "config": config}, 1.5e-3, seed)
        return done / "model", bits(done)
    first = run(place / "align", short, {"init_from": str(start)}, 3e-3, seed, align=teacher)
    model = {"init_from": str(first / "model")}
    done = run(place / "tune", whole - short, model, 1e-3, seed)
    return done / "model", bits(done, short * STEP)


@torch.no_grad()
def decoding(folder):
    """Return milliseconds a token after 1,024 and 16,384 tokens, and the cache's bytes."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    found, size = [], 0
    for length in (1024, 16384):
        cache = None
        for part in (torch.arange(length) % 200).view(-1, 1024):
            output = model(part[None], cache=cache, use_cache=True, logits_to_keep=1)
            cache = output.cache
        token, times = torch.tensor([[65]]), []
        for _ in range(40):
            begun = time.perf_counter()
            model(token, cache=cache, use_cache=True)
            times.append(time.perf_counter() - begun)
        found.append(1e3 * sorted(times)[len(times) // 2])
        size = sum(x.nbytes for layer in cache.layers for x in layer.states.values())
    return found, size


def measured(cell, teacher, runs, tokens, teacher_bits):
    """Return a cell's line."""
    begun = time.perf_counter()
    folder, curve = made(cell, teacher, runs, tokens)
    at = {share: [t for t in curve if t <= 1.01 * share * tokens] for share in SHARES}
    line = {**cell, "teacher": f"{teacher_bits:.4f}"}
    for share, known in at.items():
        line[f"bits_{share:.0%}"] = f"{curve[max(known)]:.4f}" if known else ""
    scores = evaluate(folder, suite="zoo-recall", output_dir=folder.parent, name="recall")
    line["recall"] = " ".join(f"{x['value']:.3f}" for x in read_json(scores)["results"])
    long = read_json(folder.parent / "run.json")["finished"]["lengths"][str(LONG)]
    line["bits_8192"] = f"{long['loss'] / math.log(2):.4f}"
    (line["step_ms_1024"], line["step_ms_16384"]), line["cache_bytes_16384"] = decoding(folder)
    line |= {name: f"{line[name]:.3f}" for name in ("step_ms_1024", "step_ms_16384")}
    return {**line, "seconds": round(time.perf_counter() - begun)}


def known():
    """Return the cells that are in the file."""
    if not RESULTS.exists():
        return set()
    with RESULTS.open(newline="") as file:
        return {tuple(line[name] for name in CELL) for line in csv.DictReader(file)}


def main():
    """Run the cells that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="FIELD=VALUE,...")
    options = parser.parse_args()
    only = dict(part.split("=") for part in options.only.split(",") if part)
    facts = read_json(options.teacher.parent / "run.json")["finished"]
    lines = read_metrics(options.teacher.parent / "metrics.jsonl")
    tokens = max(line["tokens"] for line in lines)
    for seed in range(options.seeds):
        for mixer in MIXERS:
            for layers in LAYERS:
                for start in STARTS:
                    cell = dict(zip(CELL, (mixer, layers, start, seed), strict=True))
                    told = {name: str(value) for name, value in cell.items()}
                    if any(told[name] != value for name, value in only.items()):
                        continue
                    if tuple(told.values()) in known():
                        continue
                    teacher_bits = facts["validation_loss"] / math.log(2)
                    line = measured(cell, options.teacher, options.runs, tokens, teacher_bits)
                    new = not RESULTS.exists()
                    with RESULTS.open("a", newline="") as file:
                        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                        if new:
                            writer.writeheader()
                        writer.writerow(line)
                    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
