"""The convolution kernel of a filter given by the coefficients of its transfer function."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ssmzoo_kernels.declaration import Op, accumulator
from ssmzoo_kernels.dispatch import Backend
from ssmzoo_kernels.rational_kernel import eager, reference
from ssmzoo_kernels.validation import check_count, check_leading, check_tensor

OP = "rational_kernel"
Mode = Literal["exact", "truncated"]

OFFERS = ("reference", "eager")


def _saved(_: Any, sizes: Mapping[str, Any]) -> Sequence[int]:
    """Return the shape of ``1 / a``: its spectrum's half as pairs, or its series."""
    if sizes["grid"] is not None:
        return sizes["D_a"], sizes["grid"] // 2 + 1, 2
    return sizes["D_a"], sizes["length"]


KERNEL = Op(
    OP,
    inputs={"a": "D_a n", "b": "D n"},
    outputs={"kernel": "D length"},
    options={"length": "int", "grid": "int?"},
    offers=OFFERS,
    saved=_saved,
    keeps=("a", "b", "kernel", "saved"),
    reference=reference.rational_kernel,
    kernels=lambda _: eager,
)
SERIES = Op(
    "inverse_series",
    inputs={"a": "D_a n"},
    outputs={"inverse": "D_a length"},
    options={"length": "int"},
    offers=OFFERS,
    keeps=("a", "inverse"),
    reference=reference.inverse_series,
    kernels=lambda _: SimpleNamespace(
        forward=eager.inverse_series,
        backward=lambda grad, a, inverse, _: eager.inverse_series_backward(
            grad, inverse, a.shape[1]
        ),
    ),
)


def rational_kernel(
    a: Tensor,  # [D_a, n]
    b: Tensor,  # [D, n]
    length: int,
    *,
    mode: Mode = "exact",
    trunc_len: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Expand ``b(z) / a(z)`` with ``a(z) = 1 + sum a_i z^-i``, ``b(z) = sum b_i z^-i``, i = 1..n.

    - ``"exact"``: the power series, tap 0 zero. Any length; a longer kernel begins with a shorter
      one. Poles outside the unit disc make it grow.
    - ``"truncated"``: the ratio on a grid of ``trunc_len`` roots of unity (RTF, Algorithm 1), of
      which ``length`` taps are returned: the series wrapped around the grid, so that tap 0 is the
      series' tap ``trunc_len`` plus those at its multiples. Finite for poles anywhere
      but on the grid.

    The direct gain ``h0`` is no part of it: that is the convolution's ``D``. Time and memory do not
    depend on n while n is at most a quarter of the length. Computed in float32, or float64 if a
    polynomial is.

    Args:
        a: Denominators without their leading 1; ``D_a`` divides D and channel c has row
            ``c // (D / D_a)``.
        b: Numerators, from ``z^-1`` on.
        length: How many taps to return.
        mode: The meaning of the coefficients.
        trunc_len: The grid of the truncated mode, more than n; an odd one is made even by adding 1.
        backend: "auto", "eager" or "reference": torch's FFTs serve every device.

    Returns:
        ``[D, length]`` in float32 or float64.

    Raises:
        ValueError: Shapes, devices or choices that do not fit.
        TypeError: Not a tensor, or not floating point.

    Warns:
        RuntimeWarning: A denominator comes near zero on the grid of the truncated mode (looked for
            on a CPU only: on a GPU it would stall the queue).
    """
    check_polynomials(OP, a, b)
    check_rows(OP, "b", b)
    length = check_count(OP, "length", length)
    if mode not in get_args(Mode):
        raise ValueError(f"{OP}: mode must be 'exact' or 'truncated', got {mode!r}")
    grid = _grid(a.shape[1], length, mode, trunc_len)
    chosen = KERNEL.choose(backend, a)
    dtype = torch.promote_types(torch.float32, torch.promote_types(a.dtype, b.dtype))
    a, b = a.to(dtype), b.to(dtype)
    if grid is not None and a.device.type == "cpu" and not torch.compiler.is_compiling():
        _warn_of_poles_on_the_grid(a.detach(), grid)
    run = KERNEL.judge if chosen == "reference" else partial(KERNEL.run, chosen)
    return run((a, b), {"length": length, "grid": grid})


def inverse_series(
    a: Tensor,  # [D_a, n]
    length: int,
) -> Tensor:
    """Expand ``1 / a(z)`` with ``a(z) = 1 + sum a_i z^-i``: the all-pole filter behind the state.

    A longer series begins with a shorter one, bit for bit.

    Args:
        a: Denominators without their leading 1.
        length: How many terms.

    Returns:
        ``[D_a, length]`` in float32, or float64 for float64 denominators.
    """
    check_leading("inverse_series", "a", a, "[D_a, n]")
    check_rows("inverse_series", "a", a)
    length = check_count("inverse_series", "length", length)
    chosen = SERIES.choose("auto", a)
    run = SERIES.judge if chosen == "reference" else partial(SERIES.run, chosen)
    return run((a.to(accumulator(a)),), {"length": length})


def check_polynomials(op: str, a: Tensor, b: Tensor) -> None:
    """Fail unless ``a`` [D_a, n] and ``b`` [D, n] fit together, ``D_a`` dividing D."""
    check_leading(op, "a", a, "[D_a, n]")
    check_leading(op, "b", b, "[D, n]")
    check_tensor(op, "b", b, (b.shape[0], a.shape[1]), a, "[D, n]")
    check_rows(op, "a", a)
    if b.shape[0] % a.shape[0]:
        raise ValueError(
            f"{op}: the {a.shape[0]} rows of a must divide the {b.shape[0]} rows of b: "
            "each denominator serves equally many channels"
        )


def check_rows(op: str, name: str, x: Tensor) -> None:
    """Check that there is a row."""
    if not x.shape[0]:  # no FFT takes none
        raise ValueError(f"{op}: {name} must have at least one row, got {list(x.shape)}")


def _grid(order: int, length: int, mode: str, trunc_len: int | None) -> int | None:
    """Return the number of grid points of the truncated mode, None for the exact mode."""
    if mode == "exact":
        if trunc_len is not None:
            raise ValueError(f"{OP}: trunc_len belongs to mode='truncated', got mode='exact'")
        return None
    if trunc_len is None:
        raise ValueError(f"{OP}: mode='truncated' needs trunc_len, the length trained with")
    trunc_len = check_count(OP, "trunc_len", trunc_len, 1)
    grid = trunc_len + trunc_len % 2
    if length > grid:
        raise ValueError(
            f"{OP}: length must be at most trunc_len = {trunc_len} in mode='truncated', "
            f"got {length}; take mode='exact' or convolve with the {trunc_len} taps there are"
        )
    if order >= grid:
        raise ValueError(f"{OP}: trunc_len must exceed the order n = {order}, got {trunc_len}")
    return grid


def _warn_of_poles_on_the_grid(a: Tensor, grid: int) -> None:
    gaps = eager.closest_to_zero(a, grid)
    near = 1000 * torch.finfo(a.dtype).eps  # where a thousandth is lost to rounding
    row = int(gaps.argmin())
    if gaps[row] < near:
        warnings.warn(
            f"{OP}: denominator {row} comes within {near:.1g} of zero on the grid of {grid} "
            "points: a pole lies on the unit circle and the kernel is inaccurate",
            RuntimeWarning,
            stacklevel=3,
        )


__all__ = ["check_polynomials", "check_rows", "inverse_series", "rational_kernel"]
