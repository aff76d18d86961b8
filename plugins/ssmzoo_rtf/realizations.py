"""Convert rational filters from and to other realizations of the same transfer function.

Coefficients represent clustered poles badly: rounding them moves such poles far (S4's low-frequency
poles leave the unit disc). Every conversion is therefore checked, after rounding to the target
dtype, against the original impulse response, and raises an error where they differ.
"""

import torch
from torch import Tensor

from ssmzoo_kernels import rational_kernel
from ssmzoo_kernels.rational_kernel import check_polynomials

from .filters import numerator_of_response
from .stability import check_filters, first_not_finite, poles, poles_outside

# how much larger than their sum residues may be: repeated poles have infinite ones
MOST_CANCELLED = 1e6


def from_dense(
    A: Tensor,  # [D, n, n]
    B: Tensor,  # [D, n]
    C: Tensor,  # [D, n]
    D: Tensor | None = None,  # [D]
    *,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-4,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(a, b, h0)`` of ``x' = A x + B u, y = C x + D u``, one triple per channel.

    The denominator is A's characteristic polynomial; the numerator follows from the first n taps
    ``C A^(t-1) B``. Computed in float64.

    Args:
        A: State matrices.
        B: Input vectors.
        C: Output vectors, meeting the state before its update.
        D: Direct gains, zeros if absent.
        dtype: What the coefficients are rounded to.
        tolerance: The largest error of the impulse response allowed, relative to its largest tap.

    Raises:
        ValueError: Shapes that do not fit, a number that is not finite, a response that overflows,
            or poles too clustered for coefficients.
        TypeError: A complex triple.
    """
    if A.dim() != 3 or A.shape[1] != A.shape[2] or not A.shape[1]:
        raise ValueError(f"A must have shape [D, n, n] with n >= 1, got {list(A.shape)}")
    for name, vector in (("B", B), ("C", C)):
        if vector.shape != A.shape[:2]:
            raise ValueError(
                f"{name} must have shape [D, n] = {list(A.shape[:2])}, got {list(vector.shape)}"
            )
    for name, given in (("A", A), ("B", B), ("C", C)):
        if given.is_complex():
            raise TypeError(
                f"{name} must be real, got {given.dtype}; a diagonal form goes to from_diagonal"
            )
    _check_given(A.shape[0], D, A=A, B=B, C=C)
    A, state, C = A.double(), B.double(), C.double()
    taps = []
    for _ in range(_checked_taps(A.shape[1])):
        taps.append((C * state).sum(1))
        state = (A @ state[..., None])[..., 0]
    found = torch.linalg.eigvals(A)
    h0 = C.new_zeros(A.shape[0]) if D is None else D
    return _coefficients(found, torch.stack(taps, 1), h0, dtype, tolerance)


def from_diagonal(
    eigenvalues: Tensor,  # [D_a, n] complex
    residues: Tensor,  # [D, n] complex
    h0: Tensor | None = None,  # [D]
    *,
    conjugates: bool = False,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-4,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(a, b, h0)`` of the filters with taps ``sum_i r_i lambda_i^(t-1)``, t from 1 on.

    Args:
        eigenvalues: The poles; ``D_a`` divides D.
        residues: What they are weighted with.
        h0: Direct gains, zeros if absent.
        conjugates: Only one of each conjugate pair is given, and the taps are twice the real part
            of the sum; the order is 2n.
        dtype: What the coefficients are rounded to.
        tolerance: The largest error of the impulse response allowed, relative to its largest tap.

    Raises:
        ValueError: Shapes that do not fit, a number that is not finite, a response that overflows,
            taps that are not real, or poles too clustered for coefficients.
    """
    if eigenvalues.dim() != 2 or not eigenvalues.numel():
        raise ValueError(
            f"eigenvalues must have shape [D_a, n] with n >= 1, got {list(eigenvalues.shape)}"
        )
    rows, order = eigenvalues.shape
    if residues.dim() != 2 or residues.shape[1] != order or residues.shape[0] % rows:
        raise ValueError(
            f"residues must have shape [D, n] = [multiple of {rows}, {order}], "
            f"got {list(residues.shape)}"
        )
    _check_given(residues.shape[0], h0, eigenvalues=eigenvalues, residues=residues)
    values, weights = eigenvalues.to(torch.complex128), residues.to(torch.complex128)
    if conjugates:
        values = torch.cat([values, values.conj()], 1)
        weights = torch.cat([weights, weights.conj()], 1)
    taps = _modal_taps(values, weights, _checked_taps(values.shape[1]))
    if taps.imag.abs().max() > 1e-8 * taps.abs().max():
        raise ValueError(
            "eigenvalues and residues must come in conjugate pairs, got taps with imaginary part "
            f"{float(taps.imag.abs().max()):.2g}; pass one of each pair with conjugates=True"
        )
    gains = taps.real.new_zeros(weights.shape[0]) if h0 is None else h0
    return _coefficients(values, taps.real, gains, dtype, tolerance)


def to_diagonal(
    a: Tensor,  # [D_a, n]
    b: Tensor,  # [D, n]
    *,
    tolerance: float = 1e-4,
) -> tuple[Tensor, Tensor]:
    """Return poles ``[D_a, n]`` and residues ``[D, n]``, complex128; for analysis, not decoding.

    ``r_i = b(lambda_i) / a'(lambda_i)`` as polynomials in z.

    Raises:
        ValueError: Shapes that do not fit, a number that is not finite, or poles that repeat or
            nearly so: no diagonal form gives the impulse response back.
    """
    check_polynomials("to_diagonal", a, b)
    check_filters(a, b)
    order = a.shape[1]
    found, sharing = poles(a), b.shape[0] // a.shape[0]
    at = found.repeat_interleave(sharing, 0)
    value, slope = torch.zeros_like(at), torch.zeros_like(at)
    monic = torch.nn.functional.pad(a.double(), (1, 0), value=1.0).repeat_interleave(sharing, 0)
    for i in range(order):
        value = value * at + b[:, i : i + 1]
        slope = slope * at + (order - i) * monic[:, i : i + 1]
    residues = value / slope
    count = _checked_taps(order)
    expected = rational_kernel(a.double(), b.double(), count + 1)[:, 1:]
    error = _relative_error(_modal_taps(found, residues, count).real, expected)
    cancelled = residues.abs().sum(1) / expected.abs().amax(1)
    usable = (error <= tolerance) & ~(cancelled > MOST_CANCELLED)
    if not bool(usable.all()):
        row = int((~usable).nonzero()[0])
        raise ValueError(
            f"channel {row} has no usable diagonal form: poles repeat or cluster, residues add up "
            f"to {float(cancelled[row]):.2g} times its largest tap (at most {MOST_CANCELLED:g}), "
            f"and the sum misses its impulse response by {float(error[row]):.2g} of that tap "
            f"(tolerance {tolerance:g}); keep the coefficients"
        )
    return found, residues


def from_rtf2(
    a: Tensor,  # [D_a, n]
    c: Tensor,  # [D, n]
    h0: Tensor,  # [D]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(a, b, h0)`` of an ``RTF2`` filter, which reads its state after the update.

    The authors' ``RTF2`` has the numerator ``sum c_i z^(1-i)``; dividing its direct term out leaves
    ``b_m = c_(m+1) - c_1 a_m`` and ``h0 + c_1``.
    """
    if a.dim() != 2 or c.dim() != 2 or c.shape[1] != a.shape[1] or c.shape[0] % a.shape[0]:
        raise ValueError(
            "a and c must have shapes [D_a, n] and [D, n] with D_a a divisor of D, "
            f"got {list(a.shape)} and {list(c.shape)}"
        )
    first = c[:, :1]
    shifted = torch.nn.functional.pad(c[:, 1:], (0, 1))
    b = shifted - first * a.repeat_interleave(c.shape[0] // a.shape[0], 0)
    return a, b, h0 + first.sum(1)


def _checked_taps(order: int) -> int:
    return max(4 * order, 256)


def _check_given(width: int, gains: Tensor | None, **given: Tensor) -> None:
    """Fail unless there is a direct gain for every channel and all numbers are finite."""
    if gains is not None:
        if gains.shape != (width,):
            raise ValueError(
                f"the direct gains must have shape [D] = [{width}], got {list(gains.shape)}"
            )
        given["the direct gains"] = gains
    for name, tensor in given.items():
        wrong = first_not_finite(tensor)
        if wrong is not None:
            raise ValueError(f"{name} must be finite, got {wrong[1]} in row {wrong[0]}")


def _modal_taps(values: Tensor, weights: Tensor, count: int) -> Tensor:
    """Return ``sum_i r_i lambda_i^t`` for t = 0 .. count - 1, ``[D, count]`` complex."""
    values = values.repeat_interleave(weights.shape[0] // values.shape[0], 0)
    taps = []
    for _ in range(count):
        taps.append(weights.sum(1))
        weights = weights * values
    return torch.stack(taps, 1)


def _coefficients(
    found: Tensor, taps: Tensor, h0: Tensor, dtype: torch.dtype, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return coefficients of filters with given poles and first taps, if they are true to them."""
    order = found.shape[1]
    endless = ~taps.isfinite().all(1)
    if bool(endless.any()):
        row = int(endless.nonzero()[0])
        radius = float(found[row // (len(taps) // len(found))].abs().max())
        raise ValueError(
            f"channel {row} must have a finite impulse response, got an overflow within "
            f"{taps.shape[1]} taps: its largest pole has radius {radius:.4g}"
        )
    a = _polynomial(found)
    b = numerator_of_response(a, taps[:, :order])
    a, b = a.to(dtype), b.to(dtype)
    _refuse_unfaithful(found, taps, a, b, tolerance)
    return a, b, h0.to(dtype)


def _polynomial(roots: Tensor) -> Tensor:
    """Return ``prod (1 - root / z)`` without its leading 1, from its values on a grid."""
    order = roots.shape[1]
    grid = 2 * (order // 2 + 1)
    steps = torch.arange(grid, dtype=torch.float64, device=roots.device)
    angles = steps * (-2 * torch.pi / grid)
    values = torch.ones(roots.shape[0], grid, dtype=roots.dtype, device=roots.device)
    points = torch.polar(torch.ones_like(angles), angles)
    for i in range(order):
        values = values * (1 - roots[:, i : i + 1] * points)
    return torch.fft.ifft(values).real[:, 1 : order + 1]


def _refuse_unfaithful(found: Tensor, taps: Tensor, a: Tensor, b: Tensor, tolerance: float) -> None:
    radius = found.abs().amax(1)
    finite = a.isfinite().all(1)
    moved = torch.zeros_like(finite)
    moved[finite] = (radius[finite] < 1) & (poles_outside(a[finite]) > 0)
    kernel = rational_kernel(a.double(), b.double(), taps.shape[1] + 1)[:, 1:]
    error = _relative_error(kernel, taps)
    sharing = b.shape[0] // a.shape[0]
    wrong = (error > tolerance) | error.isnan() | (moved | ~finite).repeat_interleave(sharing)
    if not bool(wrong.any()):
        return
    row = int(wrong.nonzero()[0])
    owner = row // sharing
    after = float(poles(a[owner : owner + 1]).abs().max()) if bool(finite[owner]) else float("inf")
    raise ValueError(
        f"channel {row} cannot be written with {str(a.dtype).removeprefix('torch.')} coefficients: "
        "its poles cluster, so that rounding moves the largest radius from "
        f"{float(radius[owner]):.4g} to {after:.4g} and the impulse response by "
        f"{float(error[row]):.2g} of its largest tap (tolerance {tolerance:g}); keep the "
        "state-space form, or fit a filter to its response"
    )


def _relative_error(got: Tensor, expected: Tensor) -> Tensor:
    """Return each row's largest error relative to its largest tap; 0 where both are zero."""
    scale = expected.abs().amax(1)
    error = (got - expected).abs().amax(1)
    return torch.where(error == 0, error, error / scale)
