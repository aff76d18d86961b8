"""A task's labelled examples: in a seeded order to train on, split by split to judge by.

- An epoch holds every example once; its last step has those that are left. A task that draws its
  examples anew gives each epoch, and each validation, others.
- All processes take equally many parts. Where there are more parts than examples, one stands in
  that does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from ssmzoo.data.tokens import Data, json_digest
from ssmzoo.environment.portable import portable
from ssmzoo.recipe import Recipe
from ssmzoo.tasks import Batch, Supervised, load_task, symbol_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Examples(NamedTuple):
    """Some examples: what a micro-batch is made of."""

    batch: Batch
    counts: bool = True  # False for a stand-in

    @property
    def tokens(self) -> int:
        """Places that are not padding."""
        return int(self.batch.lengths.sum()) if self.counts else 0


class Splits(NamedTuple):
    """A task's three splits."""

    train: Supervised
    validation: Supervised
    test: Supervised


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

    def take(self, n: int) -> Examples:
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
        """Return, as JSON, where all processes stand between two steps."""
        return {"epoch": self._epoch, "row": self._row}

    def seek(self, position: dict[str, Any]) -> None:
        """Continue from a position, of any number of processes."""
        self._epoch, self._row, self._part = position["epoch"], position["row"], 0
        self._order = self._in_order()

    def _in_order(self) -> np.ndarray:
        if not self._task.shuffle:
            return np.arange(len(self._task))
        return np.random.default_rng([self._seed, self._epoch]).permutation(len(self._task))


class Share:
    """One process's batches of a split's first examples.

    Args:
        task: The split.
        count: So many of its examples, over all processes.
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
        self._rank, self._world, self._epoch = rank, world, epoch

    def after(self, step: int) -> Share:
        """Return the batches for the validation after a step: others each time if drawn anew."""
        if not self._task.fresh:
            return self
        place = {"rank": self._rank, "world": self._world}
        return Share(self._task, self._count, self._n, **place, epoch=step)

    def __len__(self) -> int:
        """Return how many batches each process has."""
        return -(-self._count // (self._n * self._world))

    def __iter__(self) -> Iterator[Examples]:
        """Make the batches."""
        for i in range(len(self)):
            begin = (i * self._world + self._rank) * self._n
            mine = np.arange(begin, min(begin + self._n, self._count))
            yield _examples(self._task, mine, np.zeros(1, np.int64), self._epoch)


def load_splits(recipe: Recipe) -> Splits:
    """Return the splits of a recipe's task.

    Raises:
        LookupError: No such argument or data set.
        ValueError: An argument out of range, or a split without examples.
        TypeError: An argument of another kind.
        RuntimeError: A library that the task's data needs is not installed.
    """
    name, arguments, seed = str(recipe.data.task), recipe.data.task_args, recipe.train.seed
    splits = Splits(*(load_task(name, split, seed, **arguments) for split in Splits._fields))
    for split, task in zip(Splits._fields, splits, strict=True):
        if not len(task):
            raise ValueError(f"data.task {name!r} must have {split} examples, got none")
    return splits


def task_tokenizer(task: Supervised) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a task's numbers, None for one of values."""
    return None if task.vocab_size is None else symbol_tokenizer(task.vocab_size)


def describe_splits(
    recipe: Recipe, splits: Splits, before: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the manifest of a task's data.

    Args:
        recipe: The run's recipe.
        splits: What :func:`load_splits` gave.
        before: What this function returned when the run began.

    Raises:
        ValueError: The data changed since the run began.
    """
    manifest: dict[str, Any] = {
        "source": "task",
        "task": {
            "name": recipe.data.task,
            **cast("dict[str, Any]", portable(recipe.data.task_args)),
            "seed": recipe.train.seed,
        },
        "examples": {name: len(task) for name, task in splits._asdict().items()},
        # what the data set holds, not only what it is called
        "first": [_digest_of_first(task) for task in splits],
    }
    manifest["digest"] = json_digest(manifest)
    if before is not None:
        if _without_place(before) != _without_place(manifest):
            raise ValueError(
                f"data.task {recipe.data.task!r} must give the examples that the run began with, "
                "and they have changed; start a new run"
            )
        manifest["digest"] = before["digest"]  # which depends on the name of their folder
    return manifest


def open_splits(recipe: Recipe, splits: Splits, *, rank: int = 0, world: int = 1) -> Data:
    """Return one process's share of the examples to train on, to validate and to test with."""
    train = recipe.train
    micro = train.batch_size // (world * train.accumulate)
    held_out = len(splits.validation)
    if isinstance(recipe.eval.batches, int):
        held_out = min(held_out, recipe.eval.batches * train.batch_size)
    return Data(
        ExampleSource(splits.train, train.seed, train.batch_size, rank=rank, world=world),
        Share(splits.validation, held_out, micro, rank=rank, world=world),
        len(splits.train),
        Share(splits.test, len(splits.test), micro, rank=rank, world=world),
    )


def _examples(task: Supervised, mine: np.ndarray, others: np.ndarray, epoch: int) -> Examples:
    if len(mine):
        return Examples(task.batch(mine, epoch))
    return Examples(task.batch(others, epoch), counts=False)


def _without_place(manifest: dict[str, Any]) -> str:
    """Return a digest of all but the folder that the examples lie in."""
    task = {name: value for name, value in manifest["task"].items() if name != "data"}
    return json_digest(task, manifest["examples"], manifest["first"])


def _digest_of_first(task: Supervised) -> str:
    batch = task.batch(range(min(8, len(task))))
    return json_digest(batch.inputs.tobytes().hex(), batch.labels.tobytes().hex())
