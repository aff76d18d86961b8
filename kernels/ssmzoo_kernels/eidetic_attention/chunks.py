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


def chunk_table(lengths: Tensor, seen: Tensor, window: int) -> Chunks:
    """Find the chunks of some sequences.

    Args:
        lengths: Tokens of each sequence in this call, ``[S]`` int64.
        seen: Tokens of each sequence before this call, ``[S]`` int64.
        window: Tokens a chunk.
    """
    opened = seen // window  # the chunk of each sequence's next token
    chunks = (seen + lengths - 1).div(window, rounding_mode="floor") - opened + 1
    chunks = torch.where(lengths > 0, chunks, 0)
    sequence = torch.arange(lengths.shape[0], device=lengths.device).repeat_interleave(chunks)
    place = torch.arange(sequence.shape[0], device=lengths.device)
    number = opened[sequence] + place - (chunks.cumsum(0) - chunks)[sequence]
    first = (number * window - seen[sequence]).clamp(min=0)
    end = torch.minimum((number + 1) * window - seen[sequence], lengths[sequence])
    start = seen[sequence] + first - number * window
    return Chunks(sequence, number, first, start, end - first)
