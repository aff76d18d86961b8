"""Prime hybrids from a Transformer by several mixers, and compare them with the same from scratch.

    python eval/priming.py --teacher runs/llama-text/model --runs runs/priming
    python eval/priming.py --teacher ... --runs ... --only mixer=longhorn,layers=half --share 0.2
    python eval/priming.py --teacher runs/recall-teacher/model --runs runs/recall --problem recall
    python eval/priming.py --teacher ... --runs ... --decoding

A cell is a mixer, the layers that it takes, how it starts, the share of the teacher's tokens that
it reads in all, and a seed: a line of the problem's file below ``eval/results``. Its start and its
two runs are those of ``docs/prime.md``: a fifth of its tokens aligns the new mixers, the rest
trains everything. Texts are scored in bits per byte, recall (``mqar``) by its accuracy.
``scratch`` trains the same model from random weights on as many tokens. ``attention`` keeps the
teacher's layers: ``taken`` is the teacher, ``trained`` the teacher trained on as long. Cells that
are in the file are not run again.

``--decoding`` times the teacher (``llama``) and the finished models into
``eval/results/priming-decoding.csv``; let nothing else run meanwhile, and let the C library keep
freed memory: ``MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2147483647``.
"""

import argparse
import csv
import math
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import ssmzoo.auto  # noqa: F401
from ssmzoo.checkpoints.convert import to_family
from ssmzoo.distillation.prime import prime
from ssmzoo.evaluation.evaluate import evaluate
from ssmzoo.files import read_json, write_text
from ssmzoo.training.metrics import read_metrics
from ssmzoo.training.run import train

ROOT = Path(__file__).resolve().parents[1]
DECODING = ROOT / "eval/results/priming-decoding.csv"
BMOJO_F = {"mixer_types": "bmojo_f", "sliding_window": 64, "num_fading_tokens": 16, "expand": 1}
# by mixer: what --mixer takes, and its fields
MIXERS = {
    "gated-deltanet": ("linear_attention", {}),
    "mamba2": ("linear_attention:mamba2-130m", {}),
    "longhorn": ("longhorn", {"key_init_scale": 8.0, "query_init_scale": 0.1}),
    "bmojo-f": ("bmojo", BMOJO_F),
    "bmojo-f-128": ("bmojo", {**BMOJO_F, "sliding_window": 128}),
    "rtf": ("rtf", {"d_state": 32}),
    "coffee": ("coffee", {"output_filter": True}),
}
LAYERS, STARTS = ("half", "all"), ("copied", "drawn", "scratch")
GATED = ("gated-deltanet", "mamba2", "longhorn", "coffee")
CELL = ("mixer", "layers", "start", "share", "seed")
KINDS = [
    ("attention", "none", "taken"),
    ("attention", "none", "trained"),
    *((mixer, layers, start) for mixer in MIXERS for layers in LAYERS for start in STARTS),
    *((mixer, layers, "projections") for mixer in GATED for layers in LAYERS),
]
TIMES = (*CELL, "step_ms_1024", "step_ms_16384", "cache_bytes_1024", "cache_bytes_16384")
NOT_FIELDS = {"model_type", "architectures", "dtype", "transformers_version"}


@dataclass(frozen=True)
class Problem:
    """What cells are trained on, and how they are scored."""

    results: Path
    score: str  # the name of its column
    metric: str  # of a run's metrics, which is the score times `unit`
    unit: float
    data: dict[str, Any]
    batch: int
    length: int
    tune: float  # rates of the last stage, and from scratch
    scratch: float
    longer: tuple[int, ...] = ()  # lengths beside `length`
    suite: str | None = None
    fields: dict[str, dict[str, Any]] = field(default_factory=dict)  # of a mixer here
    without: tuple[str, ...] = ()  # mixers that say nothing here

    @property
    def step(self):
        """Tokens of a step."""
        return self.batch * self.length


PROBLEMS = {
    "text": Problem(
        ROOT / "eval/results/priming.csv",
        "bits",
        "validation_loss",
        math.log(2),
        {"text": "python-stdlib", "validation": 0.05},
        batch=2,
        length=512,
        tune=5e-4,
        scratch=1.5e-3,
        longer=(8192,),
        suite="zoo-recall",
    ),
    "recall": Problem(
        ROOT / "eval/results/priming-recall.csv",
        "accuracy",
        "validation_accuracy",
        1,
        {"task": "mqar", "task_args": {"num_pairs": 8, "vocab_size": 64}, "validation": 2048},
        batch=64,
        length=64,
        tune=1e-3,
        scratch=3e-3,
        fields={"bmojo-f": {"sliding_window": 16, "num_fading_tokens": 4}},  # shorter than a row
        without=("bmojo-f-128",),
    ),
}


def run(problem, folder, steps, model, lr, seed, align=None):
    """Train as a recipe says, or go on; return the run's folder."""
    train_as = {"batch_size": problem.batch, "seq_len": problem.length, "steps": steps, "lr": lr}
    train_as |= {"weight_decay": 0.1, "betas": [0.9, 0.95], "clip": 1.0}
    recipe = {
        "model": model,
        "data": problem.data,
        "train": {**train_as, "seed": seed, "warmup": 0.05},
        "eval": {"every": max(1, steps // 4), "batches": 32},
        "checkpoint": {"every": 100, "keep": 1},
        "log": {"every": 10},
    }
    if align is not None:
        recipe["align"] = {"teacher": str(align)}
    elif problem.longer:
        recipe["eval"]["lengths"] = [*problem.longer]
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_suffix(".yaml")
    write_text(path, yaml.safe_dump(recipe))
    if not (folder / "model").is_dir():
        train(path, output_dir=folder, resume=True)
    return folder


def scores(problem, folder, before=0):
    """Return the score by tokens read, of a run that began after ``before`` tokens."""
    lines = (line for line in read_metrics(folder / "metrics.jsonl") if problem.metric in line)
    return {before + x["tokens"]: x[problem.metric] / problem.unit for x in lines}


def made(problem, cell, teacher, place, tokens):
    """Return the run that ends a cell, and its score by tokens."""
    start, seed = place / "start", cell["seed"]
    whole = max(2, round(tokens * cell["share"] / problem.step))
    if cell["mixer"] == "attention":
        if not start.exists():
            to_family(str(teacher), "hybrid", start)
        # a step that changes nothing gives the teacher's own validation
        steps, lr = (1, 1e-12) if cell["start"] == "taken" else (whole, problem.tune)
        done = run(problem, place / "tune", steps, {"init_from": str(start)}, lr, seed)
        return done, scores(problem, done)
    mixer, fields = MIXERS[cell["mixer"]]
    fields = fields | problem.fields.get(cell["mixer"], {})
    if not start.exists():
        kind = "drawn" if cell["start"] == "scratch" else cell["start"]
        prime(str(teacher), mixer, cell["layers"], start, fields=fields, start=kind, seed=seed)
    if cell["start"] == "scratch":
        config = AutoConfig.from_pretrained(start).to_diff_dict()
        config = {key: value for key, value in config.items() if key not in NOT_FIELDS}
        model = {"family": "hybrid", "config": config}
        done = run(problem, place / "tune", whole, model, problem.scratch, seed)
        return done, scores(problem, done)
    short = max(1, whole // 5)
    model = {"init_from": str(start)}
    first = run(problem, place / "align", short, model, 3e-3, seed, align=teacher)
    model = {"init_from": str(first / "model")}
    done = run(problem, place / "tune", whole - short, model, problem.tune, seed)
    return done, scores(problem, done, short * problem.step)


@torch.no_grad()
def decoding(folder):
    """Return milliseconds a token and the cache's bytes after 1,024 and 16,384 tokens."""
    model, found = AutoModelForCausalLM.from_pretrained(folder).eval(), {}
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
        found[f"step_ms_{length}"] = f"{1e3 * sorted(times)[len(times) // 2]:.3f}"
        found[f"cache_bytes_{length}"] = sum(x.nbytes for x in kept(cache))
    return found


def kept(cache):
    """Return the tensors of a cache, ours or transformers'."""
    for layer in cache.layers:
        yield from layer.states.values() if hasattr(layer, "states") else (layer.keys, layer.values)


def measured(problem, cell, teacher, place, tokens, teacher_score):
    """Return a cell's line."""
    begun = time.perf_counter()
    folder, curve = made(problem, cell, teacher, place, tokens)
    lengths = read_json(folder / "run.json")["finished"].get("lengths", {})
    line = {
        **cell,
        "tokens": max(curve),
        problem.score: f"{curve[max(curve)]:.4f}",
        "teacher": f"{teacher_score:.4f}",
    }
    for length in problem.longer:
        found = lengths[str(length)][problem.metric.removeprefix("validation_")]
        line[f"{problem.score}_{length}"] = f"{found / problem.unit:.4f}"
    if problem.suite is not None:
        found = evaluate(folder / "model", suite=problem.suite, output_dir=place, name="recall")
        line["recall"] = " ".join(f"{x['value']:.3f}" for x in read_json(found)["results"])
    line["curve"] = " ".join(f"{read}:{value:.4f}" for read, value in sorted(curve.items()))
    return {**line, "seconds": round(time.perf_counter() - begun)}


def known(path):
    """Return the cells that are in a file."""
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {tuple(line[name] for name in CELL) for line in csv.DictReader(file)}


def add(path, columns, line):
    """Add a line to a file of results."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(line)
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main():
    """Run the cells that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--problem", choices=PROBLEMS, default="text")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.1, help="of the teacher's tokens")
    parser.add_argument("--only", default="", metavar="FIELD=VALUE,...")
    parser.add_argument("--results", type=Path, help="default: the problem's file")
    parser.add_argument("--rate", type=float, help="of the last stage; default: the problem's")
    parser.add_argument("--decoding", action="store_true", help="time the finished models")
    options = parser.parse_args()
    only = dict(part.split("=") for part in options.only.split(",") if part)
    problem = PROBLEMS[options.problem]
    if options.results is not None:
        problem = replace(problem, results=options.results)
    if options.rate is not None:
        problem = replace(problem, tune=options.rate)
    teachers = scores(problem, options.teacher.parent)
    tokens = max(teachers)
    if options.decoding:
        cell = dict(zip(CELL, ("llama", "none", "taken", 1.0, 0), strict=True))
        add(DECODING, TIMES, {**cell, **decoding(options.teacher)})
    for seed in range(options.seeds):
        for kind in KINDS:
            cell = dict(zip(CELL, (*kind, options.share, seed), strict=True))
            told = {name: str(value) for name, value in cell.items()}
            unasked = any(told[name] != value for name, value in only.items())
            if unasked or cell["mixer"] in problem.without:
                continue
            place = options.runs / "-".join(told.values())
            if options.decoding:
                if (place / "tune/model").is_dir():
                    add(DECODING, TIMES, {**cell, **decoding(place / "tune/model")})
            elif tuple(told.values()) not in known(problem.results):
                given = problem, cell, options.teacher, place, tokens, teachers[tokens]
                line = measured(*given)
                add(problem.results, [*line], line)


if __name__ == "__main__":
    main()
