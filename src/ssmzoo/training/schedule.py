"""The plan of a run in steps, and the learning rates over it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ssmzoo.recipe import Recipe, TrainSection

if TYPE_CHECKING:
    import torch

_BETTER = 1e-4  # how much better, relatively, a metric must be to end a plateau


@dataclass(frozen=True)
class Plan:
    """A run in steps.

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
    """Check that a run's end, if it is known, is not before the steps it has done.

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


class Schedule:
    """The learning rates of all groups.

    The rate of a step is the group's peak, times the share that the step gives (a linear warm-up,
    then a cosine or 1), times the factor to which plateaus or a drop have lowered it.

    Args:
        optimizer: Its groups' rates are the peaks.
        options: The recipe's.
        plan: The run's steps.
        higher: Whether more of the metric that :meth:`observe_validation` is told is better.

    Attributes:
        rate: The rate of the last step, of the first group; None before the first.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, options: TrainSection, plan: Plan, *, higher: bool
    ) -> None:
        self._optimizer = optimizer  # which replaces its groups when it loads
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self._options, self._plan, self._higher = options, plan, higher
        self.rate: float | None = None
        self._step, self._factor = 0, 1.0
        self._best, self._bad = -math.inf if higher else math.inf, 0
        self._loss_sum, self._losses = 0.0, 0  # since the last validation
        self._set_rates()

    def step(self) -> None:
        """Set the rates of the next step, after each step of the optimizer."""
        self.rate = self._optimizer.param_groups[0]["lr"]
        self._step += 1
        self._set_rates()

    def observe_losses(self, losses: Iterable[float]) -> None:
        """Add the training losses of some steps to the mean that a drop looks at."""
        for loss in losses:
            self._loss_sum += loss
            self._losses += 1

    def observe_validation(self, value: float) -> None:
        """Lower the rates, once warm, at a plateau of the metric or a small training loss."""
        schedule, warm = self._options.schedule, self._step >= self._plan.warmup
        falls = warm and (
            (schedule == "plateau" and self._is_plateau(value))
            or (schedule == "drop" and self._is_drop())
        )
        if falls:
            assert self._options.factor is not None
            self._factor *= self._options.factor
        self._loss_sum, self._losses = 0.0, 0
        self._set_rates()

    def state(self) -> dict[str, Any]:
        """Return, as JSON, the state beside the number of steps."""
        return {
            "rate": self.rate,
            "factor": self._factor,
            "plateau": [self._best, self._bad],
            "drop": [self._loss_sum, self._losses],
        }

    def restore(self, step: int, state: dict[str, Any]) -> None:
        """Continue after a step from a result of :meth:`state`."""
        self._step, self.rate, self._factor = step, state["rate"], state["factor"]
        self._best, self._bad = state["plateau"]
        self._loss_sum, self._losses = state["drop"]
        self._set_rates()

    def _set_rates(self) -> None:
        factor = self._share() * self._factor
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor

    def _share(self) -> float:
        """Return the share of the peak that the next step has, before any fall."""
        warmup = self._plan.warmup
        if self._step < warmup:
            return (self._step + 1) / warmup
        if self._options.schedule != "cosine":
            return 1.0
        least = self._options.min_lr_ratio
        assert least is not None
        progress = (self._step - warmup + 1) / max(1, self._plan.total - warmup)
        return least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2

    def _is_plateau(self, value: float) -> bool:
        """Count a validation, and return whether too many in a row were no better."""
        assert self._options.patience is not None
        bound = self._best * (1 + _BETTER if self._higher else 1 - _BETTER)
        if value > bound if self._higher else value < bound:
            self._best, self._bad = value, 0
        else:
            self._bad += 1
        if self._bad <= self._options.patience:
            return False
        self._bad = 0
        return True

    def _is_drop(self) -> bool:
        """Return whether the mean training loss is small for the first time."""
        assert self._options.below is not None
        return self._factor == 1 and self._loss_sum < self._options.below * self._losses
