"""Sums of exponentials on GPUs: the products of the tables, with what stands around them fused.

Forward, the weights meet the row table on the way into the product. Backward, one pass over the
incoming gradient makes both sums, and their reduction over rows stays in registers.
"""

# a kernel launch is no ordinary call: Triton's types do not describe it
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmzoo_kernels.vandermonde.tables import Lags, blocks


@triton.jit
def load_pair(x, at, mask):
    """Load complex numbers as their real and imaginary parts."""
    return (
        tl.load(x + 2 * at, mask=mask, other=0.0),
        tl.load(x + 2 * at + 1, mask=mask, other=0.0),
    )


@triton.jit(do_not_specialize=("heads", "first_head", "some", "stride", "begin", "M", "tiles"))
def vandermonde_fwd_kernel(
    weight,
    rows,
    columns,
    out,
    heads,
    first_head,
    some,
    stride,
    begin,
    M,
    tiles,
    N: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Write ``BLOCK_M`` rows by ``BLOCK_Q`` columns of one of ``some`` heads' sums."""
    h = (tl.program_id(0) % some).to(tl.int64)
    m = (tl.program_id(1) // tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = (tl.program_id(1) % tiles) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    own = (tl.program_id(0) // some).to(tl.int64) * heads + first_head + h
    acc: tl.constexpr = out.dtype.element_ty
    sums = tl.zeros((BLOCK_M, BLOCK_Q), dtype=acc)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        wr, wi = load_pair(weight, own * N + n, n < N)
        at = (h * M + m[:, None]) * N + n[None, :]
        pr, pi = load_pair(rows, at, (m < M)[:, None] & (n < N)[None, :])
        at = (h * Q + j[None, :]) * N + n[:, None]
        er, ei = load_pair(columns, at, (n < N)[:, None] & (j < Q)[None, :])
        real = wr[None, :] * pr - wi[None, :] * pi
        imaginary = wr[None, :] * pi + wi[None, :] * pr
        sums = tl.dot(real, er, sums, input_precision="ieee", out_dtype=acc)
        sums = tl.dot(-imaginary, ei, sums, input_precision="ieee", out_dtype=acc)
    at = own * stride + begin + m[:, None] * Q + j[None, :]
    tl.store(out + at, sums, mask=(m < M)[:, None] & (j < Q)[None, :])


@triton.jit(
    do_not_specialize=("heads", "first_head", "some", "stride", "begin", "M", "rise", "fall")
)
def vandermonde_bwd_kernel(
    g,
    rows,
    columns,
    falling,
    sums,
    moments,
    heads,
    first_head,
    some,
    stride,
    begin,
    M,
    rise,
    fall,
    N: tl.constexpr,
    Q: tl.constexpr,
    MOMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Add one table's positions to the sums of ``BLOCK_N`` modes of one head.

    ``rise`` and ``fall`` are the least lags of a rising and of a falling mode among them.
    """
    h = (tl.program_id(0) % some).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = (tl.program_id(0) // some).to(tl.int64) * heads + first_head + h
    acc: tl.constexpr = g.dtype.element_ty
    down = tl.load(falling + (first_head + h) * N + n, mask=n < N, other=0) != 0
    sum_r, sum_i = load_pair(sums, own * N + n, n < N)
    mom_r = sum_r * 0.0
    mom_i = sum_r * 0.0
    for top in range(0, M, BLOCK_M):
        m = top + tl.arange(0, BLOCK_M)
        inner_r = tl.zeros((BLOCK_M, BLOCK_N), dtype=acc)
        inner_i = tl.zeros((BLOCK_M, BLOCK_N), dtype=acc)
        outer_r = tl.zeros((BLOCK_M, BLOCK_N), dtype=acc)
        outer_i = tl.zeros((BLOCK_M, BLOCK_N), dtype=acc)
        for left in range(0, Q, BLOCK_Q):
            j = left + tl.arange(0, BLOCK_Q)
            at = own * stride + begin + m[:, None] * Q + j[None, :]
            part = tl.load(g + at, mask=(m < M)[:, None] & (j < Q)[None, :], other=0.0)
            at = (h * Q + j[:, None]) * N + n[None, :]
            er, ei = load_pair(columns, at, (j < Q)[:, None] & (n < N)[None, :])
            inner_r = tl.dot(part, er, inner_r, input_precision="ieee", out_dtype=acc)
            inner_i = tl.dot(part, ei, inner_i, input_precision="ieee", out_dtype=acc)
            if MOMENT:
                lag = tl.where(down[None, :], Q - 1 - j[:, None], j[:, None]).to(acc)
                outer_r = tl.dot(part, lag * er, outer_r, input_precision="ieee", out_dtype=acc)
                outer_i = tl.dot(part, lag * ei, outer_i, input_precision="ieee", out_dtype=acc)
        at = (h * M + m[:, None]) * N + n[None, :]
        pr, pi = load_pair(rows, at, (m < M)[:, None] & (n < N)[None, :])
        sum_r += tl.sum(inner_r * pr - inner_i * pi, axis=0)
        sum_i += tl.sum(inner_r * pi + inner_i * pr, axis=0)
        if MOMENT:
            up = rise + m[:, None] * Q
            lag = tl.where(down[None, :], fall + (M - 1 - m[:, None]) * Q, up).to(acc)
            outer_r += lag * inner_r
            outer_i += lag * inner_i
            mom_r += tl.sum(outer_r * pr - outer_i * pi, axis=0)
            mom_i += tl.sum(outer_r * pi + outer_i * pr, axis=0)
    at = 2 * (own * N + n)
    tl.store(sums + at, sum_r, mask=n < N)
    tl.store(sums + at + 1, sum_i, mask=n < N)
    if MOMENT:
        mom_r += tl.load(moments + at, mask=n < N, other=0.0)
        mom_i += tl.load(moments + at + 1, mask=n < N, other=0.0)
        tl.store(moments + at, mom_r, mask=n < N)
        tl.store(moments + at + 1, mom_i, mask=n < N)


def synthesize(weight: Tensor, exponent: Tensor, lags: Lags) -> Tensor:
    """Return ``Re sum_n weight e^{c lag}`` for weights ``[B, H, N]``, as ``[B, H, L]``."""
    batch, heads, modes = weight.shape
    out = torch.empty(
        (batch, heads, lags.length), dtype=weight.dtype.to_real(), device=weight.device
    )
    if not out.numel() or not modes:
        return out.zero_()
    pairs = _pairs(weight, weight.dtype)
    for h, tables in blocks(exponent, lags, 1):
        for table in tables:
            some, count, columns = *table.rows.shape[:2], table.columns.shape[1]
            tiles = triton.cdiv(columns, _TILE)
            with torch.cuda.device_of(weight):
                vandermonde_fwd_kernel[(batch * some, triton.cdiv(count, _TILE) * tiles)](
                    pairs,
                    _pairs(table.rows, weight.dtype),
                    _pairs(table.columns, weight.dtype),
                    out,
                    heads,
                    h.start,
                    some,
                    lags.length,
                    table.begin,
                    count,
                    tiles,
                    N=modes,
                    Q=columns,
                    BLOCK_M=_TILE,
                    BLOCK_N=16,
                    BLOCK_Q=_TILE,
                    num_warps=4,
                )
    return out


def analyze(g: Tensor, exponent: Tensor, lags: Lags, moment: bool) -> tuple[Tensor, Tensor | None]:
    """Return ``sum_l g e^{c lag}`` and, on request, ``sum_l g lag e^{c lag}``, ``[B, H, N]``."""
    batch, heads, length = g.shape
    modes = exponent.shape[1]
    shape = (batch, heads, modes)
    sums = torch.zeros(shape, dtype=g.dtype.to_complex(), device=g.device)
    moments = torch.zeros_like(sums) if moment else None
    if not g.numel() or not modes:
        return sums, moments
    g = g.contiguous()
    falling = lags.falling
    if not isinstance(falling, Tensor):
        falling = torch.full((heads, modes), falling, device=g.device)
    falling = falling.to(torch.int8).contiguous()
    for h, tables in blocks(exponent, lags, 1):
        for table in tables:
            some, count, columns = *table.rows.shape[:2], table.columns.shape[1]
            with torch.cuda.device_of(g):
                vandermonde_bwd_kernel[(batch * some, triton.cdiv(modes, _MODES))](
                    g,
                    _pairs(table.rows, sums.dtype),
                    _pairs(table.columns, sums.dtype),
                    falling,
                    torch.view_as_real(sums),
                    None if moments is None else torch.view_as_real(moments),
                    heads,
                    h.start,
                    some,
                    length,
                    table.begin,
                    count,
                    lags.first + table.begin,
                    lags.last + length - table.begin - table.count,
                    N=modes,
                    Q=columns,
                    MOMENT=moment,
                    BLOCK_M=_ROWS,
                    BLOCK_N=_MODES,
                    BLOCK_Q=_COLUMNS,
                    num_warps=4,
                )
    return sums, moments


_TILE = 64
_MODES = 16
_ROWS = 32
_COLUMNS = 16


def _pairs(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_real(x.to(dtype).resolve_conj().contiguous())
