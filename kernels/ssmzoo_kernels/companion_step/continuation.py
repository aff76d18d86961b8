"""The state of the companion recurrence after many tokens, and what a state adds to later ones.

Everything here is a power series in ``z^-1`` multiplied by FFT. The state is an op with its own
backward, which keeps what came in and no spectra; the rest is on the autograd tape.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo_kernels.fft_conv.circle import slices
from ssmzoo_kernels.rational_kernel.eager import fast_size

# bytes of inputs whose spectra are held at once
BLOCK = {"cpu": 1 << 22, "cuda": 1 << 27}


def state_after(
    u: Tensor,  # [B, T, D]
    inverse: Tensor,  # [D_a, >= T]
    initial_state: Tensor | None,  # [B, n, D]
    order: int,
) -> Tensor:
    """Return ``x_T = (w[T-1] .. w[T-n])`` of ``w = u / a``, ``[B, n, D]``.

    What the state owes to the first tokens is in u already; of T < n tokens it leaves its first
    values behind theirs.
    """
    kept = min(order, u.shape[1])
    found = u.new_zeros(u.shape[0], order, u.shape[2])
    for d, g in _blocks(u, inverse):
        size, u_hat, inverse_hat = _spectra(u[..., d], inverse[g], kept)
        w = torch.fft.irfft(_per_group(u_hat, inverse_hat), n=size)
        found[:, :kept, d] = w[..., u.shape[1] - kept : u.shape[1]].flip(-1).transpose(1, 2)
    if initial_state is not None:
        found[:, kept:] = initial_state[:, : order - kept]
    return found


def state_after_backward(
    grad: Tensor,  # [B, n, D]
    u: Tensor,
    inverse: Tensor,
    initial_state: Tensor | None,
    order: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of the three tensors; spectra are computed again, not kept."""
    length = u.shape[1]
    kept = min(order, length)
    grad_u, grad_inverse = torch.zeros_like(u), torch.zeros_like(inverse)
    for d, g in _blocks(u, inverse):
        size, u_hat, inverse_hat = _spectra(u[..., d], inverse[g], kept)
        fresh = F.pad(grad[:, :kept, d].transpose(1, 2).flip(-1), (length - kept, 0))
        hat = torch.fft.rfft(fresh, n=size)
        found = torch.fft.irfft(_per_group(hat, inverse_hat.conj_physical()), n=size)
        grad_u[..., d] = found[..., :length].transpose(1, 2)
        shared = (hat * u_hat.conj_physical()).unflatten(1, (len(inverse_hat), -1)).sum((0, 2))
        grad_inverse[g, :length] = torch.fft.irfft(shared, n=size)[:, :length]
    if initial_state is None:
        return grad_u, grad_inverse, None
    return grad_u, grad_inverse, F.pad(grad[:, kept:], (0, 0, 0, kept))


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
    if not state.shape[0]:  # no FFT of nothing
        return state.mT
    size = fast_size(2 * order)
    mirrored = torch.fft.rfft(state.transpose(1, 2), n=size).conj_physical()
    hat = _per_group(mirrored, torch.fft.rfft(coefficients, n=size))
    return torch.fft.irfft(hat, n=size)[..., :order]


def owing(x: Tensor, owed: Tensor, offsets: Tensor) -> Tensor:
    """Add ``owed [S, D, n]`` to the first n tokens of the sequences in ``[B, T, D]``."""
    rows = x.flatten(0, 1)
    if not rows.shape[0]:
        return x
    places = offsets[:-1, None] + torch.arange(owed.shape[2], device=x.device)  # [S, n]
    inside = places < offsets[1:, None]
    places = places.clamp(max=rows.shape[0] - 1)
    owed = owed.mT.where(inside[..., None], 0.0)
    return rows.index_put((places,), owed, accumulate=True).view_as(x)


def _blocks(u: Tensor, inverse: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield channels that are run together, and their denominators."""
    (batch, length, width), groups = u.shape, inverse.shape[0]
    if not (batch and length and width):
        return
    sharing = width // groups
    budget = BLOCK.get(u.device.type, BLOCK["cpu"])
    fitting = budget // (batch * length * sharing * u.element_size())
    for g in slices(groups, max(1, fitting)):
        yield slice(g.start * sharing, g.stop * sharing), g


def _spectra(u: Tensor, inverse: Tensor, kept: int) -> tuple[int, Tensor, Tensor]:
    """Return a size where the last ``kept`` sums do not wrap, and both spectra of that size."""
    length = u.shape[1]
    size = fast_size(length + kept)
    hats = (torch.fft.rfft(x, n=size) for x in (u.transpose(1, 2), inverse[:, :length]))
    return size, *hats


def _per_group(x: Tensor, shared: Tensor) -> Tensor:
    """Multiply ``[B, D, F]`` by ``[D_a, F]``, each row serving D / D_a channels."""
    groups = shared.shape[0]
    grouped = x.view(x.shape[0], groups, x.shape[1] // groups, x.shape[2])
    return (grouped * shared[:, None]).view(x.shape)
