"""The predictor error token by token: the formula as it stands."""

from itertools import pairwise

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
    scores = y.new_empty(y.shape[0], dtype=exact)
    for s, (begin, end) in enumerate(pairwise(offsets.tolist())):
        before = [row.to(exact) for row in history[s]]
        for t in range(begin, end):
            now = y[t].to(exact)
            guess = sum(a * before[-i] for i, a in enumerate(weights, 1))
            error = (now - guess).square()
            size = now.square().sum() + 1e-6
            scores[t] = error.sum() / size if relative else error.mean()
            before.append(now)
    return scores
