"""Normalisation by the root mean square, forward and backward in one pass each."""

import importlib
import math

from torch import Tensor

from ssmzoo_kernels.declaration import Op
from ssmzoo_kernels.dispatch import Backend
from ssmzoo_kernels.rms_norm import reference

OP = "rms_norm"
NORM = Op(
    OP,
    inputs={"x": "B D", "weight": "D"},
    outputs={"y": "B D as weight"},
    options={"eps": "float", "offset": "float"},
    least={"x": "channel"},
    saved="B",  # 1 / sqrt(mean(x^2) + eps)
    reference=reference.rms_norm,
    kernels=lambda name: importlib.import_module(f"ssmzoo_kernels.rms_norm.{name}"),
)


def rms_norm(
    x: Tensor,  # [..., D]
    weight: Tensor,  # [D]
    *,
    eps: float,
    offset: float = 0.0,
    backend: Backend = "auto",
) -> Tensor:
    """Divide every row by its root mean square: ``(offset + weight) x / sqrt(mean(x^2) + eps)``.

    Everything inside is float32 (float64 for float64 inputs); the result is rounded once.
    Gradients flow to both tensors.

    Args:
        x: Rows to normalise, each on its own; a single one is ``[1, D]``.
        weight: A factor for each channel, from ``offset`` on.
        eps: Added to the mean square, at least 0.
        offset: 1 where weights are stored as their distance from 1.
        backend: "auto" goes by device. Naming a backend that cannot run is an error.

    Returns:
        ``[..., D]`` in the weight's dtype.

    Raises:
        ValueError: Shapes, devices or numbers that do not fit.
        TypeError: Not a tensor, not floating point, or not a number.
        RuntimeError: The named backend cannot run on this machine.
    """
    check_numbers(OP, eps, offset)
    flat = x
    if isinstance(x, Tensor) and x.dim() > 2:
        flat = x.flatten(0, -2)
    y = NORM(flat, weight, backend=backend, eps=float(eps), offset=float(offset))
    return y if flat is x else y.view(x.shape)


def check_numbers(op: str, eps: float, offset: float) -> None:
    """Fail unless both are finite numbers, and ``eps`` at least 0."""
    for name, number, least in (("eps", eps, 0.0), ("offset", offset, -math.inf)):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise TypeError(f"{op}: {name} must be a number, got {number!r}")
        if not (math.isfinite(number) and number >= least):
            rule = "finite" if least < 0 else "finite and at least 0"
            raise ValueError(f"{op}: {name} must be {rule}, got {number}")


__all__ = ["rms_norm"]
