"""Time the ops and the models, print ratios, and write one CSV a device.

Usage: python kernels/benchmarks/run.py [--only NAME ...] [--no-models] [--output FILE]
"""

import argparse
import csv
import subprocess
import sys
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
    options = parser.parse_args()
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


def time_op(entry: Entry, device: torch.device, peak: float) -> list[dict]:
    """Time one op, forward alone and with its backward, on every fast backend of the device."""
    torch.manual_seed(0)
    inputs = [x.requires_grad_() for x in entry.make(*entry.shape, device=device)]
    grad = torch.randn_like(inputs[0])
    forward, backward = entry.flops(*entry.shape)
    rows = []
    for backend in ("triton",) if device.type == "cuda" else ("cpu", "eager"):

        def both(backend: str = backend) -> None:
            entry.call(*inputs, backend=backend).backward(grad)
            for x in inputs:
                x.grad = None

        def one(backend: str = backend) -> None:
            with torch.no_grad():
                entry.call(*inputs, backend=backend)

        for label, call, flops in (("fwd", one, forward), ("fwd+bwd", both, forward + backward)):
            seconds = time_call(call, device)
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
                }
            )
            print(
                f"{entry.op:15s} {backend:7s} {label:8s} {seconds * 1e3:9.2f} ms  "
                f"{flops / seconds / 1e9:7.1f} GFLOP/s, {peak * seconds * 1e9 / flops:6.1f} times "
                "its arithmetic at matrix speed"
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
