"""The section ``train`` of a recipe and the sections in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ssmzoo.recipe.sections import (
    HIGHER_IS_BETTER,
    Beta,
    Count,
    Names,
    Section,
    exactly_one,
    whole_number,
)

# By schedule: its own fields, which other schedules refuse, with their defaults; where that is None
# the recipe must give the field. All have `warmup`, whose default is 0 in the last two.
_OF_SCHEDULES: dict[str, dict[str, float | None]] = {
    "cosine": {"min_lr_ratio": 0.1},
    "constant": {},
    "plateau": {"patience": None, "factor": 0.2, "warmup": 0.0},
    "drop": {"below": None, "factor": 0.5, "warmup": 0.0},
}


class GroupSection(Section):
    """Settings of one of the model's parameter groups that differ from the others'.

    Attributes:
        lr: Its peak learning rate; ``train.lr`` if absent.
        weight_decay: Of all its parameters; if absent, ``train.weight_decay`` for those that decay
            and 0 for the others.
    """

    lr: Annotated[float, Field(ge=0)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None


class SegmentsSection(Section):
    """How long rows are read in segments with a carried state.

    Attributes:
        count: Segments a row; they divide ``train.seq_len``.
        gradients: ``cut`` at every segment, or ``keep`` through all of a row.
        carry: Rows go on, without gradients, where those of the step before ended: every step reads
            the next tokens of the same documents.
    """

    count: Count = 1
    gradients: Literal["cut", "keep"] = "cut"
    carry: bool = False

    @model_validator(mode="after")
    def _does_something(self) -> SegmentsSection:
        if self.count == 1 and not self.carry:
            raise ValueError("train.segments needs a count of at least 2, or carry: true")
        return self


class StopSection(Section):
    """When a run ends early: after the first validation whose metric is at least this good.

    Attributes:
        metric: One of a validation's metrics. ``accuracy`` is the share of a task's labels that are
            right, ``exact_match`` the share of its examples whose labels are all right.
        value: At least this accuracy, at most this loss.
    """

    metric: Literal["loss", "accuracy", "exact_match", "rmse", "mse", "mae"]
    value: float

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Return whether a validation's metrics are this good."""
        value = metrics[self.metric]
        higher = self.metric in HIGHER_IS_BETTER
        return value >= self.value if higher else value <= self.value


class TrainSection(Section):
    """How to train. Exactly one of ``steps``, ``tokens`` and ``epochs`` is given.

    A resume may change the fields that ``_MAY_CHANGE`` in ``training/folder.py`` names, no others.

    Attributes:
        steps: Optimizer steps.
        tokens: Tokens to train on; rounded up to whole steps.
        epochs: Times through the examples of a supervised task; the last step of each may have
            fewer than ``batch_size``.
        stop_at: End before, as soon as a validation is good enough.
        batch_size: Rows an optimizer step, over all processes: the same recipe trains the same
            way on one device and on many.
        seq_len: Tokens a row. Absent with a supervised task, which knows its lengths.
        segments: Read a row in segments, for rows longer than memory.
        sequence_parallel: How many processes read a row together, each a piece of it; they divide
            ``seq_len`` and the number of processes.
        accumulate: Into how many micro-batches each process cuts its share of a step.
        lr: Peak learning rate.
        schedule: After the warm-up the rates fall along a ``cosine``, stay ``constant``, fall at
            every ``plateau`` of the validation's metric, or ``drop`` once, when the training loss
            is small.
        min_lr_ratio: The cosine ends at this share of ``lr``; 0.1 if absent.
        patience: A plateau is more than this many validations in a row that improve the metric by
            less than a ten-thousandth, as in torch's ``ReduceLROnPlateau``.
        factor: A plateau multiplies the rates of all groups by this, 0.2 if absent; so does a drop,
            0.5 if absent.
        below: The rates drop at the first validation where the mean training loss since the
            validation before is below this.
        warmup: Linear warm-up: a share of the steps below 1, a number of steps from 1 on. If
            absent, 0.05, and 0 for ``plateau`` and ``drop``.
        weight_decay: For the parameters that decay at all. AdamW with 0 is Adam.
        only: Patterns such as ``*.mixer.*``, for the names of the parameters to train; the others
            stay.
        groups: An own ``lr`` and ``weight_decay`` of a parameter group of the model, such as
            ``ssm``, or of a parameter of its mixers, such as ``B``.
        betas: AdamW's.
        clip: Largest gradient norm; 0 does not clip.
        dtype: ``bfloat16`` computes in it under autocast and keeps float32 weights; ``auto`` does
            so where the accelerator has it.
        seed: Of the initial weights and of the data's order.
        gradient_checkpointing: Compute activations again in the backward pass: ``selective`` all
            but matrix products and attention, ``true`` whole blocks.
    """

    steps: Count | None = None
    tokens: Count | None = None
    epochs: Count | None = None
    stop_at: StopSection | None = None
    batch_size: Count
    seq_len: Annotated[int, BeforeValidator(whole_number), Field(ge=2)] | None = None
    segments: SegmentsSection | None = None
    sequence_parallel: Count = 1
    accumulate: Count = 1
    lr: Annotated[float, Field(gt=0)]
    schedule: Literal["cosine", "plateau", "drop", "constant"] = "cosine"
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    patience: Count | None = None
    factor: Annotated[float, Field(gt=0, lt=1)] | None = None
    below: Annotated[float, Field(gt=0)] | None = None
    warmup: Annotated[float, Field(ge=0)] = 0.05
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    only: Names | None = None
    groups: dict[str, GroupSection] = {}
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    clip: Annotated[float, Field(ge=0)] = 1.0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    gradient_checkpointing: Literal[False, True, "selective"] = False

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_schedule(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        schedule = fields.get("schedule", "cosine")
        own = _OF_SCHEDULES.get(schedule, {}) if isinstance(schedule, str) else {}
        return {**{name: value for name, value in own.items() if value is not None}, **fields}

    @model_validator(mode="after")
    def _consistent(self) -> TrainSection:
        exactly_one(self, "train", ("steps", "tokens", "epochs"))
        for name in dict.fromkeys(name for own in _OF_SCHEDULES.values() for name in own):
            if name == "warmup":
                continue
            schedules = [schedule for schedule, own in _OF_SCHEDULES.items() if name in own]
            given = getattr(self, name) is not None
            if given and self.schedule not in schedules:
                raise ValueError(
                    f"train.{name} needs train.schedule {' or '.join(map(repr, schedules))}, "
                    f"got {self.schedule!r}"
                )
            if not given and self.schedule in schedules:
                raise ValueError(f"train.schedule {self.schedule!r} needs train.{name}")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"train.batch_size must be a multiple of train.accumulate = {self.accumulate}, "
                f"got {self.batch_size}"
            )
        if self.warmup >= 1 and not self.warmup.is_integer():
            raise ValueError(
                f"train.warmup must be below 1 or a whole number of steps, got {self.warmup}"
            )
        if self.total_steps is not None:
            self.warmup_of(self.total_steps)
        return self

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run; None where the data decides, with ``epochs``."""
        if self.tokens is not None and self.seq_len is not None:
            return -(-self.tokens // (self.batch_size * self.seq_len))
        return self.steps

    def micro_batch(self, processes: int) -> int:
        """Return how many rows or examples each of some processes computes at a time.

        Raises:
            ValueError: ``batch_size`` cannot be split so.
        """
        parts = processes * self.accumulate
        if self.batch_size % parts:
            raise ValueError(
                f"train.batch_size must be a multiple of {processes} processes x train.accumulate "
                f"= {parts}, got {self.batch_size}"
            )
        return self.batch_size // parts

    def warmup_of(self, total: int) -> int:
        """Return how many of so many steps are warm-up.

        Raises:
            ValueError: More than there are.
        """
        steps = round(self.warmup * total) if self.warmup < 1 else int(self.warmup)
        if steps > total:
            raise ValueError(f"train.warmup must be at most the run's {total} steps, got {steps}")
        return steps
