"""The tasks that a recipe can name, and their closed arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, get_args

import numpy as np

from ssmzoo.family import suggestion
from ssmzoo.tasks.cifar10 import load_cifar10
from ssmzoo.tasks.common import at_least
from ssmzoo.tasks.copying import load_copying
from ssmzoo.tasks.delay import load_delay
from ssmzoo.tasks.digits import load_digits
from ssmzoo.tasks.imdb import load_imdb
from ssmzoo.tasks.induction import induction_heads, induction_heads_zero
from ssmzoo.tasks.listops import load_listops
from ssmzoo.tasks.mad import MAD_PROBLEMS
from ssmzoo.tasks.mnist import load_mnist
from ssmzoo.tasks.pathfinder import load_pathfinder
from ssmzoo.tasks.recall import mqar
from ssmzoo.tasks.retrieval import load_retrieval
from ssmzoo.tasks.speech_commands import load_speech_commands
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
    parameters = dict(inspect.signature(function, eval_str=True).parameters)
    del parameters["split"], parameters["seed"]
    for argument, value in args.items():
        if argument not in parameters:
            hint = suggestion(argument, parameters) or f"; it has {', '.join(parameters) or 'none'}"
            raise LookupError(f"task {name} has no argument {argument!r}{hint}")
        kind = parameters[argument].annotation
        exact = isinstance(value, kind) and (isinstance(value, bool) == (kind is bool))
        if not exact and not (kind is float and type(value) is int):
            several = list in get_args(kind) and not isinstance(value, dict)
            raise TypeError(
                f"{argument} of task {name} must be {getattr(kind, '__name__', kind)}, "
                f"got {value!r}{f'; give [{value}]' if several else ''}"
            )
    for argument, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and argument not in args:
            raise ValueError(f"task {name} needs the argument {argument!r}")
    return function(split, seed, **args)


def _load_mqar(
    split: str,
    seed: int,
    *,
    seq_len: int = 64,
    num_pairs: int = 4,
    vocab_size: int = 8192,
    power: float = 0.01,
    random_filler: bool = False,
    num_train: int = 100_000,
    num_validation: int = 3_000,
    num_test: int = 3_000,
) -> Supervised:
    def make(count: int, drawn: int) -> tuple[np.ndarray, np.ndarray]:
        return mqar(
            count,
            seq_len=seq_len,
            num_pairs=num_pairs,
            vocab_size=vocab_size,
            power=power,
            random_filler=random_filler,
            seed=drawn,
        )

    return _language(split, seed, (num_train, num_validation, num_test), vocab_size, make)


def _load_induction_heads(
    split: str,
    seed: int,
    *,
    seq_len: int,
    vocab_size: int,
    num_symbols: int | None = None,
    trigger: list | None = None,
    target_length: int = 1,
    noise_length: int = 0,
    num_train: int = 100_000,
    num_validation: int = 3_000,
    num_test: int = 3_000,
    fresh: bool = False,
) -> Supervised:
    def make(count: int, drawn: int) -> tuple[np.ndarray, np.ndarray]:
        return induction_heads(
            count,
            seq_len=seq_len,
            vocab_size=vocab_size,
            num_symbols=num_symbols,
            trigger=trigger,
            target_length=target_length,
            noise_length=noise_length,
            seed=drawn,
        )

    sizes = (num_train, num_validation, num_test)
    language = _fresh_language if fresh else _language
    return language(split, seed, sizes, vocab_size, make)


def _load_induction_heads_zero(split: str, seed: int) -> Supervised:
    """Return IH0: there are but eight sequences, and every split is all of them."""
    require_split(split)
    inputs, labels = induction_heads_zero()

    def make(indices: np.ndarray, _epoch: int) -> Batch:
        return Batch(inputs[indices], labels[indices], np.full(len(indices), inputs.shape[1]))

    return Supervised("tokens", "causal_lm", len(inputs), make, vocab_size=3)


def _mad(problem: Callable[..., tuple[np.ndarray, np.ndarray]]) -> Callable[..., Supervised]:
    """Return the loader of one of MAD's problems: its own arguments, and the splits' sizes."""
    own = inspect.signature(problem, eval_str=True).parameters
    sizes = {"num_train": 12_800, "num_validation": 1_280, "num_test": 1_280}

    def load(split: str, seed: int, **args: Any) -> Supervised:
        counts = tuple(args.pop(name, size) for name, size in sizes.items())

        def make(count: int, drawn: int) -> tuple[np.ndarray, np.ndarray]:
            return problem(count, seed=drawn, **args)

        vocab_size = args.get("vocab_size", own["vocab_size"].default)
        return _language(split, seed, counts, vocab_size, make)

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("split", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str),
        inspect.Parameter("seed", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=int),
        *(p for name, p in own.items() if name not in ("num_examples", "seed")),
        *(
            inspect.Parameter(name, kind, default=size, annotation=int)
            for name, size in sizes.items()
        ),
    ]
    load.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
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
    "imdb": load_imdb,
    "induction_heads": _load_induction_heads,
    "induction_heads_zero": _load_induction_heads_zero,
    "listops": load_listops,
    "mnist": load_mnist,
    "mqar": _load_mqar,
    "pathfinder": load_pathfinder,
    "speech_commands": load_speech_commands,
    **{name: _mad(problem) for name, problem in MAD_PROBLEMS.items()},
}
