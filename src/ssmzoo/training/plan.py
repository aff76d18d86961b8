"""A run in steps: what a recipe says in epochs, tokens and shares."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ssmzoo.recipe import Recipe


@dataclass(frozen=True)
class Plan:
    """When what happens.

    Attributes:
        total: Optimizer steps of the run.
        warmup: How many of them are warm-up.
        evaluate_every: Steps between validations.
        save_every: Steps between checkpoints; None if the clock alone decides.
        epoch_steps: Steps an epoch, whole for labelled examples; None for endless data.
    """

    total: int
    warmup: int
    evaluate_every: int
    save_every: int | None
    epoch_steps: float | None

    @classmethod
    def of(cls, recipe: Recipe, epoch_rows: int | None) -> Plan:
        """Return the plan of a recipe whose data has so many rows or examples an epoch.

        Raises:
            ValueError: A warm-up longer than the run.
        """
        train = recipe.train
        epoch_steps = None if epoch_rows is None else epoch_rows / train.batch_size
        whole = 0
        if recipe.supervised:
            assert epoch_steps is not None
            epoch_steps = whole = math.ceil(epoch_steps)
        total = train.total_steps
        if total is None:
            assert train.epochs is not None
            total = train.epochs * whole

        def steps(every: int | str) -> int:
            return every if isinstance(every, int) else whole

        return cls(
            total,
            train.warmup_of(total),
            steps(recipe.eval.every),
            None if recipe.checkpoint.every is None else steps(recipe.checkpoint.every),
            epoch_steps,
        )


def require_ahead(recipe: Recipe, total: int | None, done: int) -> None:
    """Check that a run's end, if it is known, is not behind what it has done.

    Raises:
        ValueError: It is.
    """
    if total is not None and total < done:
        ends = ("steps", "tokens", "epochs")
        name = next(end for end in ends if getattr(recipe.train, end) is not None)
        raise ValueError(
            f"train.{name} must give at least the {done} steps that the run has done, got "
            f"{total}; raise it, or start a new run"
        )
