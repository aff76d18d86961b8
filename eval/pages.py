"""Write the tables of README and of the plugins' pages again, from what was measured.

Usage: python eval/pages.py

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``: ``speed`` from
``kernels/benchmarks/results/cpu.csv``, a family's name from ``eval/papers.yaml`` and
``eval/results``. A test holds the pages to what this writes.
"""

from __future__ import annotations

import csv
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from ssmzoo.files import write_text
from ssmzoo.publishing.card_facts import ScoredModel, family_words, scored_model
from ssmzoo.publishing.papers import paper_table, rows_of

ROOT = Path(__file__).resolve().parents[1]
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


def pages() -> list[Path]:
    """Return the pages that hold tables."""
    return [ROOT / "README.md", *sorted(ROOT.glob("plugins/*/README.md"))]


def rendered(page: Path) -> str:
    """Return a page's text with its tables as they follow from what was measured."""

    def table(match: re.Match[str]) -> str:
        name = match[2]
        text = speed(cpu_rows()) if name == "speed" else paper_table(rows_of(name), results())
        return f"{match[1]}{text}\n{match[3]}"

    return _TABLE.sub(table, page.read_text(encoding="utf-8"))


def cpu_rows() -> list[dict[str, str]]:
    """Return the rows of the committed benchmark of CPUs."""
    path = ROOT / "kernels/benchmarks/results/cpu.csv"
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def results() -> list[ScoredModel]:
    """Return all committed results."""
    return [scored_model(path) for path in sorted((ROOT / "eval/results").glob("*.json"))]


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
        memory = title == "training"
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
