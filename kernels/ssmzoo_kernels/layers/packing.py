"""Packed sequences as transformers' mixers tell of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ssmzoo_kernels.validation import Packing


def boundaries(x: Tensor, given: Mapping[str, Any]) -> Tensor | Packing | None:
    """Return where sequences begin and end in the flat row of ``x``; None: each row is one.

    Args:
        x: ``[B, L, ...]``.
        given: What a mixer passes besides: ``cu_seqlens`` or ``cu_seq_lens_q`` ``[S + 1]`` of the
            flat row, or ``seq_idx`` ``[B, L]``, in which a new number begins a new sequence.
    """
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if given.get(name) is not None:
            return given[name]
    seq_idx = given.get("seq_idx")
    if seq_idx is None:
        return None
    first = torch.ones_like(seq_idx[:, :1], dtype=torch.bool)
    starts = torch.cat([first.expand(len(x), 1), seq_idx[:, 1:] != seq_idx[:, :-1]], dim=1)
    places = starts.flatten().nonzero().flatten()
    return torch.cat([places, places.new_tensor([starts.numel()])])


def flat(x: Tensor, packing: object) -> Tensor:
    """Return ``[B, L, ...]`` as the flat row ``[1, B * L, ...]`` if sequences are packed in it."""
    return x if packing is None else x.reshape(1, -1, *x.shape[2:])
