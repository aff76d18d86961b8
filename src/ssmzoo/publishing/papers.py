"""What the papers report, beside what was measured here, and which word the two deserve.

``eval/papers.yaml`` holds the papers' figures and the conditions of our runs; our own figures come
from results files. The word follows from both, so nobody chooses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

import yaml

from ssmzoo.files import share
from ssmzoo.publishing.card_facts import NOT_MEASURED, ScoredModel, ShownScore

_LISTS = ("results", "better_than", "worse_than")
MEANING = """\
*figure*: the paper's setting, and its figure within two standard errors and its rounding.
*ranking*: another setting or other epochs, or another figure, and the order to the models that are
named is the paper's, by more than two standard errors. *not reached*: neither."""


@dataclass(frozen=True)
class PaperRow:
    """A row of a paper's table, and the results files that stand beside it.

    Attributes:
        row: What the row is, in words.
        results: The names of results, one a seed.
        paper: By metric, the paper's figure as printed there; the first metric is the one judged.
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


def rows_of(family: str) -> list[PaperRow]:
    """Return the rows of a family's paper that were run here.

    Raises:
        ValueError: ``eval/papers.yaml`` has an entry that is none.
    """
    entries = yaml.safe_load(share("eval/papers.yaml").read_text(encoding="utf-8"))
    known = {field.name for field in fields(PaperRow)}
    rows = []
    for entry in entries.get(family, ()):
        if not set(entry) <= known:
            raise ValueError(f"eval/papers.yaml: {entry} must have only {', '.join(sorted(known))}")
        lists = {key: tuple(entry[key]) for key in _LISTS if key in entry}
        rows.append(PaperRow(**{**entry, **lists}))
    return rows


def paper_table(rows: Sequence[PaperRow], results: Iterable[ScoredModel]) -> str:
    """Return our figures beside the paper's as Markdown; a row without results is left out."""
    named = {entry.path.stem: entry for entry in results}
    lines = [
        "| row | here | the paper | seeds | epochs here (in the paper) | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    differs = None
    for row in rows:
        if not _measured(row, named):
            continue
        what, before = row.row, differs
        differs = row.differs
        if differs is not None:
            what += f"; {differs if differs != before else 'as above'}"
        here = "; ".join(_shown(row.results, metric, named) for metric in row.paper)
        paper = "; ".join(f"{_words(metric)} {told}" for metric, told in row.paper.items())
        epochs = f"{row.epochs} ({row.paper_epochs or 'not told'})"
        cells = (what, here, paper, str(len(row.results)), epochs, word(row, named))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", MEANING]) if len(lines) > 2 else NOT_MEASURED.capitalize() + "."


def _measured(row: PaperRow, named: Mapping[str, ScoredModel]) -> bool:
    """Return whether there is a number for all that a row needs."""
    judged = next(iter(row.paper))
    needed = [(name, metric) for name in row.results for metric in row.paper]
    needed += [(name, judged) for name in (*row.better_than, *row.worse_than)]
    found = {
        (name, place.metric)
        for name, entry in named.items()
        for place, score in entry.scores.items()
        if score.value is not None
    }
    return found.issuperset(needed)


def word(row: PaperRow, named: Mapping[str, ScoredModel]) -> str:
    """Return "figure", "ranking" or "not reached" for a row, with what it is a ranking to."""
    first, *others = row.paper
    same = row.differs is None and row.paper_epochs in (None, row.epochs)
    if same and _agrees(row.paper[first], *_middle(row.results, first, named)):
        short = [
            metric
            for metric in others
            if _middle(row.results, metric, named)[0] > _number(row.paper[metric])[1]
        ]
        return f"*figure*, {' and '.join(map(_words, short))} not reached" if short else "*figure*"
    better = [_better(first, row.results, (name,), named) for name in row.better_than]
    worse = [_better(first, (name,), row.results, named) for name in row.worse_than]
    if not better + worse or not all(better + worse):
        return "*not reached*"
    sides = [("better than", row.better_than), ("worse than", row.worse_than)]
    told = [f"{side} {', '.join(f'`{n}`' for n in names)}" for side, names in sides if names]
    return f"*ranking*: {'; '.join(told)}"


def _agrees(told: str, value: float, stderr: float) -> bool:
    low, high = _number(told)
    if told.endswith("+"):
        return value >= float(told[:-1])
    return low - 2 * stderr <= value <= high + 2 * stderr


def _number(told: str) -> tuple[float, float]:
    """Return the range of numbers that are printed like this."""
    digits = told.removesuffix("+")
    half = 0.5 * 10.0 ** -len(digits.partition(".")[2])
    return float(digits) - half, float(digits) + half


def _better(
    metric: str, ours: Sequence[str], theirs: Sequence[str], named: Mapping[str, ScoredModel]
) -> bool:
    """Return whether one is better than another by more than two standard errors."""
    value, error = _middle(ours, metric, named)
    other, others_error = _middle(theirs, metric, named)
    sign = 1 if _score(named[ours[0]], metric).higher_is_better else -1
    return sign * (value - other) > 2 * math.hypot(error, others_error)


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


def _shown(names: Sequence[str], metric: str, named: Mapping[str, ScoredModel]) -> str:
    values = _values(names, metric, named)
    if len(values) == 1:
        return f"{_words(metric)} {_digits(values[0])}"
    low, middle, high = (_digits(x) for x in (values[0], median(values), values[-1]))
    return f"{_words(metric)}, median of {len(values)} seeds: {middle}, from {low} to {high}"


def _words(metric: str) -> str:
    return metric.replace("_", " ")


def _digits(value: float) -> str:
    return f"{value:.4f}"
