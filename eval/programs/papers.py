"""Set the papers' figures beside our own, with the word that both deserve.

``eval/papers.yaml`` holds the papers' figures and the conditions of our runs; our own figures come
from results. The word follows from both, so nobody chooses it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from ssmzoo.files import parse_yaml
from ssmzoo.publishing.card_results import ScoredModel, ShownScore

_FILE = "eval/papers.yaml"
PLACE = Path(__file__).resolve().parents[2] / _FILE
_FIGURE = re.compile(r"\d+(\.\d+)?(\+| ?%)?")
_MARKS = ("✗", "OOM")  # of a task that was not learned, and of a GPU's memory that did not suffice
_LISTS = ("results", "better_than", "worse_than")
_KINDS = {"rows": list, "columns": list, "paper": dict, "not_run": dict} | dict.fromkeys(
    _LISTS, list
)
_NAMES = {list: "list that is not empty", dict: "mapping that is not empty", str: "text in quotes"}
_HEAD = (
    "| row | here | the paper | seeds | epochs here (in the paper) | |",
    "| --- | --- | --- | --- | --- | --- |",
)
MEANING = """\
*figure*: the paper's setting, and its figure within two standard errors and its rounding.
*ranking*: another setting or other epochs, or another figure, and the order to the models that are
named is the paper's, by more than two standard errors (where a metric has none, RMSE, by more than
a third of the larger value). *not reached*: neither."""
ALIKE = 1 / 3  # seeds of one model on Delay lie as far apart


@dataclass(frozen=True)
class PaperRow:
    """A row of a paper's table, and the results that stand beside it.

    Attributes:
        row: What the row is, in words.
        results: The names of results, one a seed.
        paper: By metric, the paper's figure as printed there; the first metric is the one judged.
            Ours of "60.6 %" are shares.
        epochs: How long ours were trained.
        paper_epochs: How long the paper's was; None if it does not say.
        differs: What is otherwise than in the paper; None for the paper's setting.
        better_than: Names of results that this row must be better than, as in the paper.
        worse_than: Names of results that it must be worse than.
    """

    row: str
    results: tuple[str, ...]
    paper: Mapping[str, str]
    epochs: str
    paper_epochs: str | None = None
    differs: str | None = None
    better_than: tuple[str, ...] = ()
    worse_than: tuple[str, ...] = ()


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper, or a part of one.

    Attributes:
        table: Its number, as in "Table 2, Delay".
        about: What it measures, in words.
        rows: What was run here.
        not_run: By row, the paper's figures of what was not run, one a column; "-" is left out.
        columns: What those figures are.
        why: Why these rows were not run.
        note: What else must be known.
    """

    table: str
    about: str
    rows: tuple[PaperRow, ...] = ()
    not_run: Mapping[str, str] | None = None
    columns: tuple[str, ...] = ()
    why: str | None = None
    note: str | None = None


def papers() -> dict[str, list[PaperTable]]:
    """Return the papers' tables by family.

    Raises:
        ValueError: ``eval/papers.yaml`` has an entry that is none; the message names it.
    """
    content = parse_yaml(PLACE.read_text(encoding="utf-8"), _FILE)
    if not isinstance(content, dict) or not all(isinstance(x, list) for x in content.values()):
        raise ValueError(f"{_FILE}: must hold a list of tables by family, got {content!r:.60}")
    return {family: [_table(family, entry) for entry in content[family]] for family in content}


def rows_of(family: str) -> list[PaperRow]:
    """Return the rows of a family's paper that were run here, with their table.

    Raises:
        ValueError: ``eval/papers.yaml`` has an entry that is none.
    """
    return [
        replace(row, row=f"{table.table}: {row.row}")
        for table in papers().get(family, ())
        for row in table.rows
    ]


def _table(family: str, entry: Any) -> PaperTable:
    name = f"{_FILE}: {family}, {entry.get('table') if isinstance(entry, dict) else entry}"
    given = _given(PaperTable, entry, name)
    rows = tuple(_row(name, row) for row in given.pop("rows", ()))
    table = PaperTable(**{**given, "columns": tuple(given.get("columns", ())), "rows": rows})
    if table.not_run and not table.why:
        raise ValueError(f"{name}: not_run needs why, in a few words")
    for row, told in (table.not_run or {}).items():
        printed = told.split() if isinstance(told, str) else [told]
        if len(printed) != len(table.columns):
            raise ValueError(
                f"{name}, {row}: must have {len(table.columns)} figures, one a column, got {told!r}"
            )
        for figure in printed:
            if figure not in ("-", *_MARKS):
                _check_figure(f"{name}, {row}", figure)
    return table


def _row(table: str, entry: Any) -> PaperRow:
    name = f"{table}, {entry.get('row') if isinstance(entry, dict) else entry}"
    given = _given(PaperRow, entry, name)
    for figure in given["paper"].values():
        _check_figure(name, figure)
    lists = {key: tuple(given[key]) for key in _LISTS if key in given}
    return PaperRow(**{**given, **lists})


def _given(kind: type, entry: Any, name: str) -> dict[str, Any]:
    """Return an entry's fields if they are those of a kind."""
    known = [field.name for field in fields(kind)]
    needed = [field.name for field in fields(kind) if field.default is MISSING]
    if not isinstance(entry, dict) or not set(needed) <= set(entry) <= set(known):
        got = ", ".join(entry) if isinstance(entry, dict) else entry
        raise ValueError(
            f"{name}: must have {', '.join(needed)} and none but {', '.join(known)}, got {got}"
        )
    for field, value in entry.items():
        wanted = _KINDS.get(field, str)
        if not isinstance(value, wanted) or not value:
            raise ValueError(f"{name}: {field} must be a {_NAMES[wanted]}, got {value!r}")
    return dict(entry)


def _check_figure(name: str, figure: object) -> None:
    if not isinstance(figure, str) or not _FIGURE.fullmatch(figure):
        raise ValueError(f"{name}: a figure must be a number in quotes, got {figure!r}")


def whole_table(table: PaperTable, named: Mapping[str, ScoredModel]) -> str:
    """Return all rows of a table as Markdown, those that were not run too.

    Raises:
        ValueError: A row names a result that does not exist, or that has no such metric.
    """
    for row in table.rows:
        if missing := _missing(row, named):
            raise ValueError(f"{_FILE}: {table.table}, {row.row}: no result {missing}")
    lines = _lines(table.rows, named)
    for row, told in (table.not_run or {}).items():
        figures = zip(table.columns, told.split(), strict=True)
        paper = "; ".join(f"{column} {figure}" for column, figure in figures if figure != "-")
        lines.append(f"| {row} | | {paper} | | | *not run* |")
    return "\n".join([*_HEAD, *lines])


def counted(tables: Iterable[PaperTable], named: Mapping[str, ScoredModel]) -> dict[str, int]:
    """Return how many rows have which word."""
    found: dict[str, int] = {"figure": 0, "ranking": 0, "not reached": 0, "not run": 0}
    for table in tables:
        for row in table.rows:
            found[word(row, named).split("*")[1]] += 1
        found["not run"] += len(table.not_run or {})
    return found


def _lines(rows: Iterable[PaperRow], named: Mapping[str, ScoredModel]) -> list[str]:
    lines, differs = [], None
    for row in rows:
        what, before = row.row, differs
        differs = row.differs
        if differs is not None:
            what += f"; {differs if differs != before else 'as above'}"
        here = "; ".join(_shown(row, metric, named) for metric in row.paper)
        paper = "; ".join(f"{_words(metric)} {told}" for metric, told in row.paper.items())
        epochs = f"{row.epochs} ({row.paper_epochs or 'not told'})"
        cells = (what, here, paper, str(len(row.results)), epochs, word(row, named))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _missing(row: PaperRow, named: Mapping[str, ScoredModel]) -> str | None:
    """Return the first result and metric that a row needs and that has no number."""
    judged = next(iter(row.paper))
    needed = [(name, metric) for name in row.results for metric in row.paper]
    needed += [(name, judged) for name in (*row.better_than, *row.worse_than)]
    found = {
        (name, place.metric)
        for name, entry in named.items()
        for place, score in entry.scores.items()
        if score.value is not None
    }
    return next(
        (f"{name} ({metric})" for name, metric in needed if (name, metric) not in found), None
    )


def word(row: PaperRow, named: Mapping[str, ScoredModel]) -> str:
    """Return "figure", "ranking" or "not reached" for a row, with what it is a ranking to."""
    first, *others = row.paper
    same = row.differs is None and row.paper_epochs in (None, row.epochs)
    if same and _agrees(row.paper[first], *_middle(row.results, first, named)):
        short = [metric for metric in others if _falls_short(row, metric, named)]
        return f"*figure*, {' and '.join(map(_words, short))} not reached" if short else "*figure*"
    better = [_better(first, row.results, (name,), named) for name in row.better_than]
    worse = [_better(first, (name,), row.results, named) for name in row.worse_than]
    if not better + worse or not all(better + worse):
        return "*not reached*"
    sides = [("better than", row.better_than), ("worse than", row.worse_than)]
    told = [f"{side} {', '.join(f'`{n}`' for n in names)}" for side, names in sides if names]
    return f"*ranking*: {'; '.join(told)}"


def _falls_short(row: PaperRow, metric: str, named: Mapping[str, ScoredModel]) -> bool:
    low, high = _number(row.paper[metric])
    value = _middle(row.results, metric, named)[0]
    rises = _score(named[row.results[0]], metric).higher_is_better
    return value < low if rises else value > high


def _agrees(told: str, value: float, stderr: float) -> bool:
    low, high = _number(told)
    if told.endswith("+"):
        return value >= float(told[:-1])
    return low - 2 * stderr <= value <= high + 2 * stderr


def _number(told: str) -> tuple[float, float]:
    """Return the range of numbers that are printed like this."""
    digits = told.rstrip("+% ")
    unit = 0.01 if told.endswith("%") else 1.0
    half = 0.5 * 10.0 ** -len(digits.partition(".")[2])
    return unit * (float(digits) - half), unit * (float(digits) + half)


def _better(
    metric: str, ours: Sequence[str], theirs: Sequence[str], named: Mapping[str, ScoredModel]
) -> bool:
    """Return whether one is better than another by more than two standard errors.

    Where a metric has none, by more than ``ALIKE`` of the larger value.
    """
    value, error = _middle(ours, metric, named)
    other, others_error = _middle(theirs, metric, named)
    sign = 1 if _score(named[ours[0]], metric).higher_is_better else -1
    apart = 2 * math.hypot(error, others_error) or ALIKE * max(abs(value), abs(other))
    return sign * (value - other) > apart


def _score(results: ScoredModel, metric: str) -> ShownScore:
    return next(score for row, score in results.scores.items() if row.metric == metric)


def _values(names: Sequence[str], metric: str, named: Mapping[str, ScoredModel]) -> list[float]:
    found: list[Any] = [_score(named[name], metric).value for name in names]
    return sorted(found)


def _middle(
    names: Sequence[str], metric: str, named: Mapping[str, ScoredModel]
) -> tuple[float, float]:
    """Return the median over seeds and the largest standard error of one of them."""
    errors = [_score(named[name], metric).stderr or 0.0 for name in names]
    return median(_values(names, metric, named)), max(errors)


def _shown(row: PaperRow, metric: str, named: Mapping[str, ScoredModel]) -> str:
    values = _values(row.results, metric, named)
    percent = row.paper[metric].endswith("%")
    low, middle, high = (
        f"{100 * x:.2f} %" if percent else f"{x:.4f}"
        for x in (values[0], median(values), values[-1])
    )
    if len(values) == 1:
        return f"{_words(metric)} {middle}"
    return f"{_words(metric)}, median of {len(values)} seeds: {middle}, from {low} to {high}"


def _words(metric: str) -> str:
    return metric.replace("_", " ")
