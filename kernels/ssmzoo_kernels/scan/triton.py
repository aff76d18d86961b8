"""The chunk scheme of a first-order recurrence on GPUs; a family supplies its transition.

A program owns ``BLOCK_D`` channels of one span of tokens and keeps their states, a ``[BLOCK_N,
BLOCK_D]`` tile, in registers: a lane has a channel and its states. Rows of the next tokens are
loaded before those of these tokens are computed. Loops over tokens are ``while``: through a ``for``
Triton lets every lane load whole rows of ``q`` and ``k``, and keep those of all tokens ahead.

Where segments and channels alone fill a GPU, a span is a whole segment. Otherwise segments are cut:
one sweep finds what each span adds to a zero state and by what it multiplies another, a second
combines spans in order, a third runs all spans at once. The README derives both directions.

A transition is three ``@triton.jit`` functions. ``u`` and ``dt`` are ``[BLOCK_D]``, ``k`` is
``[BLOCK_N]``, ``param`` is the family's own ``[BLOCK_N, BLOCK_D]`` tile or zeros. Past a segment's
end ``u`` and ``k`` are zero and ``dt`` is minus infinity; the state must not change there.

- ``step(state, u, k, dt, param)`` returns the next state.
- ``decay(k, dt, param)`` returns the factor on the state, ``[BLOCK_N, BLOCK_D]``.
- ``adjoint(grad, state, u, k, dt, param)`` takes the gradient of the state after a token and the
  state before it. It returns the gradients of the state before, ``u``, ``dt``, ``k`` in every
  channel, and ``param`` (any tile where there is none: Triton 3.6 returns no None from a
  function); the last two are ``[BLOCK_N, BLOCK_D]``.
"""

# a kernel launch is no ordinary call: Triton's types do not describe it
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import JITFunction

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.launches import cdiv, launch_named, next_power_of_2
from ssmzoo_kernels.scan import Gradients, Inputs, chunk_slots, interval, parts_of

# Warps that keep a large GPU busy; a constant, so that results do not depend on the device.
FILL = 2048
CHUNK = 64  # tokens whose states are recomputed at once
TOKENS = 4  # loaded ahead and unrolled, forward
# Lengths make no new variants; widths and strides, which a model fixes, are compiled in.
LENGTHS = ("segments", "span", "T", "first_slot", "first_block")
NO_STEP = tl.constexpr(-math.inf)  # stands for ``dt`` where there is no token
LOG2E = tl.constexpr(math.log2(math.e))


class Transition(NamedTuple):
    """A family's recurrence (signatures: the module's docstring)."""

    step: JITFunction
    decay: JITFunction
    adjoint: JITFunction
    # limits of registers in the backward: entries of a state a lane, tokens at once
    entries: int = 16
    tokens: int = 2


class Tile(NamedTuple):
    """How a program is shaped."""

    block_n: int  # states, a power of two
    block_d: int  # channels
    tokens: int  # tokens unrolled
    num_warps: int


def tile(states: int, exact: torch.dtype, entries: int, tokens: int) -> Tile:
    """Choose a program's shape: a lane has a channel and up to ``entries`` of its states.

    Args:
        states: N.
        exact: The accumulator; where it is float64, four lanes have a channel, a token at a time.
        entries: 4, 8 or 16; beyond 256 of them a channel has more.
        tokens: How many are unrolled.
    """
    block_n = next_power_of_2(states)
    wide = exact == torch.float64
    block_d = min(8 if wide else 2 * entries, max(1, 256 * entries // block_n))
    num_warps = min(8, max(1, block_n * block_d // (32 * entries)))
    return Tile(block_n, block_d, 1 if wide else tokens, num_warps)


def span_of(tokens: int, segments: int, warps: int, chunk: int) -> int | None:
    """Return how many tokens one program runs through, or None for whole segments.

    Args:
        tokens: In all segments together.
        segments: How many there are.
        warps: Warps that one segment occupies.
        chunk: A span is a multiple of it.
    """
    if tokens <= 2 * chunk or 2 * segments * warps >= FILL:
        return None
    spans = max(1, FILL // warps)
    return chunk * -(-tokens // (spans * chunk))


@triton.jit
def locate(offsets, segments, span, slot):
    """Find the segment of a slot, the segment's first token and end, and the slot's first token."""
    low = slot * 0
    high = low + segments
    while high - low > 1:
        middle = (low + high) // 2
        reached = tl.load(offsets + middle) // span + middle <= slot
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    first = tl.load(offsets + low)
    begin = first + (slot - first // span - low) * span
    return low, first, tl.load(offsets + low + 1), begin


@triton.jit
def cells(x, n, d, down: tl.constexpr, along: tl.constexpr):
    """Point at a state's cells, and hide from the compiler which of them are neighbours.

    Where it sees any it loads four at once, lets that load lay out the state, and every sum over
    states then crosses lanes. A constant that comes last costs no register.
    """
    return tl.max_contiguous(x + d[None, :] * along + n[:, None] * down, [1, 1])


@triton.jit
def state_at(x, number, n, d, D: tl.constexpr, N: tl.constexpr):
    """Point at the cells of a state of many, ``[..., N, D]``."""
    return cells(x + number * (N * D), n, d, D, 1)


@triton.jit
def channels_and_states(block, D, N, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a block's channels and states, and which of their cells exist.

    These count within one state, so 32 bits do; tokens and slots are what must be 64 bits wide.
    """
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    return d, n, (n < N)[:, None] & (d < D)[None, :]


@triton.jit
def row_at(x, base, i: tl.constexpr, stride: tl.constexpr, columns):
    """Point at the row of token ``base + i``; a constant that comes last costs no register."""
    return x + base * stride + columns + i * stride


@triton.jit
def load_row(
    x, base, i: tl.constexpr, stride: tl.constexpr, columns, width, live, past: tl.constexpr = 0.0
):
    """Load one token's row; ``past`` past the segment's end and past the last column."""
    at = row_at(x, base, i, stride, columns)
    return tl.load(at, mask=live & (columns < width), other=past)


@triton.jit
def tokens_left(base, stop, most: tl.constexpr):
    """Return how many of the next ``most`` tokens there are, none where it is negative.

    In 32 bits, because a GPU compares 64 in two steps.
    """
    return tl.minimum(stop - base, most).to(tl.int32)


@triton.jit
def load_rows(
    x,
    base,
    stop,
    stride: tl.constexpr,
    columns,
    width,
    TOKENS: tl.constexpr,
    past: tl.constexpr = 0.0,
    COUNTED: tl.constexpr = True,
):
    """Load the rows of ``TOKENS`` tokens as they are, before anything waits for one of them.

    ``COUNTED`` compares places in 32 bits. It is faster in a scan and slower by two thirds in
    ``feedback_scan``, by the model of scoreboard.py.
    """
    count = tokens_left(base, stop, TOKENS)
    live = count > 0 if COUNTED else base < stop
    found = (load_row(x, base, 0, stride, columns, width, live, past),)
    for i in tl.static_range(1, TOKENS):
        live = count > i if COUNTED else base + i < stop
        row = load_row(x, base, i, stride, columns, width, live, past)
        found = found + (row,)  # noqa: RUF005 (Triton knows no star)
    return found


@triton.jit
def widened(rows, ACC: tl.constexpr):
    """Return rows in the accumulator's type."""
    found = (rows[0].to(ACC),)
    for i in tl.static_range(1, len(rows)):
        found = found + (rows[i].to(ACC),)  # noqa: RUF005
    return found


@triton.jit
def load_vector(x, d, D: tl.constexpr, ACC: tl.constexpr):
    """Load one number a channel; zeros where there is no such vector."""
    vector = (d * 0).to(ACC)
    if x is not None:
        vector += tl.load(x + d, mask=d < D, other=0.0).to(ACC)
    return vector


@triton.jit
def exp(x):
    """Return ``e^x``: the power of two is one instruction, the power of e half a dozen."""
    return tl.exp2(x * LOG2E)


@triton.jit
def exp_minus(x):
    """Return ``e^-x``; the sign is the constant's, because Triton would subtract x from 0."""
    return tl.exp2(x * -LOG2E)


@triton.jit
def sigmoid(x):
    """Return the logistic function; finite for every x."""
    return 1.0 / (1.0 + exp_minus(x))


@triton.jit
def silu(x):
    """Return ``x sigmoid(x)`` by one quotient; finite for every x."""
    return x / (1.0 + exp_minus(x))


@triton.constexpr_function
def log2(power):
    """Return the logarithm of a power of two."""
    return power.bit_length() - 1


@triton.constexpr_function
def halvings_of(rows, columns, warps):
    """Return how often a lane can halve the rows of a tile that it has."""
    own = rows * columns // (32 * warps)
    return max(0, min(own, rows, columns).bit_length() - 1)


@triton.jit
def across(x, rows: tl.constexpr, columns: tl.constexpr, distance: tl.constexpr):
    """Exchange columns whose numbers differ in the bit ``distance``."""
    other = tl.arange(0, columns) ^ distance
    return tl.gather(x, tl.broadcast_to(other[None, :], (rows, columns)), 1)


@triton.jit
def halved(x, half: tl.constexpr, columns: tl.constexpr, distance: tl.constexpr):
    """Add up columns that differ in a bit: one gets the upper rows' sums, the other the lower."""
    lower, upper = tl.split(tl.permute(tl.reshape(x, (2, half, columns)), (1, 2, 0)))
    second = (tl.arange(0, columns) & distance)[None, :] != 0
    kept = tl.where(second, upper, lower)
    return kept + across(tl.where(second, lower, upper), half, columns, distance)


@triton.jit
def store_channel_sums(
    at, x, N, live, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WARPS: tl.constexpr
):
    """Store the sums of ``[BLOCK_N, BLOCK_D]`` over channels, a row ``[N]``.

    A lane exchanges half of the rows that it has with another lane, until it has one: 16 rows cost
    16 exchanges, where a sum of each row would cost 80.
    """
    halvings: tl.constexpr = halvings_of(BLOCK_N, BLOCK_D, WARPS)
    for i in tl.static_range(halvings):
        x = halved(x, BLOCK_N >> (i + 1), BLOCK_D, BLOCK_D >> (i + 1))
    left: tl.constexpr = BLOCK_N >> halvings  # rows, each in lanes or warps of its own
    alike: tl.constexpr = BLOCK_D >> halvings  # columns whose sums are of the same rows
    for i in tl.static_range(log2(alike)):
        x += across(x, left, BLOCK_D, 1 << i)
    column = tl.arange(0, BLOCK_D)[None, :]
    n = column // alike * left + tl.arange(0, left)[:, None]
    tl.store(at + n, x, mask=(column % alike == 0) & (n < N) & live)


@triton.jit
def load_param(param, n, d, D: tl.constexpr, N: tl.constexpr, exists, ACC: tl.constexpr):
    """Load the family's tile from ``[N, D]``; zeros where it has none."""
    tile = exists.to(ACC) * 0.0
    if param is not None:
        tile += tl.load(state_at(param, 0, n, d, D, N), mask=exists, other=0.0).to(ACC)
    return tile


@triton.jit(do_not_specialize=LENGTHS)
def scan_fwd_carry_kernel(
    u,
    k,
    dt,
    dt_bias,
    param,
    local,
    decays,
    offsets,
    segments,
    span,
    D: tl.constexpr,
    N: tl.constexpr,
    stride_u: tl.constexpr,
    stride_k: tl.constexpr,
    stride_dt: tl.constexpr,
    STEP: tl.constexpr,
    DECAY: tl.constexpr,
    ACC: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Find the state that a span leaves when it starts from zero, and its product of decays."""
    slot = tl.program_id(0).to(tl.int64)
    _, _, end, begin = locate(offsets, segments, span, slot)
    stop = tl.minimum(begin + span, end)
    d, n, exists = channels_and_states(tl.program_id(1), D, N, BLOCK_N, BLOCK_D)
    bias = load_vector(dt_bias, d, D, ACC)
    a = load_param(param, n, d, D, N, exists, ACC)
    state = tl.zeros((BLOCK_N, BLOCK_D), ACC)
    product = tl.full((BLOCK_N, BLOCK_D), 1.0, ACC)
    u_rows = widened(load_rows(u, begin, stop, stride_u, d, D, TOKENS), ACC)
    k_rows = widened(load_rows(k, begin, stop, stride_k, n, N, TOKENS), ACC)
    dt_rows = widened(load_rows(dt, begin, stop, stride_dt, d, D, TOKENS, NO_STEP), ACC)
    base = begin
    while base < stop:
        ahead = base + TOKENS
        u_next = load_rows(u, ahead, stop, stride_u, d, D, TOKENS)
        k_next = load_rows(k, ahead, stop, stride_k, n, N, TOKENS)
        dt_next = load_rows(dt, ahead, stop, stride_dt, d, D, TOKENS, NO_STEP)
        for i in tl.static_range(TOKENS):
            dt_t = dt_rows[i] + bias
            state = STEP(state, u_rows[i], k_rows[i], dt_t, a)
            product *= DECAY(k_rows[i], dt_t, a)
        u_rows, k_rows, dt_rows = widened(u_next, ACC), widened(k_next, ACC), widened(dt_next, ACC)
        base = ahead
    if begin < stop:
        tl.store(state_at(local, slot, n, d, D, N), state, mask=exists)
        tl.store(state_at(decays, slot, n, d, D, N), product, mask=exists)


@triton.jit(do_not_specialize=LENGTHS)
def scan_bwd_carry_kernel(
    grad_out,
    q,
    k,
    dt,
    dt_bias,
    z,
    param,
    local,
    decays,
    offsets,
    segments,
    span,
    D: tl.constexpr,
    N: tl.constexpr,
    stride_grad: tl.constexpr,
    stride_q: tl.constexpr,
    stride_k: tl.constexpr,
    stride_dt: tl.constexpr,
    stride_z: tl.constexpr,
    DECAY: tl.constexpr,
    ACC: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Find the state gradient that a span's outputs send to its start, and its decays' product."""
    slot = tl.program_id(0).to(tl.int64)
    _, _, end, begin = locate(offsets, segments, span, slot)
    stop = tl.minimum(begin + span, end)
    d, n, exists = channels_and_states(tl.program_id(1), D, N, BLOCK_N, BLOCK_D)
    bias = load_vector(dt_bias, d, D, ACC)
    a = load_param(param, n, d, D, N, exists, ACC)
    grad = tl.zeros((BLOCK_N, BLOCK_D), ACC)
    product = tl.full((BLOCK_N, BLOCK_D), 1.0, ACC)
    g = tl.cdiv(stop - begin, TOKENS) - 1
    base = begin + tl.maximum(g, 0) * TOKENS
    k_rows = widened(load_rows(k, base, stop, stride_k, n, N, TOKENS), ACC)
    q_rows = widened(load_rows(q, base, stop, stride_q, n, N, TOKENS), ACC)
    dt_rows = widened(load_rows(dt, base, stop, stride_dt, d, D, TOKENS, NO_STEP), ACC)
    grad_rows = widened(load_rows(grad_out, base, stop, stride_grad, d, D, TOKENS), ACC)
    if z is not None:
        z_rows = widened(load_rows(z, base, stop, stride_z, d, D, TOKENS), ACC)
    while g >= 0:
        base = begin + g * TOKENS
        ahead = begin + tl.maximum(g - 1, 0) * TOKENS
        k_next = load_rows(k, ahead, stop, stride_k, n, N, TOKENS)
        q_next = load_rows(q, ahead, stop, stride_q, n, N, TOKENS)
        dt_next = load_rows(dt, ahead, stop, stride_dt, d, D, TOKENS, NO_STEP)
        grad_next = load_rows(grad_out, ahead, stop, stride_grad, d, D, TOKENS)
        if z is not None:
            z_next = load_rows(z, ahead, stop, stride_z, d, D, TOKENS)
        for i in tl.static_range(TOKENS - 1, -1, -1):
            g_t = grad_rows[i]
            if z is not None:
                g_t *= silu(z_rows[i])
            factor = DECAY(k_rows[i], dt_rows[i] + bias, a)
            grad = factor * (grad + q_rows[i][:, None] * g_t[None, :])
            product *= factor
        k_rows, q_rows, dt_rows = widened(k_next, ACC), widened(q_next, ACC), widened(dt_next, ACC)
        grad_rows = widened(grad_next, ACC)
        if z is not None:
            z_rows = widened(z_next, ACC)
        g -= 1
    if begin < stop:
        tl.store(state_at(local, slot, n, d, D, N), grad, mask=exists)
        tl.store(state_at(decays, slot, n, d, D, N), product, mask=exists)


@triton.jit(do_not_specialize=LENGTHS)
def scan_combine_kernel(
    local,
    decays,
    first_carry,
    last_carry,
    offsets,
    span,
    D: tl.constexpr,
    N: tl.constexpr,
    ACC: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Replace every span's ``local`` by the carry that enters it, span after span."""
    segment = tl.program_id(0).to(tl.int64)
    d, n, exists = channels_and_states(tl.program_id(1), D, N, BLOCK_N, BLOCK_D)
    carry = tl.zeros((BLOCK_N, BLOCK_D), ACC)
    if first_carry is not None:
        carry += tl.load(state_at(first_carry, segment, n, d, D, N), mask=exists, other=0.0).to(ACC)
    first = tl.load(offsets + segment)
    spans = tl.cdiv(tl.load(offsets + segment + 1) - first, span)
    for j in range(0, spans):
        i = spans - 1 - j if REVERSE else j
        slot = first // span + segment + i
        at = state_at(local, slot, n, d, D, N)
        added = tl.load(at, mask=exists, other=0.0)
        factor = tl.load(state_at(decays, slot, n, d, D, N), mask=exists, other=0.0)
        tl.store(at, carry, mask=exists)
        carry = factor * carry + added
    if last_carry is not None:
        tl.store(state_at(last_carry, segment, n, d, D, N), carry, mask=exists)


@triton.jit(do_not_specialize=LENGTHS)
def scan_fwd_kernel(
    u,
    q,
    k,
    dt,
    dt_bias,
    skip,
    z,
    param,
    initial,
    starts,
    out,
    final,
    saved,
    offsets,
    segments,
    span,
    D: tl.constexpr,
    N: tl.constexpr,
    stride_u: tl.constexpr,
    stride_q: tl.constexpr,
    stride_k: tl.constexpr,
    stride_dt: tl.constexpr,
    stride_z: tl.constexpr,
    STEP: tl.constexpr,
    ACC: tl.constexpr,
    INTERVAL: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the outputs of one span, or of a whole segment where ``starts`` is None."""
    slot = tl.program_id(0).to(tl.int64)
    d, n, exists = channels_and_states(tl.program_id(1), D, N, BLOCK_N, BLOCK_D)
    state = tl.zeros((BLOCK_N, BLOCK_D), ACC)
    if starts is None:
        segment = slot
        first = tl.load(offsets + segment)
        begin = first
        stop = tl.load(offsets + segment + 1)
        if initial is not None:
            state += tl.load(
                cells(initial + segment * (N * D), n, d, 1, N), mask=exists, other=0.0
            ).to(ACC)
    else:
        segment, first, end, begin = locate(offsets, segments, span, slot)
        stop = tl.minimum(begin + span, end)
        at = state_at(starts, slot, n, d, D, N)
        state += tl.load(at, mask=exists & (begin < stop), other=0.0)
    a = load_param(param, n, d, D, N, exists, ACC)
    bias = load_vector(dt_bias, d, D, ACC)
    through = load_vector(skip, d, D, ACC)
    u_rows = widened(load_rows(u, begin, stop, stride_u, d, D, TOKENS), ACC)
    q_rows = widened(load_rows(q, begin, stop, stride_q, n, N, TOKENS), ACC)
    k_rows = widened(load_rows(k, begin, stop, stride_k, n, N, TOKENS), ACC)
    dt_rows = widened(load_rows(dt, begin, stop, stride_dt, d, D, TOKENS, NO_STEP), ACC)
    if z is not None:
        z_rows = widened(load_rows(z, begin, stop, stride_z, d, D, TOKENS), ACC)
    for kept in range(begin, stop, INTERVAL):
        if saved is not None:
            number = first // INTERVAL + segment + (kept - first) // INTERVAL
            tl.store(state_at(saved, number, n, d, D, N), state, mask=exists)
        base = kept
        while base < tl.minimum(kept + INTERVAL, stop):
            ahead = base + TOKENS
            u_next = load_rows(u, ahead, stop, stride_u, d, D, TOKENS)
            q_next = load_rows(q, ahead, stop, stride_q, n, N, TOKENS)
            k_next = load_rows(k, ahead, stop, stride_k, n, N, TOKENS)
            dt_next = load_rows(dt, ahead, stop, stride_dt, d, D, TOKENS, NO_STEP)
            if z is not None:
                z_next = load_rows(z, ahead, stop, stride_z, d, D, TOKENS)
            count = tokens_left(base, stop, TOKENS)
            outs = ()
            for i in tl.static_range(TOKENS):
                state = STEP(state, u_rows[i], k_rows[i], dt_rows[i] + bias, a)
                o = tl.sum(state * q_rows[i][:, None], axis=0) + through * u_rows[i]
                outs = outs + (o,)  # noqa: RUF005
            # behind all states: no token waits for the gate of the one before
            for i in tl.static_range(TOKENS):
                o = outs[i]
                if z is not None:
                    o *= silu(z_rows[i])
                row = row_at(out, base, i, D, d)
                o = o.to(out.dtype.element_ty)  # pyright: ignore[reportAttributeAccessIssue]
                tl.store(row, o, mask=(count > i) & (d < D))
            u_rows, q_rows = widened(u_next, ACC), widened(q_next, ACC)
            k_rows, dt_rows = widened(k_next, ACC), widened(dt_next, ACC)
            if z is not None:
                z_rows = widened(z_next, ACC)
            base = ahead
    if starts is None:
        tl.store(cells(final + segment * (N * D), n, d, 1, N), state, mask=exists)


@triton.jit
def march(
    state,
    boxes,
    u,
    k,
    dt,
    bias,
    a,
    begin,
    end,
    stop,
    d,
    n,
    D: tl.constexpr,
    N: tl.constexpr,
    stride_u: tl.constexpr,
    stride_k: tl.constexpr,
    stride_dt: tl.constexpr,
    STEP: tl.constexpr,
    ACC: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Return the state at ``end``; that before every TOKENS-th token goes to ``boxes``, if any."""
    u_rows = widened(load_rows(u, begin, end, stride_u, d, D, TOKENS), ACC)
    k_rows = widened(load_rows(k, begin, end, stride_k, n, N, TOKENS), ACC)
    dt_rows = widened(load_rows(dt, begin, end, stride_dt, d, D, TOKENS, NO_STEP), ACC)
    groups = tl.cdiv(end - begin, TOKENS)
    g = groups * 0
    while g < groups:
        if boxes is not None:
            tl.store(boxes + g * state.numel, state)
        base = tl.minimum(begin + g * TOKENS, stop)
        ahead = base + TOKENS
        u_next = load_rows(u, ahead, end, stride_u, d, D, TOKENS)
        k_next = load_rows(k, ahead, end, stride_k, n, N, TOKENS)
        dt_next = load_rows(dt, ahead, end, stride_dt, d, D, TOKENS, NO_STEP)
        for i in tl.static_range(TOKENS):
            state = STEP(state, u_rows[i], k_rows[i], dt_rows[i] + bias, a)
        u_rows, k_rows, dt_rows = widened(u_next, ACC), widened(k_next, ACC), widened(dt_next, ACC)
        g += 1
    return state


@triton.jit(do_not_specialize=LENGTHS)
def scan_bwd_kernel(
    grad_out,
    grad_final,
    u,
    q,
    k,
    dt,
    dt_bias,
    skip,
    z,
    param,
    saved,
    ends,
    scratch,
    grad_u,
    grad_q,
    grad_k,
    grad_dt,
    grad_bias,
    grad_skip,
    grad_z,
    grad_param,
    grad_initial,
    offsets,
    segments,
    span,
    T,
    first_slot,
    first_block,
    D: tl.constexpr,
    N: tl.constexpr,
    stride_grad: tl.constexpr,
    stride_u: tl.constexpr,
    stride_q: tl.constexpr,
    stride_k: tl.constexpr,
    stride_dt: tl.constexpr,
    stride_z: tl.constexpr,
    STEP: tl.constexpr,
    ADJOINT: tl.constexpr,
    ACC: tl.constexpr,
    INTERVAL: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Walk one span backwards, or a whole segment where ``ends`` is None, and write all gradients.

    A march from the state saved before an interval leads to a chunk in it. Within a chunk states
    are computed anew: first every TOKENS-th, to scratch, then, going back, those of one group of
    TOKENS, which stay in registers. ``state`` is the one after the token that is walked over.
    """
    program = tl.program_id(0).to(tl.int64)
    slot = first_slot + program
    d, n, exists = channels_and_states(first_block + tl.program_id(1), D, N, BLOCK_N, BLOCK_D)
    grad = tl.zeros((BLOCK_N, BLOCK_D), ACC)
    if ends is None:
        segment = slot
        first = tl.load(offsets + segment)
        begin = first
        stop = tl.load(offsets + segment + 1)
        if grad_final is not None:
            grad += tl.load(state_at(grad_final, segment, n, d, D, N), mask=exists, other=0.0).to(
                ACC
            )
    else:
        segment, first, end, begin = locate(offsets, segments, span, slot)
        stop = tl.minimum(begin + span, end)
        at = state_at(ends, slot, n, d, D, N)
        grad += tl.load(at, mask=exists & (begin < stop), other=0.0)
    a = load_param(param, n, d, D, N, exists, ACC)
    bias = load_vector(dt_bias, d, D, ACC)
    through = load_vector(skip, d, D, ACC)
    sum_bias = tl.zeros((BLOCK_D,), ACC)
    sum_skip = tl.zeros((BLOCK_D,), ACC)
    sum_param = tl.zeros((BLOCK_N, BLOCK_D), ACC)
    own = (program * tl.num_programs(1) + tl.program_id(1)) * (CHUNK // TOKENS * BLOCK_N * BLOCK_D)
    boxes = cells(scratch + own, n, tl.arange(0, BLOCK_D), BLOCK_D, 1)
    partial = tl.program_id(1).to(tl.int64) * T

    # 0, which the compiler does not know: it would keep values of a march for the walk back, and
    # spill; these differ by it
    nothing = tl.minimum(segments, 0).to(ACC)
    first_kept = first // INTERVAL + segment + (begin - first) // INTERVAL
    chunks = tl.cdiv(tl.maximum(stop - begin, 0), CHUNK)
    for c in range(0, chunks):
        # The three minima here change no number. They hide from the compiler that positions are
        # linear in the loop's counter, or seen before; it would keep a pointer per tensor and token
        # in registers, and spill.
        chunk = tl.minimum(begin + (chunks - 1 - c) * CHUNK, stop)
        chunk_stop = tl.minimum(chunk + CHUNK, stop)
        groups = tl.cdiv(chunk_stop - chunk, TOKENS)
        number = first_kept + (chunks - 1 - c) // (INTERVAL // CHUNK)
        state = tl.load(state_at(saved, number, n, d, D, N), mask=exists, other=0.0)
        if INTERVAL > CHUNK:
            start = chunk - (chunks - 1 - c) % (INTERVAL // CHUNK) * CHUNK
            state = march(
                *(state, None, u, k, dt, bias, a, start, chunk, stop, d, n),
                *(D, N, stride_u, stride_k, stride_dt, STEP, ACC, TOKENS),
            )
        # threads may read each other's writes
        tl.debug_barrier()
        state = march(
            *(state, boxes, u, k, dt, bias, a, chunk, chunk_stop, stop, d, n),
            *(D, N, stride_u, stride_k, stride_dt, STEP, ACC, TOKENS),
        )
        tl.debug_barrier()
        base = tl.minimum(chunk + (groups - 1) * TOKENS, stop)
        u_rows = widened(load_rows(u, base, chunk_stop, stride_u, d, D, TOKENS), ACC)
        k_rows = widened(load_rows(k, base, chunk_stop, stride_k, n, N, TOKENS), ACC)
        q_rows = widened(load_rows(q, base, chunk_stop, stride_q, n, N, TOKENS), ACC)
        dt_rows = widened(load_rows(dt, base, chunk_stop, stride_dt, d, D, TOKENS, NO_STEP), ACC)
        grad_rows = widened(load_rows(grad_out, base, chunk_stop, stride_grad, d, D, TOKENS), ACC)
        if z is not None:
            z_rows = widened(load_rows(z, base, chunk_stop, stride_z, d, D, TOKENS), ACC)
        kept = tl.load(boxes + (groups - 1) * (BLOCK_N * BLOCK_D))
        g = groups - 1
        while g >= 0:
            base = tl.minimum(chunk + g * TOKENS, stop)
            before = tl.maximum(g - 1, 0)
            ahead = tl.minimum(chunk + before * TOKENS, stop)
            u_next = load_rows(u, ahead, chunk_stop, stride_u, d, D, TOKENS)
            k_next = load_rows(k, ahead, chunk_stop, stride_k, n, N, TOKENS)
            q_next = load_rows(q, ahead, chunk_stop, stride_q, n, N, TOKENS)
            dt_next = load_rows(dt, ahead, chunk_stop, stride_dt, d, D, TOKENS, NO_STEP)
            grad_next = load_rows(grad_out, ahead, chunk_stop, stride_grad, d, D, TOKENS)
            if z is not None:
                z_next = load_rows(z, ahead, chunk_stop, stride_z, d, D, TOKENS)
            states = (kept,)
            for i in tl.static_range(TOKENS - 1):
                kept = STEP(kept, u_rows[i], k_rows[i], dt_rows[i] + bias, a)
                states = states + (kept,)  # noqa: RUF005 (Triton knows no star)
            for i in tl.static_range(TOKENS - 1, -1, -1):
                live = base + i < chunk_stop
                here = live & (d < D)
                u_t, k_t, q_t, g_t = u_rows[i], k_rows[i] + nothing, q_rows[i], grad_rows[i]
                if z is not None:
                    gate = z_rows[i]
                    o = tl.sum(state * q_t[:, None], axis=0) + through * u_t
                    open_ = sigmoid(gate)
                    grad_gate = g_t * o * open_ * (1.0 + gate * (1.0 - open_))
                    grad_gate = grad_gate.to(grad_z.dtype.element_ty)
                    tl.store(row_at(grad_z, base, i, D, d), grad_gate, mask=here)
                    g_t *= gate * open_
                sum_skip += g_t * u_t
                row = row_at(grad_q, partial + base, i, N, 0)
                store_channel_sums(row, state * g_t[None, :], N, live, BLOCK_N, BLOCK_D, WARPS)
                grad += q_t[:, None] * g_t[None, :]
                state = states[i]
                if i == 0:
                    # ahead of its use, but not before registers are free
                    kept = tl.load(boxes + before * (BLOCK_N * BLOCK_D))
                dt_t = dt_rows[i] + bias + nothing
                grad, gu, gdt, gk, gparam = ADJOINT(grad, state, u_t, k_t, dt_t, a)
                gu += through * g_t
                tl.store(row_at(grad_u, base, i, D, d), gu.to(grad_u.dtype.element_ty), mask=here)
                tl.store(
                    row_at(grad_dt, base, i, D, d), gdt.to(grad_dt.dtype.element_ty), mask=here
                )
                row = row_at(grad_k, partial + base, i, N, 0)
                store_channel_sums(row, gk, N, live, BLOCK_N, BLOCK_D, WARPS)
                sum_bias += tl.where(live, gdt, 0.0)
                if param is not None:
                    sum_param += gparam
            u_rows, k_rows, q_rows = (
                widened(u_next, ACC),
                widened(k_next, ACC),
                widened(q_next, ACC),
            )
            dt_rows, grad_rows = widened(dt_next, ACC), widened(grad_next, ACC)
            if z is not None:
                z_rows = widened(z_next, ACC)
            g -= 1
    if dt_bias is not None:
        tl.store(grad_bias + slot * D + d, sum_bias, mask=d < D)
    if skip is not None:
        tl.store(grad_skip + slot * D + d, sum_skip, mask=d < D)
    if param is not None:
        tl.store(state_at(grad_param, slot, n, d, D, N), sum_param, mask=exists)
    if ends is None and grad_initial is not None:
        tl.store(state_at(grad_initial, segment, n, d, D, N), grad, mask=exists)


def rows(x: Tensor) -> Tensor:
    """Return a matrix with contiguous rows, as the kernels read them; a copy only if needed."""
    return x if x.stride(1) == 1 else x.contiguous()


def near_rows(x: Tensor) -> Tensor:
    """Do as ``rows`` does, with rows so near that 32 bits count within 128 of them."""
    return rows(x) if x.stride(0) < 2**24 else x.contiguous()


class Plan(NamedTuple):
    """How one call is cut into programs, and the arguments that its kernels share, by name."""

    shape: Tile
    blocks: int  # of channels
    span: int | None  # tokens a program, or None for whole segments
    slots: int  # saved states
    arguments: dict[str, Any]


def plan(transition: Transition, inputs: Inputs, offsets: Tensor, entries: int, ahead: int) -> Plan:
    """Shape the programs of a call and gather the arguments that its kernels share."""
    u, q, k, dt, dt_bias, skip, z, param, _ = inputs
    exact = accumulator(u)
    (tokens, width), states, segments = u.shape, k.shape[1], offsets.shape[0] - 1
    shape = tile(states, exact, entries, ahead)
    blocks = cdiv(width, shape.block_d)
    between = interval(states, CHUNK)
    span = span_of(tokens, segments, blocks * shape.num_warps, between)
    matrices = {"u": rows(u), "q": rows(q), "k": rows(k), "dt": rows(dt)}
    matrices["z"] = None if z is None else rows(z)
    vectors = {"dt_bias": whole(dt_bias), "skip": whole(skip), "param": whole(_turned(param))}
    arguments = {
        **matrices,
        **vectors,
        **{f"stride_{name}": _stride(x) for name, x in matrices.items()},
        "offsets": offsets,
        "segments": segments,
        "span": span,
        "T": tokens,
        "D": width,
        "N": states,
        "STEP": transition.step,
        "DECAY": transition.decay,
        "ADJOINT": transition.adjoint,
        "ACC": _ACC[exact],
        "INTERVAL": between,
        "CHUNK": CHUNK,
        "TOKENS": shape.tokens,
        "BLOCK_N": shape.block_n,
        "BLOCK_D": shape.block_d,
        "WARPS": shape.num_warps,
    }
    return Plan(shape, blocks, span, chunk_slots(tokens, segments, between), arguments)


def every_register() -> dict[str, int]:
    """Return the launch option that lets a thread have all registers there are.

    Left to itself, ptxas now and then spills to let one more program in. HIP has no such option.
    """
    return {} if torch.version.hip else {"maxnreg": 255}


@triton.jit
def unfold(blocks: tl.constexpr):
    """Return where a program stands on two axes that are one in the grid; blocks vary fastest.

    A grid's first axis may have 2^31 - 1 programs, every other one no more than 65,535.
    """
    program = tl.program_id(0)
    return (program // blocks).to(tl.int64), program % blocks


def launch(kernel: JITFunction, grid: tuple[int, int], made: Plan, **own: object) -> None:
    """Launch a kernel with its own arguments and with those of the plan that it names."""
    values = made.arguments | own
    options = {"num_warps": made.shape.num_warps}
    if kernel in (scan_bwd_carry_kernel, scan_bwd_kernel) or values["ACC"] == tl.float64:
        options |= every_register()
    launch_named(kernel, grid, values, **options)


def forward(
    transition: Transition, inputs: Inputs, offsets: Tensor, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a family's scan; returns outputs, final states and the state before every interval.

    ``out[t] = (sum_n S[t, n] q[t, n] + skip * u[t]) * silu(z[t])``; ``S`` follows the transition.
    """
    u, _, k, *_, initial_state = inputs
    exact = accumulator(u)
    (tokens, width), states, segments = u.shape, k.shape[1], offsets.shape[0] - 1
    made = plan(transition, inputs, offsets, 16, TOKENS)
    blocks, span = made.blocks, made.span
    out = u.new_empty(tokens, width)
    saved = u.new_empty(made.slots if save else 0, states, width, dtype=exact)
    starts, programs = None, segments
    final = u.new_empty(segments, width, states, dtype=exact)
    if span is not None:
        final = u.new_empty(segments, states, width, dtype=exact)
        programs = chunk_slots(tokens, segments, span)
        starts = u.new_empty(programs, states, width, dtype=exact)
        decays = torch.empty_like(starts)
        found = {"local": starts, "decays": decays}
        launch(scan_fwd_carry_kernel, (programs, blocks), made, **found)
        launch(
            scan_combine_kernel,
            (segments, blocks),
            made,
            **found,
            first_carry=_transposed(initial_state),
            last_carry=final,
            REVERSE=False,
        )
        final = final.transpose(1, 2).contiguous()
    launch(
        scan_fwd_kernel,
        (programs, blocks),
        made,
        initial=whole(initial_state),
        starts=starts,
        out=out,
        final=final,
        saved=saved if save else None,
    )
    return out, final, saved


def backward(
    transition: Transition,
    grad_out: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, D, N]
    inputs: Inputs,
    offsets: Tensor,  # [S + 1] int64
    saved: Tensor,  # [slots, N, D]
) -> Gradients:
    """Run a family's scan backwards from the states that ``forward`` saved."""
    u, q, k, dt, dt_bias, skip, z, param, initial_state = inputs
    exact = accumulator(u)
    (tokens, width), states, segments = u.shape, k.shape[1], offsets.shape[0] - 1
    # where warps share channels, sums between them want registers
    entries = transition.entries if states <= 16 else transition.entries // 2
    made = plan(transition, inputs, offsets, entries, transition.tokens)
    shape, blocks, span = made.shape, made.blocks, made.span
    grad_out = rows(torch.zeros_like(u) if grad_out is None else grad_out)
    grad_final = _transposed(grad_final)
    incoming = {"grad_out": grad_out, "stride_grad": _stride(grad_out)}
    grad_initial = None
    if initial_state is not None:
        grad_initial = u.new_empty(segments, states, width, dtype=exact)
    ends, programs = None, segments
    if span is not None:
        programs = chunk_slots(tokens, segments, span)
        ends = u.new_empty(programs, states, width, dtype=exact)
        decays = torch.empty_like(ends)
        found = {"local": ends, "decays": decays}
        ahead = tile(states, exact, entries, TOKENS).tokens
        launch(
            *(scan_bwd_carry_kernel, (programs, blocks), made),
            **incoming,
            **found,
            TOKENS=ahead,
        )
        launch(
            scan_combine_kernel,
            (segments, blocks),
            made,
            **found,
            first_carry=grad_final,
            last_carry=grad_initial,
            REVERSE=True,
        )
    # partial sums of q and k, and a scratch for states: where all blocks and programs at once
    # would want more of either than is bounded, several launches share it
    parts = max(1, parts_of(blocks, width, states))
    at_once = max(1, min(programs, 4 * FILL // (parts * shape.num_warps)))
    box = shape.block_n * shape.block_d
    part_q = q.new_empty(parts, tokens, states, dtype=exact)
    part_k = torch.empty_like(part_q)
    per_program = u.new_empty(programs, width, dtype=exact)
    per_param = None
    if param is not None:
        per_param = u.new_empty(programs, states, width, dtype=exact)
    grads = {
        "grad_u": u.new_empty(tokens, width),
        "grad_dt": dt.new_empty(tokens, width),
        "grad_z": None if z is None else z.new_empty(tokens, width),
        "grad_bias": None if dt_bias is None else torch.empty_like(per_program),
        "grad_skip": None if skip is None else torch.empty_like(per_program),
        "grad_param": per_param,
        "grad_initial": grad_initial,
    }
    scratch = u.new_empty(at_once * parts * (CHUNK // shape.tokens) * box, dtype=exact)
    grad_q = part_q.new_zeros(tokens, states)
    grad_k = torch.zeros_like(grad_q)
    for first_block in range(0, blocks, parts):
        some = min(parts, blocks - first_block)
        for first_slot in range(0, programs, at_once):
            launch(
                scan_bwd_kernel,
                (min(at_once, programs - first_slot), some),
                made,
                **incoming,
                **grads,
                grad_final=grad_final,
                saved=saved,
                ends=ends,
                scratch=scratch,
                grad_q=part_q,
                grad_k=part_k,
                first_slot=first_slot,
                first_block=first_block,
            )
        grad_q += part_q[:some].sum(0)
        grad_k += part_k[:some].sum(0)
    grad_bias, grad_skip, grad_param = (
        None if x is None else x.sum(0) for x in (grads["grad_bias"], grads["grad_skip"], per_param)
    )
    return (
        grads["grad_u"],
        grad_q,
        grad_k,
        grads["grad_dt"],
        grad_bias,
        grad_skip,
        grads["grad_z"],
        _turned(grad_param),
        _transposed(grad_initial),
    )


_ACC = {torch.float32: tl.float32, torch.float64: tl.float64}


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def whole(x: Tensor | None) -> Tensor | None:
    """Return a contiguous tensor, or None for None."""
    return None if x is None else x.contiguous()


def _turned(param: Tensor | None) -> Tensor | None:
    return None if param is None else param.T


def _transposed(states: Tensor | None) -> Tensor | None:
    return None if states is None else states.transpose(1, 2).contiguous()
