"""The sum and its norm in C: rms_norm.c."""

from torch import Tensor

from ssmzoo_kernels.add_rms_norm import eager
from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.rms_norm import cpu as norm

load = norm.load


def forward(
    residual: Tensor,  # [B, D]
    x: Tensor,  # [B, D]
    weight: Tensor,  # [D]
    save: bool,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the total ``[B, D]``, its norm ``[B, D]``, and the inverse roots ``[B]``."""
    if residual.dtype is accumulator(residual):
        total, y, inverse = norm.normalise(residual, x, weight, eps, offset)
        assert total is not None
        return total, y, inverse
    # C would normalise before rounding
    total = (residual.float() + x.float()).to(residual.dtype)
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
    return eager.by_norm(norm, grad_total, grad_y, total, weight, inverse, eps, offset)
