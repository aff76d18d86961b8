"""Time and memory of a layer against the size of its state: RTF, DSS and a scan.

Usage: python eval/speed/state_free.py [--sizes 16 64 ...] [--length 8192]

One training step of one layer's sequence map (RTF: kernel and convolution; DSS: the same; the scan:
Longhorn's), forward and backward. Time is the process's CPU time with one thread, the least of many
rounds in which all sizes take turns, so that what else the machine does hardly counts. Memory is
what torch holds at the highest, by its profiler's count. Writes
kernels/benchmarks/results/state_free.csv and .png.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from report import draw, write_table
from torch.profiler import ProfilerActivity, profile

from ssmzoo_kernels import fft_conv, longhorn_scan, rational_kernel, vandermonde
from ssmzoo_kernels.machine import circumstances, keep_freed_memory

RESULTS = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks" / "results"
SIZES = [16, 32, 64, 128, 256, 512, 1024, 2048]
NAMES = {"rtf": "RTF, truncated", "rtf exact": "RTF, exact", "dss": "DSS", "scan": "scan"}
WIDTH = 64
ROUNDS = {"rtf": 60, "rtf exact": 60, "dss": 8, "scan": 8}


def rtf(length: int, order: int, mode: str) -> Callable[[], object]:
    """Return a step of an RTF layer."""
    a, b = torch.randn(2, WIDTH, order)
    u = torch.randn(1, length, WIDTH, requires_grad=True)
    leaves = [u, (a / (2 * a.abs().sum(1, keepdim=True))).requires_grad_(), b.requires_grad_()]
    grid = length if mode == "truncated" else None
    grad = torch.randn(1, length, WIDTH)

    def step() -> object:
        kernel = rational_kernel(*leaves[1:], length, mode=mode, trunc_len=grid)  # type: ignore[arg-type]
        return torch.autograd.grad(fft_conv(u, kernel)[0], leaves, grad)

    return step


def dss(length: int, modes: int) -> Callable[[], object]:
    """Return a step of a DSS layer."""
    dt = torch.exp(torch.empty(WIDTH, 1, dtype=torch.float64).uniform_(-7, -2.3))
    exponent = torch.complex(-0.5 * dt.expand(-1, modes), dt * 3.0 * torch.arange(modes))
    weight = torch.randn(WIDTH, modes, dtype=torch.complex64)
    u = torch.randn(1, length, WIDTH)
    leaves = [x.requires_grad_() for x in (u, weight, exponent)]
    grad = torch.randn(1, length, WIDTH)

    def step() -> object:
        y = fft_conv(u, vandermonde(weight, exponent, length))[0]
        return torch.autograd.grad(y, leaves, grad)

    return step


def scan(length: int, states: int) -> Callable[[], object]:
    """Return a step of a scan whose state has as many numbers a channel."""
    u, dt = torch.randn(2, 1, length, WIDTH)
    q, k = torch.randn(2, 1, length, states) / states**0.5
    leaves = [x.requires_grad_() for x in (u, q, k, dt)]
    grad = torch.randn(1, length, WIDTH)
    bias, direct = torch.zeros(WIDTH), torch.ones(WIDTH)
    return lambda: torch.autograd.grad(longhorn_scan(*leaves, bias, direct)[0], leaves, grad)


def steps(length: int, size: int) -> dict[str, Callable[[], object]]:
    """Return the step of every layer."""
    return {
        "rtf": rtf(length, size, "truncated"),
        "rtf exact": rtf(length, size, "exact"),
        "dss": dss(length, size),
        "scan": scan(length, size),
    }


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most memory that torch holds during a call, beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        call()
    held = highest = 0
    for event in record.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    return highest


def main() -> None:
    """Measure, write, draw, and say how flat RTF is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    keep_freed_memory()
    where = circumstances(torch.device("cpu"))
    calls = {
        (name, size): call
        for size in options.sizes
        for name, call in steps(options.length, size).items()
    }
    for call in calls.values():
        call()
    least = dict.fromkeys(calls, float("inf"))
    for done in range(max(ROUNDS.values())):
        for (name, size), call in calls.items():
            if done < ROUNDS[name]:
                start = time.process_time()
                call()
                least[name, size] = min(least[name, size], time.process_time() - start)
    rows = [
        {
            "layer": name,
            "n": size,
            "length": options.length,
            "width": WIDTH,
            "milliseconds": round(least[name, size] * 1e3, 2),
            "peak_mib": round(peak_bytes(call) / 2**20, 2),
            **where,
        }
        for (name, size), call in calls.items()
    ]
    for row in rows:
        print(f"{NAMES[row['layer']]:15s} n={row['n']:5d} {row['milliseconds']:9.1f} ms "
              f"{row['peak_mib']:8.1f} MiB")  # fmt: skip
    for name in ("rtf", "rtf exact"):
        for key in ("milliseconds", "peak_mib"):
            found = [r[key] for r in rows if r["layer"] == name and r["n"] <= options.length // 4]
            if found:
                print(f"{NAMES[name]}, {key}: largest / smallest {max(found) / min(found):.3f}")
    write_table(rows, options.output / "state_free.csv")
    lines = {
        title: (style, [row for row in rows if row["layer"] == name])
        for (name, title), style in zip(NAMES.items(), ("o-", "o--", "s-", "^-"), strict=True)
    }
    draw(
        lines,
        options.output / "state_free.png",
        size=("n", "state size n"),
        panels=[("milliseconds", "CPU ms", ""), ("peak_mib", "MiB", "")],
        title=f"forward and backward, length {options.length}, width {WIDTH}, one sequence",
    )


if __name__ == "__main__":
    main()
