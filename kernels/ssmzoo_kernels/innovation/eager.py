"""The predictor's error in torch: sums of shifted outputs, first tokens anew from their history."""

import torch
from torch import Tensor


def forward(
    y: Tensor,  # [T, D]
    history: Tensor,  # [S, k, D]
    offsets: Tensor,  # [S + 1] int64
    weights: list[float],
    relative: bool,
) -> Tensor:
    """Return the scores ``[T]``."""
    exact, span = torch.promote_types(torch.float32, y.dtype), len(weights)
    error = y.to(exact, copy=True)
    for back, weight in enumerate(weights, 1):
        error[back:].add_(y[:-back], alpha=-weight)
    if y.shape[0]:
        # these have looked into the sequence before theirs
        within = torch.arange(span, device=y.device)
        place = offsets[:-1, None] + within
        inside = within < offsets.diff()[:, None]
        first = y[place.clamp(max=y.shape[0] - 1)].to(exact)  # [S, k, D]
        known = torch.cat([history.to(exact), first], dim=1)
        for back, weight in enumerate(weights, 1):
            first = first - weight * known[:, span - back : 2 * span - back]
        error[place[inside]] = first[inside]
    error.square_()
    if relative:
        return error.sum(dim=-1) / (y.to(exact).square().sum(dim=-1) + 1e-6)
    return error.mean(dim=-1)
