"""The pictures of an inspection, drawn by matplotlib without a screen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssmzoo.analysis.measure import ENERGY, Inspection, LayerInspection
from ssmzoo.environment.messages import missing
from ssmzoo.modeling import Trajectories

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 12
_DOTS = 120  # an inch
_MOST_POINTS = 20_000  # poles in one panel
_MOST_LANDMARKS = 64
_MOST_REGIONS = 9  # that pale colours can tell apart
_FOR_EVER = 1e6  # tokens; an entry may decay more slowly, or grow
_BLUE, _RED, _GREY = "#33658a", "#b5482a", "#b8b8b8"


def require_matplotlib() -> None:
    """Fail unless matplotlib can be imported.

    Raises:
        RuntimeError: It cannot; the message names the extra.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise missing("pictures need matplotlib", "inspect", error) from error


def draw_pictures(found: Inspection, folder: Path, *, title: str) -> list[str]:
    """Draw an inspection into a folder and return the names of the pictures.

    Models with many layers show twelve of them, evenly spread.
    """
    drawn = []
    for name, (wanted, paint) in _PAINTERS.items():
        layers = _spread([layer for layer in found.layers if wanted(layer)])
        if layers:
            figure, about = paint(layers)
            figure.suptitle(f"{title}: {about}", fontsize=11)
            figure.savefig(folder / name, format="png")
            drawn.append(name)
    if found.trajectories is not None:
        figure = _paint_trajectories(found.trajectories)
        figure.suptitle(f"{title}: trajectories (squares: landmarks)", fontsize=11)
        figure.savefig(folder / _TRAJECTORIES, format="png")
        drawn.append(_TRAJECTORIES)
    return drawn


def _panels(
    layers: Sequence[LayerInspection], panel: Callable[[Axes, LayerInspection], None]
) -> Figure:
    figure, places = _grid(len(layers))
    for axes, layer in zip(places, layers, strict=True):
        panel(axes, layer)
        axes.set_title(f"layer {layer.layer}", fontsize=10)
    return figure


def _grid(count: int, width: float = 4.2, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    columns = min(count, 3 if count != 4 else 2)
    rows = math.ceil(count / columns)
    size = (max(width * columns, 5.5), height * rows + 0.4)
    figure = Figure(figsize=size, dpi=_DOTS, layout="constrained")
    return figure, [figure.add_subplot(rows, columns, 1 + place) for place in range(count)]


def _paint_kernels(layers: Sequence[LayerInspection]) -> tuple[Figure, str]:
    """Draw |K|, every row divided by its largest entry, the channels of short memory on top.

    Up to twice the longest memory: behind it there is little to see.
    """
    longest = max((lag for layer in layers for lag in layer.memory if lag is not None), default=0)
    shown = max(16, 2 * longest + 1)

    def panel(axes: Axes, layer: LayerInspection) -> None:
        past, ahead = layer.kernel.abs(), torch.zeros(layer.kernel.shape[0], 0)
        if layer.future_kernel is not None:
            ahead = layer.future_kernel.abs()
        sizes = torch.cat([ahead, past], dim=1)
        largest = sizes.amax(dim=1, keepdim=True).clamp(min=torch.finfo(sizes.dtype).tiny)
        past, ahead = past[:, :shown], ahead[:, :shown]
        order = sorted(range(len(sizes)), key=lambda c: _rank(layer.memory[c]))
        sizes = (torch.cat([ahead.flip(1), past], dim=1) / largest)[order]
        axes.imshow(
            sizes.numpy(),
            aspect="auto",
            # of a few large cells none shall run into the next
            interpolation="nearest" if max(sizes.shape) <= 400 else "auto",
            cmap="magma",
            vmin=0,
            vmax=1,
            extent=(-ahead.shape[1] - 0.5, past.shape[1] - 0.5, len(order) - 0.5, -0.5),
        )
        rows = "feature" if layer.source == "measured" else "channel"
        axes.set(xlabel="lag", ylabel=f"{rows}, by memory")

    figure = _panels(layers, panel)
    bar = figure.colorbar(figure.axes[0].images[0], ax=figure.axes, ticks=[0, 0.5, 1], pad=0.01)
    bar.set_label("|K| / row's largest", fontsize=8)
    lags = max(layer.kernel.shape[1] for layer in layers)
    part = f", the first {shown} of {lags} lags" if shown < lags else ""
    return figure, f"kernels{part}"


def _rank(lag: int | None) -> float:
    return math.inf if lag is None else lag


def _draw_memory(axes: Axes, layer: LayerInspection) -> None:
    lags = sorted(lag for lag in layer.memory if lag is not None)
    last = max(1, layer.kernel.shape[1] - 1)
    axes.plot(range(len(lags)), lags, color=_BLUE, linewidth=1.4, marker=".", markersize=3)
    axes.axhline(last, color=_GREY, linewidth=0.8, linestyle="--")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(-0.3, last * 2)
    axes.set(xlabel="channel, sorted", ylabel=f"lag with {ENERGY:.0%} of the energy")
    _frame(axes)


def _draw_poles(axes: Axes, layer: LayerInspection) -> None:
    assert layer.poles is not None
    points = _thinned(layer.poles.flatten())
    points = points[points.isfinite()]
    turn = torch.linspace(0, 2 * math.pi, 400)
    axes.plot(turn.cos(), turn.sin(), color="#606060", linewidth=0.6, zorder=3)
    outside = points.abs() >= 1
    for which, color, label in ((~outside, _BLUE, None), (outside, _RED, "outside")):
        if bool(which.any()):
            axes.scatter(
                points[which].real,
                points[which].imag,
                s=3 if len(points) > 500 else 9,
                alpha=0.35 if len(points) > 500 else 0.7,
                linewidths=0,
                color=color,
                label=None if label is None else f"{label}: {int(outside.sum())}",
                rasterized=True,
            )
    reach = max(1.08, 1.05 * float(points.abs().max())) if len(points) else 1.08
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), xlabel="real", ylabel="imaginary")
    axes.set_aspect("equal")
    if bool(outside.any()):
        axes.legend(frameon=False, fontsize=8, loc="upper right")
    _frame(axes)


def _draw_time_steps(axes: Axes, layer: LayerInspection) -> None:
    assert layer.time_steps is not None
    steps = layer.time_steps
    parts = steps[:, None] if steps.dim() == 1 else steps  # [C, parts]
    if bool((parts == parts[:, :1]).all()):
        parts = parts[:, :1]  # several parts, all equal
    names = ("real part", "imaginary part") if parts.shape[1] == 2 else ("",) * parts.shape[1]
    edges = _log_edges(parts)
    kinds = ("stepfilled", "step")
    for place, (part, name) in enumerate(zip(parts.T, names, strict=True)):
        color = (_BLUE, _RED)[place % 2]
        kind = kinds[min(place, 1)]
        axes.hist(part.numpy(), edges, histtype=kind, color=color, alpha=0.8, label=name or None)
    _log_axis(axes, edges[0], edges[-1])
    axes.set(xlabel="time step", ylabel="channels")
    if parts.shape[1] == 2:
        axes.legend(frameon=False, fontsize=8)
    _frame(axes)


def _draw_decay(axes: Axes, layer: LayerInspection) -> None:
    """Draw how many tokens a state entry lasts: -1 / ln(decay); at the right those that grow."""
    assert layer.decay is not None
    lasting = 1 / -layer.decay.clamp(min=1e-300, max=math.exp(-1 / _FOR_EVER)).log()
    edges, length = _log_edges(lasting), layer.kernel.shape[1]
    axes.hist(lasting.flatten().numpy(), edges, color=_BLUE, alpha=0.8)
    axes.axvline(length, color=_GREY, linewidth=0.8, linestyle="--")
    _log_axis(axes, min(edges[0], length), max(edges[-1], length))
    more = float(layer.decay.max()) >= math.exp(-1 / _FOR_EVER)
    limit = f" ({_FOR_EVER:,.0f}: or more)" if more else ""
    axes.set(xlabel=f"tokens until 1/e is left{limit}", ylabel="state entries")
    _frame(axes)


def _paint_margins(layers: Sequence[LayerInspection]) -> tuple[Figure, str]:
    from matplotlib import colormaps

    figure, (axes,) = _grid(1, width=8.0, height=4.2)
    colors = colormaps["viridis"](torch.linspace(0, 0.9, len(layers)).numpy())
    for layer, color in zip(layers, colors, strict=True):
        assert layer.radius is not None
        margin = (1 - layer.radius).sort().values
        place = torch.linspace(0, 1, len(margin)) if len(margin) > 1 else torch.tensor([0.5])
        marker = "." if len(margin) < 200 else None
        label = f"layer {layer.layer}"
        axes.plot(place.numpy(), margin.numpy(), color=color, marker=marker, label=label)
    axes.axhline(0, color=_RED, linewidth=0.8, linestyle="--")
    axes.set_xlim(-0.05, 1.05)
    axes.set(xlabel="features or denominators, sorted (share)", ylabel="1 - spectral radius")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    _frame(axes)
    return figure, "stability margins"


def _paint_trajectories(found: Trajectories) -> Figure:
    """Draw every sequence's path in a panel of its own, all on the same axes.

    Of a few landmarks each has a colour for the points nearest to it.
    """
    paths, landmarks = (x.detach().cpu().double() for x in (found.paths, found.landmarks))
    figure, places = _grid(len(paths), height=3.8)
    shown = torch.cat([paths.flatten(0, 1), landmarks[:_MOST_LANDMARKS]])
    low, high = shown.amin(dim=0), shown.amax(dim=0)
    margin = 0.08 * (high - low).max().clamp(min=1e-6)
    for axes, path, tokens in zip(places, paths, found.tokens.tolist(), strict=True):
        x, y = path.T.tolist()
        for token, (right, up) in enumerate(landmarks[:_MOST_LANDMARKS].tolist()):
            axes.plot(right, up, marker="s", color=_GREY, markersize=7)
            axes.annotate(str(token), (right, up), (5, 5), textcoords="offset points", fontsize=8)
        corner, top = (low - margin).tolist(), (high + margin).tolist()
        if 1 < len(landmarks) <= _MOST_REGIONS:
            _paint_regions(axes, landmarks, corner, top)
        turns = path.diff(dim=0)
        axes.quiver(
            x[:-1],
            y[:-1],
            *turns.T.tolist(),
            torch.linspace(0.15, 0.9, len(turns)).tolist(),
            angles="xy",
            scale_units="xy",
            scale=1,
            width=0.008,
            cmap="viridis",
            clim=(0, 1),
            zorder=3,
        )
        axes.plot(x[0], y[0], marker="o", color="#606060", markersize=4)
        axes.plot(x[-1], y[-1], marker="o", color=_RED, markersize=5, zorder=4)
        near = int((landmarks - path[-1]).norm(dim=1).argmin())
        read = " ".join(map(str, tokens)) if len(tokens) <= 12 else f"{len(tokens)} tokens"
        axes.set_title(f"{read}: ends nearest to {near}", fontsize=10)
        axes.set_aspect("equal")
        axes.set(xlim=(corner[0], top[0]), ylim=(corner[1], top[1]))
        _frame(axes)
    return figure


def _paint_regions(
    axes: Axes, landmarks: Tensor, corner: Sequence[float], top: Sequence[float]
) -> None:
    """Colour the points nearest to each landmark."""
    right, up = (
        torch.linspace(a, b, 400, dtype=landmarks.dtype) for a, b in zip(corner, top, strict=True)
    )
    points = torch.cartesian_prod(up, right).flip(1)
    nearest = torch.cdist(points, landmarks).argmin(dim=1).view(len(up), len(right))
    axes.imshow(
        nearest.numpy(),
        origin="lower",
        extent=(corner[0], top[0], corner[1], top[1]),
        cmap="Pastel1",
        vmin=0,
        vmax=_MOST_REGIONS - 1,
        alpha=0.45,
        interpolation="nearest",
    )


def _by_layer(
    panel: Callable[[Axes, LayerInspection], None], about: str
) -> Callable[[Sequence[LayerInspection]], tuple[Figure, str]]:
    return lambda layers: (_panels(layers, panel), about)


# by file name: the condition for a layer to be shown, and the painter
_PAINTERS: dict[
    str,
    tuple[
        Callable[[LayerInspection], bool],
        Callable[[Sequence[LayerInspection]], tuple[Figure, str]],
    ],
] = {
    "kernels.png": (lambda _: True, _paint_kernels),
    "memory.png": (
        lambda _: True,
        _by_layer(_draw_memory, "effective memory (dashed: the last lag)"),
    ),
    "poles.png": (lambda x: x.poles is not None, _by_layer(_draw_poles, "poles")),
    "margins.png": (lambda x: x.radius is not None, _paint_margins),
    "time_steps.png": (
        lambda x: x.time_steps is not None,
        _by_layer(_draw_time_steps, "time steps"),
    ),
    "decay.png": (
        lambda x: x.decay is not None,
        _by_layer(_draw_decay, "time constants of the state (dashed: the input's length)"),
    ),
}
_TRAJECTORIES = "trajectories.png"
PICTURES = (*_PAINTERS, _TRAJECTORIES)


def _spread(layers: Sequence[LayerInspection]) -> list[LayerInspection]:
    if len(layers) <= MOST_PANELS:
        return list(layers)
    step = (len(layers) - 1) / (MOST_PANELS - 1)
    return [layers[round(place * step)] for place in range(MOST_PANELS)]


def _thinned(points: Tensor) -> Tensor:
    return points[:: math.ceil(len(points) / _MOST_POINTS)] if len(points) else points


def _log_edges(values: Tensor) -> list[float]:
    """Return the edges of bins that are equally wide on a logarithmic axis."""
    low, high = float(values.min()), float(values.max())
    if high < low * 1.001:
        low, high = low / 1.5, high * 1.5
    bins = max(8, min(40, len(values) // 4))
    return torch.logspace(
        math.log10(low * 0.999), math.log10(high * 1.001), bins + 1, dtype=torch.float64
    ).tolist()


def _log_axis(axes: Axes, low: float, high: float) -> None:
    """Let a histogram count over whole decades, with labels at these alone: others overlap."""
    from matplotlib.ticker import MaxNLocator, NullFormatter

    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xscale("log")
    axes.set_xlim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _frame(axes: Axes) -> None:
    """Leave two of four lines around a panel, and a faint grid."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
