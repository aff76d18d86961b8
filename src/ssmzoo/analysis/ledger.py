"""A sweep's ledger: its columns, its file, the best learning rates, its table and pictures."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from ssmzoo.environment.messages import missing
from ssmzoo.files import appears_whole, write_text
from ssmzoo.recipe import HIGHER_IS_BETTER

Line: TypeAlias = dict[str, Any]
Cell: TypeAlias = tuple[str, str, int | None]  # problem, model and width

# by column, the type of its values
COLUMNS: dict[str, type] = {
    **{"problem": str, "model": str, "width": int, "lr": float, "seed": int},
    **{"length": int, "metric": str, "validation": float, "value": float, "last": float},
    **{"targets": int, "parameters": int, "state_bytes": int, "flops_per_token": int},
    **{"seconds": float, "cpu_seconds": float, "hardware": str, "date": str, "recipe": str},
    "note": str,
}


def cell_of(line: Line) -> Cell:
    """Return the problem, model and width of a line."""
    return line["problem"], line["model"], line["width"]


def write_ledger(ledger: list[Line], target: Path) -> None:
    """Write a ledger as CSV, which appears complete or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(ledger)
    write_text(target, text.getvalue())


def read_ledger(path: str | Path) -> list[Line]:
    """Read the lines of a ``ledger.csv``; an empty field is None.

    Raises:
        ValueError: It is no ledger, or a line is cut or wrong; the message has its number.
    """
    with Path(path).open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        if next(reader, None) != list(COLUMNS):
            raise ValueError(f"{path} must begin with the columns {','.join(COLUMNS)}")
        ledger = []
        for fields in reader:
            try:
                pairs = zip(COLUMNS.items(), fields, strict=True)
                ledger.append({name: kind(x) if x else None for (name, kind), x in pairs})
            except ValueError as error:
                raise ValueError(
                    f"{path}, line {reader.line_num}, is cut or wrong: {error}"
                ) from None
    return ledger


def best_rates(ledger: list[Line]) -> dict[Cell, list[Line]]:
    """Return, by problem, model and width, the lines of the learning rate that is best on average.

    Rates are ranked by the validation's mean over the seeds that all of them have, or over their
    own seeds where there are none; a run that diverged is the worst.
    """
    groups: dict[Cell, dict[float, list[Line]]] = {}
    for line in ledger:
        if line["lr"] is not None:  # an unsupported pair has none
            rates = groups.setdefault(cell_of(line), {})
            rates.setdefault(line["lr"], []).append(line)

    def best(rates: dict[float, list[Line]]) -> list[Line]:
        common = set.intersection(*({line["seed"] for line in lines} for lines in rates.values()))
        return max(
            rates.values(),
            key=lambda lines: mean([x for x in lines if not common or x["seed"] in common]),
        )

    def mean(lines: list[Line]) -> float:
        if any(line["validation"] is None for line in lines):
            return -math.inf
        sign = 1 if lines[0]["metric"] in HIGHER_IS_BETTER else -1
        return sign * sum(line["validation"] for line in lines) / len(lines)

    return {place: best(rates) for place, rates in groups.items()}


def by_length(lines: list[Line]) -> dict[int, list[Line]]:
    """Return the lines of one rate by the length of the evaluation, without runs that diverged."""
    found: dict[int, list[Line]] = {}
    for line in lines:
        if line["value"] is not None:
            found.setdefault(line["length"], []).append(line)
    return found


def spread(lines: list[Line]) -> tuple[float, float, float]:
    """Return mean, least and greatest score of lines, the seeds of one rate and length."""
    values = [line["value"] for line in lines]
    return sum(values) / len(values), min(values), max(values)


def ledger_table(ledger: list[Line]) -> str:
    """Return the ledger's best learning rates as text: means over seeds, least and greatest."""
    texts = []
    for problem in dict.fromkeys(line["problem"] for line in ledger):
        lines = [line for line in ledger if line["problem"] == problem]
        metric = next((line["metric"] for line in lines if line["metric"]), None)
        runs = [line for line in lines if line["lr"] is not None]  # an unsupported pair has none
        judged = [line for line in runs if line["value"] is not None]
        lengths = sorted({line["length"] for line in judged or runs})
        heads = [f"at {length:,}" for length in lengths]
        rows = [
            ["model", "width", "lr", "seeds", *heads, "state bytes", "flops/token", "parameters"]
        ]
        for (_, model, width), found in best_rates(lines).items():
            shown = [shown_scores(found, length) or "none" for length in lengths]
            sizes = [found[0][name] for name in ("state_bytes", "flops_per_token", "parameters")]
            sizes = ["none" if size is None else f"{size:,}" for size in sizes]
            seeds = len({line["seed"] for line in found})
            rows.append([model, str(width or "own"), f"{found[0]['lr']:g}", str(seeds), *shown])
            rows[-1] += sizes
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        texts.append(f"{problem}: {metric}" if metric else problem)
        for first, *rest in rows:
            cells = [f"{cell:>{room}}" for cell, room in zip(rest, widths[1:], strict=True)]
            texts.append(f"  {first:<{widths[0]}}  {'  '.join(cells)}")
        for line in lines:
            if line["lr"] is None:
                texts.append(f"  {line['model']}: none, for {line['note']}")
        texts.append("")
    return "\n".join(texts).rstrip()


def shown_model(model: str, width: int | None, places: Iterable[tuple[str, int | None]]) -> str:
    """Return a model's name, with its width where models of several widths are shown."""
    many = len({other for _, other in places}) > 1
    return f"{model} {width}" if many and width is not None else model


def shown_scores(lines: list[Line], length: int) -> str:
    """Return the mean at one length, and the range over several seeds, of one learning rate."""
    found = by_length(lines).get(length, [])
    lost = [line for line in lines if line["value"] is None]
    # a run that diverged has one line, for all lengths
    diverged = sum(line["metric"] is None or line["length"] == length for line in lost)
    if not found:
        return "diverged" if diverged else ""
    mean, least, greatest = spread(found)
    text = f"{mean:.3f}" if len(found) == 1 else f"{mean:.3f} ({least:.3f} to {greatest:.3f})"
    return f"{text}, {diverged} diverged" if diverged else text


def draw_problem(lines: list[Line], target: Path) -> None:
    """Draw one problem: every model at its best rate, and its score over the bytes of its state.

    On the left are means over seeds with bars from the least to the greatest, at the training
    length (full) and at the others (hollow). On the right are those at the training length, against
    the state of one sequence; models whose state could not be counted are missing there.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise missing("pictures need matplotlib", "train", error) from error
    best = {place: found for place, found in best_rates(lines).items() if by_length(found)}
    figure = Figure(figsize=(11, 2 + 0.26 * len(best)), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2, sharex=False)
    sizes = _draw_models(left, right, best)
    metric = next(line["metric"] for line in lines if line["metric"])
    left.set_xlabel(metric.replace("_", " "))
    right.set(xlabel="state of one sequence in bytes", ylabel=metric.replace("_", " "))
    if metric == "accuracy":
        left.set_xlim(-0.02, 1.02)
        right.set_ylim(-0.02, 1.02)
    if sizes and max(sizes) > 8 * min(sizes):
        right.set_xscale("log", base=2)
    else:
        right.xaxis.set_major_locator(MaxNLocator(5))
        right.xaxis.set_major_formatter("{x:,.0f}")
    lengths = list(by_length([line for found in best.values() for line in found]))
    shown = f"{lengths[0]:,} tokens"
    if len(lengths) > 1:
        shown = f"full: {shown}, hollow: {' and '.join(f'{n:,}' for n in lengths[1:])}"
    count = len({line["seed"] for line in lines if line["seed"] is not None})
    seeds = "1 seed" if count == 1 else f"mean of {count} seeds"
    figure.suptitle(f"{lines[0]['problem']}; {shown}; {seeds}", size=10)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    with appears_whole(target) as unfinished:
        figure.savefig(unfinished, format="png")


def _draw_models(left: Any, right: Any, best: dict[Cell, list[Line]]) -> list[int]:
    """Draw every model at its best rate, and return the states' sizes that are known."""
    names, sizes, markers = [], [], "osD^vP*Xhd<"
    places = [(model, width) for _, model, width in best]
    known = list(dict.fromkeys(model for model, _ in places))
    for row, ((_, model, width), found) in enumerate(best.items()):
        names.append(shown_model(model, width, places))
        number = known.index(model)
        style = {"color": f"C{number % 10}", "marker": markers[number % len(markers)], "capsize": 2}
        for place, seeds in enumerate(by_length(found).values()):
            mean, least, greatest = spread(seeds)
            error = [[mean - least], [greatest - mean]]
            filling = None if place == 0 else "none"
            left.errorbar([mean], [row], xerr=error, mfc=filling, **style)
            size = seeds[0]["state_bytes"]
            if place == 0 and size is not None:
                right.errorbar([size], [mean], yerr=error, **style)
                offset = {"xytext": (5, 3), "textcoords": "offset points"}
                right.annotate(names[-1], (size, mean), size=6, **offset)
                sizes.append(size)
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    return sizes
