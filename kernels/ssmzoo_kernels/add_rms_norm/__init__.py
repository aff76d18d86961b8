"""A residual sum and its norm by the root mean square, in one pass."""

import importlib

from torch import Tensor

from ssmzoo_kernels.add_rms_norm import reference
from ssmzoo_kernels.declaration import Op
from ssmzoo_kernels.dispatch import Backend
from ssmzoo_kernels.rms_norm import check_numbers

OP = "add_rms_norm"
SUM = Op(
    OP,
    inputs={"residual": "B D", "x": "B D", "weight": "D"},
    outputs={"total": "B D", "y": "B D as weight"},
    options={"eps": "float", "offset": "float"},
    least={"residual": "channel"},
    saved="B",  # 1 / sqrt(mean(total^2) + eps)
    keeps=("total", "weight", "saved"),
    alike={"x": "residual"},
    reference=reference.add_rms_norm,
    kernels=lambda name: importlib.import_module(f"ssmzoo_kernels.add_rms_norm.{name}"),
)


def add_rms_norm(
    residual: Tensor,  # [..., D]
    x: Tensor,  # [..., D]
    weight: Tensor,  # [D]
    *,
    eps: float,
    offset: float = 0.0,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Add to a residual stream, and divide every row of the sum by its root mean square.

    ``total = residual + x`` in the residual's dtype, and
    ``y = (offset + weight) total / sqrt(mean(total^2) + eps)`` of the total as it was rounded:
    what a sum and :func:`rms_norm` give one after the other. Everything inside is float32
    (float64 for a float64 residual). Gradients flow to all three tensors.

    Args:
        residual: The stream so far.
        x: The branch's output, in any floating dtype.
        weight: A factor for each channel, from ``offset`` on.
        eps: Added to the mean square, at least 0.
        offset: 1 where weights are stored as their distance from 1.
        backend: "auto" goes by device. Naming a backend that cannot run is an error.

    Returns:
        The total ``[..., D]`` in the residual's dtype, and y ``[..., D]`` in the weight's.

    Raises:
        ValueError: Shapes, devices or numbers that do not fit.
        TypeError: Not a tensor, not floating point, or not a number.
        RuntimeError: The named backend cannot run on this machine.
    """
    check_numbers(OP, eps, offset)
    pair = [residual, x]
    if isinstance(residual, Tensor) and residual.dim() > 2:
        if isinstance(x, Tensor) and x.shape != residual.shape:
            raise ValueError(
                f"{OP}: x must have the residual's shape {list(residual.shape)}, "
                f"got {list(x.shape)}"
            )
        pair = [part.flatten(0, -2) if isinstance(part, Tensor) else part for part in pair]
    total, y = SUM(*pair, weight, backend=backend, eps=float(eps), offset=float(offset))
    if pair[0] is residual:
        return total, y
    return total.view(residual.shape), y.view(residual.shape)


__all__ = ["add_rms_norm"]
