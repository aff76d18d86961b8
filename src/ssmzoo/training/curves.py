"""The picture of a run's losses."""

from __future__ import annotations

from pathlib import Path

from ssmzoo.environment.messages import first_line
from ssmzoo.files import appears_whole
from ssmzoo.training.metrics import read_metrics


def require_curves() -> None:
    """Fail where curves cannot be drawn.

    Raises:
        RuntimeError: matplotlib is missing, or does not import.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"log.curves needs matplotlib ({first_line(error)}): pip install 'ssmzoo[train]', or "
            "set log.curves to false"
        ) from error


def draw_curves(metrics: Path, target: Path, *, title: str, loss: str) -> None:
    """Draw training and validation loss over the tokens of a ``metrics.jsonl``.

    ``title`` and ``loss``, the loss in words, stand above and beside the picture.
    The target, a PNG file, appears complete or not at all. With nothing measured yet nothing is
    drawn.
    """
    require_curves()
    from matplotlib.figure import Figure

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
