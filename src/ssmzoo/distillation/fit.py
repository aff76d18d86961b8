"""Filters of small order fitted to given long ones.

A filter may need poles so close to each other that float32 coefficients cannot represent them.
Errors are therefore measured after rounding, as the filter will be used: a lower order whose
coefficients survive rounding wins over a higher one whose coefficients do not. Modes survive it.

Dimensions: D channels, K taps (1, 2, ...; tap 0 belongs to the direct gain), n order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ssmzoo_kernels import rational_kernel, vandermonde

# channels whose matrices are decomposed together
CHUNK = 32
# poles on or outside the unit circle are moved inside to this radius
RADIUS = 1 - 1e-5


@dataclass(frozen=True)
class RationalFit:
    """Filters ``b(z) / a(z)`` in float32, and how far they are from the given ones.

    Attributes:
        a: Denominators ``[D, n]``; all poles lie inside the unit disc.
        b: Numerators ``[D, n]``.
        error: ``|fitted - given| / |given|`` over all taps, in the 2-norm, ``[D]``.
    """

    a: Tensor
    b: Tensor
    error: Tensor


@dataclass(frozen=True)
class ModalFit:
    """Filters ``h_t = Re sum_i r_i lambda_i^{t-1}`` in complex64, and how far they are.

    Attributes:
        poles: lambda ``[D, n / 2]``, inside the unit disc.
        residues: r ``[D, n / 2]``.
        error: ``|fitted - given| / |given|`` over all taps, in the 2-norm, ``[D]``.
    """

    poles: Tensor
    residues: Tensor
    error: Tensor


def fit_rational(taps: Tensor, order: int, *, steps: int = 300, lr: float = 3e-3) -> RationalFit:
    """Fit coefficients: modes by Hankel SVD turned into coefficients, then gradient descent.

    Where no mode survives rounding, the descent begins at the first n taps.

    Args:
        taps: Taps 1, 2, ... of the filters, ``[D, K]``, K at least 2.
        order: n.
        steps: Steps of Adam in float64, on each channel's squared relative error.
        lr: Their first rate; it falls to zero as a cosine.

    Raises:
        ValueError: Too few taps for the order, or a tap that is not finite.
    """
    taps = _checked(taps, order)
    best = _Best(taps, order)
    best.offer(torch.zeros_like(taps[:, :order]), taps[:, :order])
    tried = order
    while tried >= 1:
        best.offer(*_coefficients(*_modes(taps, tried), order))
        tried //= 2
    _descend(best, steps, lr)
    return RationalFit(best.a, best.b, best.error)


def fit_modal(taps: Tensor, order: int, *, steps: int = 300, lr: float = 3e-3) -> ModalFit:
    """Fit modes ``h_t = Re sum_i r_i lambda_i^{t-1}``, n / 2 of them, as Laughing Hyena does.

    Modes start at those of a Hankel SVD and descend. A mode and its conjugate are one real filter
    of order 2.

    Args:
        taps: As for :func:`fit_rational`.
        order: n, even.
        steps: As there.
        lr: As there.

    Raises:
        ValueError: As there, or an odd order.
    """
    taps = _checked(taps, order)
    if order % 2:
        raise ValueError(
            f"order must be even for kind='modal', a mode and its conjugate, got {order}"
        )
    poles, residues = _descend_modes(taps, *_best_pairs(taps, order), steps, lr)
    poles, residues = poles.to(torch.complex64), residues.to(torch.complex64)
    error = relative_error(_modal_response(poles, residues, taps.shape[1]), taps)
    return ModalFit(poles, residues, error)


def relative_error(fitted: Tensor, taps: Tensor) -> Tensor:
    """Return each row's error in the 2-norm, relative to the row; nan counts as infinite."""
    scale = taps.norm(dim=1)
    error = (fitted - taps).norm(dim=1)
    error = torch.where(error == 0, error, error / scale)
    return error.nan_to_num(nan=math.inf, posinf=math.inf)


class _Best:
    """For every channel the best stable coefficients that were offered, rounded to float32."""

    def __init__(self, taps: Tensor, order: int) -> None:
        self.taps = taps
        self.a = taps.new_zeros(taps.shape[0], order, dtype=torch.float32)
        self.b = torch.zeros_like(self.a)
        self.error = taps.new_full((taps.shape[0],), math.inf)

    def offer(self, a: Tensor, b: Tensor) -> None:
        """Take over the rows that are stable and better than those so far."""
        a, b = a.float(), b.float()
        finite = a.isfinite().all(dim=1) & b.isfinite().all(dim=1)
        a, b = a.where(finite[:, None], 0.0), b.where(finite[:, None], 0.0)
        error = relative_error(_response(a, b, self.taps.shape[1]), self.taps)
        better = finite & (error < self.error)
        better[better.clone()] = _radius(a[better]) < 1
        self.a[better], self.b[better], self.error[better] = a[better], b[better], error[better]


def _checked(taps: Tensor, order: int) -> Tensor:
    if taps.dim() != 2 or taps.shape[1] < 2:
        raise ValueError(f"taps must have shape [D, K] with K >= 2, got {list(taps.shape)}")
    if not 1 <= order <= taps.shape[1] // 2:
        raise ValueError(
            f"order must be between 1 and half of the {taps.shape[1]} taps, got {order}"
        )
    if not bool(taps.isfinite().all()):
        row = int((~taps.isfinite().all(dim=1)).nonzero()[0])
        raise ValueError(f"channel {row} must have finite taps")
    return taps.detach().double()


def _response(a: Tensor, b: Tensor, count: int) -> Tensor:
    """Return taps 1 .. count in float64, ``[D, K]``."""
    return rational_kernel(a.double(), b.double(), count + 1)[:, 1:]


def _radius(a: Tensor) -> Tensor:
    order = a.shape[1]
    companion = a.new_zeros(a.shape[0], order, order, dtype=torch.float64)
    companion[:, 0] = -a.double()
    companion.diagonal(offset=-1, dim1=1, dim2=2).fill_(1.0)
    return torch.linalg.eigvals(companion).abs().amax(dim=1)


def _modes(taps: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """Return poles and residues ``[D, n]`` of the best realizations of the taps' Hankel matrices.

    Kung's method: the leading left singular vectors span what a state of order n can show over
    time, and the matrix that moves them one step on has the poles.
    """
    rows = min(taps.shape[1] // 2, max(4 * order, 64))
    found = []
    for some in taps.split(CHUNK):
        hankel = some.unfold(1, some.shape[1] - rows + 1, 1)  # [d, rows, K - rows + 1]
        span = torch.linalg.svd(hankel, full_matrices=False)[0][..., :order]
        step = torch.linalg.pinv(span[:, :-1]) @ span[:, 1:]
        poles = torch.linalg.eigvals(step)
        size = poles.abs()
        # reflected into the disc, off the circle, and not zero, whose powers are not a number
        inside = torch.where(size > 1, 1 / size, size).clamp(1e-12, RADIUS)
        poles = torch.polar(inside, poles.angle())
        found.append((poles, _residues(poles, some)))
    return torch.cat([f[0] for f in found]), torch.cat([f[1] for f in found])


def _residues(poles: Tensor, taps: Tensor) -> Tensor:
    """Return the residues with the least squares of the error, ``[d, n]``."""
    steps = torch.arange(taps.shape[1], device=taps.device)
    powers = poles[:, None] ** steps[:, None]  # [d, K, n]
    return (torch.linalg.pinv(powers, rtol=1e-12) @ taps.to(poles.dtype)[..., None])[..., 0]


def _coefficients(poles: Tensor, residues: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """Return the numerators and denominators of some modes, zeros up to the order."""
    count = poles.shape[1]
    # from the values on a grid: products of polynomials in an unlucky order overflow
    grid = count + 1
    angles = torch.arange(grid, dtype=torch.float64, device=poles.device) * (-2 * math.pi / grid)
    points = torch.polar(torch.ones_like(angles), angles)
    values = torch.ones(poles.shape[0], grid, dtype=poles.dtype, device=poles.device)
    for i in range(count):
        values = values * (1 - poles[:, i : i + 1] * points)
    a = torch.fft.ifft(values).real  # [D, count + 1]
    weights, taps = residues, []
    for _ in range(count):
        taps.append(weights.sum(dim=1).real)
        weights = weights * poles
    h = torch.stack(taps, dim=1)
    b = [(a[:, : m + 1].flip(1) * h[:, : m + 1]).sum(dim=1) for m in range(count)]
    room = (0, order - count)
    pad = torch.nn.functional.pad
    return pad(a[:, 1:], room), pad(torch.stack(b, dim=1), room)


def _descend(best: _Best, steps: int, lr: float) -> None:
    """Improve coefficients by Adam; every channel is a problem of its own."""
    if not steps:
        return
    a = best.a.double().requires_grad_()
    b = best.b.double().requires_grad_()
    scale = best.taps.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)

    def loss() -> Tensor:
        fitted = rational_kernel(a, b, best.taps.shape[1] + 1)[:, 1:]
        errors = ((fitted - best.taps) / scale[:, None]).square().sum(dim=1)
        # a channel that exploded must not take the others along
        return errors[errors.isfinite()].sum()

    for step in _adam([a, b], loss, steps, lr):
        if step % 25 == 0 or step == steps:
            best.offer(a.detach(), b.detach())


def _adam(leaves: list[Tensor], loss: Callable[[], Tensor], steps: int, lr: float) -> Iterator[int]:
    """Run Adam with a cosine to zero; yield after every step."""
    optimizer = torch.optim.Adam(leaves, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        with torch.enable_grad():
            loss().backward()
        for leaf in leaves:
            if leaf.grad is not None:
                leaf.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        optimizer.step()
        schedule.step()
        yield step


def _best_pairs(taps: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """Return poles and residues ``[D, n / 2]`` of the ``Re sum`` that comes nearest.

    From realizations of the order and of lower ones: where a lower one is exact, the other
    poles of a higher one are noise.
    """
    count = order // 2
    poles = torch.full((taps.shape[0], count), 0.5, dtype=torch.complex128, device=taps.device)
    residues, error = torch.zeros_like(poles), taps.new_full((taps.shape[0],), math.inf)
    tried = order
    while tried >= 1:
        found = _pairs(*_modes(taps, tried), taps, count)
        own = relative_error(_modal_response(*found, taps.shape[1]), taps)
        better = own < error
        for kept, new in zip((poles, residues, error), (*found, own), strict=True):
            kept[better] = new[better]
        tried //= 2
    return poles, residues


def _pairs(poles: Tensor, residues: Tensor, taps: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the loudest modes, one of each conjugate pair, ``[D, count]``, and their residues.

    Residues are those of ``Re sum``, with the least squares of the error.
    """
    share = residues.abs() * (1 - poles.abs().square()).rsqrt()  # a mode's 2-norm
    share = torch.where(
        poles.imag < -1e-12, -1.0, torch.where(poles.imag > 1e-12, 2 * share, share)
    )
    loudest = share.argsort(dim=1, descending=True)[:, :count]
    others = share.gather(1, loudest) < 0  # conjugates of the ones chosen
    chosen = poles.gather(1, loudest).masked_fill(others, 0.5)
    both = torch.cat([chosen, chosen.conj()], dim=1)
    pairs = zip(both.split(CHUNK), taps.split(CHUNK), strict=True)
    found = 2 * torch.cat([_residues(*some)[:, : chosen.shape[1]] for some in pairs])
    short = (0, count - chosen.shape[1])
    pad = torch.nn.functional.pad
    return pad(chosen, short, value=0.5), pad(found, short)


def _modal_response(poles: Tensor, residues: Tensor, count: int) -> Tensor:
    """Return taps 1 .. count in float64, ``[D, K]``."""
    return vandermonde(residues.to(torch.complex128), poles.to(torch.complex128).log(), count)


def _descend_modes(
    taps: Tensor, poles: Tensor, residues: Tensor, steps: int, lr: float
) -> tuple[Tensor, Tensor]:
    """Improve modes by Adam; return the best."""
    scale = taps.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    speed = (-poles.abs().clamp(min=1e-6).log()).clamp(min=-math.log(RADIUS)).log().requires_grad_()
    angle = poles.angle().requires_grad_()
    weight = torch.view_as_real(residues / scale[:, None]).clone().requires_grad_()

    def now() -> tuple[Tensor, Tensor]:
        exponent = torch.complex(-speed.exp(), angle)
        return exponent, torch.view_as_complex(weight)

    def errors() -> Tensor:
        exponent, residue = now()
        fitted = vandermonde(residue, exponent, taps.shape[1])
        return (fitted - taps / scale[:, None]).square().sum(dim=1)

    with torch.no_grad():
        best = [errors(), *now()]
        best = [x.clone() for x in best]
    for _ in _adam([speed, angle, weight], lambda: errors().nan_to_num(0.0).sum(), steps, lr):
        with torch.no_grad():
            found = errors()
            better = found < best[0]
            for kept, new in zip(best, (found, *now()), strict=True):
                kept[better] = new[better]
    _, exponent, residue = best
    return exponent.exp(), residue * scale[:, None]
