"""The linear recurrence on GPUs: a lane has a column, and marches through a span of tokens.

A program owns ``BLOCK_D`` columns of one span. Rows of the next ``TOKENS`` tokens are loaded before
those of these tokens are computed. Where segments and columns alone fill a GPU, a span is a whole
segment; otherwise segments are cut as ``ssmzoo_kernels.scan.triton`` cuts them: one sweep finds
what a span adds to a zero state and the product of its ``a``, a second combines spans in order, a
third runs them all. A product is kept as a mantissa near 1 and an integer power, so that it neither
overflows nor underflows where the loop over time does not. Complex numbers are pairs of reals.
"""

# a kernel launch is no ordinary call: Triton's types do not describe it
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.launches import cdiv, launch_named
from ssmzoo_kernels.scan import chunk_slots
from ssmzoo_kernels.scan import triton as scan

BLOCK_D = 32  # columns of a program: a warp
TOKENS = 16  # loaded ahead and unrolled, half as many of wider numbers
LENGTHS = ("segments", "span")  # they make no new variants


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
def times(ar, ai, xr, xi, PAIRS: tl.constexpr):
    """Return a product; without pairs only real parts count, and imaginary ones stay."""
    if PAIRS:
        xr, xi = ar * xr - ai * xi, ar * xi + ai * xr
    else:
        xr = ar * xr
    return xr, xi


@triton.jit
def size(re, im, PAIRS: tl.constexpr):
    """Return a number whose exponent is that of the larger part."""
    return tl.maximum(tl.abs(re), tl.abs(im)) if PAIRS else re


@triton.jit
def load_parts(
    x,
    base,
    stop,
    stride: tl.constexpr,
    d,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    past: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Load rows of the next tokens as they are: real parts, then imaginary ones if there are any.

    Past the end stands ``past``.
    """
    if PAIRS:
        re = scan.load_rows(x, base, stop, 2 * stride, 2 * d, 2 * D, TOKENS, past)
        found = re + scan.load_rows(x + 1, base, stop, 2 * stride, 2 * d, 2 * D, TOKENS)
    else:
        found = scan.load_rows(x, base, stop, stride, d, D, TOKENS, past)
    return found


@triton.jit
def part(rows, i: tl.constexpr, which: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr):
    """Return a token's row of real (0) or imaginary parts (1); without pairs there is one."""
    return rows[i + which * TOKENS] if PAIRS else rows[i]


@triton.jit
def load_edge(x, number, d, D: tl.constexpr, live, PAIRS: tl.constexpr, ACC: tl.constexpr):
    """Load the parts of one of many states ``[..., D]``; zeros where there is none."""
    re = tl.zeros(d.shape, ACC)
    im = tl.zeros(d.shape, ACC)
    if x is not None:
        if PAIRS:
            re = tl.load(x + number * (2 * D) + 2 * d, mask=(d < D) & live, other=0.0).to(ACC)
            im = tl.load(x + number * (2 * D) + 2 * d + 1, mask=(d < D) & live, other=0.0).to(ACC)
        else:
            re = tl.load(x + number * D + d, mask=(d < D) & live, other=0.0).to(ACC)
    return re, im


@triton.jit
def store_parts(x, base, i: tl.constexpr, d, D: tl.constexpr, re, im, mask, PAIRS: tl.constexpr):
    """Store the row of token ``base + i``; also one of many states, with i = 0."""
    if PAIRS:
        at = scan.row_at(x, base, i, 2 * D, 2 * d)
        tl.store(at, re, mask=mask)
        tl.store(at + 1, im, mask=mask)
    else:
        tl.store(scan.row_at(x, base, i, D, d), re, mask=mask)


@triton.jit(do_not_specialize=LENGTHS)
def linear_carry_kernel(
    a,
    b,
    local,
    mantissas,
    exponents,
    offsets,
    segments,
    span,
    D: tl.constexpr,
    stride_a: tl.constexpr,
    stride_b: tl.constexpr,
    REVERSE: tl.constexpr,
    PAIRS: tl.constexpr,
    ACC: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Find the end of a span that starts from zero, and the product of its ``a``, conjugate back.

    Back, ``b`` is the gradient of ``h``, and what leaves a token goes through its ``a``.
    """
    slot = tl.program_id(0).to(tl.int64)
    _, _, end, begin = scan.locate(offsets, segments, span, slot)
    stop = tl.minimum(begin + span, end)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    re = tl.zeros((BLOCK_D,), ACC)
    im = tl.zeros((BLOCK_D,), ACC)
    m = tl.full((BLOCK_D,), 1.0, ACC)
    n = tl.zeros((BLOCK_D,), ACC)
    e = tl.zeros((BLOCK_D,), tl.int32)
    head: tl.constexpr = TOKENS - 1 if REVERSE else 0
    tail: tl.constexpr = -1 if REVERSE else TOKENS
    way: tl.constexpr = -1 if REVERSE else 1
    groups = tl.cdiv(stop - begin, TOKENS)
    base = begin
    if REVERSE:
        base += tl.maximum(groups - 1, 0) * TOKENS
    a_rows = scan.widened(load_parts(a, base, stop, stride_a, d, D, TOKENS, 1.0, PAIRS), ACC)
    b_rows = scan.widened(load_parts(b, base, stop, stride_b, d, D, TOKENS, 0.0, PAIRS), ACC)
    while groups > 0:
        ahead = tl.maximum(base - TOKENS, begin) if REVERSE else base + TOKENS
        a_next = load_parts(a, ahead, stop, stride_a, d, D, TOKENS, 1.0, PAIRS)
        b_next = load_parts(b, ahead, stop, stride_b, d, D, TOKENS, 0.0, PAIRS)
        for i in tl.static_range(head, tail, way):
            ar = part(a_rows, i, 0, TOKENS, PAIRS)
            ai = part(a_rows, i, 1, TOKENS, PAIRS)
            br = part(b_rows, i, 0, TOKENS, PAIRS)
            bi = part(b_rows, i, 1, TOKENS, PAIRS)
            if REVERSE:
                re, im = times(ar, -ai, re + br, im + bi, PAIRS)
                ai = -ai
            else:
                re, im = times(ar, ai, re, im, PAIRS)
                re, im = re + br, im + bi
            moved = exponent_of(size(ar, ai, PAIRS))
            back = power(-moved, ar)
            m, n = times(ar * back, ai * back, m, n, PAIRS)
            e += moved
        moved = exponent_of(size(m, n, PAIRS))
        back = power(-moved, m)
        m, n = m * back, n * back
        e += moved
        a_rows, b_rows = scan.widened(a_next, ACC), scan.widened(b_next, ACC)
        base = ahead
        groups -= 1
    if begin < stop:
        store_parts(local, slot, 0, d, D, re, im, d < D, PAIRS)
        store_parts(mantissas, slot, 0, d, D, m, n, d < D, PAIRS)
        tl.store(exponents + slot * D + d, e, mask=d < D)


@triton.jit(do_not_specialize=LENGTHS)
def linear_combine_kernel(
    local,
    mantissas,
    exponents,
    first_carry,
    last_carry,
    offsets,
    span,
    D: tl.constexpr,
    REVERSE: tl.constexpr,
    PAIRS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Replace every span's ``local`` by the carry that enters it, span after span."""
    segment = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    re, im = load_edge(first_carry, segment, d, D, True, PAIRS, ACC)
    first = tl.load(offsets + segment)
    spans = tl.cdiv(tl.load(offsets + segment + 1) - first, span)
    for j in range(0, spans):
        i = spans - 1 - j if REVERSE else j
        slot = first // span + segment + i
        br, bi = load_edge(local, slot, d, D, True, PAIRS, ACC)
        m, n = load_edge(mantissas, slot, d, D, True, PAIRS, ACC)
        e = tl.load(exponents + slot * D + d, mask=d < D, other=0)
        store_parts(local, slot, 0, d, D, re, im, d < D, PAIRS)
        # ordered so that it overflows or underflows only where the result does
        first_power = power(bounded(e, m), m)
        second, third = rest_of(e, m)
        re, im = times(m * first_power, n * first_power, re, im, PAIRS)
        re, im = re * second * third + br, im * second * third + bi
    if last_carry is not None:
        store_parts(last_carry, segment, 0, d, D, re, im, d < D, PAIRS)


@triton.jit(do_not_specialize=LENGTHS)
def linear_scan_fwd_kernel(
    a,
    b,
    initial,
    starts,
    h,
    final,
    offsets,
    segments,
    span,
    D: tl.constexpr,
    stride_a: tl.constexpr,
    stride_b: tl.constexpr,
    PAIRS: tl.constexpr,
    ACC: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the states of one span, or of a whole segment where ``starts`` is None."""
    slot = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    if starts is None:
        begin = tl.load(offsets + slot)
        stop = tl.load(offsets + slot + 1)
        re, im = load_edge(initial, slot, d, D, True, PAIRS, ACC)
    else:
        _, _, end, begin = scan.locate(offsets, segments, span, slot)
        stop = tl.minimum(begin + span, end)
        re, im = load_edge(starts, slot, d, D, True, PAIRS, ACC)
    a_rows = scan.widened(load_parts(a, begin, stop, stride_a, d, D, TOKENS, 1.0, PAIRS), ACC)
    b_rows = scan.widened(load_parts(b, begin, stop, stride_b, d, D, TOKENS, 0.0, PAIRS), ACC)
    base = begin
    while base < stop:
        ahead = base + TOKENS
        a_next = load_parts(a, ahead, stop, stride_a, d, D, TOKENS, 1.0, PAIRS)
        b_next = load_parts(b, ahead, stop, stride_b, d, D, TOKENS, 0.0, PAIRS)
        count = scan.tokens_left(base, stop, TOKENS)
        for i in tl.static_range(TOKENS):
            ar = part(a_rows, i, 0, TOKENS, PAIRS)
            ai = part(a_rows, i, 1, TOKENS, PAIRS)
            re, im = times(ar, ai, re, im, PAIRS)
            re += part(b_rows, i, 0, TOKENS, PAIRS)
            im += part(b_rows, i, 1, TOKENS, PAIRS)
            store_parts(h, base, i, d, D, re, im, (count > i) & (d < D), PAIRS)
        a_rows, b_rows = scan.widened(a_next, ACC), scan.widened(b_next, ACC)
        base = ahead
    if starts is None:
        store_parts(final, slot, 0, d, D, re, im, d < D, PAIRS)


@triton.jit(do_not_specialize=LENGTHS)
def linear_scan_bwd_kernel(
    grad_h,
    grad_final,
    a,
    h,
    initial,
    ends,
    grad_a,
    grad_b,
    grad_initial,
    offsets,
    segments,
    span,
    D: tl.constexpr,
    stride_a: tl.constexpr,
    stride_grad: tl.constexpr,
    PAIRS: tl.constexpr,
    ACC: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the gradients of one span, or of a whole segment where ``ends`` is None."""
    slot = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    if ends is None:
        segment = slot
        first = tl.load(offsets + slot)
        begin = first
        stop = tl.load(offsets + slot + 1)
        re, im = load_edge(grad_final, slot, d, D, True, PAIRS, ACC)
    else:
        segment, first, end, begin = scan.locate(offsets, segments, span, slot)
        stop = tl.minimum(begin + span, end)
        re, im = load_edge(ends, slot, d, D, True, PAIRS, ACC)
    groups = tl.cdiv(stop - begin, TOKENS)
    base = begin + tl.maximum(groups - 1, 0) * TOKENS
    a_rows = scan.widened(load_parts(a, base, stop, stride_a, d, D, TOKENS, 1.0, PAIRS), ACC)
    g_rows = scan.widened(
        load_parts(grad_h, base, stop, stride_grad, d, D, TOKENS, 0.0, PAIRS), ACC
    )
    h_rows = scan.widened(load_parts(h, base, stop, D, d, D, TOKENS, 0.0, PAIRS), ACC)
    gr, gi = re, im
    g = groups
    while g > 0:
        ahead = tl.maximum(base - TOKENS, begin)
        a_next = load_parts(a, ahead, stop, stride_a, d, D, TOKENS, 1.0, PAIRS)
        g_next = load_parts(grad_h, ahead, stop, stride_grad, d, D, TOKENS, 0.0, PAIRS)
        h_next = load_parts(h, ahead, stop, D, d, D, TOKENS, 0.0, PAIRS)
        count = scan.tokens_left(base, stop, TOKENS + 1)
        for i in tl.static_range(TOKENS - 1, -1, -1):
            # the later token's gradient, whose state before is this token's
            br, bi = times(
                part(h_rows, i, 0, TOKENS, PAIRS), -part(h_rows, i, 1, TOKENS, PAIRS), gr, gi, PAIRS
            )
            store_parts(grad_a, base, i + 1, d, D, br, bi, (count > i + 1) & (d < D), PAIRS)
            gr = part(g_rows, i, 0, TOKENS, PAIRS) + re
            gi = part(g_rows, i, 1, TOKENS, PAIRS) + im
            store_parts(grad_b, base, i, d, D, gr, gi, (count > i) & (d < D), PAIRS)
            re, im = times(
                part(a_rows, i, 0, TOKENS, PAIRS), -part(a_rows, i, 1, TOKENS, PAIRS), gr, gi, PAIRS
            )
        a_rows, g_rows = scan.widened(a_next, ACC), scan.widened(g_next, ACC)
        h_rows = scan.widened(h_next, ACC)
        base = ahead
        g -= 1
    if begin < stop:
        hr, hi = load_edge(h, begin - 1, d, D, begin > first, PAIRS, ACC)
        xr, xi = load_edge(initial, segment, d, D, begin == first, PAIRS, ACC)
        br, bi = times(hr + xr, -(hi + xi), gr, gi, PAIRS)
        store_parts(grad_a, begin, 0, d, D, br, bi, d < D, PAIRS)
    if ends is None and grad_initial is not None:
        store_parts(grad_initial, segment, 0, d, D, re, im, d < D, PAIRS)


def forward(
    a: Tensor,  # [T, D]
    b: Tensor,  # [T, D]
    initial_state: Tensor | None,  # [S, D]
    offsets: Tensor,  # [S + 1] int64
) -> tuple[Tensor, Tensor]:
    """Return all states ``[T, D]`` and every segment's last."""
    exact = accumulator(a)
    segments, width = offsets.shape[0] - 1, a.shape[1]
    a, b, initial = _rows(a), _rows(b), _whole(initial_state)
    h = a.new_empty(a.shape, dtype=exact)
    final = a.new_empty(segments, width, dtype=exact)
    if not width:
        return h, final
    made = _arguments(a, exact, offsets) | {"b": _numbers(b), "stride_b": b.stride(0)}
    starts, programs = _carries(made, a, exact, initial, final, REVERSE=False)
    tensors = {"initial": initial, "starts": starts, "h": h, "final": final}
    _launch(linear_scan_fwd_kernel, programs, made | _all_numbers(tensors))
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
    a, h, initial = _rows(a), h.contiguous(), _whole(initial_state)
    grad_h = _rows(torch.zeros_like(h) if grad_h is None else grad_h)
    grad_a, grad_b = torch.empty_like(h), torch.empty_like(h)
    grad_initial = None if initial is None else h.new_empty(segments, width)
    if not width:
        return grad_a, grad_b, grad_initial
    made = _arguments(a, exact, offsets)
    grad_final = _whole(grad_final)
    sent = made | {"b": _numbers(grad_h), "stride_b": grad_h.stride(0)}
    ends, programs = _carries(sent, a, exact, grad_final, grad_initial, REVERSE=True)
    tensors = {"grad_h": grad_h, "grad_final": grad_final, "h": h, "initial": initial, "ends": ends}
    tensors |= {"grad_a": grad_a, "grad_b": grad_b, "grad_initial": grad_initial}
    made |= _all_numbers(tensors) | {"stride_grad": grad_h.stride(0)}
    _launch(linear_scan_bwd_kernel, programs, made)
    return grad_a, grad_b, grad_initial


def _arguments(a: Tensor, exact: torch.dtype, offsets: Tensor) -> dict[str, Any]:
    """Return the arguments that all kernels of a call share, by name."""
    (tokens, width), segments = a.shape, offsets.shape[0] - 1
    return {
        "a": _numbers(a),
        "stride_a": a.stride(0),
        "offsets": offsets,
        "segments": segments,
        "span": scan.span_of(tokens, segments, cdiv(width, BLOCK_D), scan.CHUNK),
        "D": width,
        "PAIRS": exact.is_complex,
        "ACC": _ACC[exact.to_real()],
        "TOKENS": TOKENS if exact == torch.float32 else TOKENS // 2,
        "BLOCK_D": BLOCK_D,
    }


def _carries(
    made: dict[str, Any],
    a: Tensor,
    exact: torch.dtype,
    first: Tensor | None,
    last: Tensor | None,
    *,
    REVERSE: bool,
) -> tuple[Tensor | None, int]:
    """Return the states before the spans, None for whole segments, and the number of programs."""
    span, segments = made["span"], made["segments"]
    if span is None:
        return None, segments
    programs = chunk_slots(a.shape[0], segments, span)
    local = a.new_empty(programs, a.shape[1], dtype=exact)
    found = {"local": local, "mantissas": torch.empty_like(local)}
    found |= {"first_carry": first, "last_carry": last}
    made = made | _all_numbers(found)
    made |= {"exponents": torch.empty_like(local, dtype=torch.int32), "REVERSE": REVERSE}
    _launch(linear_carry_kernel, programs, made)
    _launch(linear_combine_kernel, segments, made)
    return local, programs


def _launch(kernel: Any, programs: int, values: dict[str, Any]) -> None:
    grid = (programs, cdiv(values["D"], BLOCK_D))
    launch_named(kernel, grid, values, num_warps=1)


_ACC = {torch.float32: tl.float32, torch.float64: tl.float64}


def _rows(x: Tensor) -> Tensor:
    """Return a matrix with adjacent columns, without lazy conjugation or negation."""
    return scan.rows(x.resolve_conj().resolve_neg())


def _whole(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.resolve_conj().resolve_neg().contiguous()


def _numbers(x: Tensor | None) -> Tensor | None:
    """Return complex numbers as pairs."""
    return torch.view_as_real(x) if x is not None and x.is_complex() else x


def _all_numbers(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: _numbers(x) for name, x in tensors.items()}
