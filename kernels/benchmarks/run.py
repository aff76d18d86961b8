"""Time the ops, print ratios, and write one CSV a device.

Usage: python kernels/benchmarks/run.py [--only NAME ...] [--output FILE]
"""

import argparse
import csv
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from errors import ERRORS
from registry import ENTRIES, Entry

from ssmzoo_kernels.machine import circumstances, keep_freed_memory, measured_apart, memory_growth

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = [
    "what", "variant", "pass", "shape", "dtype", "milliseconds", "tokens_per_second", "runs",
    "slowest", "fastest", "gflops", "share_of_peak", "gbytes_per_second", "share_of_copy",
    "peak_mib", "error", "device", "threads", "torch", "transformers", "triton", "commit", "dirty",
    "cpu_vectors", "torch_vectors", "kernel_vectors", "omp_num_threads", "date",
]  # fmt: skip


ROUNDS = 9
PATIENCE = 60  # seconds: a longer call is not run again for its memory


def main() -> int:
    """Run the benchmarks that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these ops")
    parser.add_argument(
        "--output", type=Path, help="default: results/<device>.csv beside this file"
    )
    options = parser.parse_args()
    names = {entry.op for entry in ENTRIES}
    wanted = set(options.only or names)
    if wanted - names:
        parser.error(f"nothing is called {sorted(wanted - names)}; there is {sorted(names)}")

    keep_freed_memory()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = circumstances(device)
    peaks = Peaks(device)
    print(
        f"{where['device']}: a large matrix product reaches {peaks.product('float32'):.0f} "
        f"GFLOP/s in float32, a copy {peaks.copy:.0f} GB/s, read and written"
    )
    output = options.output or Path(__file__).parent / "results" / f"{where['slug']}.csv"
    passed: set[tuple[str, ...]] = set()
    failed = False
    for entry in ENTRIES:
        if entry.op in wanted and backends(entry, device):
            tests = tests_of(entry, device)
            if tests not in passed and not tests_pass(*tests):
                print(f"{entry.op} is not timed: {' '.join(tests)} fails", file=sys.stderr)
                return 1
            passed.add(tests)
            try:
                write(output, [{**row, **where} for row in time_entry(entry, device, peaks)])
            except Exception as error:  # a compiler's, or no memory: the others are timed
                print(f"{entry.op} {text(entry.shape)}: {error!r}", file=sys.stderr)
                failed = True
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(f"written: {output}")
    return int(failed)


def backends(entry: Entry, device: torch.device) -> tuple[str, ...]:
    """Return the entries that are timed on a device."""
    return entry.gpu if device.type == "cuda" else entry.cpu


def tests_of(entry: Entry, device: torch.device) -> tuple[str, ...]:
    """Return pytest's arguments for an op's tests; on a GPU for those of all ops."""
    if device.type == "cuda":
        return ("-m", "gpu and not slow", "-n", str(min(8, os.cpu_count() or 1)), "tests/kernels")
    return (entry.tests or f"tests/kernels/test_{entry.op}.py",)


def tests_pass(*words: str) -> bool:
    """Run tests quietly."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


class Peaks:
    """What the device does at best: of arithmetic by a matrix product, of memory by a copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._size = 8192 if device.type == "cuda" else 2048
        self._found: dict[str, float] = {}
        x, y = torch.empty(2, 2**28 if device.type == "cuda" else 2**25, device=device)
        (seconds,) = typical_seconds([lambda: y.copy_(x)], device)
        self.copy = 2 * x.nbytes / seconds / 1e9
        """GB/s, read and written."""

    def product(self, dtype: str) -> float:
        """Return the GFLOP/s of a large matrix product."""
        if dtype not in self._found:
            kind = getattr(torch, dtype)
            a, b = torch.randn(2, self._size, self._size, device=self._device).to(kind)
            (seconds,) = typical_seconds([lambda: a @ b], self._device)
            self._found[dtype] = 2 * self._size**3 / seconds / 1e9
        return self._found[dtype]


def drawn(entry: Entry, shape: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    """Draw an entry's inputs: activations in its dtype, parameters as they are."""
    dtype = getattr(torch, entry.dtype)
    inputs = entry.make(*shape, device=device)
    narrow = dtype != torch.float32
    return [x.to(dtype) if narrow and x.dim() > 2 else x for x in inputs]


def least_bytes(entry: Entry, device: torch.device) -> dict[str, int]:
    """Return the bytes that a pass must move: inputs, the output that is timed, gradients."""
    inputs = drawn(entry, entry.shape, device)
    with torch.no_grad():
        out = entry.call(*inputs, backend=backends(entry, device)[0]).nbytes
    read = sum(x.nbytes for x in inputs)
    return {"fwd": read + out, "fwd+bwd": 3 * read + 2 * out}


def passes(
    entry: Entry, shape: tuple[int, ...], device: torch.device, variant: str
) -> dict[str, Callable[[], object]]:
    """Return the calls to measure: a forward alone, and one with its backward."""
    torch.manual_seed(0)
    inputs = [x.requires_grad_(entry.backward) for x in drawn(entry, shape, device)]
    if variant in entry.peers:
        return entry.peers[variant](shape, *inputs)
    call = entry.call

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


def print_peak(op: str, shape: str, dtype: str, variant: str, label: str) -> None:
    """Print the MiB by which one call raises the memory of a process that just began."""
    device = torch.device("cpu")
    entry = next(e for e in ENTRIES if (e.op, text(e.shape), e.dtype) == (op, shape, dtype))
    _, length, *widths = entry.shape
    # builds and loads what it needs; a kernel must stay longer than its filter's order
    passes(entry, (1, max(1, length // 2), *widths), device, variant)[label]()
    call = passes(entry, entry.shape, device, variant)[label]
    sys.stdout.write(f"{memory_growth(call, device) / 2**20:.1f}\n")


def peak_memory(*call: str) -> float:
    """Return the MiB that :func:`print_peak` prints in a process of its own."""
    here = str(Path(__file__).parent)
    program = f"import sys; sys.path.insert(0, {here!r}); import run; run.print_peak(*{call!r})"
    return measured_apart(program)


def text(shape: tuple[int, ...]) -> str:
    """Write a shape as it stands in the table."""
    return "x".join(map(str, shape))


def typical_seconds(calls: list[Callable[[], object]], device: torch.device) -> list[float]:
    """Time the calls: on a CPU in turns, each one's least; on a GPU by events, the median.

    What disturbs a CPU disturbs all calls alike. A GPU is given calls without waiting for each, and
    its cache is emptied between them.
    """
    if device.type == "cuda":
        from triton.testing import do_bench

        return [do_bench(call, return_mode="median") / 1e3 for call in calls]
    # builds, loads, and tells how many calls make a measurement: 2 ms or more
    warm = [(timed(call, device), timed(call, device))[1] for call in calls]
    counts = [max(1, int(2e-3 / max(seconds, 1e-7))) for seconds in warm]
    least = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for i, (call, count) in enumerate(zip(calls, counts, strict=True)):
            least[i] = min(least[i], sum(timed(call, device) for _ in range(count)) / count)
    return least


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def time_entry(entry: Entry, device: torch.device, peaks: Peaks) -> list[dict]:
    """Measure one op: the device's fast backends and their peers."""
    work = {}
    if entry.flops is not None:
        forward, backward = entry.flops(*entry.shape)
        work = {"fwd": forward, "fwd+bwd": forward + backward}
    moved, peak = least_bytes(entry, device), peaks.product(entry.dtype)
    rows = []
    measured = {
        (variant, label): call
        for variant in (*backends(entry, device), *entry.peers)
        for label, call in passes(entry, entry.shape, device, variant).items()
    }
    repeated = [key for key in measured if key[0] not in entry.once]
    seconds = dict(
        zip(repeated, typical_seconds([measured[key] for key in repeated], device), strict=True)
    )
    for key in measured:
        if key not in seconds:
            seconds[key] = timed(measured[key], device)
    errors = {}
    if entry.op in ERRORS:
        torch.manual_seed(0)
        errors = ERRORS[entry.op](entry.shape, *drawn(entry, entry.shape, device))
    for (variant, label), took in seconds.items():
        row = {
            "what": entry.op,
            "variant": variant,
            "pass": label,
            "shape": text(entry.shape),
            "dtype": entry.dtype,
            "milliseconds": round(took * 1e3, 4),
            "tokens_per_second": round(entry.shape[0] * entry.shape[1] / took),
        }
        line = f"{entry.op:15s} {row['shape']:18s} {variant:30s} {label:8s} {took * 1e3:10.3f} ms"
        if label in work:
            gflops = work[label] / took / 1e9
            row |= {"gflops": round(gflops, 2), "share_of_peak": round(gflops / peak, 4)}
            line += f", {gflops:6.1f} GFLOP/s: {peak / gflops:.1f} times its time at matrix speed"
        rate = moved[label] / took / 1e9
        row |= {"gbytes_per_second": round(rate, 2), "share_of_copy": round(rate / peaks.copy, 4)}
        line += f", {rate:7.1f} GB/s of what must be moved"
        if took < PATIENCE:
            if device.type == "cuda":
                mib = memory_growth(measured[variant, label], device) / 2**20
            else:
                mib = peak_memory(entry.op, text(entry.shape), entry.dtype, variant, label)
            row["peak_mib"] = round(mib, 1)
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
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(path)


if __name__ == "__main__":
    sys.exit(main())
