"""The description of a training run: a closed, typed YAML file, checked before any work is done.

Relative paths in a recipe are relative to the working directory; the copy that a run keeps holds
absolute ones. Numbers such as ``3e-4`` are numbers here, although YAML 1.1 reads them as text.
"""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from ssmzoo.environment.hub_metadata import checked
from ssmzoo.environment.messages import missing, shortened
from ssmzoo.family import suggestion
from ssmzoo.files import (
    STDLIB,
    dump_yaml,
    is_utf8,
    kind_of_records,
    package_data,
    parse_yaml,
    refuse_blank,
)

try:
    from pydantic import (
        BaseModel,
        BeforeValidator,
        ConfigDict,
        Field,
        ValidationError,
        ValidationInfo,
        field_validator,
        model_validator,
    )
except ImportError as error:
    raise missing("recipes need pydantic", "train", error) from error


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _several(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _count_or(word: str, name: str) -> BeforeValidator:
    def check(value: object) -> object:
        value = _whole(value)
        if value == word or (type(value) is int and value >= 1):
            return value
        raise ValueError(f"{name} must be a whole number from 1 on or {word!r}, got {value!r}")

    return BeforeValidator(check)


ROW_TASKS = ("mqar", "induction_heads")  # these can be drawn without end, as rows of one length

# of a validation's metrics; of loss, rmse, mse and mae less is better
HIGHER_IS_BETTER = frozenset({"accuracy", "exact_match"})

Checked = TypeVar("Checked", bound="Section")

Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Names = Annotated[list[str], BeforeValidator(_several)]
Paths = Annotated[list[str], BeforeValidator(_several), Field(min_length=1)]


def _not_blank(value: object, name: str) -> object:
    several = isinstance(value, list)
    rule = "must name files or folders" if several else "must be a name or a folder"
    for path in value if several else [value]:
        if isinstance(path, str):
            refuse_blank(path, f"{name} {rule}")
    return value


class Section(BaseModel):
    """A closed part of a YAML file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """What is trained: a family of the zoo, any transformers model type, or existing weights.

    Attributes:
        family: An installed family, e.g. ``longhorn``.
        preset: One of the family's presets; ``config`` wins over it.
        config_of: A transformers ``model_type``, e.g. ``mamba2``, for a baseline on the same data.
        init_from: A folder or Hub id whose weights are the start.
        config: Fields of the model's configuration. ``vocab_size`` is the tokenizer's if absent;
            a supervised task also says ``num_labels``, ``input_channels``, ``problem_type`` and
            ``horizon``.
    """

    family: str | None = None
    preset: str | None = None
    config_of: str | None = None
    init_from: str | None = None
    config: dict[str, Any] = {}

    @field_validator("init_from")
    @classmethod
    def _named(cls, value: object) -> object:
        return _not_blank(value, "model.init_from")

    @model_validator(mode="after")
    def _one_origin(self) -> ModelSection:
        _exactly_one(self, "model", ("family", "config_of", "init_from"))
        if self.preset is not None and self.family is None:
            raise ValueError("model.preset needs model.family")
        if self.config and self.init_from is not None:
            raise ValueError("model.config must be empty with model.init_from")
        return self


class DataSection(Section):
    """What it is trained on.

    Attributes:
        text: Files, folders or globs; a file is a document. Links are followed; what is hidden, and
            in folders what is not UTF-8, is left out. ``python-stdlib`` stands for the sources and
            documentation of the running Python's standard library.
        jsonl: Files or globs (``.gz`` too); a line is a document, its text under ``text_field``.
        parquet: Files or globs; a row is a document, its text in the column ``text_field``.
        dataset: A data set on the Hub, or a local folder that ``datasets`` can load.
        task: A task of :func:`ssmzoo.tasks.load_task`. It is supervised and has its own validation
            and test split, unless ``train.seq_len`` asks ``mqar`` or ``induction_heads`` for rows
            without end.
        task_args: The task's arguments.
        config: The Hub data set's configuration.
        split: Its split to train on.
        revision: Its branch, tag or commit; the commit found at the start is kept for a resume.
        streaming: Read while training and keep nothing on disk. For ``jsonl``, ``parquet`` and
            ``dataset``.
        shuffle_buffer: Documents shuffled together when streaming, over all processes. Other
            sources are shuffled whole.
        workers: Processes that tokenise beside each process that trains, ahead of it when
            streaming. With 0 it does so itself.
        text_field: Where the text is in a record.
        tokenizer: ``bytes``, a name or a folder. If absent, ``model.init_from``'s, else bytes.
            A task needs none: its tokens are numbers.
        validation: What is held out. A number below 1: that share of the documents, at least one,
            and of a single document, or a few long ones, the end; a whole number: so many documents
            (the first ones when streaming); otherwise paths, or a split's name for ``dataset``.
    """

    text: Paths | None = None
    jsonl: Paths | None = None
    parquet: Paths | None = None
    dataset: str | None = None
    task: str | None = None
    task_args: dict[str, Any] = {}
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = False
    shuffle_buffer: Count = 1000
    workers: Annotated[int, BeforeValidator(_whole), Field(ge=0)] = 0
    text_field: str = "text"
    tokenizer: str | None = None
    validation: Any = None

    @property
    def source(self) -> str:
        """Which of the five kinds of source is used."""
        kinds = ("text", "jsonl", "parquet", "dataset", "task")
        return next(kind for kind in kinds if getattr(self, kind) is not None)

    @field_validator("text", "jsonl", "parquet", "dataset", "tokenizer", "validation")
    @classmethod
    def _named(cls, value: object, info: ValidationInfo) -> object:
        return _not_blank(value, f"data.{info.field_name}")

    @field_validator("validation")
    @classmethod
    def _held_out(cls, value: object) -> object:
        if isinstance(value, float) and value >= 1 and value.is_integer():
            value = int(value)
        if isinstance(value, str):
            value = [value]
        fraction = isinstance(value, float) and 0 < value < 1
        number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        names = isinstance(value, list) and value and all(isinstance(v, str) for v in value)
        if value is None or fraction or number or names:
            return value
        raise ValueError(
            "data.validation must be a share between 0 and 1, a number of documents, or paths, "
            f"got {value!r}"
        )

    @model_validator(mode="after")
    def _one_source(self) -> DataSection:
        _exactly_one(self, "data", ("text", "jsonl", "parquet", "dataset", "task"))
        held_out = self.validation if isinstance(self.validation, list) else []
        for path in [*self.text, *held_out] if self.text is not None else ():
            if (kind := kind_of_records(path)) is not None:
                way_out = (
                    f"give {path!r} as data.{kind}"
                    if path in self.text
                    else f"data.validation must be text, too, got {path!r}"
                )
                raise ValueError(f"data.text reads plain text; {way_out}")
        if self.streaming and self.source in ("text", "task"):
            raise ValueError(f"data.streaming must be false with data.{self.source}")
        if self.streaming and isinstance(self.validation, float):
            raise ValueError(
                "data.validation must be a number of documents, a split or paths when streaming, "
                f"got {self.validation!r}"
            )
        for name in ("config", "revision"):
            if getattr(self, name) is not None and self.source != "dataset":
                raise ValueError(f"data.{name} needs data.dataset")
        fields = type(self).model_fields
        for name, sources in (
            ("split", ("dataset",)),
            ("text_field", ("jsonl", "parquet", "dataset")),
        ):
            if getattr(self, name) != fields[name].default and self.source not in sources:
                places = " or ".join(f"data.{source}" for source in sources)
                raise ValueError(f"data.{name} needs {places}, got data.{self.source}")
        if self.shuffle_buffer != fields["shuffle_buffer"].default and not self.streaming:
            raise ValueError("data.shuffle_buffer needs data.streaming: true")
        if self.workers and self.task is not None:
            raise ValueError(f"data.workers must be 0 with data.task, got {self.workers}")
        if self.task_args and self.task is None:
            raise ValueError("data.task_args needs data.task")
        if self.tokenizer is not None and self.task is not None:
            raise ValueError("data.tokenizer must be absent with data.task: its tokens are numbers")
        if self.task is not None and not isinstance(self.validation, int | None):
            raise ValueError(
                f"data.validation must be a number of examples for a task, got {self.validation!r}"
            )
        return self


class GroupSection(Section):
    """What differs for one of the model's parameter groups.

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
        metric: What a validation reports. Of the labels of a task ``accuracy`` is the share that
            is right, ``exact_match`` the share of examples of which all are.
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
    """How it is trained. Exactly one of ``steps``, ``tokens`` and ``epochs`` is given.

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
        patience: A plateau is more than so many validations in a row without a better metric (by a
            ten-thousandth), as in torch's ``ReduceLROnPlateau``.
        factor: A plateau multiplies the rates of all groups by this, 0.2 if absent; so does a drop,
            0.5 if absent.
        below: They drop at the first validation since whose predecessor the mean training loss is
            below this.
        warmup: Linear warm-up: a share of the steps below 1, a number of steps from 1 on. If
            absent, 0.05, and 0 for ``plateau`` and ``drop``.
        weight_decay: For the parameters that decay at all. AdamW with 0 is Adam.
        groups: By parameter group of the model, such as ``ssm``, or by a parameter of its mixers,
            such as ``B``, its own ``lr``, ``weight_decay``.
        betas: AdamW's.
        clip: Largest gradient norm; 0 does not clip.
        dtype: ``bfloat16`` computes in it under autocast and keeps float32 weights; ``auto`` does
            so where the accelerator has it.
        seed: Of the initial weights and of the data's order.
        gradient_checkpointing: Compute activations again in the backward pass.
    """

    steps: Count | None = None
    tokens: Count | None = None
    epochs: Count | None = None
    stop_at: StopSection | None = None
    batch_size: Count
    seq_len: Annotated[int, BeforeValidator(_whole), Field(ge=2)] | None = None
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
    groups: dict[str, GroupSection] = {}
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    clip: Annotated[float, Field(ge=0)] = 1.0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    gradient_checkpointing: bool = False

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_schedule(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        own = {
            "cosine": {"min_lr_ratio": 0.1},
            "plateau": {"factor": 0.2, "warmup": 0.0},
            "drop": {"factor": 0.5, "warmup": 0.0},
        }
        schedule = fields.get("schedule", "cosine")
        return {**(own.get(schedule, {}) if isinstance(schedule, str) else {}), **fields}

    @model_validator(mode="after")
    def _consistent(self) -> TrainSection:
        _exactly_one(self, "train", ("steps", "tokens", "epochs"))
        for name, schedules in (
            ("min_lr_ratio", ("cosine",)),
            ("patience", ("plateau",)),
            ("factor", ("plateau", "drop")),
            ("below", ("drop",)),
        ):
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


class EvalSection(Section):
    """Validation while training: ``batches`` batches, or ``"all"``, and when.

    Attributes:
        every: So many steps, or ``"epoch"``; and always after the last step.
        batches: Of ``train.batch_size`` rows.
        lengths: The finished model is also measured at these: on the test examples of a task with
            an argument ``length`` or ``seq_len``, or on as many held-out tokens in rows so long.
            ``run.json`` has the metrics.
    """

    every: Annotated[int | Literal["epoch"], _count_or("epoch", "eval.every")] = 200
    batches: Annotated[int | Literal["all"], _count_or("all", "eval.batches")] = 20
    lengths: list[Count] = []


class CheckpointSection(Section):
    """What is kept of a run's states: a checkpoint after the last step, and before it where due.

    Attributes:
        every: A checkpoint every so many steps, or every ``"epoch"``. Absent, it is 500 without
            ``minutes``, and with them the clock alone decides.
        minutes: A checkpoint after the first step that ends so long after the last checkpoint, by
            the clock of the first process.
        keep: How many of the newest stay.
        best: Keep that of the best validation beside them: by the metric of ``train.stop_at``, else
            by the task's first, of equal ones by the loss. ``model/`` is made of it, and the test
            split judges it.
    """

    every: Annotated[int | Literal["epoch"], _count_or("epoch", "checkpoint.every")] | None = None
    minutes: Annotated[float, Field(gt=0)] | None = None
    keep: Count = 2
    best: bool = False

    @model_validator(mode="before")
    @classmethod
    def _every_by_default(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("minutes") is None:
            return {"every": 500, **fields}
        return fields

    @model_validator(mode="after")
    def _due_at_all(self) -> CheckpointSection:
        if self.every is None and self.minutes is None:
            raise ValueError("checkpoint must have every, minutes or both, got none")
        return self


class LogSection(Section):
    """A line of ``metrics.jsonl`` every ``every`` steps, and their picture ``loss.png``.

    Away from a terminal ``ssmzoo train`` prints each line, in words, on standard error.

    Attributes:
        every: Steps.
        curves: Whether the picture is drawn.
    """

    every: Count = 10
    curves: bool = True


class AdapterSection(Section):
    """What is trained in place of the weights of ``model.init_from``, which stay as they are.

    Attributes:
        kind: ``state``, the states that the model starts every sequence from. A classifier's head
            is trained beside it. The run's folder ``adapter/`` holds it.
    """

    kind: Literal["state"]


class CardSection(Section):
    """What the model's card tells the Hub, which lists models by it.

    Attributes:
        license: The weights' licence, by its id on the Hub, e.g. ``apache-2.0``; ``other`` for one
            that the Hub has no id for.
        license_name: With ``other``, the licence's name.
        license_link: With ``other``, where its text is: an address, or ``LICENSE`` (``.md``) for
            that file in the model's folder, which is then published too.
        language: Codes of the languages that the model reads, e.g. ``en``.
        datasets: Data sets on the Hub that it was trained on; ``data.dataset`` if absent.
        base_model: The models on the Hub that it was trained from; ``model.init_from`` if absent.
        pipeline_tag: The task on the Hub; that of the model's head if absent.
    """

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    language: Names | None = None
    datasets: Names | None = None
    base_model: Names | None = None
    pipeline_tag: str | None = None

    @model_validator(mode="after")
    def _as_the_hub_takes_it(self) -> CardSection:
        checked(self.model_dump())
        return self


class Recipe(Section):
    """A whole run."""

    model: ModelSection
    data: DataSection
    train: TrainSection
    adapter: AdapterSection | None = None
    card: CardSection | None = None
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()

    @property
    def supervised(self) -> bool:
        """Whether the data is a task's labelled examples and not rows of tokens."""
        return self.data.task is not None and self.train.seq_len is None

    @model_validator(mode="after")
    def _sections_fit(self) -> Recipe:
        task = self.data.task
        if task is not None:
            _require_task(task)
        if self.train.segments is not None:
            self._segments_fit(self.train.segments)
        if self.train.sequence_parallel > 1:
            self._pieces_fit(self.train.sequence_parallel)
        if self.adapter is not None:
            self._adapter_fits()
        if self.eval.lengths:
            self._lengths_fit()
        if self.supervised:
            if self.train.tokens is not None:
                raise ValueError(
                    f"train.tokens must be absent with data.task {task!r}, whose examples have "
                    "lengths of their own; give train.epochs or train.steps"
                )
            if self.data.validation is not None:
                raise ValueError(
                    f"data.validation must be absent with data.task {task!r}, which has a "
                    "validation split of its own"
                )
        else:
            self._rows_fit(task)
        return self

    def _cuts_rows(self, field: str, number: str, pieces: int) -> None:
        length = self.train.seq_len
        if length is None:
            raise ValueError(f"{field} needs rows of train.seq_len tokens")
        if length % pieces:
            raise ValueError(f"{number} must divide train.seq_len = {length}, got {pieces}")

    def _segments_fit(self, segments: SegmentsSection) -> None:
        self._cuts_rows("train.segments", "train.segments.count", segments.count)
        if segments.carry and (self.data.streaming or self.data.task is not None):
            raise ValueError(
                "train.segments.carry needs documents that are all at hand: no data.streaming, no "
                "data.task"
            )

    def _pieces_fit(self, pieces: int) -> None:
        self._cuts_rows("train.sequence_parallel", "train.sequence_parallel", pieces)
        if self.train.segments is not None:
            raise ValueError(
                "train.sequence_parallel and train.segments both cut a row; give one of them"
            )

    def _adapter_fits(self) -> None:
        if self.model.init_from is None:
            raise ValueError("adapter needs model.init_from, whose weights stay as they are")
        if self.train.sequence_parallel > 1 or self.train.segments is not None:
            raise ValueError(
                "adapter must be absent with train.sequence_parallel and train.segments, whose "
                "pieces of a row do not start anew"
            )

    def _lengths_fit(self) -> None:
        from ssmzoo.tasks import length_argument

        if self.supervised and length_argument(str(self.data.task)) is None:
            raise ValueError(
                f"eval.lengths must be absent with data.task {self.data.task!r}, which has no "
                "argument length or seq_len"
            )
        if not self.supervised and self.data.validation is None:
            raise ValueError("eval.lengths needs data.validation to judge by")
        if self.train.segments is not None or self.train.sequence_parallel > 1:
            raise ValueError(
                "eval.lengths must be absent with train.segments and train.sequence_parallel"
            )

    def _rows_fit(self, task: str | None) -> None:
        if task is not None and task not in ROW_TASKS:
            raise ValueError(
                f"train.seq_len must be absent with data.task {task!r}, which knows its lengths, "
                f"got {self.train.seq_len}"
            )
        if self.train.seq_len is None:
            raise ValueError("train.seq_len is missing")
        by_epoch = {
            "train.epochs": self.train.epochs is not None,
            "eval.every 'epoch'": self.eval.every == "epoch",
            "checkpoint.every 'epoch'": self.checkpoint.every == "epoch",
        }
        for what, asked in by_epoch.items():
            if asked:
                raise ValueError(
                    f"{what} needs a data.task without train.seq_len, because only its epochs are "
                    "counted in examples; give steps"
                )
        judged = {
            "train.schedule 'plateau'": self.train.schedule == "plateau",
            "train.schedule 'drop'": self.train.schedule == "drop",
            "train.stop_at": self.train.stop_at is not None,
            "checkpoint.best": self.checkpoint.best,
        }
        for what, asked in judged.items():
            if asked and self.data.validation is None:
                raise ValueError(f"{what} needs data.validation to judge by")

    def to_yaml(self) -> str:
        """Return the recipe as a YAML text that :func:`load_recipe` reads back to an equal one."""
        return dump_yaml(self.model_dump(exclude_none=True))

    def differences(self, now: Recipe, sections: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
        """Yield the fields of sections that another recipe has otherwise: name, ours, theirs."""
        for section in sections:
            before, after = (
                {} if s is None else s.model_dump()
                for s in (getattr(self, section), getattr(now, section))
            )
            for field in {**before, **after}:
                if (was := before.get(field)) != (value := after.get(field)):
                    yield f"{section}.{field}", was, value

    def with_absolute_paths(self) -> Recipe:
        """Return the same recipe with every local path made absolute."""
        data = self.data
        changed: dict[str, Any] = {
            kind: [_absolute(path) for path in getattr(data, kind)]
            for kind in ("text", "jsonl", "parquet")
            if getattr(data, kind) is not None
        }
        if isinstance(data.validation, list) and data.source != "dataset":
            changed["validation"] = [_absolute(path) for path in data.validation]
        for name in ("dataset", "tokenizer"):
            place = getattr(data, name)
            if place is not None and _expanded(place).is_dir():
                changed[name] = _absolute(place)
        arguments = dict(data.task_args)
        place, cache = arguments.get("data"), arguments.get("cache")
        if isinstance(place, str) and _expanded(place).exists():
            arguments["data"] = _absolute(place)
        if isinstance(cache, str):  # a folder, made where there is none
            arguments["cache"] = _absolute(cache)
        changed["task_args"] = arguments
        model = self.model
        if model.init_from is not None and _expanded(model.init_from).is_dir():
            model = model.model_copy(update={"init_from": _absolute(model.init_from)})
        return self.model_copy(update={"data": data.model_copy(update=changed), "model": model})


class Zoo(Section):
    """Recipes in one file, such as ``eval/zoo.yaml``: many models, trained alike.

    Attributes:
        shared: Sections that all recipes have, ``data`` and ``train`` say.
        models: By name, a model's own sections; a field in them wins over the shared one.
    """

    shared: dict[str, dict[str, Any]] = {}
    models: Annotated[dict[str, dict[str, dict[str, Any]]], Field(min_length=1)]


def load_zoo(path: Path, overrides: Sequence[str] = ()) -> dict[str, Recipe]:
    """Read and check a file of recipes.

    Args:
        path: The YAML file; see :class:`Zoo`.
        overrides: ``section.field=value``, the value in YAML; they win over the file.

    Returns:
        The recipes by the names of their models.

    Raises:
        LookupError: No such file or field; the message suggests.
        ValueError: A wrong value, or a file that is not UTF-8 or not YAML.
    """
    listed, found = read_sections(Zoo, path, path.name), {}
    for name, own in listed.models.items():
        sections = {**listed.shared, **own}
        fields = {part: {**listed.shared.get(part, {}), **own.get(part, {})} for part in sections}
        for override in overrides:
            set_field(fields, override)
        found[name] = read_sections(Recipe, fields, f"{path.name}, {name}")
    return found


def load_recipe(source: str | Path | Recipe, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        source: A YAML file, the name of a shipped recipe such as ``longhorn-demo``, or a recipe.
        overrides: ``section.field=value``, the value in YAML; they win over the file.

    Raises:
        LookupError: No such recipe or field; the message suggests.
        ValueError: A wrong value, or a file that is not UTF-8 or not YAML.
    """
    if isinstance(source, Recipe):
        name, fields = "recipe", source.model_dump(exclude_none=True)
    else:
        path = _find(source)
        name, fields = path.name, fields_of(path)
        if not isinstance(fields, dict):
            raise ValueError(
                f"{name}: must hold the sections model, data, train; got {shortened(repr(fields))}"
            )
    for override in overrides:
        set_field(fields, override)
    return read_sections(Recipe, fields, name)


def read_sections(kind: type[Checked], source: Path | dict[str, Any], name: str) -> Checked:
    """Check a YAML file, or what one could hold, against a closed description.

    Args:
        kind: The description.
        source: A file or its fields.
        name: Opens the messages.

    Raises:
        LookupError: No such file or field; the message suggests.
        ValueError: A wrong value, or a file that is not UTF-8 or not YAML.
    """
    fields = fields_of(source) if isinstance(source, Path) else source
    if not isinstance(fields, dict):
        raise ValueError(f"{name}: must hold fields and values, got {shortened(repr(fields))}")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _one_line(kind, name, error) from None


def fields_of(path: Path) -> Any:
    """Return what a YAML file holds.

    Raises:
        LookupError: No such file.
        ValueError: It is not UTF-8, or not YAML.
    """
    if not path.is_file():
        raise LookupError(f"no file {str(path)!r}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: a recipe must be UTF-8 text: {error}") from None
    return parse_yaml(text, path.name)


def _find(source: str | Path) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    try:
        shipped = {p.stem: p for p in sorted(package_data("eval/recipes").glob("*.yaml"))}
    except LookupError:
        shipped = {}
    if str(source) in shipped:
        return shipped[str(source)]
    beside = [str(file) for file in path.parent.glob("*.yaml")]
    near = difflib.get_close_matches(str(source), beside, n=1)
    near = near or difflib.get_close_matches(path.stem, shipped, n=1)
    raise LookupError(
        f"no recipe {str(source)!r}, neither a file nor a shipped one"
        f"{f'; did you mean {near[0]!r}?' if near else ''}; shipped: "
        f"{', '.join(shipped) or 'none'}"
    )


def set_field(fields: dict[str, Any], override: str) -> None:
    """Change one field, ``section.field=value``, the value in YAML.

    Raises:
        ValueError: An override of another form, or into what is no section.
    """
    key, equals, value = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ValueError(f"an override must look like train.lr=3e-4, got {override!r}")
    here = fields
    for part in parts[:-1]:
        if here.get(part) is None:
            here[part] = {}
        here = here[part]
        if not isinstance(here, dict):
            raise ValueError(f"the override {override!r} goes into {part!r}, which is no section")
    # what is not UTF-8 can be no YAML, only a path
    here[parts[-1]] = parse_yaml(value, override) if is_utf8(value) else value


def _exactly_one(section: BaseModel, name: str, fields: Sequence[str]) -> None:
    given = [field for field in fields if getattr(section, field) is not None]
    if len(given) != 1:
        came = " and ".join(given) or "none"
        raise ValueError(f"{name} must have exactly one of {', '.join(fields)}, got {came}")


def _one_line(kind: type[Section], name: str, error: ValidationError) -> LookupError | ValueError:
    errors = error.errors(include_url=False)
    # An unknown field comes first: the missing one beside it is usually the same, misspelt.
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    path = [str(part) for part in first["loc"]]
    where = shortened(".".join(path))
    if first["type"] == "extra_forbidden":
        section: Any = kind
        for part in path[:-1]:
            section = _inside(section, part)
        owner = ".".join(path[:-1]) or f"the {kind.__name__.lower()}"
        known = section.model_fields
        hint = suggestion(path[-1], known) or f"; it has {', '.join(known)}"
        return LookupError(f"{name}: {owner} has no field {shortened(repr(path[-1]))}{hint}")
    if first["type"] == "missing":
        return ValueError(f"{name}: {where} is missing")
    if first["type"] == "value_error":
        return ValueError(f"{name}: {shortened(str(first.get('ctx', {}).get('error')))}")
    rule = first["msg"].replace("Input should be", "must be").replace("Input should", "must")
    came = shortened(repr(first["input"]))
    return ValueError(f"{name}: {where} {shortened(rule[0].lower() + rule[1:])}, got {came}")


def _inside(section: Any, part: str) -> Any:
    """Return the kind of a section's field, or of an entry of a mapping."""
    if get_origin(section) is dict:
        return get_args(section)[1]
    kind = section.model_fields[part].annotation
    return get_args(kind)[0] if isinstance(kind, UnionType) else kind  # a section or None


def _require_task(name: str) -> None:
    from ssmzoo.tasks import SUPERVISED_TASKS

    if name not in SUPERVISED_TASKS:
        raise LookupError(
            f"data.task: no task {name!r}{suggestion(name, SUPERVISED_TASKS)}; "
            f"there are {', '.join(SUPERVISED_TASKS)}"
        )


def _expanded(path: str) -> Path:
    return Path(os.path.expanduser(path))  # pathlib refuses ~name of a user who is not there


def _absolute(path: str) -> str:
    if path == STDLIB:
        return path
    place = _expanded(path)
    if place.is_absolute() or place.exists() or not glob.has_magic(path):
        return str(place.absolute())
    return str(Path(glob.escape(str(Path.cwd()))) / place)  # which may have brackets in its name
