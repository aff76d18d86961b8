"""The predictor error in torch: shifted sums, packed sequences end to end."""

import torch
from torch import Tensor


def innovation(
    y: Tensor,  # [T, D]
    weights: list[float],
    history: Tensor,  # [S, k, D]
    offsets: Tensor,  # [S + 1]
    relative: bool,
) -> Tensor:
    """Return the scores ``[T]``."""
    exact = torch.promote_types(torch.float32, y.dtype)
    tokens, span = y.shape[0], len(weights)
    place = torch.arange(tokens, device=y.device)
    sequence = torch.searchsorted(offsets[1:].contiguous(), place, right=True)
    within = place - offsets[sequence]
    table = torch.cat([history.flatten(0, 1).to(y.dtype), y])
    old = history.shape[0] * span
    error = y.to(exact)
    for back, weight in enumerate(weights, 1):
        # the history of sequence s ends in row s * k + k - 1
        behind = sequence * span + span + within - back
        rows = torch.where(within >= back, old + place - back, behind)
        error = error - weight * table[rows].to(exact)
    error = error.square()
    if relative:
        return error.sum(dim=-1) / (y.to(exact).square().sum(dim=-1) + 1e-6)
    return error.mean(dim=-1)
