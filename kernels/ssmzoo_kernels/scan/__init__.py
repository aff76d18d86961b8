"""What the chunked first-order recurrences share: the chunk scheme and its bookkeeping.

A recurrence ``S[t] = A[t] * S[t-1] + b[t]`` (elementwise on a ``[D, N]`` state) differs from family
to family only in its transition, the map from a token's activations to ``A`` and ``b``. The
skeletons, ``scan.h`` for CPUs and ``triton.py`` for GPUs, own everything else.
"""

import torch
from torch import Tensor


def accumulator(x: Tensor) -> torch.dtype:
    """Return the dtype of states and sums: float32, or float64 for float64 inputs."""
    return torch.promote_types(torch.float32, x.dtype)


def chunk_slots(tokens: int, segments: int, chunk: int) -> int:
    """Return how many states at the starts of chunks to make room for.

    Segment ``s`` with first token ``a`` keeps chunk ``j`` in slot ``a // chunk + s + j``: no two
    chunks share one, whatever the lengths are, and the count depends on shapes alone.
    """
    return tokens // chunk + segments


def interval(states: int, chunk: int) -> int:
    """Return how many tokens lie between saved states: whole chunks, and at least ``states``.

    A token's state is ``states`` numbers a channel, so what is saved never outweighs one activation
    ``[T, D]`` (and one state a segment), whatever the state's size.
    """
    return chunk * -(-states // chunk)


def parts_of(blocks: int, width: int, states: int) -> int:
    """Return how many partial sums ``[T, N]`` of the gradients of ``q`` and ``k`` to keep.

    One a block of channels would be ``T * D * N`` numbers over the block's width. Where that is
    more than an activation ``[T, D]`` (and more than four sums), blocks take turns at fewer.
    """
    turns = -(-blocks // max(4, width // states))
    return -(-blocks // max(1, turns))


def zeros_on_tape(like: Tensor, *others: Tensor | None) -> Tensor:
    """Return zeros like a tensor that autograd traces back to it and to others.

    What a loop over no tokens returns: every input then has a gradient, zeros.
    """
    nothing = (x[:0].abs().sum() for x in (like, *others) if x is not None)
    return torch.zeros_like(like) + sum(nothing)


def needs_library(x: Tensor) -> bool:
    """Tell whether a call must go through ``torch.library`` even without gradients.

    Tracers and tensor subclasses need it; a plain eager call saves its overhead.
    """
    return torch.compiler.is_compiling() or type(x) is not Tensor or x.device.type == "meta"
