"""Coefficients of rational filters: initialisation, stability, and conversion for decoding.

A filter is ``H(z) = h0 + b(z) / a(z)`` of order n: ``a(z) = 1 + sum a_i z^-i`` and
``b(z) = sum b_i z^-i``. ``D_a`` denominators serve D channels, channel c having denominator
``c // (D / D_a)``.
"""

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo_kernels import double, rational_kernel

Init = Literal["zeros", "xavier", "montel", "copying"]

# added to the divisor, as in the authors' code
SMALLEST_SUM = 1e-6
# units in the last place by which a sum of rounded terms may exceed the sum of their sizes
ROUNDED = 8


def initial_coefficients(
    init: Init, rows: int, order: int, *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw the coefficients of numerators or denominators, ``[rows, n]`` float32.

    ========= ==================================================================================
    zeros     the identity once h0 is 1; farthest from losing stability
    xavier    uniform within ``1 / sqrt(n)``; as denominators mostly unstable from n = 128 on
    montel    uniform within ``1 / n``; always stable
    copying   positive, with a sum of 0.999: the paper's choice for its Copying task
    ========= ==================================================================================

    Raises:
        LookupError: No initialisation of that name.
    """
    if init not in get_args(Init):
        raise LookupError(
            f"no coefficient initialisation named {init!r}; there are {', '.join(get_args(Init))}"
        )
    if init == "zeros" or not order:
        return torch.zeros(rows, order)
    drawn = torch.rand(rows, order, generator=generator)
    if init == "copying":
        return drawn * (0.999 / drawn.sum(1, keepdim=True))
    return (2 * drawn - 1) / (order if init == "montel" else order**0.5)


def montel(
    a: Tensor,  # [D_a, n]
    slack: Tensor,  # [D_a]
    margin: float,
) -> Tensor:
    """Shrink each denominator until ``sum |a_i| < 1``, which puts all poles inside the unit disc.

    ``a / ((1 + margin) sum |a| + |slack| + 1e-6)``: a reparametrisation, gradients flow to both. A
    fit drives the slack to zero where it wants slow decay; without a margin ``|a(z)|`` then comes
    arbitrarily near zero on the unit circle, with one it stays above ``margin / (1 + margin)``. The
    sum stays below 1 as it rounds, too: the distance from 1 is at least 8 eps.

    Args:
        a: Unconstrained coefficients.
        slack: Learned distance from the boundary.
        margin: Distance from the boundary that remains at zero slack, at least 0, the paper's.
    """
    # near the boundary a gradient loses its outward component, nearly all of it
    exact, apart = double(a), double(slack).abs()[:, None]
    total = exact.abs().sum(1, keepdim=True)
    divisor = (1 + margin) * total + apart + SMALLEST_SUM
    most = (1 + ROUNDED * torch.finfo(a.dtype).eps) * total
    return (exact / torch.maximum(divisor, most)).to(a)


def deployed_numerator(
    a: Tensor,  # [D_a, n]
    b: Tensor,  # [D, n]
    trunc_len: int,
) -> tuple[Tensor, Tensor]:
    """Turn numerators trained on a grid into those of the infinite response.

    Training on the truncated kernel k fits ``C (I - A^M)``, M the grid's size. The recurrence
    ``k[m] = b_m - sum a_i k[m - i]`` of its taps 1..n gives the numerator back without a matrix,
    also with poles outside the disc. Computed in float64.

    Args:
        a: Denominators.
        b: Numerators as trained.
        trunc_len: The grid's length.

    Returns:
        The numerators ``[D, n]`` and the tap that the grid wraps onto tap 0, ``[D]``, in b's dtype:
        a step with the direct gain ``h0 +`` that tap reproduces every tap of the trained kernel.
    """
    order = a.shape[1]
    kernel = rational_kernel(double(a), double(b), order + 1, mode="truncated", trunc_len=trunc_len)
    true = numerator_of_response(double(a), kernel[:, 1:])
    return true.to(b), kernel[:, 0].to(b)


def ends_within(
    a: Tensor,  # [D_a, n]
    b: Tensor,  # [D, n]
    length: int,
) -> Tensor:
    """Return which infinite responses are zero up to rounding after ``length`` taps, ``[D_a]``.

    That is as much as a transform of the kernel rounds in b's dtype, in the 2-norm. All channels of
    a denominator must agree, ``[D_a]``. Looked at are as many taps again: more than the order, so
    that a stable filter that is silent for so long stays silent.
    """
    response = rational_kernel(double(a), double(b), 2 * length)
    rest, all_of_it = response[:, length:].norm(dim=1), response.norm(dim=1)
    rounding = torch.finfo(b.dtype).eps * math.log2(4 * length)
    # overflows compare as inf and nan
    silent = (rest <= rounding * all_of_it) & all_of_it.isfinite()
    return silent.view(a.shape[0], -1).all(1).to(a.device)


def numerator_of_response(
    a: Tensor,  # [D_a, n]
    response: Tensor,  # [D, n]
) -> Tensor:
    """Return the b ``[D, n]`` for which ``b / a`` begins with taps 1..n of an impulse response.

    ``b_m = sum_{i<m} a_i h_{m-i}`` with ``a_0 = 1``.
    """
    order = a.shape[1]
    if not order:
        return response
    monic_hat = torch.fft.rfft(F.pad(a, (1, 0), value=1.0), n=2 * order)
    grouped = response.reshape(a.shape[0], response.shape[0] // a.shape[0], order)
    product = torch.fft.rfft(grouped, n=2 * order) * monic_hat[:, None]
    return torch.fft.irfft(product, n=2 * order)[..., :order].reshape(response.shape)
