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
    """Return how many chunk-start states to make room for.

    Segment ``s`` with first token ``a`` keeps chunk ``j`` in slot ``a // chunk + s + j``: no two
    chunks share one, whatever the lengths are, and the count depends on shapes alone.
    """
    return tokens // chunk + segments


def needs_library(x: Tensor) -> bool:
    """Tell whether a call must go through ``torch.library`` even without gradients.

    Tracers and tensor subclasses need it; a plain eager call saves its overhead.
    """
    return torch.compiler.is_compiling() or type(x) is not Tensor or x.device.type == "meta"
