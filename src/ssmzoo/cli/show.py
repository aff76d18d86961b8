"""Print JSON, tables and sizes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def print_json(value: object) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_table(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print rows under the first one's keys, each column as wide as it must be."""
    rows = list(rows)
    if not rows:
        return
    table = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def in_bytes(size: int) -> str:
    """Return a size in words, e.g. ``"1.2 MB"``."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def quieten_bars() -> None:
    """Let transformers and the Hub draw progress bars on a terminal only, as ours do."""
    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()


@contextmanager
def layer_bar(name: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Draw a bar of layers on a terminal; yield what is called with those done, and all."""
    from tqdm import tqdm

    quieten_bars()
    with tqdm(desc=name, unit="layer", disable=None if shown else True) as bar:

        def progress(done: int, layers: int) -> None:
            bar.total = layers
            bar.update(done - bar.n)

        yield progress


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
