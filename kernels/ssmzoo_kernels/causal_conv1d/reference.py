"""The short causal convolution as a sum over its taps; the judge of the other implementations."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu"]


def causal_conv1d(
    x: Tensor,  # [B, L, D]
    weight: Tensor,  # [D, K]
    bias: Tensor | None = None,  # [D]
    initial_state: Tensor | None = None,  # [B, K - 1, D]
    *,
    activation: Activation | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve along the sequence (equations and shapes: the public op of the same name)."""
    length, taps = x.shape[1], weight.shape[1]
    if initial_state is None:
        initial_state = x.new_zeros(x.shape[0], taps - 1, x.shape[2])
    history = torch.cat([initial_state.to(x.dtype), x], dim=1)  # [B, K - 1 + L, D]
    exact = torch.promote_types(torch.float32, x.dtype)
    weight = weight.to(exact)
    y = torch.zeros_like(x, dtype=exact)
    for j in range(taps):
        y = y + weight[:, j] * history[:, j : j + length].to(exact)
    if bias is not None:
        y = y + bias.to(exact)
    if activation == "silu":
        y = F.silu(y)
    return y.to(x.dtype), history[:, length:].clone()  # a view would keep the whole input
