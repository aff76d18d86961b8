"""The short causal convolution in torch, with its own backward: any device, no compiler."""

import torch
from torch import Tensor

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.segments import by_length


def forward(
    x: Tensor,  # [T, D]
    weight: Tensor,  # [D, K]
    bias: Tensor | None,  # [D]
    initial_state: Tensor | None,  # [S, K - 1, D]
    offsets: Tensor,  # [S + 1] int64
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs ``[T, D]`` and the last K - 1 inputs of every segment, in x's dtype."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    final_state = x.new_empty(offsets.shape[0] - 1, weight.shape[1] - 1, x.shape[1])
    for members, places in by_length(offsets):
        history = _history(x, weight, initial_state, members, places)
        y = _convolve(history, weight, bias, places.shape[1])
        out[places] = (y * y.sigmoid() if activation else y).to(x.dtype)
        final_state[members] = history[:, places.shape[1] :]
    return out, final_state


def backward(
    grad_out: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, K - 1, D]
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    offsets: Tensor,
    activation: str | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight, bias and initial state, None where one was absent."""
    exact, taps = accumulator(x), weight.shape[1]
    filters = weight.to(exact)
    grad_x = torch.empty_like(x, dtype=exact, memory_format=torch.contiguous_format)
    grad_initial = grad_x.new_empty(offsets.shape[0] - 1, taps - 1, x.shape[1])
    grad_weight = torch.zeros_like(filters)
    grad_bias = grad_x.new_zeros(x.shape[1])
    for members, places in by_length(offsets):
        length = places.shape[1]
        history = _history(x, weight, initial_state, members, places).to(exact)
        grad_history = torch.zeros_like(history)
        if grad_final is not None:
            grad_history[:, length:] = grad_final[members].to(exact)
        if grad_out is not None:
            grad = grad_out[places].to(exact)
            if activation:
                y = _convolve(history, weight, bias, length)
                opened = y.sigmoid()
                grad = grad * opened * (1 + y * (1 - opened))
            for j in range(taps):
                grad_history[:, j : j + length] += filters[:, j] * grad
                grad_weight[:, j] += (grad * history[:, j : j + length]).sum(dim=(0, 1))
            grad_bias += grad.sum(dim=(0, 1))
        grad_initial[members] = grad_history[:, : taps - 1]
        grad_x[places] = grad_history[:, taps - 1 :]
    return grad_x, grad_weight, grad_bias, grad_initial


def _history(
    x: Tensor, weight: Tensor, initial_state: Tensor | None, members: Tensor, places: Tensor
) -> Tensor:
    """Return a group's inputs after the K - 1 before them, ``[G, K - 1 + L, D]``."""
    if initial_state is None:
        before = x.new_zeros(len(members), weight.shape[1] - 1, x.shape[1])
    else:
        before = initial_state[members].to(x.dtype)
    return torch.cat([before, x[places]], dim=1)


def _convolve(history: Tensor, weight: Tensor, bias: Tensor | None, length: int) -> Tensor:
    """Return the convolution before its activation, ``[G, L, D]``, in the accumulator's dtype."""
    exact = accumulator(history)
    filters = weight.to(exact)
    y = history.new_zeros(history.shape[0], length, history.shape[2], dtype=exact)
    if bias is not None:
        y += bias.to(exact)
    for j in range(filters.shape[1]):
        y += filters[:, j] * history[:, j : j + length]
    return y
