"""Time the ops and the models, print ratios, and write one CSV a device.

Usage: python kernels/benchmarks/run.py [--only NAME ...] [--no-models] [--output FILE]
"""

import argparse
import csv
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from registry import ENTRIES, Entry

from ssmzoo.bench import bench, environment, matmul_peak, time_call
from ssmzoo.files import appears_whole

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = [
    "what", "variant", "pass", "shape", "dtype", "milliseconds", "tokens_per_second",
    "gflops", "share_of_peak", "peak_mib", "device", "threads", "torch", "transformers",
    "triton", "commit", "date",
]  # fmt: skip


def main() -> int:
    """Run what was asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these ops, or 'models'")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048])
    parser.add_argument(
        "--slow-peers", action="store_true", help="also the peers that take minutes"
    )
    parser.add_argument(
        "--output", type=Path, help="default: results/<device>.csv beside this file"
    )
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)  # op, backend, pass
    options = parser.parse_args()
    if options.peak:
        measure_peak(*options.peak)
        return 0
    names = {entry.op for entry in ENTRIES} | {"models"}
    wanted = set(options.only or names)
    if wanted - names:
        parser.error(f"nothing is called {sorted(wanted - names)}; there is {sorted(names)}")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = environment(device)
    peak = matmul_peak(device)
    print(f"{where['device']}: a large matrix product reaches {peak:.0f} GFLOP/s in float32")
    rows = []
    for entry in ENTRIES:
        if entry.op in wanted:
            if not tests_pass(entry.op):
                print(f"{entry.op}: its tests fail; nothing is timed", file=sys.stderr)
                return 1
            rows += time_op(entry, device, peak)
    if "models" in wanted:
        rows += bench(["longhorn"], lengths=options.lengths, peers=True, slow=options.slow_peers)
    output = options.output or Path(__file__).parent / "results" / f"{where['slug']}.csv"
    write(output, [{**row, **where} for row in rows])
    print(f"written: {output}")
    return 0


def tests_pass(op: str) -> bool:
    """Run the op's tests quietly."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"tests/kernels/test_{op}.py"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def passes(
    entry: Entry, shape: tuple[int, ...], device: torch.device, backend: str
) -> dict[str, Callable[[], None]]:
    """Return the calls to measure: a forward alone, and one with its backward."""
    torch.manual_seed(0)
    inputs = [x.requires_grad_() for x in entry.make(*shape, device=device)]
    grad = torch.randn_like(inputs[0])

    def one() -> None:
        with torch.no_grad():
            entry.call(*inputs, backend=backend)

    def both() -> None:
        entry.call(*inputs, backend=backend).backward(grad)
        for x in inputs:
            x.grad = None

    return {"fwd": one, "fwd+bwd": both}


def measure_peak(op: str, backend: str, label: str) -> None:
    """Print the MiB by which one call raises this process's memory at its highest.

    On a CPU that is all its memory, so call this once in a process that has done nothing else.
    """
    entry = next(entry for entry in ENTRIES if entry.op == op)
    device = torch.device("cuda" if backend == "triton" else "cpu")
    _, _, *widths = entry.shape
    passes(entry, (1, 64, *widths), device, backend)[label]()  # builds and loads what it needs
    call = passes(entry, entry.shape, device, backend)[label]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        grown = torch.cuda.max_memory_allocated() - before
    else:
        # what was once taken and given back would hide growth: take it again
        ballast = torch.empty(max(0, highest_memory() - present_memory()), dtype=torch.uint8)
        ballast.fill_(1)
        before = highest_memory()
        call()
        grown = highest_memory() - before
    sys.stdout.write(f"{grown / 2**20:.1f}\n")


def highest_memory() -> int:
    """Return the most bytes of memory that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def present_memory() -> int:
    """Return the bytes of memory that this process has now; more than any has, off Linux."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 2**63
    return pages * resource.getpagesize()


def time_op(entry: Entry, device: torch.device, peak: float) -> list[dict]:
    """Measure one op, forward alone and with its backward, on the device's fast backends."""
    forward, backward = entry.flops(*entry.shape)
    work = {"fwd": forward, "fwd+bwd": forward + backward}
    rows = []
    for backend in ("triton",) if device.type == "cuda" else ("cpu", "eager"):
        for label, call in passes(entry, entry.shape, device, backend).items():
            flops, seconds = work[label], time_call(call, device)
            command = [sys.executable, __file__, "--peak", entry.op, backend, label]
            # allocations of activations are mapped, and unmapped when they are freed
            fresh = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
            run = subprocess.run(command, env=fresh, capture_output=True, text=True, check=True)
            rows.append(
                {
                    "what": entry.op,
                    "variant": backend,
                    "pass": label,
                    "shape": "x".join(map(str, entry.shape)),
                    "dtype": "float32",
                    "milliseconds": round(seconds * 1e3, 3),
                    "tokens_per_second": round(entry.shape[0] * entry.shape[1] / seconds),
                    "gflops": round(flops / seconds / 1e9, 2),
                    "share_of_peak": round(flops / seconds / 1e9 / peak, 4),
                    "peak_mib": float(run.stdout),
                }
            )
            print(
                f"{entry.op:15s} {backend:7s} {label:8s} {seconds * 1e3:9.2f} ms  "
                f"{flops / seconds / 1e9:7.1f} GFLOP/s, {peak * seconds * 1e9 / flops:6.1f} times "
                f"its arithmetic at matrix speed, {float(run.stdout):.0f} MiB"
            )
    return rows


def write(path: Path, rows: list[dict]) -> None:
    """Write the rows, replacing those of an earlier run for the same things."""
    key = ("what", "variant", "pass", "shape", "dtype")
    fresh = {tuple(str(row.get(k, "")) for k in key) for row in rows}
    if path.exists():
        with path.open(newline="") as file:
            kept = [
                r for r in csv.DictReader(file) if tuple(r.get(k, "") for k in key) not in fresh
            ]
        rows = kept + rows
    with appears_whole(path) as partial, partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", restval="")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
