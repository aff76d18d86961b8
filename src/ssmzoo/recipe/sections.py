"""The sections of a recipe but ``train``: closed and typed, checked before any work is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ssmzoo.environment.hub_metadata import checked
from ssmzoo.files import kind_of_records, refuse_blank


def whole_number(value: object) -> object:
    """Return the whole number that a float is, such as 1e3; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _several(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _count_or(word: str, name: str) -> BeforeValidator:
    def check(value: object) -> object:
        value = whole_number(value)
        if value == word or (type(value) is int and value >= 1):
            return value
        raise ValueError(f"{name} must be a whole number from 1 on or {word!r}, got {value!r}")

    return BeforeValidator(check)


# of a validation's metrics; of loss, rmse, mse and mae less is better
HIGHER_IS_BETTER = frozenset({"accuracy", "exact_match"})

Count = Annotated[int, BeforeValidator(whole_number), Field(ge=1)]
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


def exactly_one(section: BaseModel, name: str, fields: Sequence[str]) -> None:
    """Check that a section has one of some fields.

    Raises:
        ValueError: It has none, or several.
    """
    given = [field for field in fields if getattr(section, field) is not None]
    if len(given) != 1:
        came = " and ".join(given) or "none"
        raise ValueError(f"{name} must have exactly one of {', '.join(fields)}, got {came}")


class ModelSection(Section):
    """The model to train: a family of the zoo, a transformers model type, or existing weights.

    Attributes:
        family: An installed family, e.g. ``longhorn``.
        preset: One of the family's presets; ``config`` wins over it.
        config_of: A transformers ``model_type``, e.g. ``mamba2``, for a baseline on the same data.
        init_from: A folder or Hub id whose weights are the start.
        config: Fields of the model's configuration. ``vocab_size`` is the tokenizer's if absent;
            a supervised task also says ``num_labels``, ``input_channels``, ``problem_type`` and
            ``horizon``.
        stock: Leave transformers' recurrent models as they are, without our kernels. The saved
            model is the same either way, and a resume may choose anew.
    """

    family: str | None = None
    preset: str | None = None
    config_of: str | None = None
    init_from: str | None = None
    config: dict[str, Any] = {}
    stock: bool | None = None  # not written where nobody asked

    @field_validator("init_from")
    @classmethod
    def _named(cls, value: object) -> object:
        return _not_blank(value, "model.init_from")

    @model_validator(mode="after")
    def _one_origin(self) -> ModelSection:
        exactly_one(self, "model", ("family", "config_of", "init_from"))
        if self.preset is not None and self.family is None:
            raise ValueError("model.preset needs model.family")
        if self.config and self.init_from is not None:
            raise ValueError("model.config must be empty with model.init_from")
        return self


class DataSection(Section):
    """The data to train and validate on.

    Attributes:
        text: Files, folders or globs; a file is a document. Links are followed; hidden files, and
            in folders files that are not UTF-8, are left out. ``python-stdlib`` stands for the
            sources and documentation of the running Python's standard library.
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
        validation: Held-out data. A number below 1: that share of the documents, at least one,
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
    workers: Annotated[int, BeforeValidator(whole_number), Field(ge=0)] = 0
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
        exactly_one(self, "data", ("text", "jsonl", "parquet", "dataset", "task"))
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
    """Which checkpoints are written and kept: one after the last step, earlier ones where due.

    Attributes:
        every: A checkpoint every so many steps, or every ``"epoch"``. Default: 500; with
            ``minutes`` given, none.
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
        trackers: Experiment trackers that get the lines, the recipe, the picture and, in the end, a
            text that a language model writes, by the names that Accelerate has for them:
            ``tensorboard``, ``wandb``, ``trackio`` and others. Their packages are installed apart,
            and their own variables say where they send it.
        project: Their project, ``ssmzoo`` if absent.
    """

    every: Count = 10
    curves: bool = True
    trackers: Names | None = None
    project: Annotated[str, Field(pattern=r"^\w[\w .-]*$")] | None = None


class AdapterSection(Section):
    """The parameters to train in place of the weights of ``model.init_from``, which stay.

    Attributes:
        kind: ``state``, the states that the model starts every sequence from. A classifier's head
            is trained beside it. The run's folder ``adapter/`` holds it.
    """

    kind: Literal["state"]


class AlignSection(Section):
    """Train the mixers of a hybrid that its teacher does not have to give what the teacher gives.

    All other weights of ``model.init_from``, which ``ssmzoo prime`` writes, stay: they are the
    teacher's, so that nothing but its attention is held beside them.

    Attributes:
        teacher: The model whose attention was replaced, a folder or a Hub id.
        match: ``mixers``: each mixer reads what the teacher's attention reads, and learns its
            outputs, all layers in one pass. ``hidden`` and ``logits``: the whole model learns the
            teacher's last hidden states, or its logits.
        temperature: Of ``logits``; both models' are divided by it.
    """

    teacher: str
    match: Literal["mixers", "hidden", "logits"] = "mixers"
    temperature: Annotated[float, Field(gt=0)] = 1.0

    @field_validator("teacher")
    @classmethod
    def _named(cls, value: object) -> object:
        return _not_blank(value, "align.teacher")

    @model_validator(mode="after")
    def _temperature_counts(self) -> AlignSection:
        if self.temperature != 1 and self.match != "logits":
            raise ValueError(f"align.temperature needs align.match 'logits', got {self.match!r}")
        return self


class CardSection(Section):
    """The metadata of the model's card, by which the Hub lists models.

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
