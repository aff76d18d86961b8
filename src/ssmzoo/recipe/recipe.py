"""A whole recipe: its sections, and whether they fit together."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import model_validator

from ssmzoo.environment.messages import suggestion
from ssmzoo.files import STDLIB, dump_yaml
from ssmzoo.recipe.sections import (
    AdapterSection,
    AlignSection,
    CardSection,
    CheckpointSection,
    DataSection,
    EvalSection,
    LogSection,
    ModelSection,
    Section,
)
from ssmzoo.recipe.train import SegmentsSection, TrainSection

# functions of ssmzoo.tasks, which data/sources.py draws without end as rows of one length
ROW_TASKS = ("mqar", "induction_heads")


class Recipe(Section):
    """A whole run."""

    model: ModelSection
    data: DataSection
    train: TrainSection
    adapter: AdapterSection | None = None
    align: AlignSection | None = None
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
        if self.align is not None:
            self._alignment_fits()
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

    def _alignment_fits(self) -> None:
        assert self.align is not None
        if self.model.init_from is None:
            raise ValueError("align needs model.init_from, a model that 'ssmzoo prime' wrote")
        others = {
            "adapter": self.adapter is not None,
            f"data.task {self.data.task!r} without train.seq_len": self.supervised,
            "eval.lengths": bool(self.eval.lengths),
            "train.only": self.train.only is not None,
            "train.segments": self.train.segments is not None,
            "train.sequence_parallel": self.train.sequence_parallel > 1,
        }
        for name, given in others.items():
            if given:
                raise ValueError(f"{name} must be absent with align")
        if self.align.match == "mixers" and self.train.gradient_checkpointing:
            raise ValueError(
                "train.gradient_checkpointing must be off with align.match 'mixers', which reads "
                "each layer's output once; take 'hidden' or 'logits'"
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
        for name, asked in by_epoch.items():
            if asked:
                raise ValueError(
                    f"{name} needs a data.task without train.seq_len, because only its epochs are "
                    "counted in examples; give steps"
                )
        judged = {
            "train.schedule 'plateau'": self.train.schedule == "plateau",
            "train.schedule 'drop'": self.train.schedule == "drop",
            "train.stop_at": self.train.stop_at is not None,
            "checkpoint.best": self.checkpoint.best,
        }
        for name, asked in judged.items():
            if asked and self.data.validation is None:
                raise ValueError(f"{name} needs data.validation to judge by")

    def to_yaml(self) -> str:
        """Return the recipe as a YAML text that :func:`load_recipe` reads back to an equal one."""
        return dump_yaml(self.model_dump(exclude_none=True))

    def differences(self, now: Recipe, sections: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
        """Yield the fields that differ in another recipe, of some sections: name, ours, theirs."""
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
        model, align = self.model, self.align
        if model.init_from is not None and _expanded(model.init_from).is_dir():
            model = model.model_copy(update={"init_from": _absolute(model.init_from)})
        if align is not None and _expanded(align.teacher).is_dir():
            align = align.model_copy(update={"teacher": _absolute(align.teacher)})
        data = data.model_copy(update=changed)
        return self.model_copy(update={"data": data, "model": model, "align": align})


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
