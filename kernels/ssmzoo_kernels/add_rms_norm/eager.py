"""The sum and its norm in torch: any device, no compiler."""

from types import ModuleType

import torch
from torch import Tensor

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.rms_norm import eager as norm


def forward(
    residual: Tensor,  # [B, D]
    x: Tensor,  # [B, D]
    weight: Tensor,  # [D]
    save: bool,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the total ``[B, D]``, its norm ``[B, D]``, and the inverse roots ``[B]``."""
    exact = accumulator(residual)
    total = (residual.to(exact) + x.to(exact)).to(residual.dtype)
    return (total, *norm.forward(total, weight, save, eps, offset))


def backward(
    grad_total: Tensor | None,  # [B, D]
    grad_y: Tensor | None,  # [B, D]
    total: Tensor,  # [B, D]
    weight: Tensor,  # [D]
    inverse: Tensor,  # [B]
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of both summands ``[B, D]`` and of the weight ``[D]``."""
    return by_norm(norm, grad_total, grad_y, total, weight, inverse, eps, offset)


def by_norm(
    norm: ModuleType,
    grad_total: Tensor | None,
    grad_y: Tensor | None,
    total: Tensor,
    weight: Tensor,
    *more: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`backward` by the norm's kernels of a backend."""
    if grad_y is None:  # a loss that does not read the norm
        assert grad_total is not None
        return grad_total.clone(), torch.zeros_like(weight)
    return norm.backward(grad_y, total, weight, *more, grad_x=grad_total)
