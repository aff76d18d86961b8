"""Kernels of rational transfer functions by torch's FFTs, with their own backward.

The cost is that of FFTs of the kernel's length; the order n only says how much of them is zero.
Conjugates are written out: inside a registered op that a compiled graph calls, torch 2.13 forgets
the lazy ones.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo_kernels.precision import double


def forward(
    a: Tensor,  # [D_a, n]
    b: Tensor,  # [D, n]
    save: bool,
    length: int,
    grid: int | None,
) -> tuple[Tensor, Tensor]:
    """Return the kernel ``[D, L]``, of the truncated mode with a grid, and ``1 / a``."""
    if grid is None:
        inverse = inverse_series(a, length)
        return exact(inverse, b, length), inverse
    inverse = inverse_on_grid(a, grid)
    return truncated(inverse, b, length, grid), torch.view_as_real(inverse)


def backward(
    grad: Tensor,  # [D, L]
    a: Tensor,
    b: Tensor,
    kernel: Tensor,
    inverse: Tensor,
    length: int,
    grid: int | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of both polynomials."""
    grad = grad.contiguous()
    if grid is None:
        return exact_backward(grad, kernel, inverse, a.shape[1])
    return truncated_backward(grad, torch.view_as_complex(inverse), b, grid)


def inverse_on_grid(a: Tensor, grid: int) -> Tensor:
    """Return ``1 / a`` on ``grid`` roots of unity, half of them, ``[D_a, F]`` complex.

    In float64, then rounded: what the sum rounds is divided by the sum, small near a slow pole.
    """
    # torch divides complex numbers one by one, its reciprocal is vectorised
    inverse = torch.fft.rfft(_monic(double(a)), n=grid).reciprocal()
    return inverse.to(a.device, torch.promote_types(a.dtype, torch.complex64))


def truncated(inverse: Tensor, b: Tensor, length: int, grid: int) -> Tensor:
    """Return the first taps of ``b(z) / a(z)`` sampled on ``grid`` roots of unity, ``[D, L]``."""
    kernel = torch.fft.irfft(inverse[:, None] * _numerator(inverse, b, grid), n=grid)
    return kernel[..., :length].reshape(b.shape[0], length).contiguous()


def truncated_backward(
    grad: Tensor,  # [D, L]
    inverse: Tensor,  # [D_a, F]
    b: Tensor,  # [D, n]
    grid: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of both polynomials."""
    (width, order), inverse = b.shape, inverse[:, None]
    groups = inverse.shape[0]
    grad_hat = torch.fft.rfft(grad.view(groups, width // groups, grad.shape[1]), n=grid)
    grad_hat = grad_hat * inverse.conj_physical()
    grad_b = torch.fft.irfft(grad_hat, n=grid)[..., 1 : order + 1]
    ratio = inverse * _numerator(inverse, b, grid)
    shared = (grad_hat * ratio.conj_physical()).sum(1)
    grad_a = -torch.fft.irfft(shared, n=grid)[..., 1 : order + 1]
    return grad_a, grad_b.reshape(b.shape)


def closest_to_zero(a: Tensor, grid: int) -> Tensor:
    """Return how near each denominator comes to zero on the grid, ``[D_a]``."""
    spectrum = torch.fft.rfft(_monic(a), n=grid)
    return (spectrum.real.square() + spectrum.imag.square()).amin(-1).sqrt()


def inverse_series(a: Tensor, length: int) -> Tensor:
    """Return ``1 / a(z)`` as a power series of ``length`` terms, ``[D_a, L]``, by Newton doubling.

    Known terms are never touched again, so a longer series begins with a shorter one. In float64:
    a doubling takes over the errors of the terms before it, and slow poles keep them.
    """
    monic = _monic(double(a))
    known = torch.ones_like(monic[:, :1])
    while known.shape[1] < length:
        half = known.shape[1]
        size = 2 * half
        known_hat = torch.fft.rfft(known, n=size)
        # a * known = 1 + z^-half error; what wraps around falls on terms below half
        error = torch.fft.irfft(known_hat * torch.fft.rfft(monic[:, :size], n=size), n=size)
        error_hat = torch.fft.rfft(error[:, half:], n=size)
        correction = torch.fft.irfft(known_hat * error_hat, n=size)[:, :half]
        known = torch.cat([known, -correction], dim=1)
    return known[:, :length].to(a).contiguous()


def inverse_series_backward(grad: Tensor, inverse: Tensor, order: int) -> Tensor:
    """Return the gradient of the denominators ``[D_a, n]`` from that of their inverse."""
    if grad.shape[1] < 2 or not order:
        return grad.new_zeros(grad.shape[0], order)
    adjoint = correlate(grad, inverse, grad.shape[1])
    grad_a = -correlate(adjoint, inverse, order + 1)[:, 1:]
    return F.pad(grad_a, (0, order - grad_a.shape[1]))


def exact(inverse: Tensor, b: Tensor, length: int) -> Tensor:
    """Return the first taps of the series ``b(z) / a(z)`` given ``1 / a``, ``[D, L]``."""
    if length < 2 or not b.shape[1]:
        return b.new_zeros(b.shape[0], length)
    terms = length - 1  # tap 0 is zero
    taps = min(b.shape[1], terms)
    # the same FFTs for every order up to a quarter of the length
    size = fast_size(terms + max(taps, length // 4))
    inverse_hat = torch.fft.rfft(inverse[:, None, :terms], n=size)
    b_hat = torch.fft.rfft(b[:, :taps].view(inverse.shape[0], -1, taps), n=size)
    kernel = torch.fft.irfft(inverse_hat * b_hat, n=size)[..., :terms]
    return F.pad(kernel.reshape(b.shape[0], terms), (1, 0))


def exact_backward(
    grad: Tensor,  # [D, L]
    kernel: Tensor,  # [D, L]
    inverse: Tensor,  # [D_a, L]
    order: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of both polynomials."""
    width, length = grad.shape
    groups, terms = inverse.shape[0], length - 1
    if length < 2 or not order:
        return grad.new_zeros(groups, order), grad.new_zeros(width, order)
    grouped = grad[:, 1:].view(groups, -1, terms)
    adjoint = correlate(grouped, inverse[:, None, :terms], terms)
    grad_b = adjoint[..., :order].reshape(width, -1)
    shared = kernel[:, 1:].view(groups, -1, terms)
    count = min(order, terms - 1)
    size = fast_size(terms + max(count + 1, length // 4))
    product = torch.fft.rfft(adjoint, n=size) * torch.fft.rfft(shared, n=size).conj_physical()
    grad_a = -torch.fft.irfft(product.sum(1), n=size)[:, 1 : count + 1]
    return F.pad(grad_a, (0, order - count)), F.pad(grad_b, (0, order - grad_b.shape[1]))


def correlate(x: Tensor, y: Tensor, lags: int) -> Tensor:
    """Return ``sum_t x[t] y[t - j]`` for the lags ``j = 0 .. lags - 1`` that exist."""
    length = x.shape[-1]
    lags = min(lags, length)
    size = fast_size(length + max(lags, length // 4))
    product = torch.fft.rfft(x, n=size) * torch.fft.rfft(y, n=size).conj_physical()
    return torch.fft.irfft(product, n=size)[..., :lags]


def fast_size(least: int) -> int:
    """Return the smallest even size with no prime factor above 5 that is at least ``least``."""
    best = 2
    while best < least:
        best *= 2
    five = 1
    while five < best:
        three = five
        while three < best:
            size = 2 * three
            while size < least:
                size *= 2
            best = min(best, size)
            three *= 3
        five *= 5
    return best


def _monic(a: Tensor) -> Tensor:
    return F.pad(a, (1, 0), value=1.0)


def _numerator(inverse: Tensor, b: Tensor, grid: int) -> Tensor:
    """Return ``b`` on the grid, ``[D_a, R, F]``."""
    numerator = torch.fft.rfft(F.pad(b, (1, 0)), n=grid)
    return numerator.view(inverse.shape[0], b.shape[0] // inverse.shape[0], numerator.shape[1])
