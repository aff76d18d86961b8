"""What a card is written from: results files, a run directory, a family's words.

Everything is checked while it is read, so that a damaged file is one clear error and never a card
with a hole in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from ssmzoo.family import Family, claims, family_of_type
from ssmzoo.files import read_json, share

NOT_MEASURED = "not measured"
NOT_RECORDED = "not recorded"  # what a run of an earlier version did not write down
PICTURE = "loss.png"

_FAMILY_FIELDS = {
    "title",
    "paper",
    "bibtex",
    "architecture",
    "equal_forms",
    "intended_use",
    "limits",
}
_PAPER_FIELDS = {"title", "authors", "venue", "year", "arxiv"}
_LONG = 3  # entries up to which a list is written out


@dataclass(frozen=True)
class Row:
    """What two scores must share to stand in one row of the table."""

    task: str
    metric: str
    settings: str
    n: int | None
    num_fewshot: int | None
    seed: int | None


@dataclass(frozen=True)
class Origin:
    """The call of ``ssmzoo eval`` that a score is from, each part as text."""

    date: str
    hardware: str
    environment: str
    versions: str
    command: str


@dataclass(frozen=True)
class Score:
    """A measured value; None where the measurement gave no finite number.

    ``benchmark`` is the data set and the task's id of a benchmark on the Hub, None for others.
    """

    value: float | None
    stderr: float | None
    higher_is_better: bool | None
    origin: Origin
    benchmark: tuple[str, str] | None = None


@dataclass(frozen=True)
class Results:
    """One results file of ``ssmzoo eval``."""

    path: Path
    name: str
    source: str
    revision: str | None
    scores: Mapping[Row, Score]
    recipe: Mapping[str, Any] | None = None

    def seed(self) -> object:
        """Return the seed that the recipe trains with, None without a recipe."""
        return None if self.recipe is None else self.recipe["train"].get("seed")

    def is_of_another_seed(self, other: Results) -> bool:
        """Say whether the same recipe was trained with another seed for these results."""
        if self.recipe is None or other.recipe is None or self.seed() == other.seed():
            return False
        return _without_seed(self.recipe) == _without_seed(other.recipe)


@dataclass(frozen=True)
class Run:
    """What a run directory says about the training."""

    facts: Mapping[str, Any]
    recipe: Any
    records: Sequence[Mapping[str, Any]]
    picture: Path | None

    def last(self, name: str) -> object:
        """Return the last recorded value of a metric, None if it was never recorded."""
        return next((r[name] for r in reversed(self.records) if r.get(name) is not None), None)

    def total(self, name: str) -> object:
        """Return a whole number that grows: its largest recorded value."""
        values = [r[name] for r in self.records if is_number(r.get(name))]
        return max(values, default=None)


def read_results(path: Path) -> Results:
    """Read a results file.

    Raises:
        ValueError: It is none; the message names the file and the entry.
    """
    content = read_json(path)
    model, entries = content.get("model"), content.get("results")
    if not isinstance(model, dict) or not isinstance(model.get("name"), str):
        raise ValueError(f"{path} is no results file of `ssmzoo eval`: it has no model.name")
    if not isinstance(entries, list):
        raise ValueError(f"{path} is no results file of `ssmzoo eval`: results must be a list")
    scores = dict(_score(f"{path}, results[{i}]", e, content) for i, e in enumerate(entries))
    recipe = content.get("recipe")
    if recipe is not None and not isinstance(
        recipe.get("train") if isinstance(recipe, dict) else None, dict
    ):
        raise ValueError(f"{path}: recipe must be an object with train, got {recipe!r}")
    return Results(
        path, model["name"], str(model.get("source")), model.get("revision"), scores, recipe
    )


def _without_seed(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a recipe decides which model comes out, but for the seed."""
    train = {name: value for name, value in recipe["train"].items() if name != "seed"}
    return {"model": recipe.get("model"), "data": recipe.get("data"), "train": train}


def _score(where: str, entry: object, content: Mapping[str, Any]) -> tuple[Row, Score]:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object, got {entry!r}")
    for field, kinds in (
        ("task", str),
        ("metric", str),
        ("settings", dict | None),
        ("n", int | None),
        ("num_fewshot", int | None),
        ("seed", int | None),
        ("higher_is_better", bool | None),
    ):
        truth = isinstance(entry.get(field), bool) and field != "higher_is_better"
        if truth or not isinstance(entry.get(field), kinds):
            raise ValueError(f"{where}.{field} must be {_kind(kinds)}, got {entry.get(field)!r}")
    for field in ("value", "stderr"):
        if entry.get(field) is not None and not is_number(entry[field]):
            raise ValueError(
                f"{where}.{field} must be a finite number or null, got {entry[field]!r}"
            )
    row = Row(
        entry["task"],
        entry["metric"],
        flat(entry["settings"]) if entry.get("settings") else "",
        entry.get("n"),
        entry.get("num_fewshot"),
        entry.get("seed"),
    )
    # a score of an earlier call carries what differs from the file's own
    origin = {
        key: flat(entry.get(key, content.get(key)))
        for key in ("date", "hardware", "versions", "command")
    }
    origin["environment"] = recorded(entry.get("environment", content.get("environment")))
    score = Score(
        entry.get("value"),
        entry.get("stderr"),
        entry.get("higher_is_better"),
        Origin(**origin),
        _benchmark(where, entry.get("benchmark")),
    )
    return row, score


def _benchmark(where: str, found: object) -> tuple[str, str] | None:
    if found is None:
        return None
    parts = [found.get(key) for key in ("dataset", "task_id")] if isinstance(found, dict) else []
    if len(parts) != 2 or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{where}.benchmark must have a dataset and a task_id, got {found!r}")
    return str(parts[0]), str(parts[1])


def _kind(kinds: object) -> str:
    names = {str: "a string", dict | None: "an object", int | None: "a whole number"}
    return names.get(kinds, "true, false or null")


def is_number(value: object) -> TypeGuard[int | float]:
    """Say whether a value is a finite number; a truth value is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def part_results(
    revision: str, place: Path, results: Sequence[Results]
) -> tuple[list[Results], list[Results]]:
    """Part the results of a model's weights from those of other models.

    Args:
        revision: The digest of the weights.
        place: The folder that holds them, or the file that says so.
        results: All of them.

    Raises:
        ValueError: None are of these weights; some are of the folder's former weights; two files
            disagree about a score.
    """
    if not results:
        return [], []
    own = [entry for entry in results if entry.revision == revision]
    others = [entry for entry in results if entry.revision != revision]
    for entry in others:
        if Path(entry.source).is_dir() and Path(entry.source).resolve() == place.resolve():
            raise ValueError(
                f"{entry.path} was measured on other weights ({entry.revision}) than {place} "
                f"holds now ({revision}); measure again with: ssmzoo eval {place}"
            )
    if not own:
        found = "; ".join(f"{entry.path} is of {entry.source}" for entry in others)
        raise ValueError(
            f"none of the results is of the weights in {place} ({found}); "
            f"measure them with: ssmzoo eval {place}"
        )
    seen: dict[Row, Results] = {}
    for entry in own:
        for row, score in entry.scores.items():
            first = seen.setdefault(row, entry)
            if first.scores[row].value != score.value:
                raise ValueError(
                    f"{first.path} and {entry.path} give this model different values of "
                    f"{row.task}, {row.metric}; pass the newer one only"
                )
    return own, others


def merged(results: Iterable[Results]) -> dict[Row, Score]:
    """Return the scores of several files as one mapping."""
    return {row: score for entry in results for row, score in entry.scores.items()}


def read_run(path: Path, *, until_step: int | None = None) -> Run:
    """Read a run directory, with what was recorded up to a step, or all of it.

    Raises:
        ValueError: A file of it is missing or corrupt; the message names the file and the line.
    """
    if not path.is_dir():
        raise ValueError(f"run_dir must be the folder of a run, got {str(path)!r}")
    facts = read_json(path / "run.json")
    texts = {}
    for name in ("recipe.yaml", "metrics.jsonl"):
        try:
            texts[name] = (path / name).read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise ValueError(f"{path / name} does not exist; {path} is not a whole run") from error
        except (OSError, ValueError) as error:
            raise ValueError(f"{path / name} is corrupt: {error}") from error
    try:
        recipe = yaml.safe_load(texts["recipe.yaml"])
    except yaml.YAMLError as error:
        raise ValueError(f"{path / 'recipe.yaml'} is corrupt: {error}") from error
    records = []
    for number, line in enumerate(texts["metrics.jsonl"].splitlines(), 1):
        where = f"{path / 'metrics.jsonl'}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is corrupt: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where} must be an object, got {line!r}")
        if until_step is None or record.get("step", 0) <= until_step:
            records.append(record)
    picture = path / PICTURE
    return Run(facts, recipe, records, picture if picture.is_file() else None)


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Return the installed family of a checkpoint; None for a model that is not of the zoo.

    Raises:
        ValueError: It is of a zoo family that is not installed.
        RuntimeError: Its family's plugin is broken.
    """
    model_type = str(config.get("model_type"))
    family = family_of_type(model_type)
    if family is None and model_type.startswith("ssmzoo_"):
        raise ValueError(
            f"config.json has model_type {model_type!r}, a family that is not installed; "
            f"installed: {', '.join(sorted(claims())) or 'none'}"
        )
    return family


def family_words(name: str) -> dict[str, Any] | None:
    """Return what ``model_cards/families/<name>.yaml`` says; None if there is no such file.

    Raises:
        ValueError: The file is not as it must be; the message names it.
    """
    try:
        path = share(f"model_cards/families/{name}.yaml")
    except LookupError:
        return None
    words = yaml.safe_load(path.read_text(encoding="utf-8"))
    for fields, found in ((_FAMILY_FIELDS, words), (_PAPER_FIELDS, (words or {}).get("paper"))):
        if not isinstance(found, dict) or set(found) != fields:
            raise ValueError(f"{path} must have exactly the fields {', '.join(sorted(fields))}")
    return {key: value.strip() if isinstance(value, str) else value for key, value in words.items()}


def recorded(environment: object) -> str:
    """Write what :func:`ssmzoo.environment.hardware.environment` recorded in one line."""
    if not isinstance(environment, Mapping):
        return NOT_RECORDED
    return flat({str(name).replace("_", " "): value for name, value in environment.items()})


def flat(value: object) -> str:
    """Write a fact of any shape in one line; long lists are counted."""
    if value is None or value in ("", {}, []):
        return NOT_MEASURED
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {flat(part)}" for key, part in value.items() if part is not None)
    if isinstance(value, list | tuple):
        return f"({len(value)})" if len(value) > _LONG else ", ".join(map(flat, value))
    return str(value)
