"""A task's labelled examples: in a seeded order to train on, and held-out splits.

- An epoch holds every example once; its last step has those that are left. A task that draws its
  examples anew gives each epoch, and each validation, others.
- All processes read equally many batches. Where there are fewer examples than batches, an example
  that does not count stands in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ssmzoo.tasks import Batch, Supervised


class Examples(NamedTuple):
    """The examples of a micro-batch."""

    batch: Batch
    counts: bool = True  # False for a stand-in

    @property
    def tokens(self) -> int:
        """Places that are not padding."""
        return int(self.batch.lengths.sum()) if self.counts else 0


class ExampleSource:
    """A task's examples, epoch after epoch, each in an order of its own.

    Args:
        task: The split to train on.
        seed: Of the order.
        batch_size: Examples a step, over all processes.
    """

    def __init__(
        self, task: Supervised, seed: int, batch_size: int, *, rank: int = 0, world: int = 1
    ) -> None:
        self._task, self._seed, self._batch_size = task, seed, batch_size
        self._rank, self._world = rank, world
        self._epoch, self._row, self._part = 0, 0, 0
        self._order = self._in_order()

    def next_batch(self, n: int) -> Examples:
        """Return this process's next part of a step: ``n`` examples, or fewer at an epoch's end."""
        parts = self._batch_size // n
        step = self._order[self._row : self._row + self._batch_size]
        mine = np.array_split(step, parts)[self._part * self._world + self._rank]
        part = _examples(self._task, mine, step[:1], self._epoch)
        self._part += 1
        if self._part * self._world == parts:
            self._part = 0
            self._row += self._batch_size
            if self._row >= len(self._task):
                self._epoch, self._row = self._epoch + 1, 0
                self._order = self._in_order()
        return part

    def position(self) -> dict[str, Any]:
        """Return, as JSON, the position of all processes between two steps."""
        return {"epoch": self._epoch, "row": self._row}

    def seek(self, *positions: dict[str, Any]) -> None:
        """Continue from the positions of any number of processes."""
        self._epoch, self._row, self._part = positions[0]["epoch"], positions[0]["row"], 0
        self._order = self._in_order()

    def _in_order(self) -> np.ndarray:
        if not self._task.shuffle:
            return np.arange(len(self._task))
        return np.random.default_rng([self._seed, self._epoch]).permutation(len(self._task))


class HeldOutExamples:
    """One process's batches of a split's first examples.

    Args:
        task: The split.
        count: So many of its examples, over all processes. Fewer than all are drawn, always the
            same ones: many splits are sorted by class.
        n: Examples a batch.
        epoch: Which examples, where a split is drawn anew.
    """

    def __init__(
        self,
        task: Supervised,
        count: int,
        n: int,
        *,
        rank: int = 0,
        world: int = 1,
        epoch: int = 0,
    ) -> None:
        self._task, self._count, self._n = task, count, n
        self._order = np.arange(count)
        if count < len(task) and not task.fresh:
            self._order = np.random.default_rng(0).permutation(len(task))[:count]
        self._rank, self._world, self._epoch = rank, world, epoch

    def after(self, step: int) -> HeldOutExamples:
        """Return the batches for the validation after a step: others each time if drawn anew."""
        if not self._task.fresh:
            return self
        place = {"rank": self._rank, "world": self._world}
        return HeldOutExamples(self._task, self._count, self._n, **place, epoch=step)

    def __len__(self) -> int:
        """Return how many batches each process has."""
        return -(-self._count // (self._n * self._world))

    def __iter__(self) -> Iterator[Examples]:
        """Make the batches."""
        for i in range(len(self)):
            begin = (i * self._world + self._rank) * self._n
            mine = self._order[begin : begin + self._n]
            yield _examples(self._task, mine, np.zeros(1, np.int64), self._epoch)


def _examples(task: Supervised, mine: np.ndarray, others: np.ndarray, epoch: int) -> Examples:
    if len(mine):
        return Examples(task.batch(mine, epoch))
    return Examples(task.batch(others, epoch), counts=False)
