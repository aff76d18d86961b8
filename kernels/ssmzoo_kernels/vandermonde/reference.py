"""Sums of exponentials, one position after the other; the judge of the other implementations."""

import torch
from torch import Tensor

from ssmzoo_kernels.scan import zeros_on_tape


def vandermonde(
    weight: Tensor,  # [..., H, N] complex
    exponent: Tensor,  # [H, N] complex128
    reversed: Tensor | None,  # [H, N] bool
    *,
    length: int,
    offset: int,
    norm_length: int,
) -> Tensor:
    """Return the sums ``[..., H, length]`` (equations: the public op of the same name)."""
    found = [zeros_on_tape(weight.real[..., :0], exponent)]
    for l in range(offset, offset + length):
        lag = _lag(reversed, l, norm_length - 1 - l, exponent)
        terms = weight * torch.exp(exponent * lag).to(weight.dtype)
        found.append(terms.real.sum(-1, keepdim=True))
    return torch.cat(found, -1)


def vandermonde_state(
    u: Tensor,  # [B, L, H]
    exponent: Tensor,  # [H, N] complex128
    reversed: Tensor | None,  # [H, N] bool
    *,
    offset: int,
) -> Tensor:
    """Return the states ``[B, H, N]`` (equations: the public op of the same name)."""
    inputs = u.to(torch.promote_types(torch.float32, u.dtype))
    zeros = inputs.new_zeros(u.shape[0], *exponent.shape, dtype=inputs.dtype.to_complex())
    state = zeros_on_tape(zeros, inputs, exponent)
    for j in range(u.shape[1]):
        lag = _lag(reversed, u.shape[1] - 1 - j, offset + j, exponent)
        state = state + inputs[:, j, :, None] * torch.exp(exponent * lag).to(state.dtype)
    return state


def _lag(reversed: Tensor | None, forward: int, backward: int, like: Tensor) -> Tensor:
    lag = torch.full(like.shape, forward, dtype=torch.float64, device=like.device)
    return lag if reversed is None else torch.where(reversed, float(backward), lag)
