"""The predictor's error token by token: the formula as it stands; the judge of the others."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


@torch.no_grad()
def innovation(
    y: Tensor,  # [B, L, D]
    history: Tensor | None = None,  # [B, k, D]
    *,
    weights: Sequence[float],
    cu_seqlens: Tensor | None = None,
    relative: bool = False,
) -> tuple[Tensor, Tensor]:
    """Score outputs by their prediction (equations and shapes: the public op of the same name)."""
    batch, length, width = y.shape
    bounds = range(0, batch * length + 1, length) if length else [0] * (batch + 1)
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
    exact = torch.promote_types(torch.float32, y.dtype)
    rows, scores = y.reshape(batch * length, width), []
    ends = y.new_zeros(len(bounds) - 1, len(weights), width)
    if history is not None:
        ends = history.to(y.dtype)
    ends = list(ends)
    for s, (begin, end) in enumerate(pairwise(bounds)):
        for t in range(begin, end):
            now = rows[t].to(exact)
            guess = torch.zeros_like(now)
            for i, weight in enumerate(weights, 1):
                guess = guess + weight * ends[s][-i].to(exact)
            error = (now - guess).square()
            score = error.sum() / (now.square().sum() + 1e-6) if relative else error.mean()
            scores.append(score)
            ends[s] = torch.cat([ends[s][1:], rows[t : t + 1]])
    found = torch.stack(scores) if scores else y.new_zeros(0, dtype=exact)
    return found.view(batch, length), torch.stack(ends)
