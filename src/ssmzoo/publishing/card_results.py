"""Scores for a card, read from results files and assigned to weights by their digest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssmzoo.evaluation.results import read_results

NOT_MEASURED = "not measured"
NOT_RECORDED = "not recorded"  # in a results file, or by the run
_LONG = 3  # entries up to which a list is written out


@dataclass(frozen=True)
class Row:
    """A row of the table: scores that share these fields are comparable."""

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
class ShownScore:
    """A measured value; None where the measurement gave no finite number.

    ``benchmark`` is the data set and the task's id of a benchmark on the Hub, None for others.
    """

    value: float | None
    stderr: float | None
    higher_is_better: bool | None
    origin: Origin
    benchmark: tuple[str, str] | None = None


@dataclass(frozen=True)
class ScoredModel:
    """The scores in one results file, by the row of the table that they stand in."""

    path: Path
    name: str
    source: str
    revision: str | None
    scores: Mapping[Row, ShownScore]
    recipe: Mapping[str, Any] | None = None

    def seed(self) -> object:
        """Return the seed that the recipe trains with, None without a recipe."""
        return None if self.recipe is None else self.recipe["train"].get("seed")

    def is_of_another_seed(self, other: ScoredModel) -> bool:
        """Tell whether these are results of the same recipe, trained with another seed."""
        if self.recipe is None or other.recipe is None or self.seed() == other.seed():
            return False
        return _without_seed(self.recipe) == _without_seed(other.recipe)


def scored_model(path: Path) -> ScoredModel:
    """Read a results file for a card.

    Raises:
        ValueError: It is none; the message names the file and the field.
    """
    content = read_results(path)
    whole: dict[str, Any] = dict(content)
    scores = {}
    for score in content["results"]:
        entry: dict[str, Any] = dict(score)
        row = Row(
            entry["task"],
            entry["metric"],
            flat(entry["settings"]) if entry.get("settings") else "",
            entry.get("n"),
            entry.get("num_fewshot"),
            entry.get("seed"),
        )
        # a score of an earlier call has fields of its own where they differ from the file's
        call = {key: entry.get(key, whole.get(key)) for key in Origin.__annotations__}
        origin = {key: flat(value) for key, value in call.items()}
        origin["environment"] = recorded(call["environment"])
        benchmark = entry.get("benchmark")
        scores[row] = ShownScore(
            entry.get("value"),
            entry.get("stderr"),
            entry.get("higher_is_better"),
            Origin(**origin),
            (benchmark["dataset"], benchmark["task_id"]) if benchmark else None,
        )
    model = content["model"]
    return ScoredModel(
        path, model["name"], model["source"], model["revision"], scores, content.get("recipe")
    )


def _without_seed(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a recipe that determine the model, without the seed."""
    train = {name: value for name, value in recipe["train"].items() if name != "seed"}
    others = {name: recipe.get(name) for name in ("model", "data", "adapter")}
    return {**others, "train": train}


def split_results(
    revision: str, place: Path, results: Sequence[ScoredModel]
) -> tuple[list[ScoredModel], list[ScoredModel]]:
    """Split results into those of a model's weights and those of other models.

    Args:
        revision: The digest of the weights.
        place: The folder with the weights, or the ``.json`` beside a card; for errors.
        results: The results to split.

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
    seen: dict[Row, ScoredModel] = {}
    for entry in own:
        for row, score in entry.scores.items():
            first = seen.setdefault(row, entry)
            if first.scores[row].value != score.value:
                raise ValueError(
                    f"{first.path} and {entry.path} give this model different values of "
                    f"{row.task}, {row.metric}; pass the newer one only"
                )
    return own, others


def merged(results: Iterable[ScoredModel]) -> dict[Row, ShownScore]:
    """Return the scores of several files as one mapping."""
    return {row: score for entry in results for row, score in entry.scores.items()}


def recorded(environment: object) -> str:
    """Write a record of :func:`ssmzoo_kernels.machine.environment` in one line."""
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
