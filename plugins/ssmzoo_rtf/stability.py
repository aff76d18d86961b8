"""Locate the poles of a denominator without computing them.

As z runs around a circle, ``a(z) = prod (1 - pole / z)`` winds around zero once backward for every
pole outside the circle and not at all for a pole inside. The winding number costs an FFT.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo_kernels import double

FINEST_GRID = 2**20
# up to this order all eigenvalues of the companion matrix are cheap
SMALL_ORDER = 128
# the largest error of a radius that is found by bisection
RADIUS_ERROR = 1e-3


def poles_outside(a: Tensor, radius: float | Tensor = 1.0) -> Tensor:
    """Count the poles that are not inside a circle, ``[D_a]`` int64; zeros mean stable.

    Uses the winding number of ``a`` on a grid that is refined, row by row, until no step turns by
    more than a right angle; poles too near the circle for that are computed.

    Args:
        a: Denominators without their leading 1, ``[D_a, n]``.
        radius: The circle's radius, or one per row.

    Raises:
        ValueError: A coefficient is not finite, or a radius not positive.
    """
    _check_finite(a)
    home, a = a.device, double(a)
    radii = torch.as_tensor(radius, dtype=torch.float64, device=a.device).expand(a.shape[0])
    if not bool((radii > 0).all()):
        raise ValueError(f"radius must be positive, got {radius}")
    scaled = _on_circle(a, radii)
    counts = torch.zeros(a.shape[0], dtype=torch.int64, device=a.device)
    open_rows = torch.arange(a.shape[0], device=a.device)
    grid = 2 ** math.ceil(math.log2(4 * (a.shape[1] + 1)))
    while len(open_rows) and grid <= FINEST_GRID:
        still = []
        # a bounded number of rows at a time: fine grids are long
        for rows in open_rows.split(max(1, 2**22 // grid)):
            turns, clear = _winding(scaled[rows], grid)
            counts[rows[clear]] = -turns[clear]
            still.append(rows[~clear])
        open_rows = torch.cat(still)
        grid *= 4
    for row in open_rows.tolist():
        limit = radii[row] * (1 - 1e-10)
        counts[row] = (poles(a[row : row + 1])[0].abs() >= limit).sum()
    return counts.to(home)


def spectral_radius(a: Tensor) -> Tensor:
    """Return the largest pole's distance from zero, ``[D_a]`` float64.

    Exact up to order 128; above it, bisection finds it to 1e-3 by counting poles outside circles.

    Args:
        a: Denominators without their leading 1, ``[D_a, n]``.

    Raises:
        ValueError: A coefficient is not finite.
    """
    _check_finite(a)
    a = double(a)
    if not a.shape[1]:
        return a.new_zeros(a.shape[0])
    if a.shape[1] <= SMALL_ORDER:
        return poles(a).abs().amax(1)
    low = torch.zeros(a.shape[0], dtype=torch.float64, device=a.device)
    high = 1 + a.abs().amax(1)  # Cauchy's bound
    while bool(((high - low) > RADIUS_ERROR).any()):
        middle = (low + high) / 2
        outside = poles_outside(a, middle) > 0
        low, high = torch.where(outside, middle, low), torch.where(outside, high, middle)
    return (low + high) / 2


def poles(a: Tensor) -> Tensor:
    """Return all poles ``[D_a, n]`` complex128: the eigenvalues of the companion matrix."""
    a, order = double(a), a.shape[1]
    companion = a.new_zeros(a.shape[0], order, order)
    companion[:, 0] = -a
    companion.diagonal(offset=-1, dim1=1, dim2=2).fill_(1.0)
    return torch.linalg.eigvals(companion)


def _check_finite(a: Tensor) -> None:
    wrong = first_not_finite(a)
    if wrong is not None:
        raise ValueError(f"denominator {wrong[0]} must be finite, got {wrong[1]}")


def first_not_finite(x: Tensor) -> tuple[int, float | complex] | None:
    """Return the first row with an entry that is not finite, and the entry; None if all are."""
    wrong = ~x.isfinite()
    if x.is_meta or not bool(wrong.any()):
        return None
    return int(wrong.nonzero()[0, 0]), x[wrong][0].item()


def _on_circle(a: Tensor, radii: Tensor) -> Tensor:
    """Return ``a`` on circles as if on the unit circle, ``[D_a, n + 1]``, largest entry 1."""
    monic = F.pad(a, (1, 0), value=1.0)
    powers = torch.arange(monic.shape[1], device=a.device)
    # in logarithms: r^-i alone may overflow
    sizes = monic.abs().log() - powers * radii.log()[:, None]
    return monic.sign() * (sizes - sizes.amax(1, keepdim=True)).exp()


def _winding(coefficients: Tensor, grid: int) -> tuple[Tensor, Tensor]:
    """Return how often each row turns around zero, and whether the grid is fine enough to say."""
    values = torch.fft.rfft(coefficients, n=grid)
    steps = (values[:, 1:] * values[:, :-1].conj()).angle()
    rounding = 1e-12 * coefficients.abs().sum(1)
    clear = (steps.abs().amax(1) <= math.pi / 2) & (values.abs().amin(1) > rounding)
    # half a circle, and the other half is its mirror image
    return (steps.sum(1) / math.pi).round().to(torch.int64), clear
