"""Eidetic attention on GPUs: one pass with an online softmax; three kernels for the backward.

Forward: a program owns ``BLOCK_M`` queries of a chunk and a head, and walks over the tiles of the
window and of the chunk's memory. Backward: the same walk for the gradient of the
queries; then a program owns ``BLOCK_N`` keys of a sequence, or rows of a chunk's memory, and walks
over the queries that see them. Nothing is added atomically.

A position counts from a sequence's first token; rows from before the call lie in ``past``. A query
at p sees the keys from ``p - WINDOW + 1`` to ``p``. Scores carry a factor log2(e), so that powers
of two do. Calls with late keys never come here.
"""

# a kernel launch is no ordinary call: Triton's types do not describe it
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import functools
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.eidetic_attention.arguments import Call, Tensors
from ssmzoo_kernels.launches import cdiv, launch, next_power_of_2

UNBOUNDED = 1 << 30  # a window that no sequence fills
_READ = 7  # tensors, without the late ones
LOG2_E = 1.4426950408889634
# numbers of rows make no new variants; what a model fixes is compiled in
VARYING = ("sequences", "past_rows")


@triton.jit
def owner_of(ends, sequences, slot):
    """Return the sequence that a slot belongs to, and the first of that sequence's slots."""
    low = slot * 0
    high = low + sequences - 1
    while low < high:
        middle = (low + high) // 2
        behind = tl.load(ends + middle) > slot
        high = tl.where(behind, middle, high)
        low = tl.where(behind, low, middle + 1)
    return low.to(tl.int64), tl.load(ends + low - 1, mask=low > 0, other=0)


@triton.jit
def rows_at(new, past, begin, old, start, seen, stride, stride_past, BLOCK: tl.constexpr):
    """Point at the rows of the positions from ``start`` on, ``[BLOCK, 1]``.

    ``begin`` is where position 0 would lie among the call's tokens, ``old`` where in ``past``.
    """
    i = tl.arange(0, BLOCK)[:, None]
    at = new + (begin + start) * stride + i * stride
    if past is not None:
        before = past + (old + start) * stride_past + i * stride_past
        at = tl.where(i + start < seen, before, at)
    return at


@triton.jit
def product(a, b, ACC: tl.constexpr):
    """Return a matrix product with sums in ACC, of float32 numbers as they are."""
    return tl.dot(a, b, input_precision="ieee", out_dtype=ACC)


@triton.jit
def meet(
    one,
    two,
    acc,
    q,
    g,
    k,
    v,
    visible,
    scale,
    MASKED: tl.constexpr,
    BACKWARD: tl.constexpr,
    ACC: tl.constexpr,
):
    """Let queries meet a tile of keys.

    Forward: the largest score, the sum of exponentials, and the sum of weighted values are brought
    up to date. Backward: with the logarithm of the whole sum, and what every key's share of the
    gradient is lessened by, the queries' gradient grows.
    """
    scores = product(q, tl.trans(k), ACC) * scale
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    if BACKWARD:
        weights = tl.exp2(scores - one[:, None])
        change = weights * (product(g, tl.trans(v), ACC) - two[:, None])
        acc += product(change.to(k.dtype), k, ACC)
    else:
        top = tl.maximum(one, tl.max(scores, axis=1))
        # as long as nothing is visible the largest score is minus infinity
        safe = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(one - safe)
        two = two * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None] + product(weights.to(v.dtype), v, ACC)
        one = top
    return one, two, acc


@triton.jit
def read_window(
    one,
    two,
    acc,
    q,
    g,
    p,
    first,
    last,
    k,
    v,
    past_k,
    past_v,
    begin,
    old,
    seen,
    scale,
    stride_k,
    stride_v,
    WINDOW: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BACKWARD: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Let queries at ``first`` to ``last`` read their window; k, v point at their head."""
    column = tl.arange(0, BLOCK_D)[None, :]
    i = tl.arange(0, BLOCK_N)
    low = tl.maximum(first - WINDOW + 1, 0)
    high = last + 1
    tiles = tl.cdiv(tl.maximum(high - low, 0), BLOCK_N)
    # all queries see the tiles from the last one's oldest key to the first one's newest
    inner = tl.minimum(tl.cdiv(tl.maximum(last - WINDOW + 1 - low, 0), BLOCK_N), tiles)
    outer = tl.maximum(inner, tl.maximum(first + 1 - low, 0) // BLOCK_N)
    for part in tl.static_range(3):
        start = 0 if part == 0 else (inner if part == 1 else outer)
        stop = inner if part == 0 else (outer if part == 1 else tiles)
        for tile in range(start, stop):
            at = low + tile * BLOCK_N
            key = at + i
            live = (key < high)[:, None] & (column < D)
            k_rows = rows_at(k, past_k, begin, old, at, seen, stride_k, G * D, BLOCK_N)
            v_rows = rows_at(v, past_v, begin, old, at, seen, stride_v, G * D, BLOCK_N)
            keys = tl.load(k_rows + column, mask=live, other=0.0)
            values = tl.load(v_rows + column, mask=live, other=0.0)
            behind = p[:, None] - key[None, :]
            visible = (behind >= 0) & (behind < WINDOW) & (key < high)[None, :]
            one, two, acc = meet(
                one, two, acc, q, g, keys, values, visible, scale, part != 1, BACKWARD, ACC
            )
    return one, two, acc


@triton.jit
def read_all(
    one,
    two,
    acc,
    q,
    g,
    p,
    first,
    last,
    head_group,
    sequence,
    chunk,
    k,
    v,
    past_k,
    past_v,
    mem_k,
    mem_v,
    mem_count,
    mem_positions,
    begin,
    seen,
    past_rows,
    scale,
    stride_k,
    stride_v,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BACKWARD: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Let the queries of a block read window and memory."""
    of = head_group * D
    if past_k is not None:
        past_k += of
        past_v += of
    one, two, acc = read_window(
        one,
        two,
        acc,
        q,
        g,
        p,
        first,
        last,
        k + of,
        v + of,
        past_k,
        past_v,
        begin,
        sequence * past_rows + past_rows - seen,
        seen,
        scale,
        stride_k,
        stride_v,
        WINDOW,
        G,
        D,
        BACKWARD,
        ACC,
        BLOCK_N,
        BLOCK_D,
    )
    if mem_k is not None:
        column = tl.arange(0, BLOCK_D)[None, :]
        count = tl.load(mem_count + chunk)
        for start in range(0, count, BLOCK_N):
            row = start + tl.arange(0, BLOCK_N)
            at = (chunk * ROWS + row)[:, None] * (G * D) + of + column
            live = (row < count)[:, None] & (column < D)
            keys = tl.load(mem_k + at, mask=live, other=0.0)
            values = tl.load(mem_v + at, mask=live, other=0.0)
            visible = (row < count)[None, :]
            if mem_positions is not None:
                held = tl.load(mem_positions + chunk * ROWS + row, mask=row < count, other=0)
                visible = visible & (held[None, :] <= p[:, None] - WINDOW)
            one, two, acc = meet(
                one, two, acc, q, g, keys, values, visible, scale, True, BACKWARD, ACC
            )
    return one, two, acc


@triton.jit
def block_at(
    slot,
    ends,
    first_chunk,
    offsets,
    seen,
    sequences,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Find a slot's block of queries.

    Returns its sequence, where position 0 of that would lie among the call's tokens, the tokens
    seen before, the block's positions, the first and the last of them in the call, and its chunk's
    number among the call's chunks.
    """
    sequence, before = owner_of(ends, sequences, slot)
    past = tl.load(seen + sequence).to(tl.int32)
    token = tl.load(offsets + sequence)
    length = (tl.load(offsets + sequence + 1) - token).to(tl.int32)
    per_chunk: tl.constexpr = (WINDOW + BLOCK_M - 1) // BLOCK_M
    opened = past // WINDOW
    block = (slot - before).to(tl.int32) + (past - opened * WINDOW) // BLOCK_M
    number = opened + block // per_chunk
    low = number * WINDOW + block % per_chunk * BLOCK_M
    first = tl.maximum(low, past)
    end = tl.minimum(tl.minimum(low + BLOCK_M, number * WINDOW + WINDOW), past + length)
    chunk = tl.load(first_chunk + sequence) + number - opened
    return sequence, token - past, past, low + tl.arange(0, BLOCK_M), first, end - 1, chunk


@triton.jit(do_not_specialize=VARYING)
def eidetic_attention_fwd_kernel(
    q,
    k,
    v,
    mem_k,
    mem_v,
    past_k,
    past_v,
    mem_count,
    mem_positions,
    out,
    lse,
    offsets,
    seen,
    ends,
    first_chunk,
    sequences,
    past_rows,
    scale: tl.constexpr,
    stride_q: tl.constexpr,
    stride_k: tl.constexpr,
    stride_v: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write outputs and log sums of one block of queries and one head."""
    slot, head = tl.program_id(0), tl.program_id(1)
    if slot >= tl.load(ends + sequences - 1):
        return
    sequence, begin, past, p, first, last, chunk = block_at(
        slot, ends, first_chunk, offsets, seen, sequences, WINDOW, BLOCK_M
    )
    column = tl.arange(0, BLOCK_D)[None, :]
    here = (p >= first) & (p <= last)
    live = here[:, None] & (column < D)
    row = begin + p
    queries = tl.load(q + row[:, None] * stride_q + head * D + column, mask=live, other=0.0)
    top = tl.full((BLOCK_M,), float("-inf"), ACC)
    total = tl.zeros((BLOCK_M,), ACC)
    acc = tl.zeros((BLOCK_M, BLOCK_D), ACC)
    top, total, acc = read_all(
        top,
        total,
        acc,
        queries,
        queries,
        p,
        first,
        last,
        head // (H // G),
        sequence,
        chunk,
        k,
        v,
        past_k,
        past_v,
        mem_k,
        mem_v,
        mem_count,
        mem_positions,
        begin,
        past,
        past_rows,
        scale,
        stride_k,
        stride_v,
        WINDOW,
        ROWS,
        G,
        D,
        False,
        ACC,
        BLOCK_N,
        BLOCK_D,
    )
    acc /= total[:, None]
    at = (row * H + head)[:, None] * D + column
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=live)
    tl.store(lse + row * H + head, (top + tl.log2(total)) / 1.4426950408889634, mask=here)


@triton.jit(do_not_specialize=VARYING)
def eidetic_attention_bwd_query_kernel(
    grad,
    out,
    lse,
    q,
    k,
    v,
    mem_k,
    mem_v,
    past_k,
    past_v,
    mem_count,
    mem_positions,
    grad_q,
    shares,
    offsets,
    seen,
    ends,
    first_chunk,
    sequences,
    past_rows,
    scale: tl.constexpr,
    stride_q: tl.constexpr,
    stride_k: tl.constexpr,
    stride_v: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the gradient of one block of queries and one head, and ``sum(grad * out)`` of each."""
    slot, head = tl.program_id(0), tl.program_id(1)
    if slot >= tl.load(ends + sequences - 1):
        return
    sequence, begin, past, p, first, last, chunk = block_at(
        slot, ends, first_chunk, offsets, seen, sequences, WINDOW, BLOCK_M
    )
    column = tl.arange(0, BLOCK_D)[None, :]
    here = (p >= first) & (p <= last)
    live = here[:, None] & (column < D)
    row = begin + p
    at = (row * H + head)[:, None] * D + column
    queries = tl.load(q + row[:, None] * stride_q + head * D + column, mask=live, other=0.0)
    g = tl.load(grad + at, mask=live, other=0.0)
    share = tl.sum(g.to(ACC) * tl.load(out + at, mask=live, other=0.0).to(ACC), axis=1)
    tl.store(shares + row * H + head, share, mask=here)
    # where there is no query, no weight
    known = tl.load(lse + row * H + head, mask=here, other=float("inf")) * 1.4426950408889634
    acc = tl.zeros((BLOCK_M, BLOCK_D), ACC)
    known, share, acc = read_all(
        known,
        share,
        acc,
        queries,
        g,
        p,
        first,
        last,
        head // (H // G),
        sequence,
        chunk,
        k,
        v,
        past_k,
        past_v,
        mem_k,
        mem_v,
        mem_count,
        mem_positions,
        begin,
        past,
        past_rows,
        scale,
        stride_k,
        stride_v,
        WINDOW,
        ROWS,
        G,
        D,
        True,
        ACC,
        BLOCK_N,
        BLOCK_D,
    )
    acc *= scale / 1.4426950408889634
    tl.store(grad_q + at, acc.to(grad_q.dtype.element_ty), mask=live)


@triton.jit
def see(
    grad_k,
    grad_v,
    keys,
    values,
    key,
    held,
    first,
    end,
    inner,
    outer,
    begin,
    q,
    grad,
    lse,
    shares,
    head_group,
    scale,
    stride_q,
    SHIFT: tl.constexpr,
    REACH: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Gather what the queries at positions ``first`` to ``end`` give to a tile of keys and values.

    All of the tile is seen by the queries from tile ``inner`` to ``outer``; by the others, key c by
    those less than ``REACH`` behind ``key[c] + SHIFT``, if ``held[c]``.
    """
    column = tl.arange(0, BLOCK_D)[None, :]
    i = tl.arange(0, BLOCK_M)
    tiles = tl.cdiv(tl.maximum(end - first, 0), BLOCK_M)
    for part in tl.static_range(3):
        start = 0 if part == 0 else (inner if part == 1 else outer)
        stop = inner if part == 0 else (outer if part == 1 else tiles)
        for turn in range(start * (H // G), stop * (H // G)):
            head = head_group * (H // G) + turn % (H // G)
            at = first + turn // (H // G) * BLOCK_M
            p = at + i
            here = p < end
            live = here[:, None] & (column < D)
            row = begin + at + i
            queries = tl.load(q + row[:, None] * stride_q + head * D + column, mask=live, other=0.0)
            g = tl.load(grad + (row * H + head)[:, None] * D + column, mask=live, other=0.0)
            known = tl.load(lse + row * H + head, mask=here, other=float("inf"))
            share = tl.load(shares + row * H + head, mask=here, other=0.0)
            scores = product(keys, tl.trans(queries), ACC) * scale
            weights = tl.exp2(scores - known[None, :] * 1.4426950408889634)
            if part != 1:
                behind = p[None, :] - SHIFT - key[:, None]
                visible = held[:, None] & (behind >= 0) & (behind < REACH)
                weights = tl.where(visible, weights, 0.0)
            grad_v += product(weights.to(g.dtype), g, ACC)
            change = weights * (product(values, tl.trans(g), ACC) - share[None, :])
            grad_k += product(change.to(queries.dtype), queries, ACC)
    return grad_k, grad_v


@triton.jit(do_not_specialize=("sequences", "past_rows"))
def eidetic_attention_bwd_band_kernel(
    grad,
    lse,
    shares,
    q,
    k,
    v,
    past_k,
    past_v,
    grad_k,
    grad_v,
    grad_past_k,
    grad_past_v,
    offsets,
    seen,
    ends,
    sequences,
    past_rows,
    scale: tl.constexpr,
    stride_q: tl.constexpr,
    stride_k: tl.constexpr,
    stride_v: tl.constexpr,
    WINDOW: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the gradients of one block of keys and values and one of their heads."""
    slot, group = tl.program_id(0), tl.program_id(1)
    if slot >= tl.load(ends + sequences - 1):
        return
    sequence, before = owner_of(ends, sequences, slot)
    past = tl.load(seen + sequence).to(tl.int32)
    token = tl.load(offsets + sequence)
    now = past + (tl.load(offsets + sequence + 1) - token).to(tl.int32)
    begin = token - past
    at = past - tl.minimum(past, past_rows) + (slot - before).to(tl.int32) * BLOCK_N
    key = at + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)[None, :]
    live = (key < now)[:, None] & (column < D)
    of = group * D
    old = sequence * past_rows + past_rows - past
    if past_k is not None:
        past_k += of
        past_v += of
    k_rows = rows_at(k + of, past_k, begin, old, at, past, stride_k, G * D, BLOCK_N)
    v_rows = rows_at(v + of, past_v, begin, old, at, past, stride_v, G * D, BLOCK_N)
    keys = tl.load(k_rows + column, mask=live, other=0.0)
    values = tl.load(v_rows + column, mask=live, other=0.0)
    oldest, newest = at, tl.minimum(at + BLOCK_N, now) - 1
    first = tl.maximum(oldest, past)
    end = tl.minimum(newest + WINDOW, now)
    tiles = tl.cdiv(tl.maximum(end - first, 0), BLOCK_M)
    # all keys are seen from the newest one's own query to the oldest one's last
    inner = tl.minimum(tl.cdiv(tl.maximum(newest - first, 0), BLOCK_M), tiles)
    outer = tl.maximum(inner, tl.maximum(tl.minimum(oldest + WINDOW, end) - first, 0) // BLOCK_M)
    if BLOCK_D > 128:  # of one loop, whose addresses the registers hold too
        inner, outer = 0, 0
    change_k, change_v = see(
        tl.zeros((BLOCK_N, BLOCK_D), ACC),
        tl.zeros((BLOCK_N, BLOCK_D), ACC),
        keys,
        values,
        key,
        key < now,
        first,
        end,
        inner,
        outer,
        begin,
        q,
        grad,
        lse,
        shares,
        group,
        scale,
        stride_q,
        0,
        WINDOW,
        H,
        G,
        D,
        ACC,
        BLOCK_M,
        BLOCK_D,
    )
    change_k *= scale / 1.4426950408889634
    # a zero that the compiler does not know keeps no address in a register through the loops
    key += tl.minimum(sequences, 0)
    live = (key < now)[:, None] & (column < D)
    place = (begin + key)[:, None] * (G * D) + of + column
    new = live & (key >= past)[:, None]
    tl.store(grad_k + place, change_k.to(grad_k.dtype.element_ty), mask=new)
    tl.store(grad_v + place, change_v.to(grad_v.dtype.element_ty), mask=new)
    if past_k is not None:
        place = (old + key)[:, None] * (G * D) + of + column
        before_call = live & (key < past)[:, None]
        tl.store(grad_past_k + place, change_k.to(grad_k.dtype.element_ty), mask=before_call)
        tl.store(grad_past_v + place, change_v.to(grad_v.dtype.element_ty), mask=before_call)


@triton.jit(do_not_specialize=("sequences",))
def eidetic_attention_bwd_memory_kernel(
    grad,
    lse,
    shares,
    q,
    mem_k,
    mem_v,
    mem_count,
    mem_positions,
    grad_mem_k,
    grad_mem_v,
    offsets,
    seen,
    chunk_ends,
    sequences,
    scale: tl.constexpr,
    stride_q: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the gradients of one tile of a chunk's memory and one of its heads."""
    chunk, group = tl.program_id(0).to(tl.int64), tl.program_id(2)
    sequence, before = owner_of(chunk_ends, sequences, chunk)
    past = tl.load(seen + sequence).to(tl.int32)
    token = tl.load(offsets + sequence)
    now = past + (tl.load(offsets + sequence + 1) - token).to(tl.int32)
    low = (past // WINDOW + (chunk - before).to(tl.int32)) * WINDOW
    first = tl.maximum(low, past)
    # a memory behind those of all chunks has no queries
    end = tl.where(
        chunk < tl.load(chunk_ends + sequences - 1), tl.minimum(low + WINDOW, now), first
    )
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    held = row < tl.load(mem_count + chunk)
    column = tl.arange(0, BLOCK_D)[None, :]
    place = (chunk * ROWS + row)[:, None] * (G * D) + group * D + column
    live = held[:, None] & (column < D)
    keys = tl.load(mem_k + place, mask=live, other=0.0)
    values = tl.load(mem_v + place, mask=live, other=0.0)
    key = row * 0 - WINDOW
    if mem_positions is not None:
        key = tl.load(mem_positions + chunk * ROWS + row, mask=held, other=0).to(tl.int32)
    change_k, change_v = see(
        tl.zeros((BLOCK_N, BLOCK_D), ACC),
        tl.zeros((BLOCK_N, BLOCK_D), ACC),
        keys,
        values,
        key,
        held,
        first,
        end,
        0,
        0,
        token - past,
        q,
        grad,
        lse,
        shares,
        group,
        scale,
        stride_q,
        WINDOW,
        2147483647,
        H,
        G,
        D,
        ACC,
        BLOCK_M,
        BLOCK_D,
    )
    change_k *= scale / 1.4426950408889634
    stored = (row < ROWS)[:, None] & (column < D)
    tl.store(grad_mem_k + place, change_k.to(grad_mem_k.dtype.element_ty), mask=stored)
    tl.store(grad_mem_v + place, change_v.to(grad_mem_v.dtype.element_ty), mask=stored)


class Tile(NamedTuple):
    """How a program is shaped."""

    owned: int  # the queries, or the keys, that a program owns
    met: int  # the keys, or the queries, that they meet at a time
    num_warps: int
    num_stages: int


@functools.cache
def target_of(device: torch.device) -> Literal["sm_80", "sm_90", "hip"]:
    """Return what programs are shaped for: AMD's GPUs, those with HGMMA, or all others."""
    if torch.version.hip:
        return "hip"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        return "sm_90"
    return "sm_80"


def tile(
    width: int,
    dtype: torch.dtype,
    program: Literal["forward", "decode", "query", "keys"],
    target: Literal["sm_80", "sm_90", "hip"],
) -> Tile:
    """Choose a program's shape: what the target's registers hold.

    Backward, ``query`` owns queries and ``keys`` owns keys or memory. Two stages let what is met
    next come in while the tile before is worked on; float64 has no registers left for it.
    """
    halves = dtype.itemsize == 2
    stages = 1 if dtype == torch.float64 else 2
    if program == "decode":  # one query is all that a program owns
        num_warps = 8 if width > 128 or dtype == torch.float32 else 4
        shape = Tile(16, 32 if halves and width <= 128 else 16, num_warps, stages)
    elif halves and width > 128:
        # HGMMA takes 64 rows; HMMA would compute the scores of so many twice
        keys = (64, 16) if target == "sm_90" else (32, 32)
        owned, met = {"forward": (64, 32), "query": (64, 16), "keys": keys}[program]
        shape = Tile(owned, met, 8, 2)
    elif halves:
        shape = Tile(64, 64 if program == "forward" else 32, 4 if width <= 64 else 8, 2)
    elif width > 64:
        shape = Tile(16, 16, 8, stages)
    elif dtype == torch.float64:
        shape = Tile(32, 32, 4, 1)
    else:
        shape = Tile(32 if program == "forward" else 16, 16, 4, 2)
    if target != "hip":
        return shape
    # a warp has 64 lanes there, and of up to four each lane has 512 registers
    met = 16 if halves and width > 64 and program in ("query", "keys") else shape.met
    return shape._replace(met=met, num_warps=4)


class _Grid(NamedTuple):
    """Where sequences have their blocks and chunks among the programs, found without a wait."""

    slots: int  # no fewer than blocks
    ends: Tensor  # [S] behind each sequence's last block of queries
    first_chunk: Tensor  # [S]
    chunk_ends: Tensor  # [S]


def _grid(tokens: int, call: Call, window: int, block: int) -> _Grid:
    seen, length = call.seen, call.offsets.diff()
    last, per_chunk = seen + length - 1, -(-window // block)
    first, final = (x // window * per_chunk + x % window // block for x in (seen, last))
    ends = torch.where(length > 0, final - first + 1, 0).cumsum(0)
    chunk_ends = torch.where(length > 0, last // window - seen // window + 1, 0).cumsum(0)
    # blocks are cut short where sequences begin and end, and chunks that are no multiple of them
    cuts = 2 * seen.shape[0]
    if window % block:
        cuts += tokens // window + seen.shape[0]
    first_chunk = torch.cat([chunk_ends.new_zeros(1), chunk_ends[:-1]])
    return _Grid(min(tokens, tokens // block + cuts), ends, first_chunk, chunk_ends)


def forward(tensors: Tensors, call: Call) -> tuple[Tensor, Tensor]:
    """Return outputs ``[T, H, d]`` and the logarithms of sums ``[T, H]``."""
    tensors = _prepare(tensors)
    q = tensors.q
    tokens, heads, width = q.shape
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=accumulator(q))
    if tokens:
        # one token of every sequence: a block of queries is nearly empty
        decodes = tokens == call.seen.shape[0]
        shape = tile(width, q.dtype, "decode" if decodes else "forward", target_of(q.device))
        grid = _grid(tokens, call, call.window or UNBOUNDED, shape.owned)
        launch(
            eidetic_attention_fwd_kernel,
            (grid.slots, heads),
            *tensors[:_READ],
            call.mem_count,
            call.mem_positions,
            out,
            lse,
            *_places(tensors, call, grid),
            **_query_constants(tensors, call, shape),
        )
    return out, lse


def backward(
    grad_out: Tensor,  # [T, H, d]
    out: Tensor,
    lse: Tensor,  # [T, H]
    tensors: Tensors,
    call: Call,
) -> Tensors:
    """Return the gradients of ``forward``'s tensors, None where one was absent."""
    # rows from before the call that no query sees, and all where there is no query, stay zero
    grads = Tensors(*(None if x is None else x.new_zeros(x.shape) for x in tensors))
    tensors = _prepare(tensors)
    q = tensors.q
    tokens, heads, width = q.shape
    if not tokens:
        return grads
    window = call.window or UNBOUNDED
    shape = tile(width, q.dtype, "query", target_of(q.device))
    grid = _grid(tokens, call, window, shape.owned)
    grad_out, shares = grad_out.contiguous(), torch.empty_like(lse)
    incoming = (grad_out, lse, shares, q)
    launch(
        eidetic_attention_bwd_query_kernel,
        (grid.slots, heads),
        grad_out,
        out,
        lse,
        *tensors[:_READ],
        call.mem_count,
        call.mem_positions,
        grads.q,
        shares,
        *_places(tensors, call, grid),
        **_query_constants(tensors, call, shape),
    )
    shape = tile(width, q.dtype, "keys", target_of(q.device))
    rows = 0 if tensors.past_k is None else tensors.past_k.shape[1]
    sequences, block = call.seen.shape[0], shape.owned
    keys = call.offsets.diff() + call.seen.clamp(max=rows)
    launch(
        eidetic_attention_bwd_band_kernel,
        ((tokens + sequences * rows) // block + sequences, tensors.k.shape[1]),
        *incoming,
        tensors.k,
        tensors.v,
        tensors.past_k,
        tensors.past_v,
        grads.k,
        grads.v,
        *((grads.past_k, grads.past_v) if rows else (None, None)),
        call.offsets,
        call.seen,
        (-(-keys // block)).cumsum(0),
        sequences,
        rows,
        stride_q=q.stride(0),
        stride_k=tensors.k.stride(0),
        stride_v=tensors.v.stride(0),
        WINDOW=window,
        BLOCK_M=shape.met,
        BLOCK_N=shape.owned,
        **_constants(tensors, call, shape),
    )
    if tensors.mem_k is not None:
        memories, rows, groups, _ = tensors.mem_k.shape
        tiles = (memories, cdiv(rows, shape.owned), groups)
        launch(
            eidetic_attention_bwd_memory_kernel,
            tiles,
            *incoming,
            *tensors[3:5],
            call.mem_count,
            call.mem_positions,
            *grads[3:5],
            call.offsets,
            call.seen,
            grid.chunk_ends,
            call.seen.shape[0],
            stride_q=q.stride(0),
            WINDOW=window,
            ROWS=rows,
            BLOCK_M=shape.met,
            BLOCK_N=shape.owned,
            **_constants(tensors, call, shape),
        )
    return grads


_ACC = {torch.float32: tl.float32, torch.float64: tl.float64}


def _prepare(tensors: Tensors) -> Tensors:
    """Return the tensors as the kernels read them; those without any row as absent."""
    found = []
    for name, x in zip(Tensors._fields, tensors, strict=True):
        rows = 1 if name in ("q", "k", "v") else 2
        if x is None or (rows == 2 and not x.shape[0] * x.shape[1]):
            found.append(None)
        elif rows == 1 and x.stride()[1:] == (x.shape[2], 1) and x.stride(0) < 2**24:
            found.append(x)  # rows may lie apart, 32 bits counting within a tile of them
        else:
            found.append(x.contiguous())
    return Tensors(*found)


def _places(tensors: Tensors, call: Call, grid: _Grid) -> tuple[Tensor | int, ...]:
    rows = 0 if tensors.past_k is None else tensors.past_k.shape[1]
    starts = (call.offsets, call.seen, grid.ends, grid.first_chunk)
    return (*starts, call.seen.shape[0], rows)


def _query_constants(tensors: Tensors, call: Call, shape: Tile) -> dict:
    return {
        "stride_q": tensors.q.stride(0),
        "stride_k": tensors.k.stride(0),
        "stride_v": tensors.v.stride(0),
        "WINDOW": call.window or UNBOUNDED,
        "ROWS": 0 if tensors.mem_k is None else tensors.mem_k.shape[1],
        "BLOCK_M": shape.owned,
        "BLOCK_N": shape.met,
        **_constants(tensors, call, shape),
    }


def _constants(tensors: Tensors, call: Call, shape: Tile) -> dict:
    _, heads, width = tensors.q.shape
    return {
        "scale": call.scale * LOG2_E,
        "H": heads,
        "G": tensors.k.shape[1],
        "D": width,
        "ACC": _ACC[accumulator(tensors.q)],
        "BLOCK_D": max(16, next_power_of_2(width)),
        "num_warps": shape.num_warps,
        "num_stages": shape.num_stages,
    }
