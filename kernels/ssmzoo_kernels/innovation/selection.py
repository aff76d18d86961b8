"""Which tokens a bounded memory keeps: those with the largest scores, of equal ones the oldest."""

from typing import NamedTuple

import torch
from torch import Tensor

OP = "select_memory"


class Selection(NamedTuple):
    """What a memory keeps, by position; places that hold nothing come last.

    Attributes:
        scores: ``[R, n]``, minus infinity where a place holds nothing.
        positions: ``[R, n]``.
        indices: Where they lie in what was there, followed by what is new, ``[R, n]``.
        count: How many places hold something, ``[R]``.
    """

    scores: Tensor
    positions: Tensor
    indices: Tensor
    count: Tensor


@torch.no_grad()
def select_memory(
    scores: Tensor,  # [R, m]
    positions: Tensor,  # [R, m] int64
    new_scores: Tensor,  # [R, n]
    new_positions: Tensor,  # [R, n] int64
    count: int,
) -> Selection:
    """Merge new tokens into memories: the ``count`` largest scores stay, and come by position.

    Of equal scores the older position stays, whatever the order of the arguments, so that merging
    chunk after chunk, token after token (a new one enters on ``>`` and drives out the youngest of
    the smallest) and taking the largest of all at once are the same. No gradient flows.

    Args:
        scores: Of the memory, minus infinity in places that hold nothing; m may be 0.
        positions: Of the memory's tokens.
        new_scores: Of tokens that may enter, minus infinity where there is none.
        new_positions: Of these tokens.
        count: How many a memory holds. There are fewer places while ``m + n`` is less.

    Raises:
        ValueError: Shapes or a count that do not fit.
    """
    shape = scores.shape
    if scores.dim() != 2:
        raise ValueError(f"{OP}: scores must have shape [R, m], got {list(shape)}")
    for name, tensor, like in (
        ("positions", positions, scores),
        ("new_positions", new_positions, new_scores),
    ):
        if tensor.shape != like.shape:
            rule = "scores'" if like is scores else "new_scores'"
            raise ValueError(
                f"{OP}: {name} must have {rule} shape {list(like.shape)}, got {list(tensor.shape)}"
            )
    if new_scores.dim() != 2 or new_scores.shape[0] != shape[0]:
        raise ValueError(
            f"{OP}: new_scores must have shape [R, n] with R = {shape[0]}, "
            f"got {list(new_scores.shape)}"
        )
    if count < 0:
        raise ValueError(f"{OP}: count must be 0 or more, got {count}")
    scores, positions = torch.cat([scores, new_scores], 1), torch.cat([positions, new_positions], 1)
    # stable, since topk leaves the order of ties open: by position, then by score
    oldest = positions.argsort(dim=1, stable=True)
    best = scores.gather(1, oldest).argsort(dim=1, descending=True, stable=True)[:, :count]
    holds = ~scores.gather(1, oldest).gather(1, best).isneginf()
    # what `best` counts are ranks by position already
    order = best.masked_fill(~holds, scores.shape[1]).argsort(dim=1, stable=True)
    indices = oldest.gather(1, best.gather(1, order))
    return Selection(
        scores.gather(1, indices), positions.gather(1, indices), indices, holds.sum(dim=1)
    )
