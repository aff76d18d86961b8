"""One token of the companion recurrence on GPUs: both sums in one pass over the ring.

A program owns ``BLOCK_D`` channels of one row and reads their rings once, ``BLOCK_N`` values at a
time; it writes one value a channel.
"""

# a kernel launch is no ordinary call: Triton's types do not describe it
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def companion_step_kernel(
    u,
    ring,
    position,
    a,
    b,
    d,
    y,
    D: tl.constexpr,
    N: tl.constexpr,
    SHARING: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Step one row's block of channels; ``x_n``'s place is read before ``w`` is written there."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = channel < D
    first = tl.load(position + row)
    if N > 0:
        first = first % N
        first = tl.where(first < 0, first + N, first)
    state = ring + (row * D + channel) * N
    by_a = tl.zeros((BLOCK_D, BLOCK_N), dtype=ring.dtype.element_ty)
    by_b = tl.zeros((BLOCK_D, BLOCK_N), dtype=ring.dtype.element_ty)
    for start in range(0, N, BLOCK_N):
        i = start + tl.arange(0, BLOCK_N)
        place = first + i
        place = tl.where(place < N, place, place - N)
        mask = live[:, None] & (i < N)[None, :]
        x = tl.load(state[:, None] + place[None, :], mask=mask, other=0.0)
        at_a = (channel // SHARING)[:, None] * N + i[None, :]
        at_b = channel[:, None] * N + i[None, :]
        by_a += x * tl.load(a + at_a, mask=mask, other=0.0)
        by_b += x * tl.load(b + at_b, mask=mask, other=0.0)
    drive = tl.load(u + row * D + channel, mask=live, other=0.0)
    gain = tl.load(d + channel, mask=live, other=0.0)
    tl.store(y + row * D + channel, gain * drive + tl.sum(by_b, axis=1), mask=live)
    if N > 0:
        last = tl.where(first > 0, first - 1, N - 1)
        tl.store(state + last, drive - tl.sum(by_a, axis=1), mask=live)


def step_(
    u: Tensor,  # [B, D]
    ring: Tensor,  # [B, D, n], written
    position: Tensor,  # [B]
    a: Tensor,  # [D_a, n]
    b: Tensor,  # [D, n]
    d: Tensor,  # [D]
) -> Tensor:
    """Return the outputs ``[B, D]`` in the ring's dtype; put ``w`` where ``x_n`` was."""
    batch, width, order = ring.shape
    u, position, a, b, d = (x.contiguous() for x in (u, position, a, b, d))
    y = ring.new_empty(batch, width)
    if not y.numel():
        return y
    block_n = min(256, max(16, int(triton.next_power_of_2(max(order, 1)))))
    block_d = max(1, 1024 // block_n)
    with torch.cuda.device_of(ring):
        companion_step_kernel[(batch, triton.cdiv(width, block_d))](
            u,
            ring,
            position,
            a,
            b,
            d,
            y,
            D=width,
            N=order,
            SHARING=width // a.shape[0],
            BLOCK_D=block_d,
            BLOCK_N=block_n,
            num_warps=4,
        )
    return y
