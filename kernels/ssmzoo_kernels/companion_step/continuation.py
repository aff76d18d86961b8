"""The state of the companion recurrence after many tokens, and what a state adds to later ones.

Everything here is a power series in ``z^-1`` multiplied by FFT, on the autograd tape.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo_kernels.rational_kernel.eager import fast_size


def state_after(
    u: Tensor,  # [B, T, D]
    a: Tensor,  # [D_a, n]
    inverse: Tensor,  # [D_a, >= T]
    initial_state: Tensor | None,  # [B, n, D]
) -> Tensor:
    """Return ``x_T = (w[T-1] .. w[T-n])`` of ``w = u / a``, ``[B, n, D]``."""
    (batch, length, width), order = u.shape, a.shape[1]
    kept = min(order, length)
    if not kept or not batch:
        return u.new_zeros(batch, order, width) if initial_state is None else initial_state
    size = fast_size(length + kept)
    hat = torch.fft.rfft(u.transpose(1, 2), n=size)
    if initial_state is None:
        late = u.new_zeros(batch, order - kept, width)
    else:
        late = initial_state[:, : order - kept]
        owed = -by_state(initial_state, a)[..., :kept]
        hat = hat + torch.fft.rfft(owed, n=size)
    w = torch.fft.irfft(_per_group(hat, torch.fft.rfft(inverse[:, :length], n=size)), n=size)
    fresh = w[..., length - kept : length].flip(-1).transpose(1, 2)
    return torch.cat([fresh, late], dim=1)


def response(
    state: Tensor,  # [B, n, D]
    a: Tensor,  # [D_a, n]
    b: Tensor,  # [D, n]
    kernel: Tensor,  # [D, >= T], b / a
    length: int,
) -> Tensor:
    """Return the next T outputs without any input, ``[B, T, D]``."""
    kept = min(a.shape[1], length)
    if not kept or not state.shape[0]:
        return state.new_zeros(state.shape[0], length, state.shape[2])
    owed = -by_state(state, a)[..., :kept]
    direct = by_state(state, b)[..., :kept]
    size = fast_size(length + kept)
    hat = torch.fft.rfft(owed, n=size) * torch.fft.rfft(kernel[:, :length], n=size)
    y = torch.fft.irfft(hat, n=size)[..., :length]
    return (y + F.pad(direct, (0, length - kept))).transpose(1, 2)


def by_state(state: Tensor, coefficients: Tensor) -> Tensor:
    """Return ``sum_{i > j} c_i x_{i-j}`` for ``j = 0 .. n - 1``, ``[B, D, n]``.

    That is what the values before token 0 contribute to token j through ``c``.
    """
    order = state.shape[1]
    size = fast_size(2 * order)
    mirrored = torch.fft.rfft(state.transpose(1, 2), n=size).conj_physical()
    hat = _per_group(mirrored, torch.fft.rfft(coefficients, n=size))
    return torch.fft.irfft(hat, n=size)[..., :order]


def _per_group(x: Tensor, shared: Tensor) -> Tensor:
    """Multiply ``[B, D, F]`` by ``[D_a, F]``, each row serving D / D_a channels."""
    groups = shared.shape[0]
    grouped = x.view(x.shape[0], groups, x.shape[1] // groups, x.shape[2])
    return (grouped * shared[:, None]).view(x.shape)
