"""One token of the companion recurrence on GPUs: both sums in one pass over the ring.

A program owns ``BLOCK_D`` channels of one row and reads their rings once, ``BLOCK_N`` values of
each at a time; it writes one value a channel.
"""

# a kernel launch is no ordinary call: Triton's types do not describe it
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

from ssmzoo_kernels.launches import cdiv, launch, next_power_of_2


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
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Step one row's block of channels."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = channel < D
    first = tl.load(position + row) % (N + 1)
    first = tl.where(first < 0, first + N + 1, first)
    state = ring + row * (N + 1) * D + channel
    by_a = tl.zeros((BLOCK_N, BLOCK_D), dtype=ring.dtype.element_ty)
    by_b = tl.zeros((BLOCK_N, BLOCK_D), dtype=ring.dtype.element_ty)
    for start in range(0, N, BLOCK_N):
        i = start + tl.arange(0, BLOCK_N)
        place = first + i
        place = tl.where(place <= N, place, place - N - 1)
        mask = (i < N)[:, None] & live[None, :]
        x = tl.load(state[None, :] + place[:, None] * D, mask=mask, other=0.0)
        at = i[:, None] * D + channel[None, :]
        by_a += x * tl.load(a + at, mask=mask, other=0.0)
        by_b += x * tl.load(b + at, mask=mask, other=0.0)
    drive = tl.load(u + row * D + channel, mask=live, other=0.0)
    gain = tl.load(d + channel, mask=live, other=0.0)
    tl.store(y + row * D + channel, gain * drive + tl.sum(by_b, axis=0), mask=live)
    free = tl.where(first > 0, first - 1, N)
    tl.store(state + free * D, drive - tl.sum(by_a, axis=0), mask=live)


def forward(
    u: Tensor,  # [B, D]
    ring: Tensor,  # [B, n + 1, D], written
    position: Tensor,  # [B]
    a: Tensor,  # [n, D]
    b: Tensor,  # [n, D]
    d: Tensor,  # [D]
) -> Tensor:
    """Return the outputs ``[B, D]`` in the ring's dtype; put ``w`` in the free place."""
    (batch, width), order = u.shape, a.shape[0]
    u, position, a, b, d = (x.contiguous() for x in (u, position, a, b, d))
    y = ring.new_empty(batch, width)
    if not y.numel():
        return y
    # neighbours fill whole sectors of memory, and few channels still fill many programs
    block_d, block_n = 16, min(64, max(16, next_power_of_2(order)))
    launch(
        companion_step_kernel,
        (batch, cdiv(width, block_d)),
        u,
        ring,
        position,
        a,
        b,
        d,
        y,
        D=width,
        N=order,
        BLOCK_D=block_d,
        BLOCK_N=block_n,
        num_warps=4,
    )
    return y
