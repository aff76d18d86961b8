"""Where the chunks of a sequence lie: spans of ``window`` tokens, counted from its first token."""

from typing import NamedTuple

import torch
from torch import Tensor


class Chunks(NamedTuple):
    """The chunks that have tokens in this call, sequence after sequence, each in order."""

    sequence: Tensor  # [n] which sequence
    number: Tensor  # [n] which of its chunks, counted from its very first token
    first: Tensor  # [n] the chunk's first token in this call, counted from the call's first one
    start: Tensor  # [n] where in the chunk that token lies
    count: Tensor  # [n] how many of its tokens are in this call


def chunk_table(lengths: Tensor, seen: Tensor, window: int, most: int | None = None) -> Chunks:
    """Find the chunks of some sequences.

    Args:
        lengths: Tokens of each sequence in this call, ``[S]`` int64.
        seen: Tokens of each sequence before this call, ``[S]`` int64.
        window: Tokens a chunk.
        most: A bound on their number, so that nobody need count them: that many come back, the ones
            too many at the end without tokens.
    """
    opened = seen // window  # the chunk of each sequence's next token
    chunks = (seen + lengths - 1).div(window, rounding_mode="floor") - opened + 1
    ends = torch.where(lengths > 0, chunks, 0).cumsum(0)
    place = torch.arange(int(ends[-1:].sum()) if most is None else most, device=lengths.device)
    sequence = torch.searchsorted(ends, place, right=True).clamp(max=lengths.shape[0] - 1)
    before = torch.where(sequence > 0, ends[sequence - 1], 0)
    number = opened[sequence] + place - before
    length, past = lengths[sequence], seen[sequence]
    first = (number * window - past).clamp(min=0).minimum(length)
    end = ((number + 1) * window - past).minimum(length)
    return Chunks(sequence, number, first, past + first - number * window, end - first)
