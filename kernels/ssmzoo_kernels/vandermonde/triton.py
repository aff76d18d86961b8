"""Sums of exponentials on GPUs: tables, and their products with what stands around them fused.

A table's exponentials are float64 and are written once, in the dtype of the products.
Forward, the weights meet the row table on the way into the product. Backward, one pass over the
incoming gradient makes both sums, and their reduction over rows stays in registers.
"""

# a kernel launch is no ordinary call: Triton's types do not describe it
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmzoo_kernels.launches import cdiv, launch
from ssmzoo_kernels.vandermonde.tables import Lags, layout

# pi / 2 in parts; the first two have so few bits that their products with integers are exact
HALF_PI_1 = tl.constexpr(float.fromhex("0x1.921fb54400000p+0"))
HALF_PI_2 = tl.constexpr(float.fromhex("0x1.0b4611a600000p-34"))
HALF_PI_3 = tl.constexpr(float.fromhex("0x1.3198a2e037073p-69"))


@triton.jit
def load_pair(x, at, mask):
    """Load complex numbers as their real and imaginary parts."""
    return (
        tl.load(x + 2 * at, mask=mask, other=0.0),
        tl.load(x + 2 * at + 1, mask=mask, other=0.0),
    )


@triton.jit
def cosine_and_sine(angle):
    """Return both, in float64.

    CUDA's own functions have a table in local memory for large angles. Here quarter turns are taken
    off, by as many parts of pi / 2 as leave no more error than the angle has; up to pi / 4 Taylor's
    polynomials leave out terms below 5e-17.
    """
    quarters = tl.floor(angle * 0.63661977236758134308 + 0.5)
    x = angle - quarters * HALF_PI_1 - quarters * HALF_PI_2 - quarters * HALF_PI_3
    square = x * x
    cosine = square * 0.0 + 1.0
    sine = square * 0.0 + 1.0
    for i in tl.static_range(8, 0, -1):
        cosine = 1.0 - cosine * square * (1.0 / ((2 * i - 1) * (2 * i)))
        sine = 1.0 - sine * square * (1.0 / ((2 * i) * (2 * i + 1)))
    sine *= x
    turn = quarters - 4.0 * tl.floor(quarters * 0.25)  # 0 to 3
    odd = (turn == 1.0) | (turn == 3.0)
    c = tl.where(odd, sine, cosine)
    s = tl.where(odd, cosine, sine)
    return tl.where((turn == 1.0) | (turn == 2.0), -c, c), tl.where(turn >= 2.0, -s, s)


@triton.jit(do_not_specialize=("first_head", "blocks", "count", "step", "rise", "fall"))
def vandermonde_table_kernel(
    exponent,
    falling,
    table,
    first_head,
    blocks,
    count,
    step,
    rise,
    fall,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write ``BLOCK`` of one head's ``count`` by N exponentials, of lags ``step`` apart.

    ``rise`` and ``fall`` are the least lags of a rising and of a falling mode.
    """
    h = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    number, n = at // N, at % N
    live = number < count
    cr, ci = load_pair(exponent, (first_head + h) * N + n, live)
    down = tl.load(falling + (first_head + h) * N + n, mask=live, other=0) != 0
    lag = tl.where(down, fall + (count - 1 - number) * step, rise + number * step).to(tl.float64)
    size = tl.exp(cr * lag)
    cosine, sine = cosine_and_sine(ci * lag)
    at = 2 * (h * count * N + at)
    tl.store(table + at, (size * cosine).to(table.dtype.element_ty), mask=live)
    tl.store(table + at + 1, (size * sine).to(table.dtype.element_ty), mask=live)


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
    falling = _falling(lags, exponent)
    heads_at_once, cuts = layout(exponent, lags, 1)
    for h in heads_at_once:
        for begin, count, columns, rise, fall in cuts:
            down, across = _tables(exponent, falling, h, (count, columns, rise, fall), out.dtype)
            tiles = cdiv(columns, _TILE)
            some = h.stop - h.start
            launch(
                vandermonde_fwd_kernel,
                (batch * some, cdiv(count, _TILE) * tiles),
                *(pairs, down, across, out, heads, h.start, some),
                *(lags.length, begin, count, tiles),
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
    falling = _falling(lags, exponent)
    heads_at_once, cuts = layout(exponent, lags, 1)
    for h in heads_at_once:
        for begin, count, columns, rise, fall in cuts:
            down, across = _tables(exponent, falling, h, (count, columns, rise, fall), g.dtype)
            some = h.stop - h.start
            launch(
                vandermonde_bwd_kernel,
                (batch * some, cdiv(modes, _MODES)),
                *(g, down, across, falling, torch.view_as_real(sums)),
                None if moments is None else torch.view_as_real(moments),
                *(heads, h.start, some, length, begin, count, rise, fall),
                N=modes,
                Q=columns,
                MOMENT=moment,
                BLOCK_M=_ROWS,
                BLOCK_N=_MODES,
                BLOCK_Q=_COLUMNS,
                num_warps=4,
            )
    return sums, moments


def _falling(lags: Lags, exponent: Tensor) -> Tensor:
    falling = lags.falling
    if not isinstance(falling, Tensor):
        falling = torch.full(exponent.shape, falling, device=exponent.device)
    return falling.to(torch.int8).contiguous()


def _tables(
    exponent: Tensor, falling: Tensor, h: slice, cut: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return a cut's table of rows ``[h, M, N, 2]`` and its table of columns ``[h, Q, N, 2]``."""
    rows, columns, rise, fall = cut
    some, modes = h.stop - h.start, exponent.shape[1]
    exponent = _pairs(exponent, torch.complex128)
    found = []
    for count, step, least in ((rows, columns, (rise, fall)), (columns, 1, (0, 0))):
        table = torch.empty(some, count, modes, 2, dtype=dtype, device=exponent.device)
        blocks = cdiv(count * modes, _ENTRIES)
        launch(
            vandermonde_table_kernel,
            (some * blocks,),
            *(exponent, falling, table, h.start, blocks, count, step, *least),
            N=modes,
            BLOCK=_ENTRIES,
            num_warps=4,
        )
        found.append(table)
    return found[0], found[1]


_TILE = 64
_MODES = 16
_ROWS = 32
_COLUMNS = 16
_ENTRIES = 512  # of a table that a program writes


def _pairs(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_real(x.to(dtype).resolve_conj().contiguous())
