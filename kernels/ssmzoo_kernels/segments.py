"""Segments of a flat row of tokens, for implementations that run equal lengths together."""

from collections import defaultdict
from itertools import pairwise

import torch
from torch import Tensor


def by_length(offsets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Group segments of equal length.

    Args:
        offsets: Where segments start and end, ``[S + 1]``.

    Returns:
        Per length: the segments' numbers ``[G]`` and their tokens' ``[G, L]``.
    """
    groups = defaultdict(list)
    for segment, (begin, end) in enumerate(pairwise(offsets.tolist())):
        groups[end - begin].append(segment)
    found = []
    for length, members in groups.items():
        segments = torch.tensor(members, device=offsets.device)
        steps = torch.arange(length, device=offsets.device)
        found.append((segments, offsets[segments, None] + steps))
    return found
