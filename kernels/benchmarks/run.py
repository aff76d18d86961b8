"""Time the ops and the models, print ratios, and write one CSV a device.

Usage: python kernels/benchmarks/run.py [--only NAME ...] [--runs N] [--output FILE]
"""

import argparse
import csv
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from errors import ERRORS
from registry import ENTRIES, Entry
from report import write_table
from steady import give_back_freed_memory, keep_freed_memory

from ssmzoo.analysis.bench import bench, circumstances, matmul_peak, training_step

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = [
    "what", "variant", "pass", "shape", "dtype", "milliseconds", "tokens_per_second", "runs",
    "slowest", "fastest", "gflops", "share_of_peak", "peak_mib", "error", "device", "threads",
    "torch", "transformers", "triton", "commit", "dirty", "cpu_vectors", "torch_vectors",
    "kernel_vectors", "omp_num_threads", "date",
]  # fmt: skip


FAMILIES = ["longhorn", "dss", "rtf", "coffee", "bmojo"]
ROUNDS = 9
PATIENCE = 60  # seconds: what takes longer is not run again for its memory


def main() -> int:
    """Run what was asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these ops, or 'models'")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="of the models")
    parser.add_argument(
        "--slow-peers", action="store_true", help="also the peers that take minutes"
    )
    parser.add_argument(
        "--output", type=Path, help="default: results/<device>.csv beside this file"
    )
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)  # op, shape, variant, pass
    options = parser.parse_args()
    if options.peak:
        measure_peak(*options.peak)
        return 0
    names = {entry.op for entry in ENTRIES} | {"models"}
    wanted = set(options.only or names)
    if wanted - names:
        parser.error(f"nothing is called {sorted(wanted - names)}; there is {sorted(names)}")

    keep_freed_memory()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = circumstances(device)
    peak = matmul_peak(device)
    print(f"{where['device']}: a large matrix product reaches {peak:.0f} GFLOP/s in float32")
    output = options.output or Path(__file__).parent / "results" / f"{where['slug']}.csv"
    passed = set()
    for entry in ENTRIES:
        if entry.op in wanted:
            tests = entry.tests or f"tests/kernels/test_{entry.op}.py"
            if tests not in passed and not tests_pass(tests):
                print(f"{entry.op}: its tests fail; nothing is timed", file=sys.stderr)
                return 1
            passed.add(tests)
            write(output, [{**row, **where} for row in time_entry(entry, device, peak)])
    if "models" in wanted:
        measured = bench(
            FAMILIES, lengths=options.lengths, slow=options.slow_peers, runs=options.runs
        )
        write(output, [{**row, **where} for row in measured])
        give_back_freed_memory()
        for row in measured:
            if row["pass"].startswith("train") and "default" not in row["variant"]:
                row["peak_mib"] = peak_memory("model", "", row["variant"], row["pass"])
        write(output, [{**row, **where} for row in measured])
    print(f"written: {output}")
    return 0


def tests_pass(path: str) -> bool:
    """Run an op's tests quietly."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", path]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def passes(
    entry: Entry, shape: tuple[int, ...], device: torch.device, variant: str
) -> dict[str, Callable[[], object]]:
    """Return the calls to measure: a forward alone, and one with its backward."""
    torch.manual_seed(0)
    inputs = [x.requires_grad_(entry.backward) for x in entry.make(*shape, device=device)]
    if variant in entry.peers:
        return entry.peers[variant](shape, *inputs)
    call = entry.call
    assert call is not None

    def one() -> None:
        with torch.no_grad():
            call(*inputs, backend=variant)

    if not entry.backward:
        return {"fwd": one}
    with torch.no_grad():
        grad = torch.randn_like(call(*inputs, backend=variant))

    def both() -> None:
        call(*inputs, backend=variant).backward(grad)
        for x in inputs:
            x.grad = None

    return {"fwd": one, "fwd+bwd": both}


def measure_peak(op: str, shape: str, variant: str, label: str) -> None:
    """Print the MiB by which one call raises this process's memory at its highest.

    On a CPU that is all its memory, so call this once in a process that has done nothing else.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if op == "model":
        training_step(variant, 64, device)()
        call = training_step(variant, int(label.removeprefix("train L=")), device)
    else:
        entry = next(e for e in ENTRIES if (e.op, text(e.shape)) == (op, shape))
        _, length, *widths = entry.shape
        # builds and loads what it needs; a kernel must stay longer than its filter's order
        passes(entry, (1, max(1, length // 2), *widths), device, variant)[label]()
        call = passes(entry, entry.shape, device, variant)[label]
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


def peak_memory(op: str, shape: str, variant: str, label: str) -> float:
    """Return the peak of a call in MiB, from a process of its own."""
    command = [sys.executable, __file__, "--peak", op, shape, variant, label]
    # allocations of activations are mapped, and unmapped when they are freed
    fresh = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run(command, env=fresh, capture_output=True, text=True, check=True)
    return float(run.stdout)


def text(shape: tuple[int, ...]) -> str:
    """Write a shape as it stands in the table."""
    return "x".join(map(str, shape))


def least_seconds(calls: list[Callable[[], object]], device: torch.device) -> list[float]:
    """Time the calls in turns, so that what disturbs one disturbs all; return each one's least."""

    def once(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    # builds, loads, and tells how many calls make a measurement: 2 ms or more
    warm = [(once(call), once(call))[1] for call in calls]
    counts = [max(1, int(2e-3 / max(seconds, 1e-7))) for seconds in warm]
    least = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for i, (call, count) in enumerate(zip(calls, counts, strict=True)):
            least[i] = min(least[i], sum(once(call) for _ in range(count)) / count)
    return least


def time_entry(entry: Entry, device: torch.device, peak: float) -> list[dict]:
    """Measure one op: the device's fast backends and their peers, in turns."""
    work = {}
    if entry.flops is not None:
        forward, backward = entry.flops(*entry.shape)
        work = {"fwd": forward, "fwd+bwd": forward + backward}
    backends = entry.gpu if device.type == "cuda" else entry.cpu
    rows = []
    measured = {
        (variant, label): call
        for variant in (*backends, *entry.peers)
        for label, call in passes(entry, entry.shape, device, variant).items()
    }
    repeated = [key for key in measured if key[0] not in entry.once]
    seconds = dict(
        zip(repeated, least_seconds([measured[key] for key in repeated], device), strict=True)
    )
    for key in measured:
        if key not in seconds:
            start = time.perf_counter()
            measured[key]()
            seconds[key] = time.perf_counter() - start
    errors = {}
    if entry.op in ERRORS:
        torch.manual_seed(0)
        errors = ERRORS[entry.op](entry.shape, *entry.make(*entry.shape, device=device))
    for (variant, label), took in seconds.items():
        row = {
            "what": entry.op,
            "variant": variant,
            "pass": label,
            "shape": text(entry.shape),
            "dtype": "float32",
            "milliseconds": round(took * 1e3, 4),
            "tokens_per_second": round(entry.shape[0] * entry.shape[1] / took),
        }
        line = f"{entry.op:15s} {row['shape']:18s} {variant:30s} {label:8s} {took * 1e3:10.3f} ms"
        if label in work:
            gflops = work[label] / took / 1e9
            row |= {"gflops": round(gflops, 2), "share_of_peak": round(gflops / peak, 4)}
            line += f", {gflops:6.1f} GFLOP/s: {peak / gflops:.1f} times its time at matrix speed"
        if took < PATIENCE:
            row["peak_mib"] = peak_memory(entry.op, text(entry.shape), variant, label)
            line += f", {row['peak_mib']:.0f} MiB"
        if variant in errors:
            row["error"] = f"{errors[variant]:.2g}"
            line += f", off by {row['error']} of the largest result"
        print(line)
        rows.append(row)
    for line in ratios(entry, seconds):
        print(line)
    return rows


def ratios(entry: Entry, seconds: dict[tuple[str, str], float]) -> list[str]:
    """Set the first variant's times against all others'."""
    first = next(iter(seconds))[0]
    return [
        f"{entry.op} {text(entry.shape)}, {label}: {first} takes "
        f"{seconds[first, label] / took:.3g} times what {variant} takes"
        for (variant, label), took in seconds.items()
        if variant != first and (first, label) in seconds
    ]


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
    write_table(rows, path, COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
