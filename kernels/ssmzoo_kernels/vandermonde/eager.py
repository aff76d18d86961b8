"""Sums of exponentials in two levels: small tables in float64, then matrix products.

With ``l = m Q + j`` an exponential ``e^{c l}`` is ``e^{c m Q} e^{c j}``, so that a head's sums over
modes are one product of the row table ``[M, 2N]`` and the column table ``[2N, Q]``. A reversed mode
counts its lags down; its tables do the same, and the last row, which would count below zero where Q
does not divide the length, is a product of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# bytes of tables in flight: within a CPU's cache, or enough to fill a GPU
WORKSPACE = {"cpu": 1 << 22, "cuda": 1 << 28}


@dataclass(frozen=True)
class Lags:
    """Which lag belongs to which position.

    Attributes:
        length: How many positions there are.
        first: The first position's lag where lags rise.
        last: The last position's lag where lags fall.
        falling: Which modes' lags fall, ``[H, N]`` or all or none.
    """

    length: int
    first: int
    last: int
    falling: Tensor | bool


def synthesize(weight: Tensor, exponent: Tensor, lags: Lags) -> Tensor:
    """Return ``Re sum_n weight e^{c lag}`` for weights ``[B, H, N]``, as ``[B, H, L]``."""
    batch, heads, modes = weight.shape
    out = weight.real.new_empty(batch, heads, lags.length)
    if not out.numel() or not modes:
        return out.zero_()
    for h, tables in _blocks(exponent, lags, batch):
        for table in tables:
            rows = table.rows.unsqueeze(1)  # [h, 1, M, N]
            if batch == 1:
                left = (weight[0, h, None, None] * rows).to(weight.dtype)
            else:
                left = weight[:, h].transpose(0, 1).unsqueeze(2) * rows.to(weight.dtype)
            product = _flat(left.conj()) @ _flat(table.columns.to(weight.dtype)).transpose(1, 2)
            block = product.view(-1, batch, table.count)  # [h, B, M Q]
            out[:, h, table.begin : table.begin + table.count] = block.transpose(0, 1)
    return out


def analyze(g: Tensor, exponent: Tensor, lags: Lags, moment: bool) -> tuple[Tensor, Tensor | None]:
    """Return ``sum_l g e^{c lag}`` and, on request, ``sum_l g lag e^{c lag}``.

    Args:
        g: What is summed, ``[B, H, L]``.
        exponent: The exponents ``[H, N]``.
        lags: Which lag belongs to which position.
        moment: Whether to return the second sum too.

    Returns:
        Both ``[B, H, N]``, complex.
    """
    batch, heads, _ = g.shape
    shape = (batch, heads, exponent.shape[1])
    sums = g.new_zeros(shape, dtype=g.dtype.to_complex())
    moments = torch.zeros_like(sums) if moment else None
    if not g.numel() or not sums.numel():
        return sums, moments
    for h, tables in _blocks(exponent, lags, batch):
        for table in tables:
            part = g[:, h, table.begin : table.begin + table.count].transpose(0, 1)
            part = part.reshape(part.shape[0], batch * table.rows.shape[1], -1)  # [h, B M, Q]
            rows = table.rows.to(sums.dtype).unsqueeze(1)  # [h, 1, M, N]
            columns = table.columns.to(sums.dtype)
            inner = _complex(part @ _flat(columns), batch)  # [h, B, M, N]
            sums[:, h] += (inner * rows).sum(2).transpose(0, 1)
            if moments is not None:
                weighted = columns * table.column_lags.to(g.dtype)
                outer = _complex(part @ _flat(weighted), batch)
                outer += inner * table.row_lags.to(g.dtype).unsqueeze(-3)
                moments[:, h] += (outer * rows).sum(2).transpose(0, 1)
    return sums, moments


@dataclass(frozen=True)
class _Table:
    """Consecutive positions of some heads: M rows of Q columns.

    Attributes:
        begin: The first position.
        count: How many there are, ``M Q``.
        rows: ``e^{c row_lags}``, ``[h, M, N]`` complex128.
        columns: ``e^{c column_lags}``, ``[h, Q, N]`` complex128.
        row_lags: ``[M, 1]`` or ``[h, M, N]``.
        column_lags: ``[Q, 1]`` or ``[h, Q, N]``.
    """

    begin: int
    count: int
    rows: Tensor
    columns: Tensor
    row_lags: Tensor
    column_lags: Tensor


def width(length: int) -> int:
    """Return how many columns a table has: a power of two near the root of the length."""
    return min(256, max(16, 1 << (length.bit_length() + 1) // 2), length)


def _blocks(exponent: Tensor, lags: Lags, batch: int) -> Iterator[tuple[slice, list[_Table]]]:
    """Yield blocks of heads with the tables that cover all positions."""
    heads, modes = exponent.shape
    columns = width(lags.length)
    each = 16 * modes * (columns + (batch + 1) * -(-lags.length // columns))
    budget = WORKSPACE.get(exponent.device.type, WORKSPACE["cpu"])
    block = max(1, min(heads, budget // each))
    for start in range(0, heads, block):
        h = slice(start, min(start + block, heads))
        falling = lags.falling
        if isinstance(falling, Tensor):
            falling = falling[h].unsqueeze(1)  # [h, 1, N]
        yield h, _tables(exponent[h].unsqueeze(1), lags, falling, columns)


def _tables(c: Tensor, lags: Lags, falling: Tensor | bool, columns: int) -> list[_Table]:
    full, rest = divmod(lags.length, columns)
    found = []
    begin = 0
    for rows, count in ((full, columns), (1, rest)):
        if not rows * count:
            continue
        across, column_lags = _powers(c, 1, count, falling)
        down, row_lags = _powers(c, count, rows, falling)
        rise = lags.first + begin
        fall = lags.last + lags.length - begin - rows * count
        if isinstance(falling, Tensor):
            least = falling.to(row_lags.dtype) * (fall - rise) + rise
            down, row_lags = down * torch.exp(c * least), row_lags + least
        elif least := fall if falling else rise:
            down, row_lags = down * torch.exp(c * least), row_lags + least
        found.append(_Table(begin, rows * count, down, across, row_lags, column_lags))
        begin += rows * count
    return found


def _powers(c: Tensor, step: int, count: int, falling: Tensor | bool) -> tuple[Tensor, Tensor]:
    """Return ``e^{c lags}`` ``[h, count, N]`` and the lags: multiples of a step, from or to zero.

    The table is the outer product of two small ones: one rounding more in float64, and twice the
    root of the count in exponentials.
    """
    small = 1 << (count.bit_length() // 2)
    large = -(-count // small)
    lags = torch.arange(small * large, device=c.device, dtype=torch.float64).unsqueeze(1) * step
    low = torch.exp(c * lags[:small]).unsqueeze(1)
    high = torch.exp(c * lags[::small]).unsqueeze(2)
    table, lags = (high * low).flatten(1, 2)[:, :count], lags[:count]
    if isinstance(falling, Tensor):
        return torch.where(falling, table.flip(1), table), torch.where(falling, lags.flip(0), lags)
    return (table.flip(1), lags.flip(0)) if falling else (table, lags)


def _flat(x: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones, ``[h, rows, 2 N]``."""
    pairs = torch.view_as_real(x.resolve_conj())
    return pairs.reshape(x.shape[0], -1, 2 * x.shape[-1])


def _complex(x: Tensor, batch: int) -> Tensor:
    """Return ``[h, B M, 2 N]`` pairs as complex numbers ``[h, B, M, N]``."""
    return torch.view_as_complex(x.view(x.shape[0], batch, -1, x.shape[2] // 2, 2))
