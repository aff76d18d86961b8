"""Gated linear attention on GPUs: chunks side by side where that goes, states in registers.

Forward: a program a chunk and head finds what pairs of tokens have to do with each other and, for
the delta rule, solves its triangle; then a program a sequence, head and block of values takes its
state through the chunks. Backward: the same first step; states between chunks are found again, from
each saved one by a program of its own; a program a sequence takes the gradient of the state from
the last chunk to the first; a program a chunk and head finds the gradients of tokens. ``README.md``
has the equations. Decays of pairs are exponentials of sums over just the tokens between them.

Products of bfloat16 inputs round what they multiply to bfloat16 and add in float32; those of other
dtypes round nothing. Nothing is added atomically.
"""

# a kernel launch is no ordinary call: Triton's types do not describe it
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.launches import cdiv, launch, next_power_of_2
from ssmzoo_kernels.scan import chunk_slots, interval

Row = Tensor | None

# before 3.7 Triton does not compile a scan of one column that lies as a product's result does
SCANS_A_COLUMN = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7))


@triton.jit
def owner_of(ends, segments, slot):
    """Return the sequence that a slot belongs to, and its place among that sequence's slots."""
    low = slot * 0
    high = low + segments - 1
    while low < high:
        middle = (low + high) // 2
        behind = tl.load(ends + middle) > slot
        high = tl.where(behind, middle, high)
        low = tl.where(behind, low, middle + 1)
    return low.to(tl.int64), slot - tl.load(ends + low - 1, mask=low > 0, other=0)


@triton.jit
def product(a, b, DOT: tl.constexpr, ACC: tl.constexpr):
    """Return a matrix product of numbers rounded to DOT, with sums in ACC."""
    return tl.dot(a.to(DOT), b.to(DOT), input_precision="ieee", out_dtype=ACC)


@triton.jit
def tile_of(x, token, stride, count, SIZE, ACC: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Load ``[C, BLOCK]``: rows of tokens, zeros behind the last one and behind SIZE columns."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, BLOCK)[None, :]
    at = x + token * stride + (row * stride + column)
    return tl.load(at, mask=(row < count) & (column < SIZE), other=0.0).to(ACC)


@triton.jit
def logs_of(
    log_decay,
    token,
    head,
    first,
    stride,
    count,
    E: tl.constexpr,
    ACC: tl.constexpr,
    C: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Load logarithms of decays ``[C, BLOCK_E]`` from a column on, zeros where there are none."""
    if log_decay is None:
        return tl.zeros((C, BLOCK_E), ACC)
    else:
        at = log_decay + head * E + first
        return tile_of(at, token, stride, count, E - first, ACC, C, BLOCK_E)


@triton.jit
def strengths_of(beta, token, head, stride, count, ACC: tl.constexpr, C: tl.constexpr):
    """Load beta ``[C]``, or ones."""
    row = tl.arange(0, C)
    if beta is None:
        return tl.full((C,), 1.0, ACC)
    else:
        return tl.load(beta + (token + row) * stride + head, mask=row < count, other=0.0).to(ACC)


@triton.jit
def sums_down(logs, REVERSE: tl.constexpr, C: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return sums of logarithms ``[C, BLOCK_E]`` from the first token on, or to the last."""
    if BLOCK_E == 1 and not SCANS_A_COLUMN:
        return tl.cumsum(tl.reshape(logs, (C,)), axis=0, reverse=REVERSE)[:, None]
    else:
        return tl.cumsum(logs, axis=0, reverse=REVERSE)


@triton.jit
def between(logs, C: tl.constexpr):
    """Return what is left behind token i of what token j wrote, ``[C, C]``, of decays of heads."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    sums = tl.cumsum(tl.where(row > column, logs, 0.0), axis=0)
    return tl.where(row >= column, tl.exp(sums), 0.0)


@triton.jit
def reached(logs, k, j, C: tl.constexpr):
    """Return what is left behind each token of the key of token j, and its decays."""
    row = tl.arange(0, C)[:, None]
    left = tl.where(row >= j, tl.exp(tl.cumsum(tl.where(row > j, logs, 0.0), axis=0)), 0.0)
    return left * tl.sum(tl.where(row == j, k, 0.0), axis=0)[None, :], left


@triton.jit(do_not_specialize=["segments"])
def pairs_kernel(
    q,
    k,
    log_decay,
    beta,
    weights,
    solved,
    turned,
    offsets,
    ends,
    segments,
    stride_q: tl.constexpr,
    stride_k: tl.constexpr,
    stride_g: tl.constexpr,
    stride_b: tl.constexpr,
    H: tl.constexpr,
    COPIES: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    DELTA: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write, of a chunk, queries by keys, and the inverse of what errors and keys are solved with.

    ``solved`` gets T, ``turned`` its counterpart whose transpose the backward multiplies with.
    """
    slot, head = tl.program_id(0), tl.program_id(1)
    if slot < tl.load(ends + segments - 1):
        segment, place = owner_of(ends, segments, slot)
        token = tl.load(offsets + segment) + place.to(tl.int64) * C
        count = tl.minimum(tl.load(offsets + segment + 1) - token, C)
        row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        group = head // COPIES
        # all loads come before the first product; tiles last, as they wait on their way to it
        strength = strengths_of(beta, token, head, stride_b, count, ACC, C)
        logs = logs_of(log_decay, token, head, 0, stride_g, count, E, ACC, C, BLOCK_E)
        queries = tile_of(q + group * K, token, stride_q, count, K, ACC, C, BLOCK_K)
        keys = tile_of(k + group * K, token, stride_k, count, K, ACC, C, BLOCK_K)
        known = tl.zeros((C, C), ACC)
        if BLOCK_E == 1:
            left = between(logs, C)
            asked = product(queries, tl.trans(keys), DOT, ACC) * left
            if DELTA:
                known = product(keys, tl.trans(keys), DOT, ACC) * left
        else:
            asked = tl.zeros((C, C), ACC)
            for j in range(C):
                on, _ = reached(logs, keys, j, C)
                asked = tl.where(column == j, tl.sum(queries * on, axis=1)[:, None], asked)
                if DELTA:
                    known = tl.where(column == j, tl.sum(keys * on, axis=1)[:, None], known)
        at = ((token + row) * H + head) * C + column
        live = row < count
        tl.store(weights + at, asked, mask=live)
        if DELTA:
            known = tl.where(row > column, known, 0.0)
            matrix = known * strength[None, :]
            inverse = tl.where(row == column, 1.0, tl.zeros((C, C), ACC))
            for i in range(1, C):
                own = tl.sum(tl.where(row == i, matrix, 0.0), axis=0)
                new = tl.sum(own[:, None] * inverse, axis=0)
                inverse = tl.where(row == i, inverse - new[None, :], inverse)
            tl.store(solved + at, inverse, mask=live)
            if turned is not None:
                other = tl.dot(inverse, known, input_precision="ieee", out_dtype=ACC)
                other = tl.where(row == column, 1.0, 0.0) - strength[:, None] * other
                tl.store(turned + at, other, mask=live)


@triton.jit(do_not_specialize=["segments"])
def march_kernel(
    q,
    k,
    v,
    log_decay,
    beta,
    initial,
    weights,
    solved,
    out,
    final,
    saved,
    states,
    errors,
    offsets,
    ends,
    segments,
    scale,
    stride_q: tl.constexpr,
    stride_k: tl.constexpr,
    stride_v: tl.constexpr,
    stride_g: tl.constexpr,
    stride_b: tl.constexpr,
    H: tl.constexpr,
    COPIES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    BETWEEN: tl.constexpr,
    DELTA: tl.constexpr,
    AGAIN: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Take states through the chunks of a sequence and write outputs.

    AGAIN: through those behind a saved state, and write states and errors.
    """
    head, first_column = tl.program_id(1), tl.program_id(2) * BLOCK_V
    segment, start = tl.program_id(0).to(tl.int64), tl.program_id(0).to(tl.int64) * 0
    runs = True
    if AGAIN:
        slot = tl.program_id(0)
        runs = slot < tl.load(ends + segments - 1)
        slot = tl.where(runs, slot, 0)
        segment, place = owner_of(ends, segments, slot)
        start = place.to(tl.int64) * BETWEEN
    begin = tl.load(offsets + segment)
    stop = tl.load(offsets + segment + 1)
    at_saved = begin // BETWEEN + segment
    at_chunk = begin // C + segment
    first = begin + start
    if AGAIN:
        stop = tl.where(runs, tl.minimum(stop, first + BETWEEN), first)
    c, row = tl.arange(0, BLOCK_K)[:, None], tl.arange(0, C)[:, None]
    n = first_column + tl.arange(0, BLOCK_V)[None, :]
    inside, at_state = (c < K) & (n < V), c * V + n
    if AGAIN:
        source = saved + ((at_saved + start // BETWEEN) * H + head) * K * V
        state = tl.load(source + at_state, mask=inside & runs, other=0.0)
    elif initial is not None:
        source = initial + (segment * H + head) * K * V
        state = tl.load(source + at_state, mask=inside, other=0.0).to(ACC)
    else:
        state = tl.zeros((BLOCK_K, BLOCK_V), ACC)
    for token in range(first, stop, C):
        count = tl.minimum(stop - token, C)
        done = token - begin
        if AGAIN:
            target = states + ((at_chunk + done // C) * H + head) * K * V
            tl.store(target + at_state, state, mask=inside)
        elif saved is not None:
            target = saved + ((at_saved + done // BETWEEN) * H + head) * K * V
            tl.store(target + at_state, state, mask=inside & (done % BETWEEN == 0))
        group = head // COPIES
        keys = tile_of(k + group * K, token, stride_k, count, K, ACC, C, BLOCK_K)
        values = tile_of(
            v + head * V + first_column, token, stride_v, count, V - first_column, ACC, C, BLOCK_V
        )
        logs = logs_of(log_decay, token, head, 0, stride_g, count, E, ACC, C, BLOCK_E)
        later = logs_of(log_decay, token + 1, head, 0, stride_g, count - 1, E, ACC, C, BLOCK_E)
        kept = tl.exp(sums_down(logs, False, C, BLOCK_E))
        left = tl.exp(sums_down(later, True, C, BLOCK_E))
        at_pair = ((token + row) * H + head) * C + tl.arange(0, C)[None, :]
        if DELTA:
            inverse = tl.load(solved + at_pair, mask=row < count, other=0.0)
            values = product(inverse, values - product(kept * keys, state, DOT, ACC), DOT, ACC)
        at_token = ((token + row) * H + head) * V + n
        live = (row < count) & (n < V)
        if AGAIN:
            tl.store(errors + at_token, values, mask=live)
        written = strengths_of(beta, token, head, stride_b, count, ACC, C)[:, None] * values
        if not AGAIN:
            queries = tile_of(q + group * K, token, stride_q, count, K, ACC, C, BLOCK_K)
            asked = tl.load(weights + at_pair, mask=row < count, other=0.0)
            read = product(kept * queries, state, DOT, ACC) + product(asked, written, DOT, ACC)
            tl.store(out + at_token, (scale * read).to(out.dtype.element_ty), mask=live)
        last = tl.exp(tl.sum(logs, axis=0))
        state = last[:, None] * state + product(tl.trans(left * keys), written, DOT, ACC)
    if not AGAIN:
        tl.store(final + (segment * H + head) * K * V + at_state, state, mask=inside)


@triton.jit
def march_back_kernel(
    q,
    k,
    log_decay,
    beta,
    grad_out,
    grad_final,
    weights,
    turned,
    carries,
    grad_errors,
    grad_initial,
    offsets,
    scale,
    stride_q: tl.constexpr,
    stride_k: tl.constexpr,
    stride_g: tl.constexpr,
    stride_b: tl.constexpr,
    H: tl.constexpr,
    COPIES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    DELTA: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Take the gradient of the state back through a sequence; write it and those of errors."""
    segment, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_column = tl.program_id(2) * BLOCK_V
    begin, stop = tl.load(offsets + segment), tl.load(offsets + segment + 1)
    c, row = tl.arange(0, BLOCK_K)[:, None], tl.arange(0, C)[:, None]
    n = first_column + tl.arange(0, BLOCK_V)[None, :]
    inside, at_state = (c < K) & (n < V), c * V + n
    at_end = (segment * H + head) * K * V + at_state
    carry = tl.zeros((BLOCK_K, BLOCK_V), ACC)
    if grad_final is not None:
        carry = tl.load(grad_final + at_end, mask=inside, other=0.0).to(ACC)
    chunks = tl.cdiv(stop - begin, C)
    for done in range(0, chunks):
        number = chunks - 1 - done
        token = begin + number * C
        count = tl.minimum(stop - token, C)
        target = carries + ((begin // C + segment + number) * H + head) * K * V
        tl.store(target + at_state, carry, mask=inside)
        group = head // COPIES
        queries = tile_of(q + group * K, token, stride_q, count, K, ACC, C, BLOCK_K)
        keys = tile_of(k + group * K, token, stride_k, count, K, ACC, C, BLOCK_K)
        logs = logs_of(log_decay, token, head, 0, stride_g, count, E, ACC, C, BLOCK_E)
        later = logs_of(log_decay, token + 1, head, 0, stride_g, count - 1, E, ACC, C, BLOCK_E)
        kept = tl.exp(sums_down(logs, False, C, BLOCK_E))
        left = tl.exp(sums_down(later, True, C, BLOCK_E))
        at_token = ((token + row) * H + head) * V + n
        live = (row < count) & (n < V)
        at_pair = ((token + row) * H + head) * C + tl.arange(0, C)[None, :]
        grad = scale * tl.load(grad_out + at_token, mask=live, other=0.0).to(ACC)
        asked = tl.load(weights + at_pair, mask=row < count, other=0.0)
        errors = product(tl.trans(asked), grad, DOT, ACC) + product(left * keys, carry, DOT, ACC)
        last = tl.exp(tl.sum(logs, axis=0))
        carry = last[:, None] * carry + product(tl.trans(kept * queries), grad, DOT, ACC)
        if DELTA:
            inverse = tl.load(turned + at_pair, mask=row < count, other=0.0)
            errors = product(tl.trans(inverse), errors, DOT, ACC)
            strength = strengths_of(beta, token, head, stride_b, count, ACC, C)
            values = strength[:, None] * errors
            carry -= product(tl.trans(kept * keys), values, DOT, ACC)
        tl.store(grad_errors + at_token, errors, mask=live)
    if grad_initial is not None:
        tl.store(grad_initial + at_end, carry, mask=inside)


@triton.jit(do_not_specialize=["segments", "tokens"])
def gradients_kernel(
    q,
    k,
    log_decay,
    beta,
    grad_out,
    errors,
    grad_errors,
    states,
    carries,
    grad_q,
    grad_k,
    grad_v,
    grad_decay,
    grad_beta,
    offsets,
    ends,
    segments,
    tokens,
    scale,
    stride_q: tl.constexpr,
    stride_k: tl.constexpr,
    stride_g: tl.constexpr,
    stride_b: tl.constexpr,
    H: tl.constexpr,
    COPIES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    DELTA: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write the gradients of a chunk's tokens, for some rows of the state.

    Rows add up in the gradients of decays of heads: ``grad_decay`` gets parts.
    """
    slot, head = tl.program_id(0), tl.program_id(1)
    if slot < tl.load(ends + segments - 1):
        segment, place = owner_of(ends, segments, slot)
        begin = tl.load(offsets + segment)
        token = begin + place.to(tl.int64) * C
        count = tl.minimum(tl.load(offsets + segment + 1) - token, C)
        part = tl.program_id(2)
        first_row = part * BLOCK_C
        c, row = first_row + tl.arange(0, BLOCK_C)[:, None], tl.arange(0, C)[:, None]
        column = tl.arange(0, C)[None, :]
        strength = strengths_of(beta, token, head, stride_b, count, ACC, C)[:, None]
        first = 0
        if BLOCK_E > 1:
            first = first_row
        logs = logs_of(log_decay, token, head, first, stride_g, count, E, ACC, C, BLOCK_E)
        later = logs_of(log_decay, token + 1, head, first, stride_g, count - 1, E, ACC, C, BLOCK_E)
        group = head // COPIES
        at_q, at_k, wide = q + group * K + first_row, k + group * K + first_row, K - first_row
        queries = tile_of(at_q, token, stride_q, count, wide, ACC, C, BLOCK_C)
        keys = tile_of(at_k, token, stride_k, count, wide, ACC, C, BLOCK_C)
        source = ((begin // C + segment + place) * H + head) * K * V
        read = tl.zeros((C, BLOCK_C), ACC)
        asked = tl.zeros((C, BLOCK_C), ACC)
        handed = tl.zeros((C, BLOCK_C), ACC)
        own = tl.zeros((C, C), ACC)
        other = tl.zeros((C, C), ACC)
        sums = tl.zeros((C,), ACC)
        through = tl.zeros((BLOCK_C,), ACC)
        for column_v in range(0, V, BLOCK_V):
            n = column_v + tl.arange(0, BLOCK_V)[None, :]
            inside, live = (c < K) & (n < V), (row < count) & (n < V)
            at = ((token + row) * H + head) * V + n
            grad = scale * tl.load(grad_out + at, mask=live, other=0.0).to(ACC)
            error = tl.load(errors + at, mask=live, other=0.0)
            change = tl.load(grad_errors + at, mask=live, other=0.0)
            state = tl.load(states + source + c * V + n, mask=inside, other=0.0)
            carry = tl.load(carries + source + c * V + n, mask=inside, other=0.0)
            sums += tl.sum(error * change, axis=1)
            through += tl.sum(state * carry, axis=1)
            error = strength * error
            change = strength * change
            tl.store(grad_v + at, change, mask=live & (part == 0))
            read += product(grad, tl.trans(state), DOT, ACC)
            handed += product(error, tl.trans(carry), DOT, ACC)
            own += product(grad, tl.trans(error), DOT, ACC)
            if DELTA:
                asked -= product(change, tl.trans(state), DOT, ACC)
                other -= product(change, tl.trans(error), DOT, ACC)
        own = tl.where(row >= column, own, 0.0)
        other = tl.where(row > column, other, 0.0)
        i = tl.arange(0, C)
        if grad_beta is not None:
            tl.store(grad_beta + (token + i) * H + head, sums, mask=(i < count) & (part == 0))
        kept = tl.exp(sums_down(logs, False, C, BLOCK_E))
        left = tl.exp(sums_down(later, True, C, BLOCK_E))
        columns = first_row + tl.arange(0, BLOCK_C)[None, :]
        at_rows = (token + row) * (H * K) + head * K + columns
        live = (row < count) & (columns < K)
        to_q = kept * read
        to_k = kept * asked + left * handed
        # a decay counts for all that is written before its token and read at it or later
        read = kept * (queries * read + keys * asked)
        handed = left * keys * handed
        if BLOCK_E == 1:
            decays = between(logs, C)
            crossing = own * product(queries, tl.trans(keys), DOT, ACC)
            if DELTA:
                crossing += other * product(keys, tl.trans(keys), DOT, ACC)
            crossing = tl.where(row > column, crossing * decays, 0.0)
            own *= decays
            other *= decays
            to_q += product(own, keys, DOT, ACC)
            to_k += product(tl.trans(own), queries, DOT, ACC)
            if DELTA:
                to_k += product(other, keys, DOT, ACC)
                to_k += product(tl.trans(other), keys, DOT, ACC)
            if grad_decay is not None:
                below = tl.cumsum(crossing, axis=0, reverse=True)
                below += tl.sum(handed, axis=1)[None, :]
                sums = tl.sum(tl.where(row > column, below, 0.0), axis=1)
                sums += tl.cumsum(tl.sum(read, axis=1), axis=0, reverse=True)
                sums += tl.sum(through * tl.sum(tl.exp(tl.sum(logs, axis=0)), axis=0), axis=0)
                at = (part.to(tl.int64) * tokens + token + i) * H + head
                tl.store(grad_decay + at, sums, mask=i < count)
        else:
            before = tl.where(row > column, 1.0, tl.zeros((C, C), ACC))
            to_decay = tl.dot(before, handed, input_precision="ieee", out_dtype=ACC)
            to_decay += tl.cumsum(read, axis=0, reverse=True)
            to_decay += (through * tl.exp(tl.sum(logs, axis=0)))[None, :]
            for j in range(C):
                on, decays = reached(logs, keys, j, C)
                asks = tl.sum(tl.where(column == j, own, 0.0), axis=1)[:, None]
                meets = tl.sum(tl.where(column == j, other, 0.0), axis=1)[:, None]
                to_q += asks * on
                to_k += meets * on
                back = asks * queries + meets * keys
                to_k += tl.where(row == j, tl.sum(decays * back, axis=0)[None, :], 0.0)
                crossing = tl.where(row > j, on * back, 0.0)
                crossing = tl.cumsum(crossing, axis=0, reverse=True)
                to_decay += tl.where(row > j, crossing, 0.0)
            tl.store(grad_decay + at_rows, to_decay, mask=live)
        tl.store(grad_q + at_rows, to_q, mask=live)
        tl.store(grad_k + at_rows, to_k, mask=live)


@triton.jit
def step_kernel(
    q,
    k,
    v,
    log_decay,
    beta,
    initial,
    out,
    final,
    offsets,
    scale,
    stride_q: tl.constexpr,
    stride_k: tl.constexpr,
    stride_v: tl.constexpr,
    stride_g: tl.constexpr,
    stride_b: tl.constexpr,
    H: tl.constexpr,
    COPIES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    DELTA: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Decay, write and read token by token, for sequences of about one."""
    segment, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BLOCK_K)
    n = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    at = (segment * H + head) * K * V + c[:, None] * V + n[None, :]
    inside = (c < K)[:, None] & (n < V)[None, :]
    state = tl.zeros((BLOCK_K, BLOCK_V), ACC)
    if initial is not None:
        state = tl.load(initial + at, mask=inside, other=0.0).to(ACC)
    group = head // COPIES
    for token in range(tl.load(offsets + segment), tl.load(offsets + segment + 1)):
        queries = tl.load(q + token * stride_q + group * K + c, mask=c < K, other=0.0).to(ACC)
        keys = tl.load(k + token * stride_k + group * K + c, mask=c < K, other=0.0).to(ACC)
        written = tl.load(v + token * stride_v + head * V + n, mask=n < V, other=0.0).to(ACC)
        if log_decay is not None:
            logs = log_decay + token * stride_g + head * E + c % E
            state *= tl.exp(tl.load(logs, mask=c < K, other=0.0).to(ACC))[:, None]
        if DELTA:
            written -= tl.sum(keys[:, None] * state, axis=0)
        if beta is not None:
            written *= tl.load(beta + token * stride_b + head).to(ACC)
        state += keys[:, None] * written[None, :]
        read = scale * tl.sum(queries[:, None] * state, axis=0)
        tl.store(out + (token * H + head) * V + n, read.to(out.dtype.element_ty), mask=n < V)
    tl.store(final + at, state, mask=inside)


class Tile(NamedTuple):
    """How programs are shaped."""

    tokens: int
    block_v: int
    block_k: int  # rows of the state of a program that finds gradients
    num_warps: int


def tile(keys: int, width: int, rowwise: bool, dtype: torch.dtype, chunk: int) -> Tile:
    """Choose the programs' shape, by the registers of sm_80 and sm_90."""
    rows = max(16, next_power_of_2(keys))
    tokens = 16 if rowwise or rows > 128 or dtype != torch.bfloat16 else min(chunk, 32)
    numbers = 4096 if dtype == torch.bfloat16 else 1024
    block_v = max(16, min(next_power_of_2(max(1, width)), numbers // rows, 32))
    block_k = min(rows, 16 if dtype == torch.float64 else 32)
    return Tile(tokens, block_v, block_k, 4 if rows < 64 and tokens == 16 else 8)


def forward(
    q: Tensor,  # [T, G, K]
    k: Tensor,  # [T, G, K]
    v: Tensor,  # [T, H, V]
    log_decay: Row,  # [T, H, 1] or [T, H, K]
    beta: Row,  # [T, H]
    initial_state: Row,  # [S, H, K, V]
    offsets: Tensor,  # [S + 1] int64
    save: bool,
    rule: str,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, final states and, with ``save``, the state before every interval."""
    call = _Call(q, k, v, log_decay, beta, initial_state, offsets, rule, chunk)
    (tokens, heads, width), keys, segments = v.shape, q.shape[2], call.segments
    out = v.new_empty(v.shape)
    final = v.new_empty(segments, heads, keys, width, dtype=call.exact)
    slots = chunk_slots(tokens, segments, call.between) if save else 0
    saved = final.new_empty(slots, heads, keys, width)
    if not final.numel():
        return out, final, saved
    blocks = (segments, heads, cdiv(width, call.shape.block_v))
    if tokens <= segments and not save:
        launch(
            step_kernel,
            blocks,
            *call.tensors,
            out,
            final,
            offsets,
            scale,
            stride_v=call.tensors[2].stride(0),
            BLOCK_V=call.shape.block_v,
            **call.constants("DOT", "C", "BLOCK_E"),
        )
        return out, final, saved
    weights, solved, _ = call.pairs(backward=False)
    launch(
        march_kernel,
        blocks,
        *call.tensors,
        weights,
        solved,
        out,
        final,
        saved if save else None,
        None,
        None,
        offsets,
        None,
        segments,
        scale,
        stride_v=call.tensors[2].stride(0),
        BETWEEN=call.between,
        AGAIN=False,
        BLOCK_V=call.shape.block_v,
        **call.constants(),
    )
    return out, final, saved


def backward(
    grad_out: Row,  # [T, H, V]
    grad_final: Row,  # [S, H, K, V]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Row,
    beta: Row,
    initial_state: Row,
    offsets: Tensor,
    saved: Tensor,  # [slots, H, K, V]
    rule: str,
    scale: float,
    chunk: int,
) -> tuple[Row, ...]:
    """Return the gradients of the inputs, from the states that the forward saved."""
    call = _Call(q, k, v, log_decay, beta, initial_state, offsets, rule, chunk)
    exact, segments = call.exact, call.segments
    (tokens, heads, width), (_, groups, keys) = v.shape, q.shape
    size = call.shape.tokens
    grad_v = v.new_zeros(v.shape, dtype=exact)
    grad_q, grad_k = (v.new_zeros(tokens, heads, keys, dtype=exact) for _ in range(2))
    block = call.shape.block_k
    parts = cdiv(keys, block)
    grad_decay = parts_of_decay = None
    if log_decay is not None:
        grad_decay = parts_of_decay = v.new_zeros(log_decay.shape, dtype=exact)
        if call.rows == 1:
            parts_of_decay = v.new_zeros(parts, *log_decay.shape, dtype=exact)
    grad_beta = None if beta is None else v.new_zeros(beta.shape, dtype=exact)
    grad_initial = None
    if initial_state is not None:
        grad_initial = v.new_zeros(initial_state.shape, dtype=exact)
        if grad_final is not None:
            grad_initial.copy_(grad_final)  # of no tokens
    if tokens and heads and width:
        grad_out = torch.zeros_like(grad_v) if grad_out is None else grad_out.contiguous()
        grad_final = None if grad_final is None else grad_final.contiguous()
        slots = chunk_slots(tokens, segments, size)
        states, carries = v.new_empty(2, slots, heads, keys, width, dtype=exact)
        errors, grad_errors = v.new_empty(2, tokens, heads, width, dtype=exact)
        blocks = cdiv(width, call.shape.block_v)
        spans = chunk_slots(tokens, segments, call.between)
        weights, solved, turned = call.pairs(backward=True)
        launch(
            march_kernel,
            (spans, heads, blocks),
            *call.tensors,
            weights,
            solved,
            None,
            None,
            saved,
            states,
            errors,
            offsets,
            call.ends(call.between),
            segments,
            scale,
            stride_v=call.tensors[2].stride(0),
            BETWEEN=call.between,
            AGAIN=True,
            BLOCK_V=call.shape.block_v,
            **call.constants(),
        )
        q, k, _, log_decay, beta, _ = call.tensors
        launch(
            march_back_kernel,
            (segments, heads, blocks),
            q,
            k,
            log_decay,
            beta,
            grad_out,
            grad_final,
            weights,
            turned,
            carries,
            grad_errors,
            grad_initial,
            offsets,
            scale,
            BLOCK_V=call.shape.block_v,
            **call.constants(),
        )
        launch(
            gradients_kernel,
            (slots, heads, parts),
            q,
            k,
            log_decay,
            beta,
            grad_out,
            errors,
            grad_errors,
            states,
            carries,
            grad_q,
            grad_k,
            grad_v,
            parts_of_decay,
            grad_beta,
            offsets,
            call.ends(size),
            segments,
            tokens,
            scale,
            BLOCK_V=call.shape.block_v,
            BLOCK_C=block,
            **call.constants("BLOCK_K") | ({"BLOCK_E": block} if call.rows > 1 else {}),
        )
    if parts_of_decay is not None and call.rows == 1:
        grad_decay = parts_of_decay.sum(dim=0)
    if groups < heads:
        grad_q, grad_k = (x.unflatten(1, (groups, -1)).sum(dim=2) for x in (grad_q, grad_k))
    return grad_q, grad_k, grad_v, grad_decay, grad_beta, grad_initial


_ACC = {torch.float32: tl.float32, torch.float64: tl.float64}


class _Call:
    """A call's tensors as kernels read them, and the arguments that its launches share."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Row,
        beta: Row,
        initial_state: Row,
        offsets: Tensor,
        rule: str,
        chunk: int,
    ) -> None:
        state = None if initial_state is None else initial_state.contiguous()
        rows = (_rows(x) for x in (q, k, v, log_decay, beta))
        self.tensors: tuple[Any, ...] = (*rows, state)
        self.offsets, self.segments = offsets, offsets.shape[0] - 1
        self.exact, self.delta = accumulator(q), rule == "delta"
        self.between = interval(q.shape[2], chunk)
        self.rows = 1 if log_decay is None else log_decay.shape[2]
        half = all(x.dtype == torch.bfloat16 for x in (q, k, v))
        dtype = torch.bfloat16 if half else self.exact
        self.shape = tile(q.shape[2], v.shape[2], self.rows > 1, dtype, chunk)
        self.dot = tl.bfloat16 if half else _ACC[self.exact]

    def ends(self, size: int) -> Tensor:
        """Return how many pieces of so many tokens there are up to each sequence's end."""
        return (-(-self.offsets.diff() // size)).cumsum(0)

    def constants(self, *absent: str) -> dict[str, Any]:
        """Return what is compiled into the kernels, without what one does not take."""
        q, k, v, log_decay, beta, _ = self.tensors
        keys = q.shape[2]
        block = max(16, next_power_of_2(keys))
        named = {
            "stride_q": q.stride(0),
            "stride_k": k.stride(0),
            "stride_g": 0 if log_decay is None else log_decay.stride(0),
            "stride_b": 0 if beta is None else beta.stride(0),
            "H": v.shape[1],
            "COPIES": v.shape[1] // q.shape[1],
            "K": keys,
            "V": v.shape[2],
            "E": self.rows,
            "DELTA": self.delta,
            "ACC": _ACC[self.exact],
            "DOT": self.dot,
            "C": self.shape.tokens,
            "BLOCK_K": block,
            "BLOCK_E": block if self.rows > 1 else 1,
            "num_warps": self.shape.num_warps,
            "num_stages": 3 if self.dot == tl.bfloat16 else 2,
        }
        return {name: x for name, x in named.items() if name not in absent}

    def pairs(self, *, backward: bool) -> tuple[Tensor, Row, Row]:
        """Launch the kernel of pairs; return its matrices, a row a token."""
        q, k, v, log_decay, beta, _ = self.tensors
        tokens, heads, _ = v.shape
        size = self.shape.tokens
        count = 1 + self.delta * (1 + backward)
        made = v.new_empty(count, tokens, heads, size, dtype=self.exact)
        weights, solved, turned = [*made, None, None][:3]
        launch(
            pairs_kernel,
            (chunk_slots(tokens, self.segments, size), heads),
            q,
            k,
            log_decay,
            beta,
            weights,
            solved,
            turned,
            self.offsets,
            self.ends(size),
            self.segments,
            **self.constants("V") | {"num_warps": 4 if q.shape[2] <= 64 else 8},
        )
        return weights, solved, turned


def _rows(x: Row) -> Row:
    """Return a tensor whose heads and columns are adjacent; tokens may lie apart."""
    if x is None or (x.shape[0] and x[0].is_contiguous() and x.stride(0) < 2**24):
        return x  # 32 bits count within a tile of them
    return x.contiguous()
