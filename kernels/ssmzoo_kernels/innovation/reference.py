"""The predictor's error token by token: the formula as it stands; the judge of the others."""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def innovation(
    y: Tensor,  # [B, L, D]
    history: Tensor | None = None,  # [B, k, D]
    *,
    weights: Sequence[float],
    relative: bool = False,
) -> tuple[Tensor, Tensor]:
    """Score outputs by their prediction (equations and shapes: the public op of the same name)."""
    exact, span = torch.promote_types(torch.float32, y.dtype), len(weights)
    if history is None:
        history = y.new_zeros(y.shape[0], span, y.shape[2])
    known = torch.cat([history.to(y.dtype), y], dim=1)  # [B, k + L, D]
    scores = [y.new_zeros(y.shape[0], 0, dtype=exact)]
    for t in range(y.shape[1]):
        now = y[:, t].to(exact)
        guess = torch.zeros_like(now)
        for i, weight in enumerate(weights, 1):
            guess = guess + weight * known[:, span + t - i].to(exact)
        error, size = (now - guess).square(), now.square().sum(dim=-1) + 1e-6
        score = error.sum(dim=-1) / size if relative else error.mean(dim=-1)
        scores.append(score.unsqueeze(1))
    return torch.cat(scores, dim=1), known[:, y.shape[1] :].clone()
