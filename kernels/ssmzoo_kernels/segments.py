"""Segments of a flat row of tokens, for implementations that run equal lengths together."""

from collections import defaultdict
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Group:
    """Segments of about the same length, side by side: each in a row, zeros after its end.

    Attributes:
        members: The segments' numbers ``[G]``.
        places: Where their tokens lie ``[G, L]``; past a segment's end, somewhere in the row.
        inside: Which of these are the segment's own ``[G, L]``; None if all are.
    """

    members: Tensor
    places: Tensor
    inside: Tensor | None

    def gather(self, row: Tensor) -> Tensor:
        """Return the segments of a row ``[T, D]`` as ``[G, L, D]``."""
        found = row[self.places]
        return found if self.inside is None else found.where(self.inside.unsqueeze(-1), 0.0)

    def scatter(self, found: Tensor, row: Tensor) -> None:
        """Write ``[G, L, D]`` to where the segments lie in a row ``[T, D]``."""
        if self.inside is None:
            row[self.places] = found.to(row.dtype)
        else:
            row[self.places[self.inside]] = found[self.inside].to(row.dtype)


def by_magnitude(offsets: Tensor) -> list[Group]:
    """Group segments whose lengths differ by less than a factor of two.

    So many that differ run in few calls, and what is filled up with zeros is less than the tokens.
    """
    groups = defaultdict(list)
    for segment, (begin, end) in enumerate(pairwise(offsets.tolist())):
        groups[(end - begin).bit_length()].append((segment, end - begin))
    found = []
    for segments in groups.values():
        numbers, lengths = zip(*segments, strict=True)
        members = torch.tensor(numbers, device=offsets.device)
        steps = torch.arange(max(lengths), device=offsets.device)
        places, inside = offsets[members, None] + steps, None
        if len(set(lengths)) > 1:
            inside = steps < torch.tensor(lengths, device=offsets.device).unsqueeze(1)
            places = places.where(inside, 0)
        found.append(Group(members, places, inside))
    return found
