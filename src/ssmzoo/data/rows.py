"""Rows of tokens in a seeded order, resumable by position, one share for each process.

- A row holds the end of one document, whole ones, and the beginning of the next. No state and no
  loss may cross the seams, which are marked in ``starts``; labels there are -100.
- The order of the rows does not depend on the number of processes; process ``r`` of ``w`` takes
  every ``w``-th run of rows. Where a stream is in few pieces, several processes read the same one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ssmzoo.data.documents import OpenPiece, Piece
from ssmzoo.data.tokens import TokensOnDisk
from ssmzoo.data.workers import Workers, encoded

Part = TypeVar("Part", covariant=True)

IGNORED = -100
TASK_BLOCK = 1024
LANES = 64  # of a stream at most: each keeps a file open
PIECES = 4  # of a lane in an epoch at least: lanes of a few pieces differ in length


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

    def seek(self, *positions: dict[str, Any]) -> None:
        """Continue from the positions of all processes that read the same source."""
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
        pieces: Beginning and end of each document [n, 2].
        seq_len: Tokens a row.
        seed: Of the order.
        what: What the tokens are, for messages: "training" or "held-out".
        field: Of the recipe, for messages: what says the length.

    Raises:
        ValueError: Fewer tokens than one row.
    """

    def __init__(
        self,
        tokens: np.ndarray | TokensOnDisk,
        pieces: np.ndarray,
        seq_len: int,
        seed: int,
        *,
        rank: int = 0,
        world: int = 1,
        what: str = "training",
        field: str = "train.seq_len",
    ) -> None:
        total = int((pieces[:, 1] - pieces[:, 0]).sum())
        if total < seq_len:
            raise ValueError(
                f"the {what} text must fill at least one row of {field} = {seq_len} tokens, "
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
        tokens: np.ndarray | TokensOnDisk,
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


class StreamedRows(NumberedRows):
    """Rows cut from a stream of documents that comes in pieces, shuffled in blocks.

    The pieces of an epoch are in a seeded order; epochs follow each other without end, and piece
    ``i`` of them all is read by lane ``i mod lanes``. A step takes as many rows from every lane,
    always at the same places, so that no row depends on the number of processes: a process reads
    the lanes of its places. There are as many lanes as divide ``batch_size``, at most :data:`LANES`
    and at most one for :data:`PIECES` pieces.

    Args:
        pieces: What opens each piece.
        workers: What tokenises.
        seq_len: Tokens a row.
        batch_size: Rows a step, over all processes.
        seed: Of all orders.
        block: Documents that are shuffled together, over all lanes.
        keep: Whether to train on a document.
        field: The recipe's field that names the documents, for errors.

    Raises:
        ValueError: No text at all, noticed on reading.
    """

    def __init__(
        self,
        pieces: Sequence[OpenPiece],
        workers: Workers,
        seq_len: int,
        batch_size: int,
        seed: int,
        *,
        block: int,
        keep: Callable[[str], bool] = lambda _: True,
        field: str = "the stream",
        rank: int = 0,
        world: int = 1,
    ) -> None:
        super().__init__(rank, world)
        most = min(LANES, max(1, len(pieces) // PIECES))
        self.lanes = max(n for n in range(1, most + 1) if batch_size % n == 0)
        self._batch_size, self._each = batch_size, batch_size // self.lanes
        self._documents = _DealtPieces(pieces, self.lanes, seed, keep, workers, field)
        self._workers, self._seq_len = workers, seq_len
        self._block = -(-block // self.lanes)
        self._opened: dict[int, _Lane] = {}
        self._left: dict[str, dict[str, Any]] = {}  # where lanes stood that are not opened yet

    def rows(self, numbers: range) -> Rows:
        """Return the rows of these numbers, none of which may be before those returned last."""
        input_ids = np.empty((len(numbers), self._seq_len), np.int64)
        starts = np.empty((len(numbers), self._seq_len), bool)
        for i, number in enumerate(numbers):
            step, place = divmod(number, self._batch_size)
            lane, place = divmod(place, self._each)
            input_ids[i], starts[i] = self._lane(lane).row(step * self._each + place)
        starts[:, 0] = True
        return Rows(input_ids, np.where(starts, IGNORED, input_ids), starts)

    def position(self) -> dict[str, Any]:
        """Return, as JSON, where all processes stand, and this one's lanes."""
        opened = {str(number): lane.position for number, lane in self._opened.items()}
        pieces = len(self._documents.pieces)
        return {"row": self._next, "pieces": pieces, "lanes": {**self._left, **opened}}

    def seek(self, *positions: dict[str, Any]) -> None:
        """Continue from the positions of any number of processes.

        Raises:
            ValueError: They are of other pieces, or of a version that kept them otherwise.
        """
        if "lanes" not in positions[0]:
            raise ValueError(
                "the checkpoint's position in its stream is of an earlier version of ssmzoo, which "
                "read streams in another order; resume with that version, or start a new run"
            )
        was, now = positions[0]["pieces"], len(self._documents.pieces)
        if was != now:
            raise ValueError(
                f"{self._documents.field} must come in the {was} pieces that the run began with, "
                f"got {now}; use the versions of ssmzoo and datasets in run.json, or start a new "
                "run"
            )
        self._next, self._opened, self._left = int(positions[0]["row"]), {}, {}
        # of a lane that several have read, the furthest: all rows before are taken
        for position in positions:
            for number, lane in position["lanes"].items():
                if number not in self._left or lane["first"] > self._left[number]["first"]:
                    self._left[number] = lane

    def _lane(self, number: int) -> _Lane:
        if number not in self._opened:
            self._opened[number] = _Lane(
                self._documents,
                number,
                self._workers,
                self._seq_len,
                self._block,
                self._left.pop(str(number), None),
            )
        return self._opened[number]


class _DealtPieces:
    """The pieces of a stream, epoch after epoch, dealt to lanes."""

    def __init__(
        self,
        pieces: Sequence[OpenPiece],
        lanes: int,
        seed: int,
        keep: Callable[[str], bool],
        workers: Workers,
        field: str,
    ) -> None:
        self.pieces, self.seed, self.field = pieces, seed, field
        self._lanes, self._keep, self._workers = lanes, keep, workers
        self._orders: dict[int, np.ndarray] = {}
        if not pieces:
            self.require_any()

    def epoch(self, lane: int, turn: int) -> int:
        """Return the epoch of the piece that a lane reads as its ``turn``-th."""
        return (turn * self._lanes + lane) // len(self.pieces)

    def open(self, lane: int, turn: int, place: Any) -> Piece:
        """Open that piece."""
        epoch = self.epoch(lane, turn)
        if epoch not in self._orders:
            rng = np.random.default_rng([self.seed, epoch])
            # lanes may be in two epochs
            self._orders = {k: v for k, v in self._orders.items() if k == epoch - 1}
            self._orders[epoch] = rng.permutation(len(self.pieces))
        piece = self._orders[epoch][(turn * self._lanes + lane) % len(self.pieces)]
        return self._kept(self.pieces[piece](place))

    def require_any(self) -> None:
        """Raise if no piece has a document with tokens to train on."""
        texts = (text for open_piece in self.pieces for text in self._kept(open_piece(None)))
        missing = "documents, got none"
        for text in texts:
            missing = "text, got only documents without tokens"
            if len(self._workers.submit(encoded, [text])()[0]):
                return
        raise ValueError(f"{self.field}: the training stream must hold {missing}")

    def _kept(self, piece: Piece) -> Piece:
        return Piece(filter(self._keep, piece), piece.place)


class _Lane:
    """The rows of one lane.

    Attributes:
        position: Where the lane stood, as JSON, before the block of the row given last: its turn
            and the place in its piece, how many blocks and rows (``first``) came before, and the
            tokens left over for the next row.
    """

    def __init__(
        self,
        documents: _DealtPieces,
        number: int,
        workers: Workers,
        seq_len: int,
        block: int,
        position: dict[str, Any] | None,
    ) -> None:
        begin = {"turn": 0, "place": None, "block": 0, "first": 0, "carry": [], "seams": []}
        self.position = position or begin
        self._documents, self._number, self._workers = documents, number, workers
        self._seq_len, self._size = seq_len, block
        self._turn, self._block = self.position["turn"], self.position["block"]
        self._last = self._turn  # the last turn whose documents had tokens
        self._piece = documents.open(number, self._turn, self.position["place"])
        self._first, self._carry = self.position["first"], np.array(self.position["carry"], int)
        self._seams = np.zeros(len(self._carry), bool)
        self._seams[self.position["seams"]] = True
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
            "seams": np.flatnonzero(self._seams).tolist(),
        }
        self._ahead = self._read() if self._workers.count else None
        rng = np.random.default_rng([self._documents.seed, self._number, block.begin["block"]])
        documents = block.tokens()
        order = rng.permutation(len(documents))
        with_tokens = [documents[i] for i in order if len(documents[i])]
        self._pack(with_tokens, rng)
        turn = block.begin["turn"]
        if with_tokens:
            self._last = turn
        elif turn - self._last >= len(self._documents.pieces):
            self._documents.require_any()
            self._last = turn

    def _read(self) -> _Block:
        """Read the next documents, of one epoch, and have them tokenised."""
        begin = {"turn": self._turn, "place": self._piece.place(), "block": self._block}
        self._block += 1
        texts: list[str] = []
        fruitless = 0
        while len(texts) < self._size:
            text = next(self._piece, None)
            if text is not None:
                texts.append(text)
                continue
            before = self._documents.epoch(self._number, self._turn)
            self._turn += 1
            self._piece = self._documents.open(self._number, self._turn, None)
            if not texts:
                begin = {**begin, "turn": self._turn, "place": None}
                fruitless += 1
                if fruitless == len(self._documents.pieces):
                    self._documents.require_any()
            elif self._documents.epoch(self._number, self._turn) > before:
                break
        return _Block(begin, self._workers.submit(encoded, texts))

    def _pack(self, documents: list[np.ndarray], rng: np.random.Generator) -> None:
        tokens = np.concatenate([self._carry, *documents])
        seams = np.zeros(len(tokens), bool)
        begin = len(self._carry)
        seams[:begin] = self._seams
        for document in documents:
            seams[begin] = True
            begin += len(document)
        rows = len(tokens) // self._seq_len
        used = rows * self._seq_len
        self._carry, self._seams = tokens[used:], seams[used:]
        order, shape = rng.permutation(rows), (rows, self._seq_len)
        self._rows = tokens[:used].reshape(shape)[order], seams[:used].reshape(shape)[order]


class _Block(NamedTuple):
    begin: dict[str, Any]  # where the lane stood before it
    tokens: Callable[[], list[np.ndarray]]
