"""The kernel of a rational transfer function from its definition; the judge of the others."""

import math

import torch
from torch import Tensor


def rational_kernel(a: Tensor, b: Tensor, *, length: int, grid: int | None) -> Tensor:
    """Return ``[D, L]`` (equations and shapes: the public op; ``grid`` None is the exact mode)."""
    dtype = torch.promote_types(torch.float32, torch.promote_types(a.dtype, b.dtype))
    b = b.to(dtype)
    a = a.to(dtype).repeat_interleave(b.shape[0] // a.shape[0], dim=0)
    return _long_division(a, b, length) if grid is None else _sampled(a, b, length, grid)


def inverse_series(a: Tensor, length: int) -> Tensor:
    """Return the power series of ``1 / a``, ``[D_a, L]``."""
    a = a.to(torch.promote_types(torch.float32, a.dtype))
    terms = [1 + a[:, :0].sum(1)]  # a constant, on a's tape
    for t in range(1, length):
        past = torch.stack(terms[: -a.shape[1] - 1 : -1], dim=1) if a.shape[1] else a
        terms.append(-(a[:, : min(t, a.shape[1])] * past).sum(1))
    return torch.stack(terms, dim=1)[:, :length]


def _long_division(a: Tensor, b: Tensor, length: int) -> Tensor:
    """``k[t] = b[t] - sum_i a[i] k[t - i]``, coefficient i being column i - 1; ``k[0] = 0``."""
    order = a.shape[1]
    kernel = [(a[:, :0] + b[:, :0]).sum(1)]  # zero, on both tapes
    for t in range(1, length):
        tap = b[:, t - 1] if t <= order else b.new_zeros(b.shape[0])
        if order:
            past = torch.stack(kernel[: -order - 1 : -1], dim=1)
            tap = tap - (a[:, : past.shape[1]] * past).sum(1)
        kernel.append(tap)
    return torch.stack(kernel, dim=1)[:, :length]


def _sampled(a: Tensor, b: Tensor, length: int, grid: int) -> Tensor:
    """Divide the polynomials' values at the roots of unity, and sum the inverse transform."""
    steps = torch.arange(grid, device=a.device, dtype=torch.float64)
    angles = (steps[:, None] * steps % grid) * (-2 * math.pi / grid)
    roots = torch.polar(torch.ones_like(angles), angles)  # [frequency, time]
    roots = roots.to(torch.promote_types(a.dtype, torch.complex64))
    powers = roots[:, 1 : a.shape[1] + 1].T
    ratio = (b.to(roots.dtype) @ powers) / (1 + a.to(roots.dtype) @ powers)
    return (ratio @ roots.conj()[:, :length]).real / grid
