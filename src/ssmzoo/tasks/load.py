"""The tasks that a recipe can name, and their closed arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import numpy as np

from ssmzoo.family import suggestion
from ssmzoo.tasks.cifar10 import load_cifar10
from ssmzoo.tasks.common import at_least
from ssmzoo.tasks.copying import load_copying
from ssmzoo.tasks.delay import load_delay
from ssmzoo.tasks.digits import load_digits
from ssmzoo.tasks.forecast import load_forecast
from ssmzoo.tasks.imdb import load_imdb
from ssmzoo.tasks.induction import induction_heads, induction_heads_zero
from ssmzoo.tasks.listops import load_listops
from ssmzoo.tasks.mad import MAD_PROBLEMS
from ssmzoo.tasks.mnist import load_mnist
from ssmzoo.tasks.pathfinder import load_pathfinder
from ssmzoo.tasks.pictures import load_pictures
from ssmzoo.tasks.recall import mqar
from ssmzoo.tasks.retrieval import load_retrieval
from ssmzoo.tasks.speech_commands import load_speech_commands
from ssmzoo.tasks.state_tracking import group_vocab_size, state_tracking
from ssmzoo.tasks.supervised import SPLITS, Batch, Supervised, require_split

_BLOCK = 1024  # rows drawn together; part of what a seed means


def load_task(name: str, split: str, seed: int, **args: Any) -> Supervised:
    """Return one split of a task.

    Args:
        name: One of :data:`SUPERVISED_TASKS`.
        split: ``train``, ``validation`` or ``test``.
        seed: What is generated is drawn from it; data sets that exist do not depend on it, save how
            their training images are turned.
        **args: The task's own arguments.

    Raises:
        LookupError: No such task, split, argument, or data set.
        ValueError: An argument is missing or out of range.
        TypeError: An argument is of another kind.
        RuntimeError: A library that the task's data needs is not installed.
    """
    if name not in SUPERVISED_TASKS:
        raise LookupError(
            f"no task {name!r}{suggestion(name, SUPERVISED_TASKS)}; "
            f"there are {', '.join(SUPERVISED_TASKS)}"
        )
    function = SUPERVISED_TASKS[name]
    task_arguments(name, function, args, said=("split", "seed"))
    return function(split, seed, **args)


def task_arguments(
    name: str, function: Callable[..., Any], args: Mapping[str, Any], said: Collection[str]
) -> dict[str, Any]:
    """Return all arguments of a task, the defaults too, after checking those that are given.

    Args:
        name: The task's, for errors.
        function: Whose arguments they are.
        args: Those given.
        said: Arguments that are not the task's own: they are said elsewhere.

    Raises:
        LookupError: No such argument.
        ValueError: One is missing.
        TypeError: One is of another kind.
    """
    parameters = dict(inspect.signature(function, eval_str=True).parameters)
    for argument in said:
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
    """Return which argument of a task says how long its examples are; None if none does."""
    parameters = inspect.signature(SUPERVISED_TASKS[name]).parameters
    return next((argument for argument in ("length", "seq_len") if argument in parameters), None)


def _kinds(annotation: Any) -> tuple[type, ...]:
    """Return the types of an annotation, without those of their items."""
    parts = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return tuple(get_origin(part) or part for part in parts)


def _load_induction_heads_zero(split: str, seed: int) -> Supervised:
    """Return IH0: there are but eight sequences, and every split is all of them."""
    require_split(split)
    inputs, labels = induction_heads_zero()

    def make(indices: np.ndarray, _epoch: int) -> Batch:
        return Batch(inputs[indices], labels[indices], np.full(len(indices), inputs.shape[1]))

    return Supervised("tokens", "causal_lm", len(inputs), make, vocab_size=3)


def _recall(
    problem: Callable[..., tuple[np.ndarray, np.ndarray]],
    *sizes: int,
    may_be_fresh: bool = False,
    vocab_size_of: Callable[..., int] | None = None,
) -> Callable[..., Supervised]:
    """Return the loader of a problem of rows: its own arguments, and the splits' sizes.

    The number of ids is the argument ``vocab_size``, or what ``vocab_size_of`` says of the others.
    """
    own = inspect.signature(problem, eval_str=True).parameters
    counted = {f"num_{split}": size for split, size in zip(SPLITS, sizes, strict=True)}

    def load(split: str, seed: int, **args: Any) -> Supervised:
        counts = tuple(args.pop(name, size) for name, size in counted.items())
        language = _fresh_language if args.pop("fresh", False) else _language

        def make(count: int, drawn: int) -> tuple[np.ndarray, np.ndarray]:
            return problem(count, seed=drawn, **args)

        if vocab_size_of is None:
            vocab_size = args.get("vocab_size", own["vocab_size"].default)
        else:
            wanted = inspect.signature(vocab_size_of).parameters
            vocab_size = vocab_size_of(**{name: args[name] for name in wanted if name in args})
        return language(split, seed, counts, vocab_size, make)

    def keyword(name: str, default: int) -> inspect.Parameter:
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, kind, default=default, annotation=type(default))

    load.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter("split", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str),
            inspect.Parameter("seed", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=int),
            *(p for name, p in own.items() if name not in ("num_examples", "seed")),
            *(keyword(name, size) for name, size in counted.items()),
            *([keyword("fresh", False)] if may_be_fresh else []),
        ]
    )
    return load


def _language(
    split: str,
    seed: int,
    sizes: tuple[int, int, int],
    vocab_size: int,
    make_rows: Callable[[int, int], tuple[np.ndarray, np.ndarray]],
) -> Supervised:
    """Return a recall problem whose rows lie in memory."""
    number = _number_of(split, sizes)
    drawn = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    inputs, labels = make_rows(sizes[number], drawn)

    def make(indices: np.ndarray, _epoch: int) -> Batch:
        lengths = np.full(len(indices), inputs.shape[1])
        return Batch(inputs[indices], labels[indices], lengths)

    return Supervised("tokens", "causal_lm", len(inputs), make, vocab_size=vocab_size)


def _fresh_language(
    split: str,
    seed: int,
    sizes: tuple[int, int, int],
    vocab_size: int,
    make_rows: Callable[[int, int], tuple[np.ndarray, np.ndarray]],
) -> Supervised:
    """Return a recall problem whose rows are drawn when they are read, others every epoch."""
    number = _number_of(split, sizes)

    # neighbouring batches share a block
    @lru_cache(maxsize=2)
    def block(epoch: int, which: int) -> tuple[np.ndarray, np.ndarray]:
        entropy = np.random.SeedSequence([seed, number, epoch, which])
        return make_rows(_BLOCK, int(entropy.generate_state(1, np.uint64)[0]))

    def make(indices: np.ndarray, epoch: int) -> Batch:
        blocks, place = np.unique(indices // _BLOCK, return_inverse=True)
        drawn = [block(epoch, which) for which in blocks.tolist()]
        rows = place * _BLOCK + indices % _BLOCK
        inputs, labels = (np.concatenate(part)[rows] for part in zip(*drawn, strict=True))
        return Batch(inputs, labels, np.full(len(indices), inputs.shape[1]))

    make(np.zeros(1, np.int64), 0)  # wrong arguments show now
    return Supervised(
        "tokens",
        "causal_lm",
        sizes[number],
        make,
        vocab_size=vocab_size,
        fresh=split != "test",
        shuffle=False,
    )


def _number_of(split: str, sizes: tuple[int, int, int]) -> int:
    require_split(split)
    for name, size in zip(SPLITS, sizes, strict=True):
        at_least(f"num_{name}", size, 1)
    return SPLITS.index(split)


SUPERVISED_TASKS: dict[str, Callable[..., Supervised]] = {
    "aan": load_retrieval,
    "cifar10": load_cifar10,
    "copying": load_copying,
    "delay": load_delay,
    "digits": load_digits,
    "forecast": load_forecast,
    "imdb": load_imdb,
    "induction_heads": _recall(induction_heads, 100_000, 3_000, 3_000, may_be_fresh=True),
    "induction_heads_zero": _load_induction_heads_zero,
    "listops": load_listops,
    "mnist": load_mnist,
    "mqar": _recall(mqar, 100_000, 3_000, 3_000),
    "pathfinder": load_pathfinder,
    "pictures": load_pictures,
    "speech_commands": load_speech_commands,
    "state_tracking": _recall(
        state_tracking,
        *(100_000, 3_000, 3_000),
        may_be_fresh=True,
        vocab_size_of=group_vocab_size,
    ),
    **{name: _recall(problem, 12_800, 1_280, 1_280) for name, problem in MAD_PROBLEMS.items()},
}
