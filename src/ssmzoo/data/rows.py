"""Rows of tokens in a seeded order, resumable by position, one share for each process.

- A row holds the end of one document, whole ones, and the beginning of the next. No state and no
  loss may cross the seams, which are marked in ``starts``; labels there are -100.
- The order of the rows does not depend on the number of processes; process ``r`` of ``w`` takes
  every ``w``-th run of rows. Only streams, read by each process on its own, differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ssmzoo.data.tokenizer import Encoder

Part = TypeVar("Part", covariant=True)

IGNORED = -100
TASK_BLOCK = 1024


class Rows(NamedTuple):
    """Some rows: what a micro-batch is made of."""

    input_ids: np.ndarray  # [n, L] int64
    labels: np.ndarray  # [n, L] int64, -100 where nothing is to be predicted
    starts: np.ndarray  # [n, L] bool, True where a document, or its continuation, begins

    @property
    def tokens(self) -> int:
        """How many tokens are read."""
        return self.input_ids.size

    @property
    def targets(self) -> int:
        """How many tokens are predicted."""
        return int((self.labels[:, 1:] != IGNORED).sum())

    def unlabelled(self) -> Rows:
        """Return these rows with nothing to predict."""
        return self._replace(labels=np.full_like(self.labels, IGNORED))


class RowSource(Protocol[Part]):
    """An endless supply of rows, or of what else a micro-batch is made of."""

    def take(self, n: int) -> Part:
        """Return this process's next ``n`` rows."""
        ...

    def position(self) -> dict[str, Any]:
        """Return, as JSON, where this process stands."""
        ...

    def seek(self, position: dict[str, Any]) -> None:
        """Continue from a position of the same source."""
        ...


class Parts(Protocol[Part]):
    """Held-out micro-batches."""

    def after(self, step: int) -> Parts[Part]:
        """Return those for the validation after a step: the same, but of a task drawn anew."""
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
    """Rows that are known by their number, so that a position is a number."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world, self._next = rank, world, 0

    def take(self, n: int) -> Rows:
        """Return this process's next ``n`` rows; the other processes take those beside them."""
        first = self._next + self._rank * n
        self._next += self._world * n
        return self.rows(range(first, first + n))

    def position(self) -> dict[str, Any]:
        """Return, as JSON, where all processes stand."""
        return {"row": self._next}

    def seek(self, position: dict[str, Any]) -> None:
        """Continue from a position, of any number of processes."""
        self._next = int(position["row"])

    @abstractmethod
    def rows(self, numbers: range) -> Rows:
        """Return the rows of these numbers, counted through all epochs."""


class PackedRows(NumberedRows):
    """Rows cut from documents that are all at hand: shuffled documents, end to end, shuffled rows.

    Each epoch has an order of its own; the tokens left over at its end are not used in it.

    Args:
        tokens: All tokens [N], possibly on disk.
        pieces: Beginning and end of each document [n, 2].
        seq_len: Tokens a row.
        seed: Of the order.
        what: What the tokens are, for messages: "training" or "held-out".

    Raises:
        ValueError: Fewer tokens than one row.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        pieces: np.ndarray,
        seq_len: int,
        seed: int,
        *,
        rank: int = 0,
        world: int = 1,
        what: str = "training",
    ) -> None:
        total = int((pieces[:, 1] - pieces[:, 0]).sum())
        if total < seq_len:
            raise ValueError(
                f"the {what} text must fill at least one row of train.seq_len = {seq_len} tokens, "
                f"got {total}"
            )
        super().__init__(rank, world)
        self._tokens, self._pieces, self._seed = tokens, pieces, seed
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
        return Rows(input_ids, np.where(starts, IGNORED, input_ids), starts)

    def fill(self, epoch: int, begin: int, input_ids: np.ndarray, starts: np.ndarray) -> None:
        """Write one row of an epoch's tokens from ``begin`` on, and where documents start in it."""
        documents, ends, _ = self._order(epoch)
        which = int(np.searchsorted(ends, begin, side="right"))
        filled = 0
        while filled < self.seq_len:
            first, stop = self._pieces[documents[which]]
            start = stop - (int(ends[which]) - begin - filled)
            count = min(int(stop - start), self.seq_len - filled)
            input_ids[filled : filled + count] = self._tokens[start : start + count]
            starts[filled] = start == first
            filled += count
            which += 1

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if epoch not in self._orders:
            rng = np.random.default_rng([self._seed, epoch])
            documents = rng.permutation(len(self._pieces))
            lengths = (self._pieces[:, 1] - self._pieces[:, 0])[documents]
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
        pieces: Beginning and end of each document [n, 2].
        seq_len: Tokens a row.
        lanes: Rows a step, over all processes.
        seed: Of the order of the documents.

    Raises:
        ValueError: Fewer tokens than one step.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        pieces: np.ndarray,
        seq_len: int,
        lanes: int,
        seed: int,
        *,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        super().__init__(rank, world)
        self._documents = PackedRows(tokens, pieces, seq_len, seed)
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
        return Rows(input_ids, np.where(starts, IGNORED, input_ids), starts)


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


class StreamedRows:
    """Rows cut from a stream of documents, shuffled in blocks.

    A block of documents is read, shuffled, packed, and its rows shuffled. A resume goes back to the
    beginning of the block, so that it reads at most one block again and continues exactly.

    Args:
        open_records: Opens the stream anew; what it gives may have ``state_dict`` and
            ``load_state_dict``, as an ``IterableDataset`` has. Without them a resume reads again
            from the beginning.
        texts: From records to documents.
        encode: From documents to tokens.
        seq_len: Tokens a row.
        seed: Of the order in a block.
        block: Documents in a block.
    """

    def __init__(
        self,
        open_records: Callable[[], Iterable[dict[str, Any]]],
        texts: Callable[[Iterable[dict[str, Any]]], Iterator[str]],
        encode: Encoder,
        seq_len: int,
        seed: int,
        *,
        block: int,
    ) -> None:
        self._open, self._texts, self._encode = open_records, texts, encode
        self.seq_len, self._seed, self._block = seq_len, seed, block
        self._epoch, self._number = 0, 0
        self._carry = np.empty(0, np.int64), np.empty(0, bool)
        self._rows = np.empty((0, seq_len), np.int64), np.empty((0, seq_len), bool)
        self._row = 0
        self._start_epoch()
        self._before = self._standing()

    def take(self, n: int) -> Rows:
        """Return this process's next ``n`` rows."""
        taken: list[tuple[np.ndarray, np.ndarray]] = []
        missing = n
        while missing:
            if self._row == len(self._rows[0]):
                self._read_block()
            part = slice(self._row, self._row + missing)
            taken.append((self._rows[0][part], self._rows[1][part]))
            self._row += len(taken[-1][0])
            missing -= len(taken[-1][0])
        input_ids, starts = (np.concatenate(part) for part in zip(*taken, strict=True))
        starts[:, 0] = True
        return Rows(input_ids, np.where(starts, IGNORED, input_ids), starts)

    def position(self) -> dict[str, Any]:
        """Return, as JSON, where this process stands."""
        return {**self._before, "row": self._row}

    def seek(self, position: dict[str, Any]) -> None:
        """Continue from a position of the same process among as many."""
        self._epoch, self._number = position["epoch"], position["block"]
        self._carry = np.array(position["carry"], np.int64), np.array(position["seams"], bool)
        self._start_epoch(position["stream"], position["records"])
        self._before = self._standing()
        self._rows = np.empty((0, self.seq_len), np.int64), np.empty((0, self.seq_len), bool)
        self._row = 0
        if position["row"]:
            self._read_block()
            self._row = position["row"]

    def _start_epoch(self, state: dict[str, Any] | None = None, records: int = 0) -> None:
        self._stream = self._open()
        self._records, self._given = records, (records, state)
        skip = records
        if state is not None and hasattr(self._stream, "load_state_dict"):
            self._stream.load_state_dict(state)  # type: ignore[attr-defined]
            skip = 0
        self._documents = self._texts(self._counted(skip))

    def _counted(self, skip: int) -> Iterator[dict[str, Any]]:
        for number, record in enumerate(self._stream):
            if number >= skip:
                self._records += 1
                yield record

    def _standing(self) -> dict[str, Any]:
        records, state = self._given
        # a stream knows its state only once it has been read
        if self._records > records and hasattr(self._stream, "state_dict"):
            state = self._stream.state_dict()  # type: ignore[attr-defined]
        return {
            "epoch": self._epoch,
            "block": self._number,
            "stream": state,
            "records": self._records,
            "carry": self._carry[0].tolist(),
            "seams": self._carry[1].tolist(),
        }

    def _read_block(self) -> None:
        """Read blocks until there is at least one row."""
        self._before = self._standing()
        self._row = 0
        fruitless = 0
        while True:
            rng = np.random.default_rng([self._seed, self._epoch, self._number])
            texts = list(islice(self._documents, self._block))
            self._number += 1
            documents = self._encode([texts[i] for i in rng.permutation(len(texts))])
            self._pack(documents, rng)
            if len(texts) < self._block:
                fruitless = 0 if texts else fruitless + 1
                if fruitless > 1:
                    raise ValueError("the training stream must hold documents, got none")
                self._epoch, self._number = self._epoch + 1, 0
                self._start_epoch()
            if len(self._rows[0]):
                return

    def _pack(self, documents: list[np.ndarray], rng: np.random.Generator) -> None:
        tokens = np.concatenate([self._carry[0], *documents]).astype(np.int64)
        seams = np.zeros(len(tokens), bool)
        begin = len(self._carry[0])
        seams[:begin] = self._carry[1]
        for document in documents:
            seams[begin] = True
            begin += len(document)
        rows = len(tokens) // self.seq_len
        used = rows * self.seq_len
        self._carry = tokens[used:], seams[used:]
        order = rng.permutation(rows)
        shape = rows, self.seq_len
        self._rows = tokens[:used].reshape(shape)[order], seams[:used].reshape(shape)[order]
