"""Choose the tokens that a bounded memory keeps: the largest scores; of equal ones the oldest."""

from typing import NamedTuple

import torch
from torch import Tensor

from ssmzoo_kernels.validation import check_leading, check_tensor

OP = "select_memory"


class Selection(NamedTuple):
    """The tokens that a memory keeps, by position; empty places come last.

    Attributes:
        scores: ``[R, n]``, minus infinity where a place holds nothing.
        positions: ``[R, n]``.
        indices: Where they lie in the old memory followed by the new tokens, ``[R, n]``.
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
    """Merge new tokens into memories: keep the ``count`` largest scores, sorted by position.

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
        ValueError: Shapes, devices or a count that do not fit; on a CPU, scores that are NaN.
        TypeError: Not a tensor, or of the wrong dtype.
    """
    check_leading(OP, "scores", scores, "[R, m]")
    check_leading(OP, "new_scores", new_scores, "[R, n]")
    shape = (scores.shape[0], new_scores.shape[1])
    check_tensor(OP, "new_scores", new_scores, shape, scores, "[R, n]")
    _check_positions("positions", positions, "scores", scores)
    _check_positions("new_positions", new_positions, "new_scores", new_scores)
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"{OP}: count must be an integer, got {count!r}")
    if count < 0:
        raise ValueError(f"{OP}: count must be 0 or more, got {count}")
    scores, positions = torch.cat([scores, new_scores], 1), torch.cat([positions, new_positions], 1)
    if scores.device.type == "cpu" and not torch.compiler.is_compiling() and scores.isnan().any():
        raise ValueError(f"{OP}: scores and new_scores must not be nan, got nan")
    # stable, since topk leaves the order of ties open: by position, then by score
    oldest = positions.argsort(dim=1, stable=True)
    best = scores.gather(1, oldest).argsort(dim=1, descending=True, stable=True)[:, :count]
    holds = ~scores.gather(1, oldest).gather(1, best).isneginf()
    # `best` has ranks by position already
    order = best.masked_fill(~holds, scores.shape[1]).argsort(dim=1, stable=True)
    indices = oldest.gather(1, best.gather(1, order))
    return Selection(
        scores.gather(1, indices), positions.gather(1, indices), indices, holds.sum(dim=1)
    )


def _check_positions(name: str, positions: Tensor, of: str, scores: Tensor) -> None:
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64:
        kind = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"{OP}: {name} must be an int64 tensor, got {kind}")
    if positions.shape != scores.shape:
        raise ValueError(
            f"{OP}: {name} must have {of}' shape {list(scores.shape)}, got {list(positions.shape)}"
        )
    if positions.device != scores.device:
        raise ValueError(f"{OP}: {name} must be on {scores.device}, got {positions.device}")
