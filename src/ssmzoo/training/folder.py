"""A run's folder: its files, and whether a run may begin or continue there."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from ssmzoo.checkpoints.weights import (
    PRIMING,
    holds_state_adapter,
    read_adapter_config,
    weights_revision,
)
from ssmzoo.environment.device import installed_versions
from ssmzoo.environment.portable import portable, portable_command
from ssmzoo.evaluation.results import (
    Results,
    Score,
    adapted,
    place_digest,
    recipe_of,
    write_results,
)
from ssmzoo.files import STDLIB, read_json, write_folder, write_json, write_text
from ssmzoo.recipe import Recipe, load_recipe
from ssmzoo.training.checkpoint import checkpoint_of, damage_of, newest_checkpoint
from ssmzoo.training.consolidate import write_adapter, write_model
from ssmzoo.training.curves import draw_curves
from ssmzoo.training.metrics import read_metrics
from ssmzoo.training.priming import history

# files that a run may leave that was killed before it began
_DONT_COUNT = re.compile(r"\.(lock|cache)|\..+\.(unfinished|replaced)|trackers")
_DRAW_SECONDS = 30  # at least, between two pictures of one run
_PACKAGES = ("ssmzoo", "torch", "transformers", "accelerate", "datasets", "numpy")
_MAY_CHANGE = {
    *("train.steps", "train.tokens", "train.epochs", "train.stop_at"),
    *("train.accumulate", "train.gradient_checkpointing", "train.sequence_parallel"),
    *("data.workers", "model.stock"),
}
# paths may change: their files are compared by name and digest when the data is opened
_PLACES = {
    *("data.text", "data.jsonl", "data.parquet", "data.dataset", "data.validation"),
    *("data.tokenizer", "data.task_args"),
}
_DATA_FACTS = ("source", "config", "revision", "documents", "tokens", "examples", "digest")


class RunFolder:
    """The folder of a run; one process writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cache = path / ".cache"
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.picture = path / "loss.png"
        self._drawn = time.perf_counter()
        self._changes: list[dict[str, Any]] = []

    def starting_point(self, recipe: Recipe, *, resume: bool) -> Path | None:
        """Return the checkpoint to continue from, None to begin; nothing is written.

        Raises:
            ValueError: The folder holds something else than a run that may be continued.
            RuntimeError: The newest checkpoint is damaged.
        """
        if all(_DONT_COUNT.fullmatch(path.name) for path in self.path.iterdir()):
            return None
        if not resume:
            raise ValueError(
                f"output_dir must be empty or new, got {self.path}, which is not; resume the run "
                "that is there, or choose another folder"
            )
        begun = self.path / "recipe.yaml"
        if not begun.exists():
            raise ValueError(
                f"output_dir must hold a run to resume, got {self.path} without recipe.yaml"
            )
        before = load_recipe(begun)
        require_same_recipe(before, recipe)
        self._changes = [
            {"field": name, "from": portable(was), "to": portable(now)}
            for name, was, now in before.differences(recipe, Recipe.model_fields)
        ]
        return newest_checkpoint(self.checkpoints)

    def manifest(self) -> dict[str, Any] | None:
        """Return the description of the data that the run began with, None before.

        Raises:
            RuntimeError: ``data.json`` is damaged.
        """
        described = self.path / "data.json"
        if not described.exists():
            return None
        try:
            return json.loads(described.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RuntimeError(
                f"{described} is damaged ({error}), and without it the run's data is unknown; "
                "put it back as it was, or start a new run"
            ) from error

    def describe(
        self, recipe: Recipe, manifest: dict[str, Any], facts: dict[str, Any], *, step: int
    ) -> None:
        """Write the description of the run: recipe, data, and the facts beside time and versions.

        ``facts["versions"]`` are those of packages that not every run needs.

        Changes at ``step`` are added to the list ``changes`` in ``run.json``.
        """
        changes = self._record_changes(facts, step)
        write_text(self.path / "recipe.yaml", recipe.to_yaml())
        write_json(self.path / "data.json", manifest)
        described = {
            "command": portable_command([*_program(), *sys.argv[1:]]),
            "date": _now(),
            "data": {
                "names": portable(getattr(recipe.data, recipe.data.source)),
                **{key: manifest[key] for key in _DATA_FACTS if key in manifest},
            },
            **facts,
            "versions": installed_versions(*_PACKAGES) | facts["versions"],
        }
        if changes:
            described["changes"] = changes
        write_json(self.path / "run.json", described)
        self._begin_stage(recipe)

    def _begin_stage(self, recipe: Recipe) -> None:
        """Keep how a primed model began, with this run as its latest stage."""
        place, here = recipe.model.init_from, self.path / PRIMING
        if place is None or here.exists() or (told := history(Path(place))) is None:
            return
        stage = {"stage": "tune"}
        if recipe.align is not None:
            stage = {"stage": "align", "match": recipe.align.match}
        write_json(here, {**told, "stages": [*told["stages"], stage]})

    def _record_changes(self, facts: dict[str, Any], step: int) -> list[dict[str, Any]]:
        """Return all changes since the run began, after writing them down if there are new ones."""
        try:
            before = read_json(self.path / "run.json")
        except ValueError:  # not there yet, or damaged and about to be replaced
            before = {}
        new = [{"step": step, **change} for change in self._changes]
        for name in ("processes", "recurrent_layers", "variables"):
            now = facts.get(name)
            if (was := before.get(name, now)) != now:
                new.append({"step": step, "field": name, "from": was, "to": now})
        changes = before.get("changes", [])
        if not new or changes[-len(new) :] == new:  # written, and killed before the recipe was
            return changes
        # before the recipe is replaced, which would lose the old values
        write_json(self.path / "run.json", {**before, "changes": changes + new})
        return changes + new

    def draw(self, title: str, loss: str, *, now: bool = False) -> None:
        """Draw the curves, if that was not done a moment ago, or ``now``."""
        if now or time.perf_counter() - self._drawn > _DRAW_SECONDS:
            draw_curves(self.metrics, self.picture, title=title, loss=loss)
            self._drawn = time.perf_counter()

    def final_checkpoint(self, best: int | None) -> Path:
        """Return the checkpoint that becomes the model: that of the step ``best``, or the last.

        Raises:
            RuntimeError: It is damaged.
        """
        if best is None:
            final = newest_checkpoint(self.checkpoints)
            assert final is not None
            return final
        final = checkpoint_of(self.checkpoints, best)
        if (damage := damage_of(final)) is not None:
            raise RuntimeError(
                f"the checkpoint {final}, the run's best, is damaged: {damage}; put it back as it "
                "was, or start the run again"
            )
        return final

    def finish(
        self,
        final: Path,
        *,
        scores: list[Score] | None,
        model_type: str,
        parameters: int,
        **facts: Any,
    ) -> None:
        """Write ``model/`` from a checkpoint, the scores if any, and last that the run is finished.

        Files that others put there, a card say, stay.
        """
        last = {k: v for line in read_metrics(self.metrics) for k, v in line.items()}

        _renew(self.path / "model", lambda folder: write_model(final, folder))
        if holds_state_adapter(final):
            _renew(self.path / "adapter", lambda folder: write_adapter(final, folder))
        if scores is not None:
            self.write_results(scores, model_type, parameters)
        described = read_json(self.path / "run.json")
        own = (name for name in ("validation_mse", "validation_rmse") if name in last)
        keys = ("loss", "validation_loss", next(own, "validation_accuracy"))
        facts = {"date": _now(), "parameters": parameters, **facts}
        described["finished"] = facts | {key: last.get(key) for key in keys}
        write_json(self.path / "run.json", described)
        shutil.rmtree(self.cache, ignore_errors=True)

    def write_results(self, scores: list[Score], model_type: str, parameters: int) -> None:
        """Write the scores of a test split in the form of ``ssmzoo eval``, as ``results.json``."""
        described = read_json(self.path / "run.json")
        source, revision = f"{self.path.name}/model", weights_revision(self.path / "model")
        target, parts = self.path / "results.json", [self.path / "model"]
        if holds_state_adapter(adapter := self.path / "adapter"):
            digest = read_adapter_config(adapter)["digest"]
            source, revision = adapted(source, f"{self.path.name}/adapter", revision, digest)
            parts.append(adapter)
        results: Results = {
            "model": {
                "name": self.path.name,
                "source": source,
                "place": place_digest(target, *parts),
                "revision": revision,
                "model_type": model_type,
                "parameters": parameters,
            },
            "recipe": recipe_of(self.path / "recipe.yaml"),
            "results": cast("list[Score]", portable(scores)),
            "versions": described["versions"],
            "hardware": described["hardware"],
            "environment": described.get("environment"),
            "date": _now(),
            "command": described["command"],
        }
        write_results(target, results)


def require_same_recipe(begun: Recipe, now: Recipe) -> None:
    """Check that only fields that may change differ from the recipe that a run began with.

    Raises:
        ValueError: Another field differs; the message names it.
    """
    sections = ("model", "data", "train", "adapter", "align")
    for name, before, after in begun.differences(now, sections):
        if name not in _MAY_CHANGE and not (name in _PLACES and _is_moved(before, after)):
            raise ValueError(
                f"{name} must stay as the run began to resume it, {before!r}, "
                f"got {after!r}; start a new run to change it"
            )


def _renew(target: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a folder; files of others that are there, a card say, stay."""
    there = [path for path in target.iterdir() if path.exists()] if target.is_dir() else []

    def write_and_keep(folder: Path) -> None:
        write(folder)
        for path in there:
            # weights under other names are of an earlier model
            if not (folder / path.name).exists() and not path.match("model*.safetensors*"):
                copy = shutil.copytree if path.is_dir() else shutil.copy2
                copy(path, folder / path.name)

    write_folder(target, write_and_keep)


def _is_moved(before: Any, after: Any) -> bool:
    """Return whether values differ in local places only: paths, a task's ``data`` and ``cache``."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(
            value == after[key] or (key in ("data", "cache") and _is_moved(value, after[key]))
            for key, value in before.items()
        )
    paths = [*(before if isinstance(before, list) else [before])]
    paths += after if isinstance(after, list) else [after]
    return all(isinstance(path, str) and (path[:1] == "/" or path == STDLIB) for path in paths)


def _program() -> list[str]:
    """Return the words that started this program; ``python -m ssmzoo`` is ``ssmzoo``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        script = sys.argv[0]
        return ["python", script] if script.endswith(".py") else [Path(script).name]
    module = spec.name.removesuffix(".__main__")
    return ["ssmzoo"] if module == "ssmzoo" else ["python", "-m", module]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
