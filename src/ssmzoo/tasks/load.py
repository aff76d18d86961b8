"""The tasks that a recipe can name; unknown arguments of a task are errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import numpy as np

from ssmzoo.environment.messages import suggestion
from ssmzoo.tasks.cifar10 import load_cifar10
from ssmzoo.tasks.common import at_least
from ssmzoo.tasks.copying import load_copying
from ssmzoo.tasks.delay import load_delay
from ssmzoo.tasks.digits import load_digits
from ssmzoo.tasks.forecast import load_forecast
from ssmzoo.tasks.imdb import load_imdb
from ssmzoo.tasks.induction import induction_heads, induction_heads_zero
from ssmzoo.tasks.listops import load_listops
from ssmzoo.tasks.mad import MAD_PROBLEMS, Rows
from ssmzoo.tasks.mnist import load_mnist
from ssmzoo.tasks.pathfinder import load_pathfinder
from ssmzoo.tasks.pictures import load_pictures
from ssmzoo.tasks.recall import mqar
from ssmzoo.tasks.retrieval import load_retrieval
from ssmzoo.tasks.speech_commands import load_speech_commands
from ssmzoo.tasks.state_tracking import group_vocab_size, state_tracking
from ssmzoo.tasks.supervised import SPLITS, Batch, Supervised, size_of

_BLOCK = 1024  # rows drawn together; part of what a seed means


def load_task(name: str, split: str, seed: int, **args: Any) -> Supervised:
    """Return one split of a task.

    Args:
        name: One of :data:`SUPERVISED_TASKS`.
        split: ``train``, ``validation`` or ``test``.
        seed: Of generated examples, and of how training images are turned and cut. Which examples
            of a data set are held out does not depend on it.
        **args: The task's own arguments.

    Raises:
        LookupError: No such task, split, argument, or data set.
        ValueError: An argument is missing or out of range, or the seed is negative.
        TypeError: An argument is of another kind.
        RuntimeError: A library that the task's data needs is not installed.
    """
    if name not in SUPERVISED_TASKS:
        raise LookupError(
            f"no task {name!r}{suggestion(name, SUPERVISED_TASKS)}; "
            f"there are {', '.join(SUPERVISED_TASKS)}"
        )
    if split not in SPLITS:
        raise LookupError(
            f"split must be one of {', '.join(SPLITS)}, got {split!r}{suggestion(split, SPLITS)}"
        )
    at_least("seed", seed, 0)
    load = SUPERVISED_TASKS[name]
    return load(split, seed, **task_arguments(name, load, args, others=("split", "seed")))


def task_arguments(
    name: str, function: Callable[..., Any], args: Mapping[str, Any], others: Collection[str]
) -> dict[str, Any]:
    """Return all arguments of a task, the defaults too, after checking those that are given.

    Args:
        name: The task's, for errors.
        function: Whose arguments they are.
        args: Those given.
        others: Arguments of the function that are not the task's own.

    Raises:
        LookupError: No such argument.
        ValueError: One is missing.
        TypeError: One is of another kind.
    """
    parameters = dict(inspect.signature(function, eval_str=True).parameters)
    for argument in others:
        del parameters[argument]
    for argument, value in args.items():
        if argument not in parameters:
            hint = suggestion(argument, parameters) or f"; it has {', '.join(parameters) or 'none'}"
            raise LookupError(f"task {name} has no argument {argument!r}{hint}")
        kinds = _kinds(parameters[argument].annotation)
        # a bool is an int, a string a sequence, and neither is meant
        exact = isinstance(value, kinds) and (
            type(value) not in (bool, str) or type(value) in kinds
        )
        if not exact and not (float in kinds and type(value) is int):
            wanted = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
            several = Sequence in kinds and not isinstance(value, dict)
            raise TypeError(
                f"{argument} of task {name} must be {wanted}, got {value!r}"
                f"{f'; give [{value}]' if several else ''}"
            )
    for argument, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and argument not in args:
            raise ValueError(f"task {name} needs the argument {argument!r}")
    return {name: args.get(name, parameter.default) for name, parameter in parameters.items()}


def length_argument(name: str) -> str | None:
    """Return the argument of a task that sets the length of its examples; None if none does."""
    parameters = inspect.signature(SUPERVISED_TASKS[name]).parameters
    return next((argument for argument in ("length", "seq_len") if argument in parameters), None)


def _kinds(annotation: Any) -> tuple[type, ...]:
    """Return the types of an annotation, without those of their items."""
    parts = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return tuple(get_origin(part) or part for part in parts)


def _load_induction_heads_zero(split: str, seed: int) -> Supervised:
    """Return IH0: there are only eight sequences, and every split is all of them."""
    return _stored_rows(*induction_heads_zero(), vocab_size=3)


def _stored_rows(inputs: np.ndarray, labels: np.ndarray, vocab_size: int) -> Supervised:
    """Return a language-model task of rows in memory."""

    def make(indices: np.ndarray, _epoch: int) -> Batch:
        return Batch(inputs[indices], labels[indices], np.full(len(indices), inputs.shape[1]))

    return Supervised("tokens", "causal_lm", len(inputs), make, vocab_size=vocab_size)


def _fresh_rows(
    split: str, seed: int, size: int, vocab_size: int, problem: Callable[..., Rows]
) -> Supervised:
    """Return a language-model task whose rows are drawn as they are read, anew every epoch."""
    number = SPLITS.index(split)

    @lru_cache(maxsize=2)  # neighbouring batches share a block
    def block(epoch: int, which: int) -> Rows:
        entropy = np.random.SeedSequence([seed, number, epoch, which])
        return problem(_BLOCK, seed=int(entropy.generate_state(1, np.uint64)[0]))

    def make(indices: np.ndarray, epoch: int) -> Batch:
        blocks, place = np.unique(indices // _BLOCK, return_inverse=True)
        drawn = [block(epoch, which) for which in blocks.tolist()]
        rows = place * _BLOCK + indices % _BLOCK
        inputs, labels = (np.concatenate(part)[rows] for part in zip(*drawn, strict=True))
        return Batch(inputs, labels, np.full(len(indices), inputs.shape[1]))

    block(0, 0)  # wrong arguments are errors now, not during training
    meaning = {"vocab_size": vocab_size, "fresh": split != "test", "shuffle": False}
    return Supervised("tokens", "causal_lm", size, make, **meaning)


def _loader_of(
    problem: Callable[..., Rows],
    *sizes: int,
    may_be_fresh: bool = False,
    vocab_size_of: Callable[[dict[str, Any]], int] = lambda args: args["vocab_size"],
) -> Callable[..., Supervised]:
    """Return the loader of a problem of rows.

    Args:
        problem: Makes rows from their number, a seed, and the task's own arguments.
        sizes: The splits' default sizes.
        may_be_fresh: Whether the task has the argument ``fresh``.
        vocab_size_of: How many ids there are, from the problem's arguments.
    """
    own = inspect.signature(problem, eval_str=True).parameters
    counts = {f"num_{split}": size for split, size in zip(SPLITS, sizes, strict=True)}

    def load(split: str, seed: int, **args: Any) -> Supervised:
        size = size_of(split, *(args.pop(name) for name in counts))
        fresh, vocab_size = args.pop("fresh", False), vocab_size_of(args)
        if fresh:
            return _fresh_rows(split, seed, size, vocab_size, partial(problem, **args))
        drawn = np.random.SeedSequence([seed, SPLITS.index(split)]).generate_state(1)[0]
        return _stored_rows(*problem(size, seed=int(drawn), **args), vocab_size=vocab_size)

    parameters = [p for name, p in own.items() if name not in ("num_examples", "seed")]
    for name, default in (counts | {"fresh": False} if may_be_fresh else counts).items():
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=type(default)))
    split_and_seed = list(inspect.signature(load, eval_str=True).parameters.values())[:2]
    signature = inspect.Signature([*split_and_seed, *parameters])
    load.__signature__ = signature  # type: ignore[attr-defined]
    return load


SUPERVISED_TASKS: dict[str, Callable[..., Supervised]] = {
    "aan": load_retrieval,
    "cifar10": load_cifar10,
    "copying": load_copying,
    "delay": load_delay,
    "digits": load_digits,
    "forecast": load_forecast,
    "imdb": load_imdb,
    "induction_heads": _loader_of(induction_heads, 100_000, 3_000, 3_000, may_be_fresh=True),
    "induction_heads_zero": _load_induction_heads_zero,
    "listops": load_listops,
    "mnist": load_mnist,
    "mqar": _loader_of(mqar, 100_000, 3_000, 3_000),
    "pathfinder": load_pathfinder,
    "pictures": load_pictures,
    "speech_commands": load_speech_commands,
    "state_tracking": _loader_of(
        state_tracking,
        *(100_000, 3_000, 3_000),
        may_be_fresh=True,
        vocab_size_of=lambda args: group_vocab_size(args["group"]),
    ),
    **{name: _loader_of(problem, 12_800, 1_280, 1_280) for name, problem in MAD_PROBLEMS.items()},
}
