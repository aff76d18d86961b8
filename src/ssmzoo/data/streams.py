"""Rows cut from streams of documents, in lanes that any number of processes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ssmzoo.data.readers import OpenShard, Shard
from ssmzoo.data.rows import NumberedRows, Rows
from ssmzoo.data.workers import Workers, encoded

LANES = 64  # at most: each keeps a file open
SHARDS_PER_LANE = 4  # in an epoch at least: lanes of few shards differ in length


class StreamedRows(NumberedRows):
    """Rows cut from a stream of documents that comes in shards, shuffled in blocks.

    The shards of an epoch are in a seeded order; epochs follow each other without end, and shard
    ``i`` of them all is read by lane ``i mod lanes``. A step reads equally many rows from every
    lane, always at the same places, so that no row depends on the number of processes: a process
    reads the lanes of its places. The number of lanes divides ``batch_size`` and is at most
    :data:`LANES`, and at most one for :data:`SHARDS_PER_LANE` shards.

    Args:
        shards: A function for each shard that opens it.
        workers: They tokenise.
        seq_len: Tokens a row.
        batch_size: Rows a step, over all processes.
        seed: Of all orders.
        block: Documents that are shuffled together, over all lanes.
        keep: Whether to train on a document.
        field: The recipe's field that names the documents, for errors.

    Raises:
        ValueError: No text at all; raised while reading.
    """

    def __init__(
        self,
        shards: Sequence[OpenShard],
        workers: Workers,
        seq_len: int,
        batch_size: int,
        seed: int,
        *,
        block: int,
        keep: Callable[[str], bool],
        field: str,
        rank: int,
        world: int,
    ) -> None:
        super().__init__(rank, world)
        most = min(LANES, max(1, len(shards) // SHARDS_PER_LANE))
        self.lanes = max(n for n in range(1, most + 1) if batch_size % n == 0)
        self._batch_size, self._each = batch_size, batch_size // self.lanes
        self._shards = _Shards(shards, self.lanes, seed, keep)
        self._workers, self._seq_len, self._field = workers, seq_len, field
        self._block = -(-block // self.lanes)
        self._opened: dict[int, _Lane] = {}
        self._left: dict[str, dict[str, Any]] = {}  # positions of lanes that are not opened yet

    def rows(self, numbers: range) -> Rows:
        """Return the rows of these numbers, none of which may be before those returned last."""
        input_ids = np.empty((len(numbers), self._seq_len), np.int64)
        starts = np.empty((len(numbers), self._seq_len), bool)
        for i, number in enumerate(numbers):
            step, place = divmod(number, self._batch_size)
            lane, place = divmod(place, self._each)
            input_ids[i], starts[i] = self._lane(lane).row(step * self._each + place)
        starts[:, 0] = True
        return Rows.of_text(input_ids, starts)

    def position(self) -> dict[str, Any]:
        """Return, as JSON, the position of all processes, and of this one's lanes."""
        opened = {str(number): lane.position for number, lane in self._opened.items()}
        lanes = {**self._left, **opened}
        return {"row": self._next, "shards": len(self._shards), "lanes": lanes}

    def seek(self, *positions: dict[str, Any]) -> None:
        """Continue from the positions of any number of processes.

        Raises:
            ValueError: They are of other shards.
        """
        was, now = positions[0]["shards"], len(self._shards)
        if was != now:
            raise ValueError(
                f"{self._field} must come in the {was} shards that the run began with, "
                f"got {now}; use the versions of ssmzoo and datasets in run.json, or start a new "
                "run"
            )
        self._next, self._opened, self._left = int(positions[0]["row"]), {}, {}
        # of a lane that several processes have read, the furthest one: all rows before it are used
        for position in positions:
            for number, lane in position["lanes"].items():
                if number not in self._left or lane["first"] > self._left[number]["first"]:
                    self._left[number] = lane

    def _lane(self, number: int) -> _Lane:
        if number not in self._opened:
            position = self._left.pop(str(number), None)
            if position is None and not self._opened:
                self._require_text()
            self._opened[number] = _Lane(
                self._shards, number, self._workers, self._seq_len, self._block, position
            )
        return self._opened[number]

    def _require_text(self) -> None:
        """Raise if no shard has a document with tokens to train on: lanes would read forever."""
        missing = "documents, got none"
        for text in self._shards.texts():
            missing = "text, got only documents without tokens"
            if len(self._workers.submit(encoded, [text])()[0]):
                return
        raise ValueError(f"{self._field}: the training stream must hold {missing}")


class _Shards:
    """The shards of a stream, epoch after epoch, dealt to lanes."""

    def __init__(
        self, shards: Sequence[OpenShard], lanes: int, seed: int, keep: Callable[[str], bool]
    ) -> None:
        self._shards, self._lanes, self.seed, self._keep = shards, lanes, seed, keep
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._shards)

    def texts(self) -> Iterator[str]:
        """Yield the documents to train on, in the order of the shards."""
        return (text for number in range(len(self)) for text in self._open(number, None))

    def epoch(self, lane: int, turn: int) -> int:
        """Return the epoch of the shard that a lane reads as its ``turn``-th."""
        return (turn * self._lanes + lane) // len(self)

    def open(self, lane: int, turn: int, position: Any) -> Shard:
        """Open that shard."""
        epoch = self.epoch(lane, turn)
        if epoch not in self._orders:
            rng = np.random.default_rng([self.seed, epoch])
            # lanes may be in two epochs
            self._orders = {k: v for k, v in self._orders.items() if k == epoch - 1}
            self._orders[epoch] = rng.permutation(len(self))
        return self._open(self._orders[epoch][(turn * self._lanes + lane) % len(self)], position)

    def _open(self, number: int, position: Any) -> Shard:
        shard = self._shards[number](position)
        return Shard(filter(self._keep, shard), shard.position)


class _Lane:
    """The rows of one lane.

    Attributes:
        position: As JSON, the lane's position before the block of the last returned row: its turn
            and the position in its shard, how many blocks and rows (``first``) came before, and the
            tokens left over for the next row.
    """

    def __init__(
        self,
        shards: _Shards,
        number: int,
        workers: Workers,
        seq_len: int,
        block: int,
        position: dict[str, Any] | None,
    ) -> None:
        begin = {"turn": 0, "position": None, "block": 0, "first": 0, "carry": [], "starts": []}
        self.position = position or begin
        self._shards, self._number, self._workers = shards, number, workers
        self._seq_len, self._size = seq_len, block
        self._turn, self._block = self.position["turn"], self.position["block"]
        self._shard = shards.open(number, self._turn, self.position["position"])
        self._first, self._carry = self.position["first"], np.array(self.position["carry"], int)
        self._starts = np.zeros(len(self._carry), bool)
        self._starts[self.position["starts"]] = True
        self._rows = np.empty((0, seq_len), int), np.empty((0, seq_len), bool)
        self._ahead: _Block | None = None

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a row, and where documents start in it."""
        while index >= self._first + len(self._rows[0]):
            self._next_block()
        return self._rows[0][index - self._first], self._rows[1][index - self._first]

    def _next_block(self) -> None:
        block = self._ahead or self._read()
        self._first += len(self._rows[0])
        self.position = {
            **block.begin,
            "first": self._first,
            "carry": self._carry.tolist(),
            "starts": np.flatnonzero(self._starts).tolist(),
        }
        self._ahead = self._read() if self._workers.count else None
        rng = np.random.default_rng([self._shards.seed, self._number, block.begin["block"]])
        documents = block.tokens()
        order = rng.permutation(len(documents))
        self._pack([documents[i] for i in order if len(documents[i])], rng)

    def _read(self) -> _Block:
        """Read the next documents, of one epoch, and have them tokenised."""
        begin = {"turn": self._turn, "position": self._shard.position(), "block": self._block}
        self._block += 1
        texts: list[str] = []
        while len(texts) < self._size:
            text = next(self._shard, None)
            if text is not None:
                texts.append(text)
                continue
            epoch = self._shards.epoch(self._number, self._turn)
            self._turn += 1
            self._shard = self._shards.open(self._number, self._turn, None)
            if not texts:
                begin |= {"turn": self._turn, "position": None}
            elif self._shards.epoch(self._number, self._turn) > epoch:
                break
        return _Block(begin, self._workers.submit(encoded, texts))

    def _pack(self, documents: list[np.ndarray], rng: np.random.Generator) -> None:
        tokens = np.concatenate([self._carry, *documents])
        starts = np.zeros(len(tokens), bool)
        begin = len(self._carry)
        starts[:begin] = self._starts
        for document in documents:
            starts[begin] = True
            begin += len(document)
        rows = len(tokens) // self._seq_len
        used = rows * self._seq_len
        self._carry, self._starts = tokens[used:], starts[used:]
        order, shape = rng.permutation(rows), (rows, self._seq_len)
        self._rows = tokens[:used].reshape(shape)[order], starts[:used].reshape(shape)[order]


class _Block(NamedTuple):
    begin: dict[str, Any]  # the lane's position before it
    tokens: Callable[[], list[np.ndarray]]
