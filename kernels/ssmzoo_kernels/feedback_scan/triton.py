"""COFFEE's scan on GPUs: a march token by token, its adjoint, and Newton's method on tiles.

The march and its adjoint keep a ``[BLOCK_N, BLOCK_D]`` tile of one segment's states in registers:
a program is a segment and a block of channels. Of a warp's 32 lanes ``32 / BLOCK_D`` share a
channel, one where BLOCK_D is 32; a lane has every so many-th of its states. A nonlinear recurrence
cannot be cut, so nothing is gained by shorter spans; where segments and channels are few, blocks
are narrower.

Newton's method takes a tile ``[BLOCK_L, BLOCK_M]`` of tokens by channel and state together, solves
it, and goes on from its last row.
"""

# a kernel launch is no ordinary call: Triton's types do not describe it
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import JITFunction

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.feedback_scan.inputs import Gradients, Inputs, Stop
from ssmzoo_kernels.feedback_scan.newton import LIMIT, NotConverged
from ssmzoo_kernels.launches import cdiv, launch_named, next_power_of_2
from ssmzoo_kernels.scan import chunk_slots, interval
from ssmzoo_kernels.scan.triton import (
    FILL,
    cells,
    channels_and_states,
    every_register,
    load_rows,
    load_vector,
    near_rows,
    row_at,
    rows,
    state_at,
    unfold,
    whole,
    widened,
)

CHUNK = 64

# padded states have this rate and a gate half open, which makes them u / 2: bounded whatever u is
_PADDED = tl.constexpr(-2.0)
_LOG2E = tl.constexpr(1.4426950408889634)
_FARTHEST = tl.constexpr(LIMIT)


@triton.jit
def opened(exponent):
    """Return ``1 / (1 + 2^exponent)``, finite and exact in its limits; NaN stays NaN."""
    most = 1000.0 if exponent.dtype == tl.float64 else 120.0
    return 1.0 / (1.0 + tl.exp2(tl.minimum(exponent, most, propagate_nan=tl.PropagateNan.ALL)))


@triton.jit
def load_tile(x, d, n, N: tl.constexpr, exists, other: tl.constexpr, ACC: tl.constexpr):
    """Load a parameter ``[D, N]`` as ``[BLOCK_N, BLOCK_D]``; ``other`` where nothing is."""
    return tl.load(cells(x, n, d, 1, N), mask=exists, other=other).to(ACC)


@triton.jit
def load_inputs(
    u,
    drive,
    base,
    stop,
    stride_u: tl.constexpr,
    stride_drive: tl.constexpr,
    d,
    D: tl.constexpr,
    ACC: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Load u of ``TOKENS`` tokens, and their gates' inputs where these are not states."""
    values = widened(load_rows(u, base, stop, stride_u, d, D, TOKENS, COUNTED=False), ACC)
    gates = values
    if drive is not None:
        gates = widened(
            load_rows(drive, base, stop, stride_drive, d, D, TOKENS, COUNTED=False), ACC
        )
    return values, gates


@triton.jit
def step(state, u_t, gate_input, lam, folded, live):
    """Return the next state; ``folded`` is ``-w log2(e)``, ``gate_input`` the gate's input."""
    gate = tl.where(live, opened(folded * gate_input), 0.0)
    return state + gate * (lam * state + u_t[None, :])


@triton.jit
def feedback_fwd_kernel(
    u,
    lam,
    w,
    C,
    w_gamma,
    skip,
    drive,
    initial,
    out,
    final,
    saved,
    offsets,
    D: tl.constexpr,
    N: tl.constexpr,
    stride_u: tl.constexpr,
    stride_drive: tl.constexpr,
    ACC: tl.constexpr,
    INTERVAL: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """March through one segment and write its outputs."""
    segment = tl.program_id(0).to(tl.int64)
    d, n, exists = channels_and_states(tl.program_id(1), D, N, BLOCK_N, BLOCK_D)
    first = tl.load(offsets + segment)
    stop = tl.load(offsets + segment + 1)
    rate = load_tile(lam, d, n, N, exists, _PADDED, ACC)
    folded = load_tile(w, d, n, N, exists, 0.0, ACC) * -_LOG2E
    readout = load_tile(C, d, n, N, exists, 0.0, ACC)
    if w_gamma is not None:
        filtering = load_tile(w_gamma, d, n, N, exists, 0.0, ACC)
    through = load_vector(skip, d, D, ACC)
    state = tl.zeros((BLOCK_N, BLOCK_D), ACC)
    if initial is not None:
        state += tl.load(cells(initial + segment * (N * D), n, d, 1, N), mask=exists, other=0.0).to(
            ACC
        )
    ahead = load_inputs(u, drive, first, stop, stride_u, stride_drive, d, D, ACC, TOKENS)
    for kept in range(first, stop, INTERVAL):
        if saved is not None:
            slot = first // INTERVAL + segment + (kept - first) // INTERVAL
            tl.store(state_at(saved, slot, n, d, D, N), state, mask=exists)
        for base in range(kept, tl.minimum(kept + INTERVAL, stop), TOKENS):
            values, gates = ahead
            ahead = load_inputs(
                u, drive, base + TOKENS, stop, stride_u, stride_drive, d, D, ACC, TOKENS
            )
            for i in tl.static_range(TOKENS):
                live = base + i < stop
                if drive is None:
                    state = step(state, values[i], state, rate, folded, live)
                else:
                    state = step(state, values[i], gates[i][None, :], rate, folded, live)
                y = tl.sum(readout * state, axis=0)
                if w_gamma is not None:
                    y *= opened(tl.sum(filtering * state, axis=0) * -_LOG2E)
                y += through * values[i]
                here = live & (d < D)
                tl.store(row_at(out, base, i, D, d), y.to(out.dtype.element_ty), mask=here)
    tl.store(cells(final + segment * (N * D), n, d, 1, N), state, mask=exists)


@triton.jit(do_not_specialize=("first_segment",))
def feedback_bwd_kernel(
    grad_out,
    grad_final,
    u,
    lam,
    w,
    C,
    w_gamma,
    skip,
    drive,
    saved,
    scratch,
    grad_u,
    grad_lam,
    grad_w,
    grad_C,
    grad_gamma,
    grad_skip,
    grad_drive,
    grad_initial,
    offsets,
    first_segment,
    D: tl.constexpr,
    N: tl.constexpr,
    stride_grad: tl.constexpr,
    stride_u: tl.constexpr,
    stride_drive: tl.constexpr,
    ACC: tl.constexpr,
    INTERVAL: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Walk one segment backwards and write its gradients, those of parameters as its share.

    A march from the state saved before an interval leads to a chunk in it. Within a chunk states
    are computed anew: first every TOKENS-th, to scratch, then, going back, those of one group of
    TOKENS, which stay in registers.
    """
    program, block = unfold(tl.cdiv(D, BLOCK_D))
    segment = first_segment + program
    d, n, exists = channels_and_states(block, D, N, BLOCK_N, BLOCK_D)
    first = tl.load(offsets + segment)
    stop = tl.load(offsets + segment + 1)
    rate = load_tile(lam, d, n, N, exists, _PADDED, ACC)
    weight = load_tile(w, d, n, N, exists, 0.0, ACC)
    readout = load_tile(C, d, n, N, exists, 0.0, ACC)
    sum_lam = tl.zeros((BLOCK_N, BLOCK_D), ACC)
    sum_w = tl.zeros((BLOCK_N, BLOCK_D), ACC)
    sum_C = tl.zeros((BLOCK_N, BLOCK_D), ACC)
    if w_gamma is not None:
        filtering = load_tile(w_gamma, d, n, N, exists, 0.0, ACC)
        sum_gamma = tl.zeros((BLOCK_N, BLOCK_D), ACC)
    through = load_vector(skip, d, D, ACC)
    sum_skip = tl.zeros((BLOCK_D,), ACC)
    carry = tl.zeros((BLOCK_N, BLOCK_D), ACC)
    if grad_final is not None:
        carry += tl.load(
            cells(grad_final + segment * (N * D), n, d, 1, N), mask=exists, other=0.0
        ).to(ACC)
    own = (program * tl.cdiv(D, BLOCK_D) + block) * (CHUNK // TOKENS * BLOCK_N * BLOCK_D)
    boxes = cells(scratch + own, n, tl.arange(0, BLOCK_D), BLOCK_D, 1)
    first_kept = first // INTERVAL + segment
    chunks = tl.cdiv(stop - first, CHUNK)
    for c in range(0, chunks):
        # as in scan.triton, minima that change no number keep pointers out of registers
        chunk = tl.minimum(first + (chunks - 1 - c) * CHUNK, stop)
        chunk_stop = tl.minimum(chunk + CHUNK, stop)
        groups = tl.cdiv(chunk_stop - chunk, TOKENS)
        kept = first_kept + (chunks - 1 - c) // (INTERVAL // CHUNK)
        state = tl.load(state_at(saved, kept, n, d, D, N), mask=exists, other=0.0)
        # the march begins as many groups before the chunk
        behind = (chunks - 1 - c) % (INTERVAL // CHUNK) * (CHUNK // TOKENS)
        base = chunk - behind * TOKENS
        ahead = load_inputs(u, drive, base, chunk_stop, stride_u, stride_drive, d, D, ACC, TOKENS)
        # threads may read each other's writes
        tl.debug_barrier()
        for g in range(-behind, groups):
            tl.store(boxes + g * (BLOCK_N * BLOCK_D), state, mask=g >= 0)
            base = tl.minimum(chunk + g * TOKENS, stop)
            values, gates = ahead
            ahead = load_inputs(
                u, drive, base + TOKENS, chunk_stop, stride_u, stride_drive, d, D, ACC, TOKENS
            )
            for i in tl.static_range(TOKENS):
                live = base + i < chunk_stop
                if drive is None:
                    state = step(state, values[i], state, rate, weight * -_LOG2E, live)
                else:
                    state = step(state, values[i], gates[i][None, :], rate, weight * -_LOG2E, live)
        tl.debug_barrier()
        base = tl.minimum(chunk + (groups - 1) * TOKENS, stop)
        ahead = load_inputs(u, drive, base, chunk_stop, stride_u, stride_drive, d, D, ACC, TOKENS)
        grad_ahead = widened(
            load_rows(grad_out, base, chunk_stop, stride_grad, d, D, TOKENS, COUNTED=False), ACC
        )
        state_ahead = tl.load(boxes + (groups - 1) * (BLOCK_N * BLOCK_D))
        for r in range(0, groups):
            base = tl.minimum(chunk + (groups - 1 - r) * TOKENS, stop)
            values, gates = ahead
            incoming, state = grad_ahead, state_ahead
            # before the chunk there is nothing to load: its first group comes again
            g = tl.maximum(groups - 2 - r, 0)
            earlier = tl.minimum(chunk + g * TOKENS, stop)
            ahead = load_inputs(
                u, drive, earlier, chunk_stop, stride_u, stride_drive, d, D, ACC, TOKENS
            )
            grad_ahead = widened(
                load_rows(grad_out, earlier, chunk_stop, stride_grad, d, D, TOKENS, COUNTED=False),
                ACC,
            )
            state_ahead = tl.load(boxes + g * (BLOCK_N * BLOCK_D))
            states = (state,)
            for i in tl.static_range(TOKENS - 1):
                live = base + i < chunk_stop
                if drive is None:
                    state = step(state, values[i], state, rate, weight * -_LOG2E, live)
                else:
                    state = step(state, values[i], gates[i][None, :], rate, weight * -_LOG2E, live)
                states = states + (state,)  # noqa: RUF005 (Triton knows no star)
            for i in tl.static_range(TOKENS - 1, -1, -1):
                live = base + i < chunk_stop
                before, u_t, grad_y = states[i], values[i], incoming[i]
                if drive is None:
                    gate = opened(before * weight * -_LOG2E)
                else:
                    gate = opened(gates[i][None, :] * weight * -_LOG2E)
                # past the end a shut gate: the state stays, and so does its gradient
                gate = tl.where(live, gate, 0.0)
                moved = rate * before + u_t[None, :]
                after = before + gate * moved
                sum_skip += grad_y * u_t
                grad_read = grad_y
                if w_gamma is not None:
                    read = tl.sum(readout * after, axis=0)
                    passed = opened(tl.sum(filtering * after, axis=0) * -_LOG2E)
                    grad_filter = grad_y * read * passed * (1.0 - passed)
                    grad_read = grad_y * passed
                    carry += filtering * grad_filter[None, :]
                    sum_gamma += after * grad_filter[None, :]
                carry += readout * grad_read[None, :]
                sum_C += after * grad_read[None, :]
                written = carry * gate
                opening = written * (1.0 - gate) * moved
                sum_lam += written * before
                carry += rate * written
                here = live & (d < D)
                if drive is None:
                    sum_w += opening * before
                    carry += weight * opening
                else:
                    sum_w += opening * gates[i][None, :]
                    grad_gate = tl.sum(weight * opening, axis=0).to(grad_drive.dtype.element_ty)
                    tl.store(row_at(grad_drive, base, i, D, d), grad_gate, mask=here)
                # padded states have a gate of 1/2, and a gradient of 0
                grad_value = tl.sum(written, axis=0) + through * grad_y
                grad_value = grad_value.to(grad_u.dtype.element_ty)
                tl.store(row_at(grad_u, base, i, D, d), grad_value, mask=here)
    tl.store(state_at(grad_lam, segment, n, d, D, N), sum_lam, mask=exists)
    tl.store(state_at(grad_w, segment, n, d, D, N), sum_w, mask=exists)
    tl.store(state_at(grad_C, segment, n, d, D, N), sum_C, mask=exists)
    if w_gamma is not None:
        tl.store(state_at(grad_gamma, segment, n, d, D, N), sum_gamma, mask=exists)
    if skip is not None:
        tl.store(grad_skip + segment * D + d, sum_skip, mask=d < D)
    if grad_initial is not None:
        tl.store(cells(grad_initial + segment * (N * D), n, d, 1, N), carry, mask=exists)


@triton.jit
def tamed(x, instead):
    """Keep an iterate within bounds; ``instead`` of NaN."""
    x = tl.where(x == x, x, instead)
    return tl.minimum(tl.maximum(x, -_FARTHEST), _FARTHEST)


@triton.jit
def compose(m, b, m_next, b_next):
    """Apply one map ``x -> m x + b`` after another; a bound on m keeps 0 times m at 0.

    Where the bound is met Newton's step is not exact. Tokens before which all is solved still are
    solved by the next step: what reaches them is 0, whatever it is multiplied with.
    """
    return tamed(m * m_next, 0.0), m_next * b + b_next


@triton.jit
def shifted(x, start, BLOCK_L: tl.constexpr):
    """Return the rows of a tile one row later; ``start`` comes first."""
    row = tl.arange(0, BLOCK_L)[:, None] + (x * 0.0).to(tl.int32)
    return tl.where(row == 0, start[None, :], tl.gather(x, tl.maximum(row - 1, 0), 0))


@triton.jit(do_not_specialize=("cap",))
def feedback_newton_kernel(
    u,
    lam,
    w,
    C,
    w_gamma,
    skip,
    drive,
    initial,
    out,
    final,
    saved,
    steps,
    residuals,
    offsets,
    tolerance,
    kept_jacobian,
    cap,
    D: tl.constexpr,
    N: tl.constexpr,
    stride_u: tl.constexpr,
    stride_drive: tl.constexpr,
    ACC: tl.constexpr,
    INTERVAL: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Solve one segment tile after tile, each until all its lanes have converged.

    ``steps`` gets the most iterations that a tile took, ``residuals`` the largest residual that was
    left. A tile that reaches the cap is the program's last.
    """
    segment, block = unfold(tl.cdiv(D, BLOCK_D))
    first = tl.load(offsets + segment)
    stop = tl.load(offsets + segment + 1)
    m = tl.arange(0, BLOCK_D * BLOCK_N)
    d, n = block * BLOCK_D + m // BLOCK_N, m % BLOCK_N
    exists = (d < D) & (n < N)
    cell = d * N + n
    rate = tl.load(lam + cell, mask=exists, other=_PADDED).to(ACC)[None, :]
    weight = tl.load(w + cell, mask=exists, other=0.0).to(ACC)[None, :]
    readout = tl.load(C + cell, mask=exists, other=0.0).to(ACC)[None, :]
    if w_gamma is not None:
        filtering = tl.load(w_gamma + cell, mask=exists, other=0.0).to(ACC)[None, :]
    channel = block * BLOCK_D + tl.arange(0, BLOCK_D)
    through = load_vector(skip, channel, D, ACC)
    row = tl.arange(0, BLOCK_L)[:, None]
    state = tl.zeros((BLOCK_D * BLOCK_N,), ACC)
    if initial is not None:
        state += tl.load(initial + segment * (N * D) + cell, mask=exists, other=0.0).to(ACC)
    most = 0
    worst = 0.0
    for base in range(first, stop, BLOCK_L):
        if saved is not None:
            slot = first // INTERVAL + segment + (base - first) // INTERVAL
            starts = exists & ((base - first) % INTERVAL == 0)
            tl.store(saved + slot * (N * D) + n * D + d, state, mask=starts)
        live = row < stop - base
        here = live & (d < D)[None, :]
        u_t = tl.load(u + base * stride_u + (row * stride_u + d[None, :]), mask=here, other=0.0)
        u_t = u_t.to(ACC)
        if drive is not None:
            at = base * stride_drive + (row * stride_drive + d[None, :])
            fixed = tl.load(drive + at, mask=here, other=0.0).to(ACC) * weight * -_LOG2E
        # the guess: all gates half open
        half = tl.where(live, 1.0 + 0.5 * rate, 1.0)
        arrived = 0.5 * u_t + tl.where(row == 0, half * state[None, :], 0.0)
        _, x = tl.associative_scan((half, arrived), 0, compose)
        x = tamed(x, 0.0)
        count = 0
        error = float("inf")
        while (error > tolerance) & (count <= tl.where(worst > tolerance, -1, cap)):
            before = shifted(x, state, BLOCK_L)
            exponent = before * weight * -_LOG2E if drive is None else fixed
            # past the end a shut gate: the state stays, and the last row is the last state
            gate = tl.where(live, opened(exponent), 0.0)
            moved = rate * before + u_t
            residual = x - (before + gate * moved)
            relative = tl.abs(residual) / tl.maximum(tl.abs(x), 1.0)
            relative = tl.where(relative == relative, relative, float("inf"))
            error = tl.max(tl.max(tl.where(exists[None, :], relative, 0.0), axis=1), axis=0)
            error = error.to(tl.float32)
            count += 1
            if (error > tolerance) & (count <= cap):
                jacobian = 1.0 + rate * gate
                if drive is None:
                    jacobian += weight * (gate * (1.0 - gate) * moved)
                _, change = tl.associative_scan((jacobian * kept_jacobian, -residual), 0, compose)
                x = tamed(x + tamed(change, 0.0), 0.0)
        most = tl.maximum(most, count - 1)
        worst = tl.maximum(worst, error)
        y = tl.sum((readout * x).reshape(BLOCK_L, BLOCK_D, BLOCK_N), axis=2)
        if w_gamma is not None:
            passed = tl.sum((filtering * x).reshape(BLOCK_L, BLOCK_D, BLOCK_N), axis=2)
            y *= opened(passed * -_LOG2E)
        writable = live & (channel < D)[None, :]
        if skip is not None:
            at = base * stride_u + (row * stride_u + channel[None, :])
            y += through[None, :] * tl.load(u + at, mask=writable, other=0.0).to(ACC)
        at = base * D + (row * D + channel[None, :])
        tl.store(out + at, y.to(out.dtype.element_ty), mask=writable)
        state = tl.sum(tl.where(row == BLOCK_L - 1, x, 0.0), axis=0)
    tl.store(final + segment * (N * D) + cell, state, mask=exists)
    own = segment * tl.cdiv(D, BLOCK_D) + block
    tl.store(steps + own, most)
    tl.store(residuals + own, worst)


class Tile(NamedTuple):
    """How a program of a march is shaped; it is one warp, so that no sum leaves it."""

    block_n: int
    block_d: int
    tokens: int  # unrolled; the adjoint keeps as many states in registers


def tile(segments: int, width: int, states: int, exact: torch.dtype, backward: bool) -> Tile:
    """Choose a program's shape: as many state entries a thread as registers allow.

    Fewer where that leaves a large GPU idle: a token's work is then shared by more threads.
    """
    block_n = next_power_of_2(states)
    entries = 16 // (2 if backward else 1) // (2 if exact == torch.float64 else 1)
    block_d = min(32, max(1, 32 * entries // block_n))
    while block_d > 8 and segments * cdiv(width, block_d) < FILL // 4:
        block_d //= 2
    tokens = (2 if backward else 4) * (2 if block_n * block_d <= 16 * entries else 1)
    if exact == torch.float64:
        tokens = 1 if backward else 4
    return Tile(block_n, block_d, tokens)


class Plan(NamedTuple):
    """How one call is cut into programs, and the arguments that its kernels share, by name."""

    shape: Tile
    blocks: int  # of channels
    arguments: dict[str, Any]


def plan(inputs: Inputs, offsets: Tensor, backward: bool) -> Plan:
    """Shape the programs of a call and gather the arguments that its kernels share."""
    exact = accumulator(inputs.u)
    width, states = inputs.lam.shape
    shape = tile(offsets.shape[0] - 1, width, states, exact, backward)
    u, drive = rows(inputs.u), None if inputs.drive is None else rows(inputs.drive)
    arguments = {
        "u": u,
        "lam": inputs.lam.contiguous(),
        "w": inputs.w.contiguous(),
        "C": inputs.C.contiguous(),
        "w_gamma": whole(inputs.w_gamma),
        "skip": whole(inputs.D),
        "drive": drive,
        "stride_u": u.stride(0),
        "stride_drive": 0 if drive is None else drive.stride(0),
        "offsets": offsets,
        "D": width,
        "N": states,
        "ACC": _ACC[exact],
        "INTERVAL": interval(states, CHUNK),
        "CHUNK": CHUNK,
        "TOKENS": shape.tokens,
        "BLOCK_N": shape.block_n,
        "BLOCK_D": shape.block_d,
    }
    return Plan(shape, cdiv(width, shape.block_d), arguments)


def launch(
    kernel: JITFunction,
    grid: tuple[int, ...],
    made: Plan,
    *,
    num_warps: int,
    registers: dict[str, int] | None = None,
    **own: object,
) -> None:
    """Launch a kernel with its own arguments and with those of the plan that it names."""
    launch_named(kernel, grid, made.arguments | own, num_warps=num_warps, **(registers or {}))


def forward(inputs: Inputs, offsets: Tensor, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, final states and, with ``save``, the state before every interval."""
    made = plan(inputs, offsets, False)
    out, final, saved = _room(inputs, offsets, save)
    segments = offsets.shape[0] - 1
    launch(
        feedback_fwd_kernel,
        (segments, made.blocks),
        made,
        num_warps=1,
        initial=whole(inputs.initial_state),
        out=out,
        final=final,
        saved=saved if save else None,
    )
    return out, final, saved


def newton(
    inputs: Inputs, offsets: Tensor, save: bool, stop: Stop
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``forward`` by Newton's method.

    Raises:
        NotConverged: Some tile has not reached the tolerance after ``max_iterations`` steps.
    """
    u, drive = inputs.u, inputs.drive
    inputs = inputs._replace(u=near_rows(u), drive=None if drive is None else near_rows(drive))
    made = plan(inputs, offsets, False)
    out, final, saved = _room(inputs, offsets, save)
    segments, width = offsets.shape[0] - 1, u.shape[1]
    block_n = made.shape.block_n
    lanes = _LANES if final.dtype == torch.float32 else _LANES // 2
    block_d = max(1, lanes // block_n)
    block_l = min(CHUNK, max(4, lanes * CHUNK // (block_n * block_d)))
    blocks = cdiv(width, block_d)
    cap = 2 * block_l if stop.max_iterations is None else stop.max_iterations
    steps = torch.empty((segments, blocks), dtype=torch.int64, device=u.device)
    residuals = final.new_empty(segments, blocks)
    launch(
        feedback_newton_kernel,
        (segments * blocks,),
        made,
        num_warps=8,
        registers=every_register(),
        initial=whole(inputs.initial_state),
        out=out,
        final=final,
        saved=saved if save else None,
        steps=steps,
        residuals=residuals,
        tolerance=float(stop.tolerance),
        kept_jacobian=1.0 - stop.damping,
        cap=cap,
        BLOCK_L=block_l,
        BLOCK_D=block_d,
    )
    failed = int((~(residuals <= stop.tolerance)).sum())
    if failed:
        raise NotConverged(
            f"Newton's method left {failed} of {residuals.numel()} blocks of lanes above the "
            f"tolerance {stop.tolerance:g} after {int(steps.max())} iterations (largest relative "
            f"residual {float(residuals.max()):.1e})"
        )
    return out, final, saved


def backward(
    grad_out: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, D, N]
    inputs: Inputs,
    offsets: Tensor,
    saved: Tensor,  # [slots, N, D]
) -> Gradients:
    """Return the gradients of the inputs."""
    u, drive, exact = inputs.u, inputs.drive, accumulator(inputs.u)
    made = plan(inputs, offsets, True)
    shape, blocks = made.shape, made.blocks
    segments, (width, states) = offsets.shape[0] - 1, inputs.lam.shape
    grad_out = rows(torch.zeros_like(u) if grad_out is None else grad_out)
    share = [u.new_empty(segments, states, width, dtype=exact) for _ in range(3)]
    grads = {
        "grad_u": u.new_empty(u.shape),
        "grad_lam": share[0],
        "grad_w": share[1],
        "grad_C": share[2],
        "grad_gamma": None if inputs.w_gamma is None else torch.empty_like(share[0]),
        "grad_skip": None if inputs.D is None else u.new_empty(segments, width, dtype=exact),
        "grad_drive": None if drive is None else drive.new_empty(drive.shape),
        "grad_initial": None,
    }
    if inputs.initial_state is not None:
        grads["grad_initial"] = u.new_empty(segments, width, states, dtype=exact)
    # a scratch for states: where all programs at once would want too much, launches share it
    at_once = max(1, min(segments, 4 * FILL // max(1, blocks)))
    box = CHUNK // shape.tokens * shape.block_n * shape.block_d
    scratch = u.new_empty(at_once * blocks * box, dtype=exact)
    for first_segment in range(0, segments, at_once):
        launch(
            feedback_bwd_kernel,
            (min(at_once, segments - first_segment) * blocks,),
            made,
            num_warps=1,
            **grads,
            grad_out=grad_out,
            stride_grad=grad_out.stride(0),
            grad_final=whole(grad_final),
            saved=saved,
            scratch=scratch,
            first_segment=first_segment,
        )
    summed = (
        None if x is None else x.sum(0).t().contiguous() for x in (*share, grads["grad_gamma"])
    )
    skip = grads["grad_skip"]
    return (
        grads["grad_u"],
        *summed,
        None if skip is None else skip.sum(0),
        grads["grad_drive"],
        grads["grad_initial"],
    )


_ACC = {torch.float32: tl.float32, torch.float64: tl.float64}
_LANES = 16  # of a tile of Newton's, whose warps share its tokens


def _room(inputs: Inputs, offsets: Tensor, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty outputs, final states and, with ``save``, saved states."""
    u, exact = inputs.u, accumulator(inputs.u)
    tokens, (width, states), segments = u.shape[0], inputs.lam.shape, offsets.shape[0] - 1
    slots = chunk_slots(tokens, segments, interval(states, CHUNK)) if save else 0
    return (
        u.new_empty(tokens, width),
        u.new_empty(segments, width, states, dtype=exact),
        u.new_empty(slots, states, width, dtype=exact),
    )
