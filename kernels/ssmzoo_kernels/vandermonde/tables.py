"""The small tables that sums of exponentials are products of.

With ``l = m Q + j`` an exponential ``e^{c l}`` is ``e^{c m Q} e^{c j}``, so that a head's sums over
modes are one product of the row table ``[M, 2N]`` and the column table ``[2N, Q]``. A reversed mode
counts its lags down; its tables do the same, and the last row, which would count below zero where Q
does not divide the length, is a product of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

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


@dataclass(frozen=True)
class Table:
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


class Cut(NamedTuple):
    """Positions that one table covers, consecutive ones."""

    begin: int
    rows: int
    columns: int
    rise: int  # the least lag of a mode whose lags rise
    fall: int  # of one whose lags fall


def layout(exponent: Tensor, lags: Lags, batch: int) -> tuple[list[slice], list[Cut]]:
    """Return as many heads at a time as their tables may take memory, and the tables of each.

    Whole rows are one table; a last row where they do not fit is another one.
    """
    heads, modes = exponent.shape
    columns = width(lags.length)
    full, rest = divmod(lags.length, columns)
    cuts, begin = [], 0
    for rows, count in ((full, columns), (1, rest)):
        if rows * count:
            fall = lags.last + lags.length - begin - rows * count
            cuts.append(Cut(begin, rows, count, lags.first + begin, fall))
            begin += rows * count
    each = 16 * modes * (columns + (batch + 1) * -(-lags.length // columns))
    budget = WORKSPACE.get(exponent.device.type, WORKSPACE["cpu"])
    block = max(1, min(heads, budget // each))
    found = []
    for start in range(0, heads, block):
        found.append(slice(start, min(start + block, heads)))
    return found, cuts


def blocks(exponent: Tensor, lags: Lags, batch: int) -> Iterator[tuple[slice, list[Table]]]:
    """Yield blocks of heads with the tables that cover all positions."""
    heads, cuts = layout(exponent, lags, batch)
    for h in heads:
        falling = lags.falling
        if isinstance(falling, Tensor):
            falling = falling[h].unsqueeze(1)  # [h, 1, N]
        yield h, _tables(exponent[h].unsqueeze(1), cuts, falling)


def _tables(c: Tensor, cuts: list[Cut], falling: Tensor | bool) -> list[Table]:
    found = []
    for begin, rows, count, rise, fall in cuts:
        across, column_lags = _powers(c, 1, count, falling)
        down, row_lags = _powers(c, count, rows, falling)
        if isinstance(falling, Tensor):
            least = falling.to(row_lags.dtype) * (fall - rise) + rise
            down, row_lags = down * torch.exp(c * least), row_lags + least
        elif least := fall if falling else rise:
            down, row_lags = down * torch.exp(c * least), row_lags + least
        found.append(Table(begin, rows * count, down, across, row_lags, column_lags))
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
