"""The norm on GPUs: a program has some rows, and reads them block of channels by block.

With ``added`` a row is a sum, which is written to ``total`` and normalised as it is there.

A row is summed first and scaled then; what the second pass reads is still in a cache. The weight's
gradient is summed by programs that each have a block of channels and a share of the rows.
"""

# a kernel launch is no ordinary call: Triton's types do not describe it
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.launches import cdiv, launch, next_power_of_2
from ssmzoo_kernels.scan.triton import rows

WIDEST = 1024  # channels of a block
TILE = 4096  # numbers that a program has at once
MOST_SHARES, LEAST_ROWS = 256, 16  # sums of the weight's gradient, and rows of each


@triton.jit
def first_of(number, stride):
    """Return where a row begins, by an offset of 64 bits."""
    return number.to(tl.int64)[:, None] * stride


@triton.jit
def row_of(x, added, total, row, here, d, stride, stride_added, ACC: tl.constexpr):
    """Return a block of rows of x or, where something is added, of the sum as ``total`` has it."""
    part = tl.load(x + first_of(row, stride) + d, mask=here, other=0.0).to(ACC)
    if added is not None:
        part += tl.load(added + first_of(row, stride_added) + d, mask=here, other=0.0).to(ACC)
        part = part.to(total.dtype.element_ty).to(ACC)
    return part


@triton.jit(do_not_specialize=("count",))
def rms_norm_fwd_kernel(
    x,
    added,
    weight,
    total,
    y,
    inverses,
    count,
    stride: tl.constexpr,
    stride_added: tl.constexpr,
    D: tl.constexpr,
    eps: tl.constexpr,
    offset: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Normalise ``ROWS`` rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK_D)
    squares = tl.zeros((ROWS, BLOCK_D), dtype=ACC)
    for start in range(0, D, BLOCK_D):
        d = (start + lane)[None, :]
        here = (row < count)[:, None] & (d < D)
        part = row_of(x, added, total, row, here, d, stride, stride_added, ACC)
        squares += part * part
    inverse = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / D + eps)
    tl.store(inverses + row, inverse, mask=row < count)
    for start in range(0, D, BLOCK_D):
        d = (start + lane)[None, :]
        here = (row < count)[:, None] & (d < D)
        # summed once more: threads do not read each other's writes
        part = row_of(x, added, total, row, here, d, stride, stride_added, ACC)
        if added is not None:
            tl.store(total + first_of(row, D) + d, part.to(total.dtype.element_ty), mask=here)
        factor = tl.load(weight + d, mask=d < D, other=0.0).to(ACC) + offset
        out = (part * inverse[:, None] * factor).to(y.dtype.element_ty)
        tl.store(y + first_of(row, D) + d, out, mask=here)


@triton.jit(do_not_specialize=("count",))
def rms_norm_bwd_kernel(
    grad_y,
    x,
    weight,
    inverses,
    more,
    grad_x,
    count,
    stride_g: tl.constexpr,
    stride: tl.constexpr,
    stride_more: tl.constexpr,
    D: tl.constexpr,
    offset: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the gradients of ``ROWS`` rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK_D)
    here = (row < count)[:, None]
    inverse = tl.load(inverses + row, mask=row < count, other=0.0)[:, None]
    products = tl.zeros((ROWS, BLOCK_D), dtype=ACC)
    for start in range(0, D, BLOCK_D):
        d = (start + lane)[None, :]
        unit = tl.load(x + first_of(row, stride) + d, mask=here & (d < D), other=0.0).to(ACC)
        grad = tl.load(grad_y + first_of(row, stride_g) + d, mask=here & (d < D), other=0.0)
        factor = tl.load(weight + d, mask=d < D, other=0.0).to(ACC) + offset
        products += grad.to(ACC) * factor * unit * inverse
    along = (tl.sum(products, axis=1) / D)[:, None]
    for start in range(0, D, BLOCK_D):
        d = (start + lane)[None, :]
        unit = tl.load(x + first_of(row, stride) + d, mask=here & (d < D), other=0.0).to(ACC)
        grad = tl.load(grad_y + first_of(row, stride_g) + d, mask=here & (d < D), other=0.0)
        factor = tl.load(weight + d, mask=d < D, other=0.0).to(ACC) + offset
        out = (grad.to(ACC) * factor - unit * inverse * along) * inverse
        if more is not None:
            other = tl.load(more + first_of(row, stride_more) + d, mask=here & (d < D), other=0.0)
            out += other.to(ACC)
        tl.store(
            grad_x + first_of(row, D) + d, out.to(grad_x.dtype.element_ty), mask=here & (d < D)
        )


@triton.jit(do_not_specialize=("count", "share"))
def rms_norm_weight_kernel(
    grad_y,
    x,
    inverses,
    sums,
    count,
    share,
    stride_g: tl.constexpr,
    stride: tl.constexpr,
    D: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Sum the weight's gradient over one share of the rows, for a block of channels."""
    number = tl.program_id(0)
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    end = tl.minimum((number + 1) * share, count)
    sum_of = tl.zeros((ROWS, BLOCK_D), dtype=ACC)
    for start in range(number * share, end, ROWS):
        row = start + tl.arange(0, ROWS)
        here = (row < end)[:, None] & (d < D)
        inverse = tl.load(inverses + row, mask=row < end, other=0.0)[:, None]
        unit = tl.load(x + first_of(row, stride) + d, mask=here, other=0.0).to(ACC) * inverse
        sum_of += tl.load(grad_y + first_of(row, stride_g) + d, mask=here, other=0.0).to(ACC) * unit
    at = number.to(tl.int64) * D + d
    tl.store(sums + at, tl.sum(sum_of, axis=0)[None, :], mask=d < D)


def forward(
    x: Tensor,  # [B, D]
    weight: Tensor,  # [D]
    save: bool,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """Return y ``[B, D]`` in the weight's dtype, and the inverse roots ``[B]``."""
    return normalise(x, None, weight, eps, offset)[1:]


def normalise(
    x: Tensor,  # [B, D]
    added: Tensor | None,  # [B, D]
    weight: Tensor,  # [D]
    eps: float,
    offset: float,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return x + added ``[B, D]`` in x's dtype (None for None), its norm, the inverse roots."""
    (count, width), exact = x.shape, accumulator(x)
    x, added = rows(x), None if added is None else rows(added)
    total = None if added is None else x.new_empty(count, width)
    y = x.new_empty(count, width, dtype=weight.dtype)
    inverses = x.new_empty(count, dtype=exact)
    if count:
        block, tall = _tile(width)
        launch(
            rms_norm_fwd_kernel,
            (cdiv(count, tall),),
            *(x, added, weight.contiguous(), total, y, inverses, count),
            stride=x.stride(0),
            stride_added=0 if added is None else added.stride(0),
            D=width,
            eps=eps,
            offset=offset,
            ACC=_of(exact),
            ROWS=tall,
            BLOCK_D=block,
            num_warps=4,
        )
    return total, y, inverses


def backward(
    grad_y: Tensor,  # [B, D]
    x: Tensor,  # [B, D]
    weight: Tensor,  # [D]
    inverse: Tensor,  # [B]
    eps: float,
    offset: float,
    grad_x: Tensor | None = None,  # [B, D]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x ``[B, D]``, plus ``grad_x``, and of the weight ``[D]``."""
    (count, width), exact = x.shape, inverse.dtype
    x, grad_y, weight = rows(x), rows(grad_y), weight.contiguous()
    more = None if grad_x is None else rows(grad_x)
    grad_row = x.new_empty(count, width)
    share = max(LEAST_ROWS, cdiv(count, MOST_SHARES))
    sums = x.new_empty(cdiv(count, share), width, dtype=exact)
    if count:
        block, tall = _tile(width)
        sizes = {"stride_g": grad_y.stride(0), "stride": x.stride(0), "D": width}
        sizes |= {"ACC": _of(exact), "ROWS": tall, "BLOCK_D": block, "num_warps": 4}
        launch(
            rms_norm_bwd_kernel,
            (cdiv(count, tall),),
            *(grad_y, x, weight, inverse, more, grad_row, count),
            stride_more=0 if more is None else more.stride(0),
            offset=offset,
            **sizes,
        )
        launch(
            rms_norm_weight_kernel,
            (len(sums), cdiv(width, block)),
            *(grad_y, x, inverse, sums, count, share),
            **sizes,
        )
    return grad_row, sums.sum(0)


def _tile(width: int) -> tuple[int, int]:
    """Return the channels of a block, and the rows of a program."""
    block = min(WIDEST, next_power_of_2(width))
    return block, max(1, min(16, TILE // block))


def _of(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32
