"""The short causal convolution on GPUs, forward and backward in one pass over the tokens each.

A program owns ``BLOCK_D`` channels of one chunk of a segment and slides a window of K values
along it in registers. Before a segment's first token the window looks into its initial state, so a
position counts from ``begin - (K - 1)``.
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
from ssmzoo_kernels.scan.triton import load_vector, locate, rows, sigmoid

CHUNK = 64


@triton.jit
def load_input(x, initial, position, begin, end, segment, stride, d, D, K, ACC: tl.constexpr):
    """Load a segment's input row or an earlier input; zeros outside."""
    row = tl.load(
        x + position * stride + d,
        mask=(position >= begin) & (position < end) & (d < D),
        other=0.0,
    ).to(ACC)
    if initial is not None:
        at = segment * (K - 1) + position - begin + (K - 1)
        row += tl.load(
            initial + at * D + d,
            mask=(position < begin) & (position >= begin - (K - 1)) & (d < D),
            other=0.0,
        ).to(ACC)
    return row


@triton.jit(do_not_specialize=("segments",))
def causal_conv1d_fwd_kernel(
    x,
    weight,
    bias,
    initial,
    y,
    final,
    offsets,
    segments,
    D: tl.constexpr,
    K: tl.constexpr,
    stride: tl.constexpr,
    SILU: tl.constexpr,
    ACC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Convolve one chunk; a segment's first chunk also writes its final state."""
    slot = tl.program_id(0).to(tl.int64)
    segment, begin, end, start = locate(offsets, segments, CHUNK, slot)
    stop = tl.minimum(start + CHUNK, end)
    d = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    b = load_vector(bias, d, D, ACC)
    taps = ()
    window = ()
    for j in tl.static_range(K):
        taps = taps + (tl.load(weight + d * K + j, mask=d < D, other=0.0).to(ACC),)  # noqa: RUF005
        if j + 1 < K:
            row = load_input(
                x, initial, start - (K - 1) + j, begin, end, segment, stride, d, D, K, ACC
            )
            window = window + (row,)  # noqa: RUF005
    for t in range(start, stop):
        row = tl.load(x + t * stride + d, mask=d < D, other=0.0).to(ACC)
        window = window + (row,)  # noqa: RUF005
        pre = b
        for j in tl.static_range(K):
            pre += taps[j] * window[j]
        if SILU:
            pre *= sigmoid(pre)
        tl.store(y + t * D + d, pre.to(y.dtype.element_ty), mask=d < D)
        window = window[1:]
    if start == begin:
        for j in tl.static_range(K - 1):
            last = load_input(
                x, initial, end - (K - 1) + j, begin, end, segment, stride, d, D, K, ACC
            )
            at = (segment * (K - 1) + j) * D + d
            tl.store(final + at, last.to(final.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=("segments",))
def causal_conv1d_bwd_kernel(
    grad_y,
    grad_final,
    x,
    weight,
    bias,
    initial,
    grad_x,
    grad_weight,
    grad_bias,
    grad_initial,
    offsets,
    segments,
    D: tl.constexpr,
    K: tl.constexpr,
    stride_grad: tl.constexpr,
    stride: tl.constexpr,
    SILU: tl.constexpr,
    ACC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write one chunk's input gradients and its share of the weights' and the bias's.

    An input gradient needs the K outputs from its own token on, so the window runs K - 1 tokens
    past the chunk; a segment's first chunk also finishes the positions before its first token.
    """
    slot = tl.program_id(0).to(tl.int64)
    segment, begin, end, start = locate(offsets, segments, CHUNK, slot)
    stop = tl.minimum(start + CHUNK, end)
    d = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    b = load_vector(bias, d, D, ACC)
    zero = (d * 0).to(ACC)
    taps = ()
    sums = ()
    window = ()
    grads = ()
    for j in tl.static_range(K):
        taps = taps + (tl.load(weight + d * K + j, mask=d < D, other=0.0).to(ACC),)  # noqa: RUF005
        sums = sums + (zero,)  # noqa: RUF005
        if j + 1 < K:
            row = load_input(
                x, initial, start - (K - 1) + j, begin, end, segment, stride, d, D, K, ACC
            )
            window = window + (row,)  # noqa: RUF005
            grads = grads + (zero,)  # noqa: RUF005
    sum_bias = zero
    first_chunk = start == begin
    # beyond a segment's tokens only its first chunk has work: an empty one's initial state
    until = tl.where(first_chunk | (start < end), stop + K - 1, start)
    for t in range(start, until):
        inside = t < end
        row = tl.load(x + t * stride + d, mask=inside & (d < D), other=0.0).to(ACC)
        grad = tl.load(grad_y + t * stride_grad + d, mask=inside & (d < D), other=0.0).to(ACC)
        window = window + (row,)  # noqa: RUF005
        if SILU:
            pre = b
            for j in tl.static_range(K):
                pre += taps[j] * window[j]
            open_ = sigmoid(pre)
            grad *= open_ * (1.0 + pre * (1.0 - open_))
        grads = grads + (grad,)  # noqa: RUF005
        own = tl.where(t < stop, grad, 0.0)
        sum_bias += own
        added = ()
        for j in tl.static_range(K):
            added = added + (sums[j] + own * window[j],)  # noqa: RUF005
        sums = added

        position = t - (K - 1)
        total = zero
        for j in tl.static_range(K):
            total += taps[K - 1 - j] * grads[j]
        if grad_final is not None:
            late = position - (end - (K - 1))
            at = (segment * (K - 1) + late) * D + d
            total += tl.load(grad_final + at, mask=(late >= 0) & (d < D), other=0.0).to(ACC)
        tl.store(
            grad_x + position * D + d,
            total.to(grad_x.dtype.element_ty),
            mask=(position >= start) & (d < D),
        )
        if grad_initial is not None:
            at = (segment * (K - 1) + position - begin + (K - 1)) * D + d
            tl.store(grad_initial + at, total, mask=(position < begin) & (d < D))
        window = window[1:]
        grads = grads[1:]
    if bias is not None:
        tl.store(grad_bias + slot * D + d, sum_bias, mask=d < D)
    for j in tl.static_range(K):
        tl.store(grad_weight + (slot * D + d) * K + j, sums[j], mask=d < D)


def forward(
    x: Tensor,  # [T, D]
    weight: Tensor,  # [D, K]
    bias: Tensor | None,  # [D]
    initial_state: Tensor | None,  # [S, K - 1, D]
    offsets: Tensor,  # [S + 1] int64
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs and every segment's last K - 1 inputs."""
    (tokens, width), taps, segments = x.shape, weight.shape[1], offsets.shape[0] - 1
    x, weight = rows(x), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    initial_state = None if initial_state is None else initial_state.contiguous()
    y = x.new_empty(tokens, width)
    final = x.new_empty(segments, taps - 1, width)
    block = _block(width)
    launch(
        causal_conv1d_fwd_kernel,
        (chunk_slots(tokens, segments, CHUNK), cdiv(width, block)),
        x,
        weight,
        bias,
        initial_state,
        y,
        final,
        offsets,
        segments,
        D=width,
        K=taps,
        stride=x.stride(0),
        SILU=activation is not None,
        ACC=_ACC[accumulator(x)],
        CHUNK=CHUNK,
        BLOCK_D=block,
        num_warps=1,
    )
    return y, final


def backward(
    grad_out: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, K - 1, D]
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    offsets: Tensor,
    activation: str | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of ``forward``'s four tensors, None where one was absent."""
    (tokens, width), taps, segments = x.shape, weight.shape[1], offsets.shape[0] - 1
    exact = accumulator(x)
    grad_out = rows(torch.zeros_like(x) if grad_out is None else grad_out)
    grad_final = None if grad_final is None else grad_final.contiguous()
    x, weight = rows(x), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    slots = chunk_slots(tokens, segments, CHUNK)
    grad_x = x.new_empty(tokens, width)
    grad_weight = x.new_empty(slots, width, taps, dtype=exact)
    grad_bias = None if bias is None else x.new_empty(slots, width, dtype=exact)
    grad_initial = None
    if initial_state is not None:
        initial_state = initial_state.contiguous()
        grad_initial = torch.empty_like(initial_state, dtype=exact)
    block = _block(width)
    launch(
        causal_conv1d_bwd_kernel,
        (slots, cdiv(width, block)),
        grad_out,
        grad_final,
        x,
        weight,
        bias,
        initial_state,
        grad_x,
        grad_weight,
        grad_bias,
        grad_initial,
        offsets,
        segments,
        D=width,
        K=taps,
        stride_grad=grad_out.stride(0),
        stride=x.stride(0),
        SILU=activation is not None,
        ACC=_ACC[exact],
        CHUNK=CHUNK,
        BLOCK_D=block,
        num_warps=1,
    )
    return (
        grad_x,
        grad_weight.sum(0),
        None if grad_bias is None else grad_bias.sum(0),
        grad_initial,
    )


_ACC = {torch.float32: tl.float32, torch.float64: tl.float64}


def _block(width: int) -> int:
    """Choose the channels of a program: one warp, up to 8 bytes a lane in bfloat16."""
    return min(128, max(32, next_power_of_2(width)))
