"""The norm row by row: the formula as it stands; the judge of the others."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float) -> Tensor:
    """Normalise rows (equation and shapes: the public op of the same name)."""
    exact = torch.promote_types(torch.float32, x.dtype)
    factor = offset + weight.to(exact)
    rows = [(factor * x[:0]).to(weight.dtype)]
    for row in x.to(exact):
        root = ((row * row).sum() / row.shape[0] + eps).sqrt()
        rows.append((factor * row / root).to(weight.dtype)[None])
    return torch.cat(rows)
