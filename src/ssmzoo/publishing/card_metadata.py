"""A card's metadata: fields of the run's recipe, its data and base, and scores."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import yaml

from ssmzoo.environment.credentials import find_credential
from ssmzoo.environment.hub_metadata import BASE_METADATA, checked, is_hub_id
from ssmzoo.family import Family
from ssmzoo.publishing.card_results import ScoredModel, merged

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData


def recipe_metadata(recipe: object) -> dict[str, Any]:
    """Return the metadata of a card that follows from a run's recipe.

    That is its section ``card``. Where this names no data set or no base, the run's are named if
    they are on the Hub.

    Raises:
        LookupError: See :func:`checked`.
        TypeError: See :func:`checked`.
        ValueError: See :func:`checked`.
    """
    data, model = _part(recipe, "data"), _part(recipe, "model")
    known = {
        "datasets": _on_hub(data.get("dataset")) or _on_hub(_data_of_task(data)),
        "base_model": _on_hub(model.get("init_from")),
    }
    return checked({**known, **_part(recipe, "card")})


def primed_metadata(primed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata that a primed model has of its base: its Hub id, and its licence."""
    return {name: primed[name] for name in BASE_METADATA if name in primed}


def base_name(recipe: object) -> str | None:
    """Return the name of a run's initial weights, a Hub id or a folder's name; None without."""
    place = _part(recipe, "model").get("init_from")
    if not isinstance(place, str) or _on_hub(place):
        return place if isinstance(place, str) else None
    folder = PurePath(place)
    return folder.parent.name if folder.name == "model" else folder.name


def _on_hub(place: object) -> str | None:
    """Return a name if it is an id on the Hub; None for a folder, which is absolute in a run."""
    given = isinstance(place, str) and is_hub_id(place) and find_credential(place) is None
    return str(place) if given else None


def _part(recipe: object, name: str) -> Mapping[str, Any]:
    part = recipe.get(name) if isinstance(recipe, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _data_of_task(data: Mapping[str, Any]) -> object:
    """Return the source of a task's data: its argument ``data``, or that argument's default."""
    from ssmzoo.tasks import SUPERVISED_TASKS

    task = SUPERVISED_TASKS.get(str(data.get("task")))
    if task is None:
        return None
    argument = inspect.signature(task).parameters.get("data")
    default = None if argument is None or argument.default is argument.empty else argument.default
    return _part(data, "task_args").get("data", default)


def benchmark_entries(own: Sequence[ScoredModel]) -> str | None:
    """Return the YAML of ``.eval_results``; None if no score is of a benchmark on the Hub."""
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    entries = [
        EvalResultEntry(
            *score.benchmark,
            value=score.value,
            date=score.origin.date,
            notes=f"{row.task}, {row.metric}, {row.num_fewshot} shots, lm-eval by ssmzoo",
        )
        for row, score in merged(own).items()
        if score.benchmark is not None and score.value is not None
    ]
    return yaml.safe_dump(eval_result_entries_to_yaml(entries)) if entries else None


def model_metadata(
    name: str, family: Family | None, own: Sequence[ScoredModel], told: Mapping[str, Any]
) -> ModelCardData:
    """Return a card's metadata: its scores, the family's tags, and the fields of ``told``."""
    from huggingface_hub import EvalResult, ModelCardData

    evaluations = []
    for row, score in merged(own).items():
        if score.value is None:
            continue
        settings = {
            "n": row.n,
            "num_fewshot": row.num_fewshot,
            "seed": row.seed,
            "stderr": score.stderr,
        }
        evaluations.append(
            EvalResult(
                task_type=told["pipeline_tag"],
                dataset_type=row.task,
                dataset_name=row.task,
                metric_type=row.metric,
                metric_name=row.metric,
                metric_value=score.value,
                metric_args={key: value for key, value in settings.items() if value is not None},
            )
        )
    tags = []
    if family is not None:
        tags = ["ssmzoo", "state-space-model", family.name, f"arxiv:{family.paper.arxiv}"]
    return ModelCardData(
        library_name="transformers",
        tags=tags or None,
        model_name=name if evaluations else None,
        eval_results=evaluations or None,
        **told,
    )
