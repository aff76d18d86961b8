"""The tables and pictures that benchmarks leave."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from ssmzoo.files import appears_whole, write_text

Rows = Sequence[Mapping[str, object]]


def write_table(rows: Rows, target: Path) -> None:
    """Write rows as CSV; what a row lacks is empty."""
    text = io.StringIO()
    names = dict.fromkeys(key for row in rows for key in row)
    writer = csv.DictWriter(text, list(names), lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, text.getvalue())


def draw(
    lines: Mapping[str, tuple[str, Rows]],
    target: Path,
    *,
    size: tuple[str, str],
    panels: Sequence[tuple[str, str, str]],
    title: str,
) -> None:
    """Draw figures over a size, both on logarithmic scales, one panel a figure.

    Args:
        lines: By label, the style and the rows of a line.
        target: The PNG file.
        size: The column of the size, and its label.
        panels: The column of each figure, its label and the panel's title.
        title: Stands above all panels.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    across, xlabel = size
    for place, (key, ylabel, heading) in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), place)
        for label, (style, rows) in lines.items():
            axes.plot([r[across] for r in rows], [r[key] for r in rows], style, label=label, ms=4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.set_title(heading, fontsize=10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False)
    figure.suptitle(title)
    with appears_whole(target) as unfinished:
        figure.savefig(unfinished, format="png")
