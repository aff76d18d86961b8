"""Hyena's implicit filters: a small network maps a tap's position to its values in all channels.

``h[i, t] = (W_out f(... f(W_in z(t) + c_in)))[i] e^{-|delta_i| t / (M - 1)}`` with
``f(x) = sin(omega x)`` and ``z(t)`` the time, its cosines and its sines.
"""

import math

import torch
from torch import Tensor

from ssmzoo_kernels import double

# the window's value after its share of the filter's length
TARGET = 1e-2


def position_features(taps: int, features: int, device: torch.device) -> Tensor:
    """Return ``z``, the time in [0, 1], then cosines, then minus sines, ``[M, E]`` float64."""
    bands = (features - 1) // 2
    steps = double(torch.arange(taps, device=device))
    time = steps / max(taps - 1, 1)
    frequencies = torch.linspace(1e-4, bands - 1, bands, dtype=steps.dtype, device=steps.device)
    phase = (2 * math.pi / taps) * steps[:, None] * frequencies
    return torch.cat([time[:, None], phase.cos(), -phase.sin()], dim=1)


def decay_rates(width: int, shares: tuple[float, float], device: torch.device) -> Tensor:
    """Return ``|delta|``, from slow to fast, ``[D]`` float64."""
    fast, slow = shares
    rate = -math.log(TARGET)
    return torch.linspace(rate / slow, rate / fast, width, dtype=torch.float64, device=device)


def implicit_kernel(
    weight_in: Tensor,  # [F, E]
    bias_in: Tensor,  # [F]
    weight: Tensor,  # [I, F, F]
    bias: Tensor,  # [I, F]
    weight_out: Tensor,  # [D, F]
    frequency: Tensor,  # [F]
    taps: int,
    shares: tuple[float, float],
    length: int,
) -> Tensor:
    """Return the first taps ``[D, L]`` of filters of ``taps`` taps, in the weights' dtype.

    Args:
        weight_in: First layer.
        bias_in: Its bias.
        weight: Hidden layers.
        bias: Their biases.
        weight_out: Last layer, without bias.
        frequency: Omega, learned, one a hidden unit.
        taps: M: positions are measured by it, so a shorter kernel begins a longer one.
        shares: Of the filter's length after which the window has fallen to 1/100, in the channel
            where it falls fastest and in the one where it falls slowest.
        length: How many taps, at most M.
    """
    z = position_features(taps, weight_in.shape[1], weight_in.device)[:length]
    hidden = torch.sin(frequency * (z.to(weight_in) @ weight_in.T + bias_in))
    for own_weight, own_bias in zip(weight, bias, strict=True):
        hidden = torch.sin(frequency * (hidden @ own_weight.T + own_bias))
    time = z[:, 0]
    window = torch.exp(-decay_rates(weight_out.shape[0], shares, z.device)[:, None] * time)
    return (weight_out @ hidden.T) * window.to(weight_out)
