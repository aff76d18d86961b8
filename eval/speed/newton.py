"""Newton's method against marching: how many steps it takes, and which is faster.

Usage: python eval/speed/newton.py [--lengths 16 64 ...] [--model FOLDER] [--long]

COFFEE's recurrence on white Gaussian inputs. Steps are counted from a trajectory of zeros, over
whole sequences at once, until the relative residual is 1e-6, for parameters of six kinds and, with
``--model``, for the lanes of a trained model on random tokens. Times are forward passes of both
solvers over a grid of lanes (B * D * N) and lengths, with parameters as a language model starts
with them, and over the trained lanes, in turns; the least of some rounds. Writes
kernels/benchmarks/results/newton.csv and .png, on a GPU with its name in theirs.
"""

import argparse
import importlib
import logging
import time
from pathlib import Path
from typing import NamedTuple

import torch
from report import write_table
from torch import Tensor

from ssmzoo.checkpoints.load import load_model, model_folder
from ssmzoo.files import appears_whole
from ssmzoo_kernels import feedback_scan, last_backend
from ssmzoo_kernels.feedback_scan import SOLVER, Solver, newton_solve
from ssmzoo_kernels.machine import circumstances

RESULTS = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks" / "results"
LENGTHS = [16, 64, 256, 1024, 4096]
LANES = 64
MOST_LANES = 512  # of a trained layer: whole channels, evenly apart
CAP, LONG_CAP = 200, 100  # steps, and those of sequences of 16384 tokens or more
GRID_LANES, GRID_LENGTHS = [16, 256, 4096, 65536], [64, 1024, 8192]
LARGEST = 2**26  # lanes times tokens that are timed
ROUNDS, SECONDS = 5, 1.0  # in turns, at least so often and so long


class Problem(NamedTuple):
    """Inputs of one recurrence a feature: ``u [1, L, D]``, the others ``[D, N]``."""

    u: Tensor
    lam: Tensor
    w: Tensor
    drive: Tensor | None = None


def contractive(length: int, lanes: int) -> Problem:
    """Keep ``2 |w| max |u| <= |lam|``."""
    u = torch.randn(1, length, lanes)
    lam = -0.5 - 0.5 * torch.rand(lanes, 1)
    return Problem(u, lam, 0.4 * lam * (2 * torch.rand(lanes, 1) - 1) / u.abs().max())


def gaussian(lam: float | None, scale: float, length: int, lanes: int) -> Problem:
    """Draw weights from N(0, 1), inputs of a size, and rates, where none is given, from (-1, 0)."""
    rates = -torch.rand(lanes, 1) if lam is None else torch.full((lanes, 1), lam)
    return Problem(scale * torch.randn(1, length, lanes), rates, torch.randn(lanes, 1))


def language_model(length: int, lanes: int, states: int = 1, batch: int = 1) -> Problem:
    """Spread rates over [1e-3, 0.9] and scale weights by their roots."""
    width = lanes // (states * batch)
    rates = torch.logspace(-3, -0.05, states if states > 1 else width)
    rates = rates.expand(width, states) if states > 1 else rates[:, None]
    return Problem(
        torch.randn(batch, length, width), -rates, torch.randn_like(rates) * rates.sqrt()
    )


REGIMES = {
    "contractive": contractive,
    "paper's start": lambda length, lanes: gaussian(0.0, 0.25, length, lanes),
    "language model's start": language_model,
    "lam in (-1, 0), std u 1": lambda length, lanes: gaussian(None, 1.0, length, lanes),
    "lam -1, std u 1": lambda length, lanes: gaussian(-1.0, 1.0, length, lanes),
    "lam in (-1, 0), std u 3": lambda length, lanes: gaussian(None, 3.0, length, lanes),
}


def trained(folder: Path, length: int) -> list[Problem]:
    """Return what the scans of a saved model are given, layer by layer, for random tokens.

    Raises:
        ValueError: There is no such model, or it has no recurrence of COFFEE's.
    """
    name = str(folder)
    model = load_model(name, model_folder(name), "float32", False)
    module = importlib.import_module(type(model).__module__)
    if not hasattr(module, "feedback_scan"):
        raise ValueError(f"--model must be a COFFEE model, got a {type(model).__name__}")
    seen: list[Problem] = []

    def record(u, lam, w, C, w_gamma=None, D=None, drive=None, *rest, **options):
        some = torch.arange(0, u.shape[2], -(-lam.numel() // MOST_LANES))
        gates = None if drive is None else drive[..., some]
        seen.append(Problem(u[..., some], lam[some], w[some], gates))
        return feedback_scan(u, lam, w, C, w_gamma, D, drive, *rest, **options)

    # 0 is filler, and a frozen row stands for a token that never comes
    frozen = getattr(model.config, "frozen_embedding_index", None)
    tokens = torch.tensor([t for t in range(1, model.config.vocab_size) if t != frozen])
    module.feedback_scan, kept = record, module.feedback_scan
    try:
        with torch.no_grad():
            model(tokens[torch.randint(len(tokens), (1, length))], use_cache=False)
    finally:
        module.feedback_scan = kept
    if not seen:
        raise ValueError("--model must be a COFFEE model with feedback_scan, got one of S6")
    return seen


def count(regime: str, length: int, problems: list[Problem]) -> dict:
    """Solve, and sum up over lanes."""
    cap = CAP if length < 16384 else LONG_CAP
    steps, converged = [], []
    for problem in problems:
        found = newton_solve(
            problem.u,
            problem.lam,
            problem.w,
            problem.drive,
            span=None,
            max_iterations=cap,
            guess="zeros",
        )
        steps.append(found.iterations.flatten())
        converged.append(found.converged.flatten())
    taken, done = torch.cat(steps).double(), torch.cat(converged)
    return {
        "what": "steps",
        "regime": regime,
        "length": length,
        "lanes": len(taken),
        "median": int(taken.median()),
        "p99": int(taken.quantile(0.99, interpolation="lower")),
        "max": int(taken.max()),
        "not_converged": round(float((~done).double().mean()), 4),
    }


def grid(length: int, lanes: int) -> Problem:
    """Return a problem to time: a language model's start, 16 states a channel where they fit."""
    states = min(16, lanes)
    return language_model(length, lanes, states, max(1, min(8, lanes // (states * 16))))


@torch.no_grad()
def measure(problem: Problem, device: torch.device, regime: str = "") -> dict:
    """Time a forward pass of both solvers in turns; without a time where Newton's gives up."""
    u, lam, w = (x.to(device) for x in problem[:3])
    drive = None if problem.drive is None else problem.drive.to(device)
    times: dict[Solver, list[float]] = {"march": [], "newton": []}
    begin = time.perf_counter()
    while len(times["march"]) <= ROUNDS or time.perf_counter() < begin + SECONDS:
        for solver, taken in times.items():
            start = time.perf_counter()
            feedback_scan(u, lam, w, w, drive=drive, solver=solver)
            if device.type == "cuda":
                torch.cuda.synchronize()
            took = time.perf_counter() - start
            taken.append(took if last_backend(SOLVER) == solver else float("nan"))
    # without the first, which builds and loads
    least = {f"{solver}_ms": round(min(taken[1:]) * 1e3, 4) for solver, taken in times.items()}
    lanes = u.shape[0] * lam.numel()
    return {"what": "time", "regime": regime, "length": u.shape[1], "lanes": lanes, **least}


def draw(rows: list[dict], target: Path) -> None:
    """Draw steps over length, and the ratio of times over lanes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), dpi=120, layout="constrained")
    steps, times = figure.subplots(1, 2)
    counted = [row for row in rows if row["what"] == "steps"]
    for regime in dict.fromkeys(row["regime"] for row in counted):
        own = [row for row in counted if row["regime"] == regime]
        (line,) = steps.plot(
            [r["length"] for r in own], [r["max"] for r in own], "o-", label=regime
        )
        steps.plot(
            [r["length"] for r in own], [r["median"] for r in own], ":", color=line.get_color()
        )
        missed = [r for r in own if r["not_converged"]]
        steps.plot([r["length"] for r in missed], [r["max"] for r in missed], "x", color="k")
    steps.set(xlabel="length", ylabel="steps until 1e-6", title="worst lane (median dotted)")
    steps.set_xscale("log", base=2)
    steps.set_yscale("log", base=2)
    steps.set_ylim(top=2**11)  # room for the legend
    steps.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    timed = [row for row in rows if row["what"] == "time" and not row["regime"]]
    for length in dict.fromkeys(row["length"] for row in timed):
        own = [row for row in timed if row["length"] == length]
        ratio = [row["newton_ms"] / row["march_ms"] for row in own]
        times.plot([row["lanes"] for row in own], ratio, "o-", label=f"length {length}")
    times.axhline(1, color="k", linewidth=0.8)
    times.set(xlabel="lanes (B D n)", ylabel="time of Newton / of marching", title="forward pass")
    times.set_xscale("log", base=2)
    times.set_yscale("log")
    times.legend(frameon=False, fontsize=8)
    for axes in (steps, times):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    with appears_whole(target) as unfinished:
        figure.savefig(unfinished, format="png")


def main() -> None:
    """Count, measure, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--long", action="store_true", help="also 16384 and 65536 tokens")
    parser.add_argument(
        "--model",
        type=Path,
        help="a saved COFFEE model: its lanes join in, its first layer is timed",
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = circumstances(device)
    rows = []

    def add(row: dict) -> None:
        rows.append(row)
        said = (
            f"median {row['median']}, 99% {row['p99']}, worst {row['max']}, "
            f"not converged {row['not_converged']:.0%}"
            if row["what"] == "steps"
            else f"march {row['march_ms']:.3f} ms, Newton {row['newton_ms']:.3f} ms"
        )
        print(
            f"{row['regime']:25s} {row['lanes']:6d} lanes, L={row['length']:6d}: {said}", flush=True
        )

    if options.model:
        try:
            trained(options.model, 1)  # before minutes of counting
        except (LookupError, ValueError) as error:
            parser.error(str(error))
    for length in [*options.lengths, *([16384, 65536] if options.long else [])]:
        for n, (regime, make) in enumerate(REGIMES.items()):
            torch.manual_seed(n)
            add(count(regime, length, [make(length, LANES)]))
        if options.model:
            torch.manual_seed(0)
            layers = trained(options.model, length)
            add(count("trained", length, layers))
            add(measure(layers[0], device, "trained"))
    for length in GRID_LENGTHS:
        for lanes in GRID_LANES:
            if length * lanes <= LARGEST:
                torch.manual_seed(0)
                add(measure(grid(length, lanes), device))
    name = "newton" if device.type == "cpu" else f"newton-{where['slug']}"
    table = options.output / f"{name}.csv"
    write_table([{**row, **where} for row in rows], table)
    draw(rows, table.with_suffix(".png"))


if __name__ == "__main__":
    main()
