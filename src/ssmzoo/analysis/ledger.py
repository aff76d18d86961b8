"""The ledger of a sweep: its columns, its file, the best learning rates, its table and pictures."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ssmzoo.environment.messages import missing
from ssmzoo.files import appears_whole, write_text
from ssmzoo.recipe import HIGHER_IS_BETTER

Line: TypeAlias = dict[str, Any]
Cell: TypeAlias = tuple[str, str, int | None]  # problem, model and width

# the ledger's, and what is made of them where they are read
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
    """Read the lines of a ``ledger.csv``; what is empty is None.

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

    It is the best by the validation's mean over the seeds that all rates have, or over its own
    where there are none; what diverged is the worst.
    """
    groups: dict[Cell, dict[float, list[Line]]] = {}
    for line in ledger:
        if line["lr"] is not None:  # a hole has none
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
    """Return the lines of one rate by the length they are judged at, without what diverged."""
    found: dict[int, list[Line]] = {}
    for line in lines:
        if line["value"] is not None:
            found.setdefault(line["length"], []).append(line)
    return found


def spread(lines: list[Line], column: str = "value") -> tuple[float, float, float]:
    """Return mean, least and greatest of a column over lines, the seeds of one rate and length."""
    values = [line[column] for line in lines]
    return sum(values) / len(values), min(values), max(values)


def ledger_table(ledger: list[Line]) -> str:
    """Return the ledger's best learning rates as text: means over seeds, least and greatest."""
    texts = []
    for problem in dict.fromkeys(line["problem"] for line in ledger):
        lines = [line for line in ledger if line["problem"] == problem]
        metric = next((line["metric"] for line in lines if line["metric"]), None)
        runs = [line for line in lines if line["lr"] is not None]  # a hole has none
        judged = [line for line in runs if line["value"] is not None]
        lengths = sorted({line["length"] for line in judged or runs})
        heads = [f"at {length:,}" for length in lengths]
        rows = [
            ["model", "width", "lr", "seeds", *heads, "state bytes", "flops/token", "parameters"]
        ]
        for (_, model, width), found in best_rates(lines).items():
            shown = [_shown(found, length) or "none" for length in lengths]
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


def markdown_table(ledger: list[Line], problems: Sequence[str], models: Sequence[str]) -> str:
    """Return models by problems as Markdown, each at its best learning rate.

    A cell is the mean over seeds and, of several, from the least to the greatest; it says how many
    diverged. ``-`` is a hole. A problem that is judged at other lengths than it is trained at has a
    column for each.

    Args:
        ledger: The lines.
        problems: The columns, in this order; those of which nothing was trained are left out.
        models: The rows, in this order, one for each width; likewise.
    """
    best = best_rates(ledger)
    places = dict.fromkeys((line["model"], line["width"]) for line in ledger)
    columns = _judged(best, problems)
    rows = [["model", *(head for head, _, _ in columns)], ["---", *["---:"] * len(columns)]]
    holes = {cell_of(line) for line in ledger if line["lr"] is None}
    for model, width in sorted(places, key=lambda place: models.index(place[0])):
        cells = []
        for _, name, length in columns:
            cell = (name, model, width)
            cells.append("-" if cell in holes else _shown(best.get(cell, []), length))
        if any(text.strip("-") for text in cells):
            rows.append([shown_model(model, width, places), *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def beside_table(ledger: list[Line], problems: Sequence[str], models: Sequence[str]) -> str:
    """Return problems by models as Markdown, and the best of all models of the ledger.

    Rows are the columns of :func:`markdown_table`, cells its means, with a star where the seeds
    differ by more than 0.1. The best is of the models that have the most seeds there, and named
    where it is one.

    Args:
        ledger: The lines.
        problems: The rows, in this order; those of which nothing was trained are left out.
        models: The columns, in this order.

    Raises:
        ValueError: Models of several widths.
    """
    widths = {line["width"] for line in ledger}
    if len(widths) > 1:
        raise ValueError(f"the ledger must have models of one width, got {sorted(widths)}")
    best = {(problem, model): lines for (problem, model, _), lines in best_rates(ledger).items()}
    holes = {(line["problem"], line["model"]) for line in ledger if line["lr"] is None}
    rows = [["problem", *models, "the best of all"], ["---", *["---:"] * (len(models) + 1)]]
    for head, problem, length in _judged(best, problems):
        cells = [
            "-" if (problem, model) in holes else _brief(best.get((problem, model), []), length)
            for model in models
        ]
        there = {
            model: found
            for (name, model), lines in best.items()
            if name == problem and (found := by_length(lines).get(length))
        }
        most = max(map(len, there.values()))
        means = {
            model: f"{spread(found)[0]:.3f}" for model, found in there.items() if len(found) == most
        }
        higher = next(iter(there.values()))[0]["metric"] in HIGHER_IS_BETTER
        first = (max if higher else min)(means.values(), key=float)
        names = [model for model, mean in means.items() if mean == first]
        whose = names[0] if len(names) == 1 else f"{len(names)} models"
        rows.append([head, *cells, f"{first} ({whose})"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _brief(lines: list[Line], length: int) -> str:
    """Return the mean at one length of the lines of a learning rate, with a star if it is wide."""
    found = by_length(lines).get(length, [])
    if not found or len(found) < len({line["seed"] for line in lines}):
        return _shown(lines, length)
    mean, least, greatest = spread(found)
    return f"{mean:.3f}{'*' if greatest - least > 0.1 else ''}"


def _judged(best: Mapping[Any, list[Line]], problems: Sequence[str]) -> list[tuple[str, str, int]]:
    """Return what problems are judged by: a heading, the problem and a length, for each length."""
    columns = []
    for name in problems:
        runs = [line for place, lines in best.items() if place[0] == name for line in lines]
        metric = next((line["metric"] for line in runs if line["metric"]), "accuracy")
        unit = "" if metric == "accuracy" else f", {metric.replace('_', ' ')}"
        for number, length in enumerate(by_length(runs)):
            where = f" at {length:,}" if number else ""
            columns.append((f"{name}{where}{unit}", name, length))
    return columns


def shown_model(model: str, width: int | None, places: Iterable[tuple[str, int | None]]) -> str:
    """Return a model's name, with its width where models of several widths are shown."""
    many = len({other for _, other in places}) > 1
    return f"{model} {width}" if many and width is not None else model


def _shown(lines: list[Line], length: int) -> str:
    """Return the mean and, of several, range at one length of the lines of a learning rate."""
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
    """Draw one problem: every model at its best rate, and what its state's bytes buy.

    On the left means over seeds, from the least to the greatest, at the training length (full) and
    at the others (hollow); on the right the former against the state of one sequence. Models whose
    state could not be counted are on the left only.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise missing("pictures need matplotlib", "train", error) from error
    best = {place: found for place, found in best_rates(lines).items() if by_length(found)}
    places = [(model, width) for _, model, width in best]
    figure = Figure(figsize=(11, 2 + 0.26 * len(best)), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2, sharex=False)
    names, sizes, markers = [], [], "osD^vP*Xhd<"
    known = list(dict.fromkeys(model for _, model, _ in best))
    for row, ((_, model, width), found) in enumerate(best.items()):
        names.append(shown_model(model, width, places))
        number = known.index(model)
        style = {"color": f"C{number % 10}", "marker": markers[number % len(markers)]}
        for place, seeds in enumerate(by_length(found).values()):
            mean, least, greatest = spread(seeds)
            error = [[mean - least], [greatest - mean]]
            filling = None if place == 0 else "none"
            left.errorbar([mean], [row], xerr=error, capsize=2, mfc=filling, **style)
            size = seeds[0]["state_bytes"]
            if place == 0 and size is not None:
                error = [[mean - least], [greatest - mean]]
                right.errorbar([size], [mean], yerr=error, capsize=2, **style)
                right.annotate(names[-1], (size, mean), xytext=(5, 3), size=6,
                               textcoords="offset points")  # fmt: skip
                sizes.append(size)
    metric = next(line["metric"] for line in lines if line["metric"])
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
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
    seeds = len({line["seed"] for line in lines if line["seed"] is not None})
    figure.suptitle(
        f"{lines[0]['problem']}; {shown}; {'1 seed' if seeds == 1 else f'mean of {seeds} seeds'}",
        size=10,
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    with appears_whole(target) as unfinished:
        figure.savefig(unfinished, format="png")
