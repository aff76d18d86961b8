"""The picture of a run's losses."""

from __future__ import annotations

from pathlib import Path

from ssmzoo.files import appears_whole
from ssmzoo.training.metrics import read_metrics


def draw_curves(metrics: Path, target: Path, *, title: str, loss: str) -> None:
    """Draw training and validation loss over the tokens of a ``metrics.jsonl``.

    ``title`` and ``loss``, the loss in words, stand above and beside the picture.
    The target, a PNG file, appears complete or not at all. With nothing measured yet nothing is
    drawn.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("curves need matplotlib: pip install 'ssmzoo[train]'") from error
    lines = read_metrics(metrics)
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for key, label, style in (
        ("loss", "training", {"color": "#9bb8d3", "linewidth": 1.2}),
        ("validation_loss", "validation", {"color": "#b5482a", "linewidth": 1.6, "marker": "o"}),
    ):
        points = [(line["tokens"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            last = f"{label}, last {points[-1][1]:.3f}"
            axes.plot(*zip(*points, strict=True), label=last, markersize=3, **style)
    if not axes.lines:
        return
    axes.set(xlabel="tokens", ylabel=loss, title=title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with appears_whole(target) as unfinished:
        figure.savefig(unfinished, format="png")
