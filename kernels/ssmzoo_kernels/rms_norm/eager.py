"""The norm in torch: any device, no compiler."""

import torch
from torch import Tensor


def forward(
    x: Tensor,  # [B, D]
    weight: Tensor,  # [D]
    save: bool,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """Return y ``[B, D]`` in the weight's dtype, and the inverse roots ``[B]``."""
    exact = torch.promote_types(torch.float32, x.dtype)
    rows = x.to(exact)
    inverse = (rows.square().mean(-1) + eps).rsqrt()
    y = rows * inverse[:, None] * (weight.to(exact) + offset)
    return y.to(weight.dtype), inverse


def backward(
    grad_y: Tensor,  # [B, D]
    x: Tensor,  # [B, D]
    weight: Tensor,  # [D]
    inverse: Tensor,  # [B]
    eps: float,
    offset: float,
    grad_x: Tensor | None = None,  # [B, D]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x ``[B, D]``, plus ``grad_x``, and of the weight ``[D]``."""
    grad = grad_y.to(inverse.dtype)
    unit = x.to(inverse.dtype) * inverse[:, None]
    scaled = grad * (weight.to(inverse.dtype) + offset)
    along = (scaled * unit).mean(-1, keepdim=True)
    grad_row = (scaled - unit * along) * inverse[:, None]
    if grad_x is not None:
        grad_row = grad_row + grad_x
    return grad_row, (grad * unit).sum(0)
