"""The tables and pictures that benchmarks leave."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from ssmzoo.files import appears_whole

Rows = Sequence[Mapping[str, object]]


def write_table(rows: Rows, target: Path, columns: Sequence[str] = ()) -> None:
    """Write rows as CSV: the columns given, or all; what a row lacks is empty."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with appears_whole(target) as partial, partial.open("w", newline="") as file:
        names = columns or list(dict.fromkeys(key for row in rows for key in row))
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


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
