"""B'MOJO's innovation: how badly the last outputs predict the next, and which tokens are kept."""

import importlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ssmzoo_kernels.declaration import Op
from ssmzoo_kernels.dispatch import Backend
from ssmzoo_kernels.innovation import reference
from ssmzoo_kernels.innovation.selection import Selection, select_memory
from ssmzoo_kernels.validation import Packing

OP = "innovation"
SCORES = Op(
    OP,
    inputs={"y": "B L D", "history": "S k D?"},
    outputs={"scores": "B L as exact"},
    options={"weights": "float[]", "relative": "bool"},
    packing="flat",
    least={"y": "channel"},
    has_backward=False,
    reference=reference.innovation,
    kernels=lambda name: importlib.import_module(f"ssmzoo_kernels.innovation.{name}"),
)


@torch.no_grad()
def innovation(
    y: Tensor,  # [B, L, D]
    weights: Sequence[float],
    history: Tensor | None = None,  # [B, k, D], zeros if absent
    *,
    cu_seqlens: Tensor | Packing | None = None,  # [S + 1]
    relative: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Measure how far each output is from a weighted mean of the k before it.

    ``e[t] = mean_d (y[t] - sum_i weights[i] y[t-i])^2``, or with ``relative``
    ``|y[t] - ...|^2 / (|y[t]|^2 + 1e-6)``; everything inside is float32 (float64 for float64
    inputs). No gradient flows.

    Args:
        y: Outputs of a state-space model.
        weights: k weights, the newest output's first.
        history: The k outputs before this call, the newest last; with ``cu_seqlens`` one row per
            packed sequence, ``[S, k, D]``.
        cu_seqlens: Where packed sequences begin and end in a single row (B = 1), int32 or int64,
            or a ``Packing`` of them, which was checked already.
        relative: Divide by the output's own size.
        backend: "auto" goes by device. Naming a backend that cannot run is an error.

    Returns:
        The scores ``[B, L]`` in float32 or float64, and the history after this call, ``[B, k, D]``
        (``[S, k, D]``) in y's dtype.

    Raises:
        ValueError: Shapes, devices or choices that do not fit.
        TypeError: Not a tensor, not floating point, weights that are no numbers, or ``relative``
            that is no bool.
        RuntimeError: The named backend cannot run on this machine.
    """
    taps = _taps(weights)
    if not isinstance(relative, bool):
        raise TypeError(f"{OP}: relative must be True or False, got {relative!r}")
    offsets: Tensor = SCORES.check((y, history), cu_seqlens, k=len(taps))
    chosen = SCORES.choose(backend, y)
    options = {"weights": taps, "relative": relative}
    if chosen == "reference":
        return SCORES.judge((y, history), options, None if cu_seqlens is None else offsets)
    batch, length, width = y.shape
    flat = y.reshape(batch * length, width)
    shape = (offsets.shape[0] - 1, len(taps), width)
    before = y.new_zeros(shape) if history is None else history.to(y.dtype)
    scores = SCORES.run(chosen, (flat, before), options, offsets)
    after = _after(y, before) if cu_seqlens is None else _after_packed(flat, before, offsets)
    return scores.view(batch, length), after


def _taps(weights: Sequence[float]) -> list[float]:
    """Return the weights as plain numbers, or fail."""
    try:
        taps = [float(weight) for weight in weights]
    except (TypeError, ValueError) as error:
        raise TypeError(f"{OP}: weights must be a sequence of numbers, got {weights!r}") from error
    if not taps:
        raise ValueError(f"{OP}: weights must have at least one entry, got none")
    # a graph with sizes that vary takes them for symbols
    if not torch.compiler.is_compiling() and not all(map(math.isfinite, taps)):
        raise ValueError(f"{OP}: weights must be finite, got {taps}")
    return taps


def _after(y: Tensor, history: Tensor) -> Tensor:
    """Return each row's last k outputs ``[B, k, D]``."""
    span = history.shape[1]
    if torch.compiler.is_exporting():  # whose graphs may leave the length open
        return torch.cat([history, y], dim=1)[:, y.shape[1] :]
    kept = max(0, span - y.shape[1])
    return torch.cat([history[:, span - kept :], y[:, -span:]], dim=1)


def _after_packed(y: Tensor, history: Tensor, offsets: Tensor) -> Tensor:
    """Return each sequence's last k outputs ``[S, k, D]``."""
    steps = torch.arange(history.shape[1], device=y.device)
    place = offsets[1:, None] - history.shape[1] + steps
    kept = (steps + offsets.diff()[:, None]).clamp(max=history.shape[1] - 1)
    old = torch.take_along_dim(history, kept[..., None], dim=1)
    if not y.shape[0]:
        return old
    here = (place >= offsets[:-1, None])[..., None]
    return torch.where(here, y[place.clamp(min=0)], old)


__all__ = ["Selection", "innovation", "select_memory"]
