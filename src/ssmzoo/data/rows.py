"""Rows of tokens in a seeded order, resumable by position, shared among processes.

- A row holds the end of one document, whole ones, and the beginning of the next. ``starts`` marks
  where documents begin; no state and no loss crosses these places, and their labels are -100.
- The order of the rows does not depend on the number of processes: process ``r`` of ``w`` reads
  every ``w``-th run of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ssmzoo.data.tokens import TokensOnDisk
from ssmzoo.tasks.common import IGNORED, counted

Part = TypeVar("Part", covariant=True)

TASK_BLOCK = 1024  # rows of a task that are drawn together


class Rows(NamedTuple):
    """The rows of a micro-batch."""

    input_ids: np.ndarray  # [n, L] int64
    labels: np.ndarray  # [n, L] int64, -100 where nothing is to be predicted
    starts: np.ndarray  # [n, L] bool, True where a document, or its continuation, begins

    @classmethod
    def of_text(cls, input_ids: np.ndarray, starts: np.ndarray) -> Rows:
        """Return rows of documents, whose first tokens nothing predicts."""
        return cls(input_ids, np.where(starts, IGNORED, input_ids), starts)

    @property
    def tokens(self) -> int:
        """How many tokens are read."""
        return self.input_ids.size

    @property
    def targets(self) -> int:
        """How many tokens are predicted."""
        return int(counted(self.labels[:, 1:]).sum())

    def unlabelled(self) -> Rows:
        """Return these rows with nothing to predict."""
        return self._replace(labels=np.full_like(self.labels, IGNORED))


class RowSource(Protocol[Part]):
    """An endless source of micro-batches."""

    def next_batch(self, n: int) -> Part:
        """Return this process's next ``n`` rows."""
        ...

    def position(self) -> dict[str, Any]:
        """Return this process's position as JSON."""
        ...

    def seek(self, *positions: dict[str, Any]) -> None:
        """Continue from the positions of all processes that read the same source."""
        ...


class HeldOut(Protocol[Part]):
    """Held-out micro-batches."""

    def after(self, step: int) -> HeldOut[Part]:
        """Return those for the validation after a step; only fresh tasks have others each time."""
        ...

    def __len__(self) -> int:
        """Return how many there are."""
        ...

    def __iter__(self) -> Iterator[Part]:
        """Return them in order."""
        ...


class HeldOutRows(list[Rows]):
    """Micro-batches of held-out rows, the same for every validation."""

    def after(self, step: int) -> HeldOutRows:
        """Return these."""
        return self


class NumberedRows(ABC):
    """Rows that are made from their number, which is therefore a position."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world, self._next = rank, world, 0

    def next_batch(self, n: int) -> Rows:
        """Return this process's next ``n`` rows; the other processes read those beside them."""
        first = self._next + self._rank * n
        self._next += self._world * n
        return self.rows(range(first, first + n))

    def position(self) -> dict[str, Any]:
        """Return the position of all processes as JSON."""
        return {"row": self._next}

    def seek(self, *positions: dict[str, Any]) -> None:
        """Continue from the positions of any number of processes."""
        self._next = int(positions[0]["row"])

    @abstractmethod
    def rows(self, numbers: range) -> Rows:
        """Return the rows of these numbers, counted through all epochs."""


class PackedRows(NumberedRows):
    """Rows cut from documents that are all at hand: shuffled documents, end to end, shuffled rows.

    Each epoch has an order of its own; the tokens left over at its end are not used in it.

    Args:
        tokens: All tokens [N], possibly on disk.
        spans: Beginning and end of each document [n, 2].
        seq_len: Tokens a row.
        seed: Of the order.
        use: Of the tokens, for errors: "training" or "held-out".
        field: The recipe's field that sets the length, for errors.

    Raises:
        ValueError: Fewer tokens than one row.
    """

    def __init__(
        self,
        tokens: np.ndarray | TokensOnDisk,
        spans: np.ndarray,
        seq_len: int,
        seed: int,
        *,
        rank: int = 0,
        world: int = 1,
        use: str = "training",
        field: str = "train.seq_len",
    ) -> None:
        total = int((spans[:, 1] - spans[:, 0]).sum())
        if total < seq_len:
            raise ValueError(
                f"the {use} text must fill at least one row of {field} = {seq_len} tokens, "
                f"got {total}"
            )
        super().__init__(rank, world)
        self._tokens, self._spans, self._seed = tokens, spans, seed
        self.seq_len, self.total = seq_len, total
        self._orders: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def __len__(self) -> int:
        """Return the rows of an epoch."""
        return self.total // self.seq_len

    def rows(self, numbers: range) -> Rows:
        """Return the rows of these numbers, counted through all epochs."""
        input_ids = np.empty((len(numbers), self.seq_len), np.int64)
        starts = np.zeros((len(numbers), self.seq_len), bool)
        for i, number in enumerate(numbers):
            epoch, row = divmod(number, len(self))
            begin = int(self._order(epoch)[2][row]) * self.seq_len
            self.fill(epoch, begin, input_ids[i], starts[i])
        starts[:, 0] = True
        return Rows.of_text(input_ids, starts)

    def fill(self, epoch: int, begin: int, input_ids: np.ndarray, starts: np.ndarray) -> None:
        """Write one row of an epoch's tokens from ``begin`` on, and where documents start in it."""
        documents, ends, _ = self._order(epoch)
        which = int(np.searchsorted(ends, begin, side="right"))
        filled = 0
        while filled < self.seq_len:
            first, stop = self._spans[documents[which]]
            start = stop - (int(ends[which]) - begin - filled)
            count = min(int(stop - start), self.seq_len - filled)
            input_ids[filled : filled + count] = self._tokens[start : start + count]
            starts[filled] = start == first
            filled += count
            which += 1

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if epoch not in self._orders:
            rng = np.random.default_rng([self._seed, epoch])
            documents = rng.permutation(len(self._spans))
            lengths = (self._spans[:, 1] - self._spans[:, 0])[documents]
            # the last epoch's order stays: a batch may lie across the border
            self._orders = {k: v for k, v in self._orders.items() if k == epoch - 1}
            self._orders[epoch] = documents, np.cumsum(lengths), rng.permutation(len(self))
        return self._orders[epoch]


class ConsecutiveRows(NumberedRows):
    """Rows that go on, step after step, where the row at the same place of the last step ended.

    An epoch's documents, shuffled and laid end to end, are cut into as many equal lanes as a step
    has rows; a step reads the next tokens of every lane. A row's first token begins a document, or
    an epoch, only where ``starts`` says so. The tokens left over are not used in that epoch.

    Args:
        tokens: All tokens [N], possibly on disk.
        spans: Beginning and end of each document [n, 2].
        seq_len: Tokens a row.
        lanes: Rows a step, over all processes.
        seed: Of the order of the documents.

    Raises:
        ValueError: Fewer tokens than one step.
    """

    def __init__(
        self,
        tokens: np.ndarray | TokensOnDisk,
        spans: np.ndarray,
        seq_len: int,
        lanes: int,
        seed: int,
        *,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        super().__init__(rank, world)
        self._documents = PackedRows(tokens, spans, seq_len, seed)
        self._lanes, self._steps = lanes, len(self._documents) // lanes
        if not self._steps:
            raise ValueError(
                f"the training text must fill one step of {lanes} rows of train.seq_len = "
                f"{seq_len} tokens, got {self._documents.total} tokens"
            )

    def __len__(self) -> int:
        """Return the rows of an epoch."""
        return self._steps * self._lanes

    def rows(self, numbers: range) -> Rows:
        """Return the rows of these numbers, counted through all epochs."""
        shape = len(numbers), self._documents.seq_len
        input_ids, starts = np.empty(shape, np.int64), np.zeros(shape, bool)
        for i, number in enumerate(numbers):
            time, lane = divmod(number, self._lanes)
            epoch, step = divmod(time, self._steps)
            begin = (lane * self._steps + step) * shape[1]
            self._documents.fill(epoch, begin, input_ids[i], starts[i])
            starts[i, 0] |= step == 0
        return Rows.of_text(input_ids, starts)


class TaskRows(NumberedRows):
    """Rows of a synthetic task, never the same twice.

    Args:
        generate: From a number of examples and a seed to ``input_ids`` and ``labels`` [n, L].
        seed: Of the whole sequence; held-out examples use another.
    """

    def __init__(
        self,
        generate: Callable[[int, int], tuple[np.ndarray, np.ndarray]],
        seed: int,
        *,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        super().__init__(rank, world)
        self._generate, self._seed = generate, seed
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def rows(self, numbers: range) -> Rows:
        """Return the rows of these numbers."""
        blocks = range(numbers.start // TASK_BLOCK, (numbers.stop - 1) // TASK_BLOCK + 1)
        self._blocks = {k: self._blocks.get(k) or self._block(k) for k in blocks}
        begin = numbers.start - blocks.start * TASK_BLOCK
        chosen = slice(begin, begin + len(numbers))
        input_ids, labels = (
            np.concatenate([self._blocks[k][part] for k in blocks])[chosen] for part in (0, 1)
        )
        starts = np.zeros(input_ids.shape, bool)
        starts[:, 0] = True
        return Rows(input_ids, labels, starts)

    def _block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
        return self._generate(TASK_BLOCK, seed)
