"""Write the tables of docs/speed.md, eval/papers.md and eval/zoo.md again.

Usage: python eval/programs/pages.py

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``: ``speed`` from
``kernels/benchmarks/results/cpu.csv``, ``speed-avx2`` from ``cpu-avx2.csv`` beside it, ``papers``
(all rows of the papers) from ``eval/papers.yaml`` and ``eval/results``, ``zoo`` from the ledger of
the sweep of that name, ``eval/results/sweep.csv``. A test holds the pages to it.
"""

from __future__ import annotations

import csv
import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from papers import MEANING, PaperTable, counted, papers, whole_table

from ssmzoo.analysis.ledger import (
    Line,
    best_rates,
    by_length,
    cell_of,
    shown_model,
    shown_scores,
)
from ssmzoo.analysis.sweep import searched_lines
from ssmzoo.analysis.sweep_plan import Sweep, load_sweep
from ssmzoo.files import write_text
from ssmzoo.publishing.card_facts import family_words
from ssmzoo.publishing.card_results import Origin, Row, ScoredModel, ShownScore, scored_model
from ssmzoo.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_TITLES = {
    "transformers Mamba2": "transformers' Mamba2",
    "transformers Mamba2 (ssmzoo's kernels)": "transformers' Mamba2, our kernels",
    "transformers Mamba (mamba.py)": "transformers' Mamba, mamba.py",
    "transformers Mamba": "transformers' Mamba, plain",
    "transformers Mamba (ssmzoo's kernels)": "transformers' Mamba, our kernels",
}
_TABLES = (
    ("training", ("train L=512", "train L=2048"), ("length 512", "length 2048")),
    (
        "`generate`",
        ("decode after 100", "decode after 20000"),
        ("after 100 tokens", "after 20,000 tokens"),
    ),
)
# the problems of the sweep ``zoo`` by the table that they stand in
ZOO = {
    "Recall": ("mqar 4", "mqar 8", "mqar 16", "noisy recall", "fuzzy recall"),
    "Copying, compression, memorization": (
        *("selective copying", "copying", "compression", "memorization"),
    ),
    "State tracking": ("parity", "sum modulo 3", "S3", "A5"),
    "Lists, delays, digits": ("listops", "delay", "digits"),
    "Text": ("text",),
}
_COSTS = ("parameters", "state_bytes", "flops_per_token")


def pages() -> list[Path]:
    """Return the pages that hold tables."""
    return [ROOT / "docs/speed.md", ROOT / "eval/papers.md", ROOT / "eval/zoo.md"]


def rendered(page: Path) -> str:
    """Return a page's text with its tables as they follow from what was measured."""

    def table(match: re.Match[str]) -> str:
        name = match[2]
        if name == "speed":
            text = speed(cpu_rows())
        elif name == "speed-avx2":
            text = speed(cpu_rows("cpu-avx2.csv"))
        elif name == "papers":
            text = all_tables(papers(), results())
        else:
            text = zoo_tables(*zoo())
        return f"{match[1]}{text}\n{match[3]}"

    return _TABLE.sub(table, page.read_text(encoding="utf-8"))


@cache
def zoo() -> tuple[Sweep, list[Line]]:
    """Return the sweep ``zoo``, and the searched lines of its committed ledger."""
    sweep = load_sweep("zoo")
    return sweep, searched_lines(sweep, ROOT / "eval/results/sweep.csv")


def cpu_rows(name: str = "cpu.csv") -> list[dict[str, str]]:
    """Return the rows of a committed benchmark of CPUs."""
    path = ROOT / "kernels/benchmarks/results" / name
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def results() -> list[ScoredModel]:
    """Return all committed results, and as others the cells of ``families.csv``."""
    folder = ROOT / "eval/results"
    with (folder / "families.csv").open(newline="", encoding="utf-8") as file:
        cells = [_cell(line) for line in csv.DictReader(file)]
    return [*(scored_model(path) for path in sorted(folder.glob("*.json"))), *cells]


def _cell(line: Mapping[str, str]) -> ScoredModel:
    """Return a cell of ``families.csv``, with the standard error that results files have."""
    task, metric, value = line["cell"].partition("-")[0], line["metric"], float(line["value"])
    tests = load_recipe(f"families-{task}").data.task_args.get("num_test")
    right = metric == "accuracy"
    stderr = math.sqrt(value * (1 - value) / (tests - 1)) if right and tests else None
    origin = Origin(line["date"], line["hardware"], "not recorded", "", line["command"])
    score = ShownScore(value, stderr, right, origin)
    return ScoredModel(
        Path(line["cell"]), line["cell"], "", None, {Row(task, metric, "", tests, 0, None): score}
    )


def all_tables(papers: Mapping[str, Iterable[PaperTable]], results: Iterable[ScoredModel]) -> str:
    """Return every table of the papers, with how many rows have which word."""
    named = {entry.path.stem: entry for entry in results}
    sections = []
    for family, tables in papers.items():
        words = family_words(family)
        assert words is not None
        arxiv = words["paper"]["arxiv"]
        sections += [
            f"## {words['title']}",
            f"[{words['paper']['title']}](https://arxiv.org/abs/{arxiv}); "
            f"[ours](../plugins/ssmzoo_{family}/README.md).",
        ]
        for table in tables:
            sections.append(f"### {table.table}: {table.about}")
            if table.why:
                sections.append(f"*not run*: {table.why}.")
            if table.note:
                sections.append(f"{table.note}.")
            if table.rows or table.not_run:
                sections.append(whole_table(table, named))
    found = counted((table for tables in papers.values() for table in tables), named)
    words = ", ".join(f"{count} *{word}*" for word, count in found.items())
    count = f"{sum(found.values())} rows: {words}."
    return "\n\n".join([count, f"{MEANING} *not run*: why stands above the table.", *sections])


def zoo_tables(sweep: Sweep, ledger: list[Line]) -> str:
    """Return the tables of a sweep's searched cells, what models cost, and unsupported pairs."""
    holes = defaultdict(list)
    for line in ledger:
        if line["lr"] is None:
            holes[line["note"]].append(f"{line['model']} on {line['problem']}")
    searched = {cell_of(line) for line in ledger if line["lr"] is not None}
    cells = len(sweep.models) * len(sweep.problems) * len(sweep.widths)
    possible = cells - sum(map(len, holes.values()))
    sections = [f"{len(searched)} of {possible} cells are searched; the others are empty."]
    for title, problems in ZOO.items():
        done = any(problem in problems for problem, _, _ in searched)
        models = list(sweep.models)
        table = _sortable(markdown_table(ledger, problems, models)) if done else "Not run yet."
        sections += [f"## {title}", table]
    if costs := _costs([line for line in ledger if line["problem"] == "mqar 8"]):
        sections += ["## What they cost", "On eight pairs of MQAR.", _sortable(costs)]
    if holes:
        texts = [f"- {', '.join(where)}: {why}." for why, where in holes.items()]
        sections += ["## What could not be run", "\n".join(texts)]
    return "\n\n".join(sections)


def markdown_table(ledger: list[Line], problems: Sequence[str], models: Sequence[str]) -> str:
    """Return models by problems as Markdown, each at its best learning rate.

    A cell is the mean over seeds and, of several, from the least to the greatest; it says how many
    diverged. ``-`` is an unsupported pair. A problem that is evaluated at other lengths, too, has a
    column for each.

    Args:
        ledger: The lines.
        problems: The columns, in this order; those of which nothing was trained are left out.
        models: The rows, in this order, one for each width; likewise.
    """
    best = best_rates(ledger)
    places = dict.fromkeys((line["model"], line["width"]) for line in ledger)
    columns = _problem_columns(best, problems)
    rows = [["model", *(head for head, _, _ in columns)], ["---", *["---:"] * len(columns)]]
    unsupported = {cell_of(line) for line in ledger if line["lr"] is None}
    for model, width in sorted(places, key=lambda place: models.index(place[0])):
        cells = []
        for _, name, length in columns:
            cell = (name, model, width)
            cells.append("-" if cell in unsupported else shown_scores(best.get(cell, []), length))
        if any(text.strip("-") for text in cells):
            rows.append([shown_model(model, width, places), *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _problem_columns(
    best: Mapping[Any, list[Line]], problems: Sequence[str]
) -> list[tuple[str, str, int]]:
    """Return the heading, the problem and the length of each column, one for each length."""
    columns = []
    for name in problems:
        runs = [line for place, lines in best.items() if place[0] == name for line in lines]
        metric = next((line["metric"] for line in runs if line["metric"]), "accuracy")
        unit = "" if metric == "accuracy" else f", {metric.replace('_', ' ')}"
        for number, length in enumerate(by_length(runs)):
            where = f" at {length:,}" if number else ""
            columns.append((f"{name}{where}{unit}", name, length))
    return columns


def _sortable(table: str) -> str:
    """Return a table that can be sorted and filtered in the site."""
    return f'<div class="ledger">\n\n{table}\n\n</div>'


def _costs(lines: list[Line]) -> str:
    """Return every model's costs on one problem, whose lines these are; empty without any."""
    best = best_rates(lines)
    places = [(model, width) for _, model, width in best]
    rows = []
    for (_, model, width), runs in best.items():
        values = (runs[0][name] for name in _COSTS)
        shown = ("not bounded" if x is None else f"{x:,}" for x in values)
        rows.append(_line([shown_model(model, width, places), *shown]))
    heads = ["model", "parameters", "bytes of state", "operations a token"]
    return "\n".join([_line(heads), _line(["---", *["---:"] * 3]), *rows]) if rows else ""


def speed(rows: Iterable[Mapping[str, str]]) -> str:
    """Return the tables of whole models' speed.

    A cell is a median and, of several runs, the least and the most. Below stands which runs they
    are; rows of several commits are told apart by it.
    """
    timed: dict[str, dict[str, Mapping[str, str]]] = {}
    for row in rows:
        if row["what"] == "model":
            timed.setdefault(row["variant"], {})[row["pass"]] = row
    lines, shown = [], []
    for title, passes, heads in _TABLES:
        memory = title == "training" and any(
            row.get("peak_mib") for found in timed.values() for row in found.values()
        )
        columns = [title, *heads, *(["memory at 2048, MiB"] if memory else [])]
        lines += [_line(columns), _line(["---"] * len(columns))]
        for variant, found in timed.items():
            here = [found[name] for name in passes if name in found]
            words = family_words(variant)
            name = words["title"] if words else _TITLES.get(variant)
            if not here or name is None:
                continue
            cells = [_speed(found.get(name)) for name in passes]
            if memory:
                mib = found.get(passes[-1], {}).get("peak_mib")
                cells.append(f"{float(mib):,.0f}" if mib else "not measured")
            lines.append(_line([name, *cells]))
            shown += here
        lines.append("")
    calls = dict.fromkeys(map(_conditions, shown))
    caption = textwrap.wrap(f"Tokens per second; {'; '.join(calls)}.", width=120)
    return "\n".join([*lines, *caption])


def _speed(row: Mapping[str, str] | None) -> str:
    if row is None:
        return "not measured"
    middle = f"{int(row['tokens_per_second']):,}"
    if int(row.get("runs") or 1) == 1:
        return middle
    return f"{middle} ({int(row['slowest']):,} to {int(row['fastest']):,})"


def _conditions(row: Mapping[str, str]) -> str:
    runs = int(row.get("runs") or 1)
    how = "one run" if runs == 1 else f"median of {runs} runs, and from the slowest to the fastest"
    dirty = " with changes" if row.get("dirty") == "True" else ""
    return f"{how}, commit {row['commit']}{dirty}, {row['date']}, {row['device']}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write every page whose tables changed."""
    for page in pages():
        text = rendered(page)
        if text != page.read_text(encoding="utf-8"):
            write_text(page, text)


if __name__ == "__main__":
    main()
