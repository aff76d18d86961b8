"""The linear recurrence on GPUs: an associative scan over tiles, with the state carried between.

A program owns ``BLOCK_D`` columns of one segment and takes ``BLOCK_L`` tokens at a time. What is
scanned are maps ``x -> m 2^e x + b``: a product of many ``a`` is kept as a mantissa near 1 and an
integer power, so that it neither overflows nor underflows where the loop over time does not.
Complex numbers are pairs of reals. The backward is the same scan from the last token to the first.
"""

# a kernel launch is no ordinary call: Triton's types do not describe it
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.launches import launch
from ssmzoo_kernels.scan.triton import near_rows


@triton.jit
def most_of(x):
    """Return the largest exponent that ``power`` is asked for, in x's dtype."""
    return 1021 if x.dtype == tl.float64 else 125


@triton.jit
def exponent_of(x):
    """Return ``floor(log2 |x|)``, and 0 where x is no normal number: its size stays in x."""
    if x.dtype == tl.float64:
        field = ((x.to(tl.int64, bitcast=True) >> 52) & 2047).to(tl.int32)
        exponent = tl.where((field == 0) | (field == 2047), 0, field - 1023)
    else:
        field = (x.to(tl.int32, bitcast=True) >> 23) & 255
        exponent = tl.where((field == 0) | (field == 255), 0, field - 127)
    return tl.minimum(exponent, most_of(x))


@triton.jit
def power(e, x):
    """Return ``2^e`` in x's dtype, exactly; e is within ``most_of(x) + 1``."""
    if x.dtype == tl.float64:
        found = ((e.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    else:
        found = ((e + 127) << 23).to(tl.float32, bitcast=True)
    return found


@triton.jit
def bounded(e, x):
    """Return the part of an exponent that one power can give."""
    return tl.minimum(tl.maximum(e, -most_of(x)), most_of(x))


@triton.jit
def rest_of(e, x):
    """Return the two powers that are left of ``2^e`` when one is taken."""
    e -= bounded(e, x)
    first = bounded(e, x)
    return power(first, x), power(bounded(e - first, x), x)


@triton.jit
def compose(m, e, b, m_next, e_next, b_next):
    """Apply one map ``x -> m 2^e x + b`` after another."""
    second, third = rest_of(e_next, b)
    # ordered so that it overflows or underflows only where the result does
    grown = m_next * power(bounded(e_next, b), b) * b * second * third
    product = m * m_next
    moved = exponent_of(product)
    return product * power(-moved, b), e + e_next + moved, grown + b_next


@triton.jit
def compose_pairs(mr, mi, e, br, bi, mr_next, mi_next, e_next, br_next, bi_next):
    """Apply one complex map ``x -> m 2^e x + b`` after another."""
    first = power(bounded(e_next, br), br)
    second, third = rest_of(e_next, br)
    re, im = mr_next * first, mi_next * first
    grown_r = (re * br - im * bi) * second * third
    grown_i = (re * bi + im * br) * second * third
    product_r = mr * mr_next - mi * mi_next
    product_i = mr * mi_next + mi * mr_next
    moved = exponent_of(tl.maximum(tl.abs(product_r), tl.abs(product_i)))
    back = power(-moved, br)
    total = e + e_next + moved
    return product_r * back, product_i * back, total, grown_r + br_next, grown_i + bi_next


@triton.jit
def advance(a, b, carry, BLOCK_L: tl.constexpr):
    """Return the states of a tile ``[BLOCK_L, BLOCK_D]``, whose first row follows ``carry``."""
    row = tl.arange(0, BLOCK_L)[:, None]
    b += tl.where(row == 0, a * carry[None, :], 0.0)
    e = exponent_of(a)
    _, _, states = tl.associative_scan((a * power(-e, a), e, b), 0, compose)
    return states, tl.sum(tl.where(row == BLOCK_L - 1, states, 0.0), axis=0)


@triton.jit
def advance_pairs(ar, ai, br, bi, cr, ci, BLOCK_L: tl.constexpr):
    """Return real and imaginary states of a tile, and of its last row."""
    row = tl.arange(0, BLOCK_L)[:, None]
    br += tl.where(row == 0, ar * cr[None, :] - ai * ci[None, :], 0.0)
    bi += tl.where(row == 0, ar * ci[None, :] + ai * cr[None, :], 0.0)
    e = exponent_of(tl.maximum(tl.abs(ar), tl.abs(ai)))
    back = power(-e, ar)
    _, _, _, hr, hi = tl.associative_scan((ar * back, ai * back, e, br, bi), 0, compose_pairs)
    cr = tl.sum(tl.where(row == BLOCK_L - 1, hr, 0.0), axis=0)
    return hr, hi, cr, tl.sum(tl.where(row == BLOCK_L - 1, hi, 0.0), axis=0)


@triton.jit
def load_pairs(x, at, mask, real: tl.constexpr, ACC: tl.constexpr):
    """Load real and imaginary parts; ``real`` where there is nothing to load."""
    re = tl.load(x + 2 * at, mask=mask, other=real).to(ACC)
    return re, tl.load(x + 2 * at + 1, mask=mask, other=0.0).to(ACC)


@triton.jit
def store_pairs(x, at, re, im, mask):
    """Store real and imaginary parts."""
    tl.store(x + 2 * at, re, mask=mask)
    tl.store(x + 2 * at + 1, im, mask=mask)


@triton.jit
def linear_scan_fwd_kernel(
    a,
    b,
    initial,
    h,
    final,
    offsets,
    D: tl.constexpr,
    stride_a: tl.constexpr,
    stride_b: tl.constexpr,
    PAIRS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the states of one segment."""
    segment = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + segment)
    stop = tl.load(offsets + segment + 1)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    edge = segment * D + d
    re = tl.zeros((BLOCK_D,), ACC)
    im = tl.zeros((BLOCK_D,), ACC)
    if initial is not None:
        if PAIRS:
            re, im = load_pairs(initial, edge, d < D, 0.0, ACC)
        else:
            re = tl.load(initial + edge, mask=d < D, other=0.0).to(ACC)
    row = tl.arange(0, BLOCK_L)[:, None]
    for base in range(begin, stop, BLOCK_L):
        # past the end the state stays: the last row is the last state
        live = (row < stop - base) & (d < D)[None, :]
        at_a = base * stride_a + (row * stride_a + d[None, :])
        at_b = base * stride_b + (row * stride_b + d[None, :])
        at = base * D + (row * D + d[None, :])
        if PAIRS:
            ar, ai = load_pairs(a, at_a, live, 1.0, ACC)
            br, bi = load_pairs(b, at_b, live, 0.0, ACC)
            hr, hi, re, im = advance_pairs(ar, ai, br, bi, re, im, BLOCK_L)
            store_pairs(h, at, hr, hi, live)
        else:
            factors = tl.load(a + at_a, mask=live, other=1.0).to(ACC)
            added = tl.load(b + at_b, mask=live, other=0.0).to(ACC)
            states, re = advance(factors, added, re, BLOCK_L)
            tl.store(h + at, states, mask=live)
    if PAIRS:
        store_pairs(final, edge, re, im, d < D)
    else:
        tl.store(final + edge, re, mask=d < D)


@triton.jit
def linear_scan_bwd_kernel(
    grad_h,
    grad_final,
    a,
    h,
    initial,
    grad_a,
    grad_b,
    grad_initial,
    offsets,
    D: tl.constexpr,
    stride_a: tl.constexpr,
    stride_grad: tl.constexpr,
    PAIRS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the gradients of one segment; rows of a tile run from later tokens to earlier ones."""
    segment = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + segment)
    stop = tl.load(offsets + segment + 1)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    edge = segment * D + d
    re = tl.zeros((BLOCK_D,), ACC)
    im = tl.zeros((BLOCK_D,), ACC)
    if grad_final is not None:
        if PAIRS:
            re, im = load_pairs(grad_final, edge, d < D, 0.0, ACC)
        else:
            re = tl.load(grad_final + edge, mask=d < D, other=0.0).to(ACC)
    column = d[None, :]
    row = tl.arange(0, BLOCK_L)[:, None]
    for done in range(0, stop - begin, BLOCK_L):
        last = stop - 1 - done
        left = last - begin  # the row of the first token, if it is in the tile
        live = (row <= left) & (column < D)
        earlier = (row < left) & (column < D)
        # a token's gradient meets the factor of the token after it, the last one's none
        coming = live & (row >= tl.where(done > 0, 0, 1))
        later = (last + 1) * stride_a + (column - row * stride_a)
        at_grad = last * stride_grad + (column - row * stride_grad)
        at = last * D + (column - row * D)
        first = (row == left) & (column < D)
        at_first = segment * D + column
        if PAIRS:
            ar, ai = load_pairs(a, later, coming, 1.0, ACC)
            gr, gi = load_pairs(grad_h, at_grad, live, 0.0, ACC)
            gr, gi, re, im = advance_pairs(ar, -ai, gr, gi, re, im, BLOCK_L)
            hr, hi = load_pairs(h, at - D, earlier, 0.0, ACC)
            if initial is not None:
                xr, xi = load_pairs(initial, at_first, first, 0.0, ACC)
                hr += xr
                hi += xi
            store_pairs(grad_b, at, gr, gi, live)
            store_pairs(grad_a, at, gr * hr + gi * hi, gi * hr - gr * hi, live)
        else:
            factors = tl.load(a + later, mask=coming, other=1.0).to(ACC)
            added = tl.load(grad_h + at_grad, mask=live, other=0.0).to(ACC)
            grads, re = advance(factors, added, re, BLOCK_L)
            before = tl.load(h + at - D, mask=earlier, other=0.0)
            if initial is not None:
                before += tl.load(initial + at_first, mask=first, other=0.0).to(ACC)
            tl.store(grad_b + at, grads, mask=live)
            tl.store(grad_a + at, grads * before, mask=live)
    if initial is not None:
        here = (d < D) & (begin < stop)
        if PAIRS:
            ar, ai = load_pairs(a, begin * stride_a + d, here, 1.0, ACC)
            store_pairs(grad_initial, edge, ar * re + ai * im, ar * im - ai * re, d < D)
        else:
            factor = tl.load(a + begin * stride_a + d, mask=here, other=1.0).to(ACC)
            tl.store(grad_initial + edge, factor * re, mask=d < D)


class Tile(NamedTuple):
    """How a program is shaped."""

    block_l: int
    block_d: int
    num_warps: int


def tile(width: int, exact: torch.dtype) -> Tile:
    """Choose a program's shape: 8 numbers of a tile a thread, 4 where numbers are wider."""
    block_d = min(32, triton.next_power_of_2(width))
    numbers = 1024 if exact == torch.float32 else 512
    return Tile(min(128, numbers // block_d), block_d, 4)


def forward(
    a: Tensor,  # [T, D]
    b: Tensor,  # [T, D]
    initial_state: Tensor | None,  # [S, D]
    offsets: Tensor,  # [S + 1] int64
) -> tuple[Tensor, Tensor]:
    """Return all states ``[T, D]`` and every segment's last."""
    exact = accumulator(a)
    segments, width = offsets.shape[0] - 1, a.shape[1]
    a, b = _rows(a), _rows(b)
    h = a.new_empty(a.shape, dtype=exact)
    final = a.new_empty(segments, width, dtype=exact)
    if width:
        shape = tile(width, exact)
        launch(
            linear_scan_fwd_kernel,
            (segments, triton.cdiv(width, shape.block_d)),
            *map(_numbers, (a, b, _whole(initial_state), h, final)),
            offsets,
            D=width,
            stride_a=a.stride(0),
            stride_b=b.stride(0),
            PAIRS=exact.is_complex,
            ACC=_ACC[exact.to_real()],
            BLOCK_L=shape.block_l,
            BLOCK_D=shape.block_d,
            num_warps=shape.num_warps,
        )
    return h, final


def backward(
    grad_h: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, D]
    a: Tensor,
    h: Tensor,
    initial_state: Tensor | None,
    offsets: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of a, b and the initial state, None where that was absent."""
    exact = h.dtype
    segments, width = offsets.shape[0] - 1, a.shape[1]
    a, h = _rows(a), h.contiguous()
    grad_h = _rows(torch.zeros_like(h) if grad_h is None else grad_h)
    grad_a, grad_b = torch.empty_like(h), torch.empty_like(h)
    grad_initial = None
    if initial_state is not None:
        grad_initial = h.new_empty(segments, width)
    if width:
        shape = tile(width, exact)
        tensors = (grad_h, _whole(grad_final), a, h, _whole(initial_state))
        launch(
            linear_scan_bwd_kernel,
            (segments, triton.cdiv(width, shape.block_d)),
            *map(_numbers, (*tensors, grad_a, grad_b, grad_initial)),
            offsets,
            D=width,
            stride_a=a.stride(0),
            stride_grad=grad_h.stride(0),
            PAIRS=exact.is_complex,
            ACC=_ACC[exact.to_real()],
            BLOCK_L=shape.block_l,
            BLOCK_D=shape.block_d,
            num_warps=shape.num_warps,
        )
    return grad_a, grad_b, grad_initial


_ACC = {torch.float32: tl.float32, torch.float64: tl.float64}


def _rows(x: Tensor) -> Tensor:
    """Return a matrix with adjacent columns whose memory holds what it means."""
    return near_rows(x.resolve_conj().resolve_neg())


def _whole(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.resolve_conj().resolve_neg().contiguous()


def _numbers(x: Tensor | None) -> Tensor | None:
    """Return complex numbers as pairs."""
    return torch.view_as_real(x) if x is not None and x.is_complex() else x
