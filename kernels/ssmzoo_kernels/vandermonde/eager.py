"""Sums of exponentials as products of small tables, by torch.

Conjugates are written out: inside a registered op that a compiled graph calls, torch 2.13 forgets
the lazy ones.
"""

import torch
from torch import Tensor

from ssmzoo_kernels.vandermonde.tables import Lags, blocks


def synthesize(weight: Tensor, exponent: Tensor, lags: Lags) -> Tensor:
    """Return ``Re sum_n weight e^{c lag}`` for weights ``[B, H, N]``, as ``[B, H, L]``."""
    batch, heads, modes = weight.shape
    out = weight.real.new_empty(batch, heads, lags.length)
    if not out.numel() or not modes:
        return out.zero_()
    for h, tables in blocks(exponent, lags, batch):
        for table in tables:
            rows = table.rows.unsqueeze(1)  # [h, 1, M, N]
            if batch == 1:
                left = (weight[0, h, None, None] * rows).to(weight.dtype)
            else:
                left = weight[:, h].transpose(0, 1).unsqueeze(2) * rows.to(weight.dtype)
            columns = _flat(table.columns.to(weight.dtype))
            product = _flat(left.conj_physical()) @ columns.transpose(1, 2)
            block = product.view(-1, batch, table.count)  # [h, B, M Q]
            out[:, h, table.begin : table.begin + table.count] = block.transpose(0, 1)
    return out


def analyze(g: Tensor, exponent: Tensor, lags: Lags, moment: bool) -> tuple[Tensor, Tensor | None]:
    """Return ``sum_l g e^{c lag}`` and, on request, ``sum_l g lag e^{c lag}``.

    Args:
        g: The summands, ``[B, H, L]``.
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
    for h, tables in blocks(exponent, lags, batch):
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


def _flat(x: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones, ``[h, rows, 2 N]``."""
    pairs = torch.view_as_real(x)
    return pairs.reshape(x.shape[0], -1, 2 * x.shape[-1])


def _complex(x: Tensor, batch: int) -> Tensor:
    """Return ``[h, B M, 2 N]`` pairs as complex numbers ``[h, B, M, N]``."""
    return torch.view_as_complex(x.view(x.shape[0], batch, -1, x.shape[2] // 2, 2))
