"""The optimizer, the plan of a run in steps, and the learning rate over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ssmzoo.recipe import Recipe, TrainSection

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau


def param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    groups: Mapping[str, Mapping[str, float]] | None = None,
) -> list[dict[str, Any]]:
    """Return optimizer groups: the model's own if it declares them, else by the usual rule.

    The usual rule: tensors of two dimensions or more decay, vectors and scalars (norms, biases)
    do not, nor does what is marked ``_no_weight_decay``; frozen parameters are left out.

    Raises:
        LookupError: A group in ``groups``, what differs by the name of a group, that the model does
            not declare.
    """
    declared: Callable[..., list[dict[str, Any]]] | None = getattr(model, "param_groups", None)
    if declared is not None:
        own = {"groups": groups} if groups else {}
        return declared(lr=lr, weight_decay=weight_decay, **own)
    if groups:
        raise LookupError(
            f"{type(model).__name__} has no parameter group {next(iter(groups))!r}; it has none"
        )
    decay, others = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            spared = parameter.ndim < 2 or getattr(parameter, "_no_weight_decay", False)
            (others if spared else decay).append(parameter)
    found = [
        {"params": decay, "lr": lr, "weight_decay": weight_decay},
        {"params": others, "lr": lr, "weight_decay": 0.0},
    ]
    return [group for group in found if group["params"]]


def make_optimizer(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    groups: Mapping[str, Mapping[str, float]] | None = None,
) -> torch.optim.AdamW:
    """Return AdamW on :func:`param_groups`, e.g. for ``Trainer(optimizers=(optimizer, None))``.

    Without weight decay it is Adam.
    """
    import torch

    found = param_groups(model, lr, weight_decay, groups)
    kinds = {parameter.device.type for group in found for parameter in group["params"]}
    return torch.optim.AdamW(found, lr=lr, betas=betas, fused=kinds <= {"cpu", "cuda"})


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


class Schedule:
    """The rates of all groups: a warm-up, then a cosine, what they are, or falls of their own.

    Args:
        optimizer: Its groups' rates are the peaks.
        options: The recipe's.
        plan: The run's steps.
        higher: Whether more of the metric that :meth:`judge` is told is better.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, options: TrainSection, plan: Plan, *, higher: bool
    ) -> None:
        from torch.optim import lr_scheduler
        from transformers import get_cosine_with_min_lr_schedule_with_warmup_lr_rate

        self._optimizer = optimizer  # which replaces its groups when it loads
        self._step, self._warmup = 0, plan.warmup
        cosine = options.schedule == "cosine"
        self._by_step: LambdaLR = get_cosine_with_min_lr_schedule_with_warmup_lr_rate(
            optimizer,
            num_warmup_steps=plan.warmup,
            num_training_steps=plan.total,
            # a cosine that ends where it begins is constant
            min_lr_rate=options.min_lr_ratio if cosine else 1.0,
        )
        self._plateau: ReduceLROnPlateau | None = None
        self._drop: _Drop | None = None
        if options.below is not None and options.factor is not None:
            self._drop = _Drop(optimizer, options.below, options.factor)
        if options.patience is not None and options.factor is not None:
            self._plateau = lr_scheduler.ReduceLROnPlateau(
                optimizer,
                mode="max" if higher else "min",
                factor=options.factor,
                patience=options.patience,
                eps=0,
            )

    def step(self) -> None:
        """Set the rates of the next step, after each step of the optimizer."""
        self._step += 1
        if not self._judges or self._step <= self._warmup:
            self._by_step.step()

    def saw(self, losses: Iterable[float]) -> None:
        """Take notice of the training losses of some steps."""
        if self._drop is not None:
            for loss in losses:
                self._drop.total += loss
                self._drop.count += 1

    def judge(self, value: float) -> None:
        """Lower the rates, once warm, if a validation's metric or the training loss says so."""
        if self._step < self._warmup:
            if self._drop is not None:
                self._drop.forget()
            return
        if self._plateau is not None:
            self._plateau.step(value)
        if self._drop is not None:
            self._drop.step()

    def state(self) -> dict[str, Any]:
        """Return, as JSON, what the steps taken do not tell."""
        state: dict[str, Any] = {}
        if self._plateau is not None:
            best, bad = self._plateau.best, self._plateau.num_bad_epochs
            state = {"best": float(best), "bad": bad}
        if self._drop is not None:
            drop = self._drop
            state = {"total": drop.total, "count": drop.count, "dropped": drop.dropped}
        if state:
            state["rates"] = [group["lr"] for group in self._optimizer.param_groups]
        return state

    def restore(self, step: int, state: dict[str, Any]) -> None:
        """Continue after a step from what :meth:`state` returned."""
        self._step = step
        by_step = self._by_step
        by_step.last_epoch = min(step, self._warmup) if self._judges else step
        factors = [rate(by_step.last_epoch) for rate in by_step.lr_lambdas]
        rates = [base * factor for base, factor in zip(by_step.base_lrs, factors, strict=True)]
        by_step._last_lr = rates
        if self._plateau is not None:
            self._plateau.best, self._plateau.num_bad_epochs = state["best"], state["bad"]
        if self._drop is not None:
            self._drop.total, self._drop.count = state["total"], state["count"]
            self._drop.dropped = state["dropped"]
        if self._judges:
            rates = state["rates"]
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    @property
    def _judges(self) -> bool:
        """Whether the rates, once warm, follow :meth:`judge` and not the steps."""
        return self._plateau is not None or self._drop is not None


class _Drop:
    """Multiply the rates of all groups once, when the mean training loss is small.

    Args:
        optimizer: Whose rates.
        below: The mean since the validation before must be smaller.
        factor: What the rates are multiplied by.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, below: float, factor: float) -> None:
        self._optimizer, self._below, self._factor = optimizer, below, factor
        self.total, self.count = 0.0, 0  # of the losses since the last step
        self.dropped = False

    def step(self) -> None:
        """Look at the mean, and begin anew."""
        if not self.dropped and self.total < self._below * self.count:
            self.dropped = True
            for group in self._optimizer.param_groups:
                group["lr"] *= self._factor
        self.forget()

    def forget(self) -> None:
        """Begin the mean anew."""
        self.total, self.count = 0.0, 0
