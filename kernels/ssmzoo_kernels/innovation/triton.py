"""The predictor's error on GPUs: a window of k + 1 rows slides along a segment in registers.

A program owns ``BLOCK_D`` channels of one chunk of a segment and writes their share of each score.
"""

# a kernel launch is no ordinary call: Triton's types do not describe it
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.launches import cdiv, launch, next_power_of_2
from ssmzoo_kernels.scan import chunk_slots
from ssmzoo_kernels.scan.triton import locate, rows

CHUNK = 64
WIDEST = 1024  # channels of a program


@triton.jit(do_not_specialize=("T", "segments"))
def innovation_fwd_kernel(
    y,
    history,
    errors,
    sizes,
    offsets,
    T,
    segments,
    D: tl.constexpr,
    stride: tl.constexpr,
    SPAN: tl.constexpr,
    WEIGHTS: tl.constexpr,
    ACC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Sum the squared errors of one chunk over a block of channels and, if asked, the squares."""
    slot = tl.program_id(0).to(tl.int64)
    segment, begin, end, start = locate(offsets, segments, CHUNK, slot)
    stop = tl.minimum(start + CHUNK, end)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    part = tl.program_id(1).to(tl.int64) * T
    window = ()
    for i in tl.static_range(SPAN):
        position = start - SPAN + i
        known = (position >= begin) & (position < end)
        row = tl.load(y + position * stride + d, mask=known & (d < D), other=0.0).to(ACC)
        at = (segment * SPAN + SPAN + position - begin) * D
        old = (position < begin) & (d < D)
        row += tl.load(history + at + d, mask=old, other=0.0).to(ACC)
        window = window + (row,)  # noqa: RUF005 (Triton knows no star)
    for t in range(start, stop):
        now = tl.load(y + t * stride + d, mask=d < D, other=0.0).to(ACC)
        error = now
        for i in tl.static_range(SPAN):
            error -= WEIGHTS[i] * window[SPAN - 1 - i]
        tl.store(errors + part + t, tl.sum(error * error, axis=0))
        if sizes is not None:
            tl.store(sizes + part + t, tl.sum(now * now, axis=0))
        window = window + (now,)  # noqa: RUF005
        window = window[1:]


def forward(
    y: Tensor,  # [T, D]
    history: Tensor,  # [S, k, D]
    offsets: Tensor,  # [S + 1] int64
    weights: list[float],
    relative: bool,
) -> Tensor:
    """Return the scores ``[T]``."""
    (tokens, width), segments, exact = y.shape, offsets.shape[0] - 1, accumulator(y)
    y = rows(y)
    block = min(WIDEST, next_power_of_2(width))
    blocks = cdiv(width, block)
    errors = y.new_empty(blocks, tokens, dtype=exact)
    sizes = torch.empty_like(errors) if relative else None
    launch(
        innovation_fwd_kernel,
        (chunk_slots(tokens, segments, CHUNK), blocks),
        y,
        history.contiguous(),
        errors,
        sizes,
        offsets,
        tokens,
        segments,
        D=width,
        stride=y.stride(0),
        SPAN=len(weights),
        WEIGHTS=tuple(weights),
        ACC=tl.float64 if exact == torch.float64 else tl.float32,
        CHUNK=CHUNK,
        BLOCK_D=block,
        num_warps=max(1, block // 256),
    )
    error = errors.sum(dim=0)
    return error / width if sizes is None else error / (sizes.sum(dim=0) + 1e-6)
