"""Runs of rows in a table of tokens: views where they lie regularly, elsewhere gathered copies."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Strided:
    """N runs of M rows each, which begin a fixed distance apart."""

    first: int
    pitch: int
    count: int
    width: int

    def take(self, table: Tensor) -> Tensor:
        """Return the rows of ``[T, ...]`` as a view ``[N, M, ...]``."""
        step = table.stride(0)
        return table.as_strided(
            (self.count, self.width, *table.shape[1:]),
            (self.pitch * step, step, *table.stride()[1:]),
            table.storage_offset() + self.first * step,
        )

    def put(self, found: Tensor, table: Tensor) -> None:
        """Write the rows of runs that do not overlap."""
        self.take(table).copy_(found)

    def add(self, found: Tensor, table: Tensor) -> None:
        """Add to the rows, of which runs may share some."""
        for begin in range(0, self.width, self.pitch):
            end = min(begin + self.pitch, self.width)
            part = Strided(self.first + begin, self.pitch, self.count, end - begin)
            part.take(table).add_(found[:, begin:end])


@dataclass(frozen=True)
class Gathered:
    """N runs of M rows each that lie anywhere; ``pitch`` columns of all runs have no row twice."""

    places: Tensor  # [N, M]
    inside: Tensor | None  # [N, M] which are the run's own; None: all. The others may be any row
    pitch: int

    @property
    def count(self) -> int:
        """Return how many runs there are."""
        return self.places.shape[0]

    @property
    def width(self) -> int:
        """Return how many rows a run has."""
        return self.places.shape[1]

    def take(self, table: Tensor) -> Tensor:
        """Return a copy of the rows of ``[T, ...]``, ``[N, M, ...]``."""
        return table.index_select(0, self.places.flatten()).unflatten(0, self.places.shape)

    def put(self, found: Tensor, table: Tensor) -> None:
        """Write the runs' own rows."""
        places, found = self._own(0, self.width, found)
        table[places] = found.to(table.dtype)

    def add(self, found: Tensor, table: Tensor) -> None:
        """Add to the runs' own rows."""
        for begin in range(0, self.width, self.pitch):
            places, part = self._own(begin, begin + self.pitch, found)
            table[places] += part

    def fill_outside(self, found: Tensor, value: float) -> Tensor:
        """Return ``[N, M, ...]`` with a value in all rows that are not the runs' own."""
        if self.inside is None:
            return found
        outside = ~self.inside.view(*self.inside.shape, *(1,) * (found.dim() - 2))
        return found.masked_fill_(outside, value)

    def _own(self, begin: int, end: int, found: Tensor) -> tuple[Tensor, Tensor]:
        places, found = self.places[:, begin:end], found[:, begin:end]
        if self.inside is None:
            return places.flatten(), found.flatten(0, 1)
        inside = self.inside[:, begin:end]
        return places[inside], found[inside]


Rows = Strided | Gathered


def runs(firsts: list[int], width: int, device: torch.device) -> Rows:
    """Return runs that begin at given rows and share none: strided where they lie regularly."""
    pitch = firsts[1] - firsts[0] if len(firsts) > 1 else width
    if firsts == [*range(firsts[0], firsts[0] + pitch * len(firsts), pitch)]:
        return Strided(firsts[0], pitch, len(firsts), width)
    places = torch.tensor(firsts, device=device)[:, None] + torch.arange(width, device=device)
    return Gathered(places, None, width)
