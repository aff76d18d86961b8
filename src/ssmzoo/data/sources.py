"""The kinds of data that a recipe can name: one class each, chosen once by :func:`data_source`."""

from __future__ import annotations

import hashlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from ssmzoo import tasks
from ssmzoo.data.documents import documents_of
from ssmzoo.data.labelled import ExampleSource, HeldOutExamples
from ssmzoo.data.rows import (
    ConsecutiveRows,
    HeldOut,
    HeldOutRows,
    PackedRows,
    Rows,
    RowSource,
    TaskRows,
)
from ssmzoo.data.streams import StreamedRows
from ssmzoo.data.tokenizer import encoder, named_tokenizer, tokenizer_digest
from ssmzoo.data.tokens import TokenStore, is_store, read_store, text_hash, tokens_of, write_store
from ssmzoo.data.workers import Workers
from ssmzoo.environment.portable import portable
from ssmzoo.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Data:
    """The data that a process of a run reads.

    Attributes:
        train: The rows, or labelled examples, to train on.
        validation: This process's held-out micro-batches; as many on every process, and none if
            the recipe holds nothing out.
        epoch_rows: Rows an epoch over all processes; None for endless data.
        test: As ``validation``, of a task's test split; None if there is none.
        lengths: As ``test``, or of rows as ``validation``, by each of ``eval.lengths``.
        close: Ends its worker processes.
    """

    train: RowSource[Any]
    validation: HeldOut[Any]
    epoch_rows: int | None
    test: HeldOut[Any] | None = None
    lengths: Mapping[int, HeldOut[Any]] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None


class DataSource(ABC):
    """The data of a recipe.

    Attributes:
        tokenizer: The tokenizer that the recipe means; None for a task of values.
        task: The training split of a supervised task; None for rows of tokens.

    Raises:
        LookupError: No such tokenizer, task, argument of the task, or data set.
        ValueError: An argument of the task that is missing or out of range.
        TypeError: An argument of the task of another kind.
    """

    tokenizer: PreTrainedTokenizerBase | None
    task: tasks.Supervised | None = None

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @abstractmethod
    def prepare(self, cache: Path, before: dict[str, Any] | None = None) -> dict[str, Any]:
        """Find, check and tokenise the data; one process does it for all.

        Args:
            cache: The folder for tokens; used as it is if it holds these tokens already.
            before: The result of this method when the run began, to resume on the same data.

        Returns:
            The manifest, as JSON: where the data came from, and its ``digest``.

        Raises:
            ValueError: Data that is missing, empty, unreadable, or changed since the run began.
        """

    @abstractmethod
    def open(self, cache: Path, manifest: dict[str, Any], *, rank: int = 0, world: int = 1) -> Data:
        """Open one process's part of the data that :meth:`prepare` made ready.

        Raises:
            ValueError: Too little text for one row, or held-out rows with nothing to predict.
        """

    @property
    def _wanted(self) -> int:
        """How many held-out rows or examples a validation reads at most."""
        batches = self.recipe.eval.batches
        return batches * self.recipe.train.batch_size if isinstance(batches, int) else sys.maxsize


def data_source(recipe: Recipe) -> DataSource:
    """Return the data of a recipe, of the kind that it names; see :class:`DataSource`."""
    if recipe.supervised:
        return LabelledExamples(recipe)
    if recipe.data.task is not None:
        return GeneratedRows(recipe)
    return StreamedText(recipe) if recipe.data.streaming else StoredText(recipe)


class _RowData(DataSource):
    """Data that is read in rows of ``train.seq_len`` tokens."""

    @property
    def _seq_len(self) -> int:
        assert self.recipe.train.seq_len is not None  # as the recipe has checked
        return self.recipe.train.seq_len

    def _held_out(
        self, rows: Callable[[range], Rows], count: int, length: int, rank: int, world: int
    ) -> HeldOutRows:
        """Return one process's micro-batches of the first held-out rows, as many on each process.

        Of rows of another length there are as few as have as many tokens. Where there are no rows
        left for one, the first stands in, with nothing to predict.

        Raises:
            ValueError: No row has anything to predict.
        """
        wanted, micro = (
            max(1, number * self._seq_len // length)
            for number in (self._wanted, self.recipe.train.micro_batch(world))
        )
        numbers = range(min(wanted, count))
        if numbers and not any(rows(range(i, i + 1)).targets for i in numbers):
            raise ValueError(
                f"data.validation must hold out rows with tokens to predict, got none in "
                f"{len(numbers)} rows; documents of one token have none; hold out others"
            )
        each = -(-len(numbers) // world)
        mine = numbers[rank * each : (rank + 1) * each]
        parts = [mine[i : i + micro] for i in range(0, each, micro)]
        return HeldOutRows(rows(p) if p else rows(numbers[:1]).unlabelled() for p in parts)


class _Text(_RowData):
    """Documents, tokenised and packed into rows."""

    tokenizer: PreTrainedTokenizerBase

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        given, source = recipe.data.tokenizer, recipe.model.init_from
        argument = "model.init_from" if given is None and source is not None else "data.tokenizer"
        self.tokenizer = named_tokenizer(given or source or "bytes", argument)
        self._documents = documents_of(recipe.data)

    def prepare(self, cache: Path, before: dict[str, Any] | None = None) -> dict[str, Any]:
        """Find and check the documents."""
        data = self.recipe.data
        manifest = {"source": data.source, **self._documents.find(before)}
        manifest["digest"] = json_digest(without_places(manifest), data.text_field)
        digest = tokenizer_digest(self.tokenizer)
        manifest["tokenizer"] = {"name": data.tokenizer, "digest": digest}
        was = manifest["tokenizer"] if before is None else before["tokenizer"]
        if was["name"] != data.tokenizer and was["digest"] != digest:
            raise ValueError(
                f"data.tokenizer must be {was['name']!r}, with which the run began, or a copy of "
                f"it, got {data.tokenizer!r}, which encodes otherwise; start a new run to change it"
            )
        return manifest

    def _named_held_out(self, manifest: dict[str, Any]) -> TokenStore | None:
        """Return the tokens of the paths or splits held out by name, None if there are none."""
        if not isinstance(self.recipe.data.validation, list):
            return None
        need = None if self._documents.reads_all_held_out else self._wanted * self._seq_len
        return tokens_of(self._documents.held_out(manifest), encoder(self.tokenizer), need)

    def _packed_held_out(
        self, store: TokenStore | None, spans: np.ndarray | None, rank: int, world: int
    ) -> tuple[HeldOutRows, dict[int, HeldOutRows]]:
        """Return held-out rows of ``train.seq_len`` tokens, and of each of ``eval.lengths``."""
        if store is None:
            return HeldOutRows(), {}
        spans = store.spans if spans is None else spans

        def of(length: int, name: str) -> HeldOutRows:
            rows = PackedRows(store.tokens, spans, length, 0, use="held-out", field=name)
            return self._held_out(rows.rows, len(rows), length, rank, world)

        longer = {length: of(length, "eval.lengths") for length in self.recipe.eval.lengths}
        return of(self._seq_len, "train.seq_len"), longer


class StoredText(_Text):
    """Files, or a downloaded data set: tokenised once, shuffled whole."""

    def prepare(self, cache: Path, before: dict[str, Any] | None = None) -> dict[str, Any]:
        """Find, check and tokenise the documents."""
        manifest, data = super().prepare(cache, before), self.recipe.data
        # a text's tokens are kept with the names of its files
        names = [file["path"] for file in manifest["files"]] if data.source == "text" else []
        key = json_digest([manifest["digest"], manifest["tokenizer"]["digest"], *names])
        if not is_store(cache, key):
            documents = self._documents.training(manifest)
            field, workers = self._documents.field, data.workers
            write_store(documents, self.tokenizer, cache, key, field, workers)
        store = read_store(cache)
        ends = store.holds_out_ends(data.validation) if before is None else before["ends"]
        _, held_out, _ = store.split(data.validation, ends=ends)
        manifest |= {"documents": len(store.ends), "tokens": len(store.tokens), "ends": ends}
        manifest["held_out"] = [store.names[i] for i in held_out] if store.names else []
        return manifest

    def open(self, cache: Path, manifest: dict[str, Any], *, rank: int = 0, world: int = 1) -> Data:
        """Open rows that are all at hand."""
        train, store = self.recipe.train, read_store(cache)
        spans, _, rest = store.split(self.recipe.data.validation, ends=manifest["ends"])
        named = self._named_held_out(manifest)
        if named is not None:
            spans = store.without(named)
        given = store.tokens, spans, self._seq_len
        if train.segments is not None and train.segments.carry:
            lanes = train.batch_size
            rows = ConsecutiveRows(*given, lanes, train.seed, rank=rank, world=world)
        else:
            rows = PackedRows(*given, train.seed, rank=rank, world=world)
        held_out = named if rest is None else store
        validation, lengths = self._packed_held_out(held_out, rest, rank, world)
        return Data(rows, validation, len(rows), lengths=lengths)


class StreamedText(_Text):
    """Records that are read and tokenised while training."""

    def open(self, cache: Path, manifest: dict[str, Any], *, rank: int = 0, world: int = 1) -> Data:
        """Open this process's share of the stream."""
        data, documents = self.recipe.data, self._documents
        encode, held_out = encoder(self.tokenizer), self._named_held_out(manifest)
        shards = documents.shards(manifest)
        if isinstance(data.validation, int):
            texts = chain.from_iterable(open_shard(None) for open_shard in shards)
            held_out = tokens_of(islice(texts, data.validation), encode, None)
        hashes = frozenset(held_out.hashes.tolist() if held_out is not None else ())
        workers = Workers(self.tokenizer, data.workers)
        rows = StreamedRows(
            shards,
            workers,
            self._seq_len,
            self.recipe.train.batch_size,
            self.recipe.train.seed,
            block=data.shuffle_buffer,
            keep=lambda text: not hashes or text_hash(text) not in hashes,
            field=documents.field,
            rank=rank,
            world=world,
        )
        validation, lengths = self._packed_held_out(held_out, None, rank, world)
        return Data(rows, validation, None, lengths=lengths, close=workers.close)


class GeneratedRows(_RowData):
    """A problem of rows of one length, drawn without end."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        name = self._name = str(recipe.data.task)
        elsewhere = ("num_examples", "seed", "seq_len")
        own = tasks.task_arguments(name, getattr(tasks, name), recipe.data.task_args, elsewhere)
        self._arguments = {**own, "seq_len": self._seq_len}
        self.tokenizer = tasks.symbol_tokenizer(own["vocab_size"])

    def prepare(self, cache: Path, before: dict[str, Any] | None = None) -> dict[str, Any]:
        """Describe the task; there is nothing to make ready."""
        seed = self.recipe.train.seed
        task = {"name": self._name, **self._arguments, "seed": seed}
        manifest: dict[str, Any] = {"source": "task", "task": task}
        return {**manifest, "digest": json_digest(manifest, self.recipe.data.text_field)}

    def open(self, cache: Path, manifest: dict[str, Any], *, rank: int = 0, world: int = 1) -> Data:
        """Open rows that are always new, and others to validate on."""
        seed, count = self.recipe.train.seed, self.recipe.data.validation or 0
        other = int(np.random.SeedSequence([seed, 1]).generate_state(1)[0])

        def held_out(length: int) -> HeldOutRows:
            draw = partial(self._draw, seq_len=length)
            fitting = max(1, count * self._seq_len // length) if count else 0
            return self._held_out(TaskRows(draw, other).rows, fitting, length, rank, world)

        return Data(
            TaskRows(self._draw, seed, rank=rank, world=world),
            held_out(self._seq_len),
            None,
            lengths={length: held_out(length) for length in self.recipe.eval.lengths},
        )

    def _draw(self, count: int, seed: int, **other: int) -> tuple[np.ndarray, np.ndarray]:
        return getattr(tasks, self._name)(count, seed=seed, **{**self._arguments, **other})


class _Splits(NamedTuple):
    train: tasks.Supervised
    validation: tasks.Supervised
    test: tasks.Supervised


class LabelledExamples(DataSource):
    """A supervised task: examples with labels, in three splits."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        name, arguments, seed = str(recipe.data.task), recipe.data.task_args, recipe.train.seed
        self._splits = _Splits(
            *(tasks.load_task(name, split, seed, **arguments) for split in _Splits._fields)
        )
        for split, task in self._splits._asdict().items():
            if not len(task):
                raise ValueError(f"data.task {name!r} must have {split} examples, got none")
        task = self.task = self._splits.train
        self.tokenizer = None
        if task.vocab_size is not None:
            self.tokenizer = tasks.symbol_tokenizer(task.vocab_size)

    def prepare(self, cache: Path, before: dict[str, Any] | None = None) -> dict[str, Any]:
        """Describe the splits, and check that they are those the run began with."""
        data, splits = self.recipe.data, self._splits
        arguments = cast("dict[str, Any]", portable(data.task_args))
        manifest: dict[str, Any] = {
            "source": "task",
            "task": {"name": data.task, **arguments, "seed": self.recipe.train.seed},
            "examples": {name: len(task) for name, task in splits._asdict().items()},
            # the content of the data set, not only its name
            "first": [_digest_of_first(task) for task in splits],
        }
        manifest["digest"] = json_digest(manifest)
        if before is not None:
            if _without_folder(before) != _without_folder(manifest):
                raise ValueError(
                    f"data.task {data.task!r} must give the examples that the run began with, "
                    "and they have changed; start a new run"
                )
            manifest["digest"] = before["digest"]  # which depends on the name of their folder
        return manifest

    def open(self, cache: Path, manifest: dict[str, Any], *, rank: int = 0, world: int = 1) -> Data:
        """Open the examples to train on, to validate and to test with."""
        train, splits, place = self.recipe.train, self._splits, {"rank": rank, "world": world}
        micro, held_out = train.micro_batch(world), min(len(splits.validation), self._wanted)
        longer = {length: self._test_of(length) for length in self.recipe.eval.lengths}
        return Data(
            ExampleSource(splits.train, train.seed, train.batch_size, **place),
            HeldOutExamples(splits.validation, held_out, micro, **place),
            len(splits.train),
            HeldOutExamples(splits.test, len(splits.test), micro, **place),
            {
                length: HeldOutExamples(task, len(task), micro, **place)
                for length, task in longer.items()
            },
        )

    def _test_of(self, length: int) -> tasks.Supervised:
        """Return the test split with examples of another length."""
        data, name = self.recipe.data, str(self.recipe.data.task)
        arguments = {**data.task_args, str(tasks.length_argument(name)): length}
        return tasks.load_task(name, "test", self.recipe.train.seed, **arguments)


def json_digest(*parts: Any) -> str:
    """Return the sha256 of some values, written as JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def without_places(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest without its files' folders and times: its content."""
    return {
        key: [[Path(f["path"]).name, f["bytes"], f["sha256"]] for f in value]
        if key.endswith("files")
        else value
        for key, value in manifest.items()
    }


def _without_folder(manifest: dict[str, Any]) -> str:
    """Return a digest of a manifest without the folder of its examples."""
    task = {name: value for name, value in manifest["task"].items() if name != "data"}
    return json_digest(task, manifest["examples"], manifest["first"])


def _digest_of_first(task: tasks.Supervised) -> str:
    batch = task.batch(range(min(8, len(task))))
    return json_digest(batch.inputs.tobytes().hex(), batch.labels.tobytes().hex())
