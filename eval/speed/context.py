"""Time and memory of a layer against its context: B'MOJO, Mamba, window and full attention.

Usage: python eval/speed/context.py [--lengths 1024 ...] [--steps 2048 ...] [--output DIR]

"layer": forward and backward of a model of one layer over one sequence, without a head, and the
bytes of its cache after as many tokens. "130M": forward and backward of the presets of 130 million
parameters on one sequence. Models take turns, and each one's least time counts. Writes
kernels/benchmarks/results/context.csv and .png.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from report import draw, write_table

from ssmzoo import load_family
from ssmzoo.modeling.compat import CACHE
from ssmzoo_kernels.machine import circumstances, keep_freed_memory

RESULTS = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks" / "results"
LENGTHS = [2**n for n in range(10, 17)]
WIDTH, HEADS, WINDOW = 256, 4, 256
LAYERS = {
    "B'MOJO": {"mixer_types": ["bmojo"], "use_rope": False},
    "Mamba": {"mixer_types": ["mamba"], "use_rope": False},
    "window attention": {"mixer_types": ["swa"], "use_rope": True},
    "attention": {"mixer_types": ["attention"], "use_rope": True},
}
PRESETS = {
    "B'MOJO": ("bmojo-130m", {}),
    "Mamba": ("mamba-130m", {}),
    "attention": ("swa-130m", {"mixer_types": ["attention"]}),
}
ENOUGH = 20.0  # seconds in a single call: what takes as long is not called again


def layer(name: str, length: int) -> tuple[Callable[[], None], Callable[[], int]]:
    """Return a step of a layer, and what counts the bytes of its cache."""
    family = load_family("bmojo")
    fields = {"vocab_size": 256, "hidden_size": WIDTH, "num_hidden_layers": 1}
    fields |= {"num_attention_heads": HEADS, "sliding_window": WINDOW, **LAYERS[name]}
    model = family.model_class(family.config(**fields)).train()
    ids = torch.randint(256, (1, length))

    def step() -> None:
        model(input_ids=ids, use_cache=False).last_hidden_state.mean().backward()
        model.zero_grad()

    def cached() -> int:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=True)[CACHE].nbytes

    return step, cached


def preset(name: str, length: int) -> Callable[[], None]:
    """Return a step of a preset of 130 million parameters."""
    family = load_family("bmojo")
    size, changes = PRESETS[name]
    model = family.causal_lm_class(family.config(size, **changes)).train()
    ids = torch.randint(model.config.vocab_size, (1, length))

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return step


def least_seconds(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the least time of each of some calls that take turns."""
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            if least[name] == float("inf") or least[name] < ENOUGH:
                start = time.perf_counter()
                call()
                least[name] = min(least[name], time.perf_counter() - start)
    return least


def main() -> None:
    """Measure, print, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--steps", nargs="*", type=int, default=[2048, 8192], metavar="LENGTH")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.manual_seed(0)
    keep_freed_memory()
    where = circumstances(torch.device("cpu"))
    rows = []

    def add(what: str, name: str, length: int, seconds: float, cache: int | None) -> None:
        kib = None if cache is None else round(cache / 1024, 1)
        row = {"what": what, "model": name, "length": length}
        rows.append({**row, "milliseconds": round(seconds * 1e3, 1), "cache_kib": kib, **where})
        held = "" if kib is None else f"{kib:12,.1f} KiB"
        print(f"{what:6s} {name:17s} {length:6d} {seconds * 1e3:10,.1f} ms{held}", flush=True)

    for length in options.lengths:
        made = {name: layer(name, length) for name in LAYERS}
        least = least_seconds({name: step for name, (step, _) in made.items()}, options.rounds)
        for name, (_, cached) in made.items():
            add("layer", name, length, least[name], cached())
    for length in options.steps:
        steps = {name: preset(name, length) for name in PRESETS}
        for name, seconds in least_seconds(steps, rounds=3).items():
            add("130M", name, length, seconds, None)
    write_table(rows, options.output / "context.csv")
    lines = {
        name: (style, [row for row in rows if row["what"] == "layer" and row["model"] == name])
        for name, style in zip(LAYERS, ("o-", "s--", "d:", "^-"), strict=True)
    }
    draw(
        lines,
        options.output / "context.png",
        size=("length", "tokens"),
        panels=[("milliseconds", "ms", "forward and backward"), ("cache_kib", "KiB", "cache")],
        title=f"one layer, width {WIDTH}, window {WINDOW}, one sequence",
    )


if __name__ == "__main__":
    main()
