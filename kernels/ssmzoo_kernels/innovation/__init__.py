"""B'MOJO's innovation: how badly the last outputs predict the next one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ssmzoo_kernels.dispatch import Backend, choose, record
from ssmzoo_kernels.innovation import eager, reference
from ssmzoo_kernels.validation import check_leading, check_tensor, segment_offsets

OP = "innovation"


@torch.no_grad()
def innovation(
    y: Tensor,  # [B, L, D]
    weights: Sequence[float],
    history: Tensor | None = None,  # [B, k, D], zeros if absent
    *,
    cu_seqlens: Tensor | None = None,  # [S + 1]
    relative: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Measure how far each output is from a weighted mean of the k before it.

    ``e[t] = mean_d (y[t] - sum_i weights[i] y[t-i])^2``, or with ``relative``
    ``|y[t] - ...|^2 / (|y[t]|^2 + 1e-6)``. No gradient flows.

    Args:
        y: Outputs of a state-space model.
        weights: k of them, that of the newest output first.
        history: The k outputs before this call, the newest last; with ``cu_seqlens`` one row per
            packed sequence, ``[S, k, D]``.
        cu_seqlens: Where packed sequences begin and end in a single row (B = 1), int32 or int64.
        relative: Divide by the output's own size.
        backend: "auto" goes by device. Naming a backend that cannot run is an error.

    Returns:
        The scores ``[B, L]`` in float32, or float64 for float64 inputs.

    Raises:
        ValueError: Shapes, devices or choices that do not fit.
        TypeError: Not a tensor, or not floating point.
    """
    check_leading(OP, "y", y, "[B, L, D]")
    batch, length, width = y.shape
    if len(weights) < 1:
        raise ValueError(f"{OP}: weights must have at least one entry, got none")
    offsets = segment_offsets(OP, y, cu_seqlens)
    shape = (offsets.numel() - 1, len(weights), width)
    if history is None:
        history = y.new_zeros(shape)
    rule = "[B, k, D]" if cu_seqlens is None else "[S, k, D]"
    check_tensor(OP, "history", history, shape, y, rule)
    chosen = choose(OP, backend, y, ("reference", "eager"))
    record(OP, chosen)
    run = reference.innovation if chosen == "reference" else eager.innovation
    flat = y.reshape(batch * length, width)
    return run(flat, list(weights), history, offsets, relative).view(batch, length)


__all__ = ["innovation"]
