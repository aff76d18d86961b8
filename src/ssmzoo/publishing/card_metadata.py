"""What a run's recipe says for its model's card: the section ``card``, the data and the base."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from ssmzoo.environment.credentials import find_credential
from ssmzoo.environment.hub_metadata import checked, is_hub_id


def of_recipe(recipe: object) -> dict[str, Any]:
    """Return what a run's recipe says for its model's card.

    That is its section ``card``; where this names no data set or no base, those of the run, if
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


def base_of(recipe: object) -> str | None:
    """Return a name of the weights that a run began with, a Hub id or a folder's; None if none."""
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
    """Return where a task has its data from, by its argument or by default."""
    from ssmzoo.tasks import SUPERVISED_TASKS

    task = SUPERVISED_TASKS.get(str(data.get("task")))
    if task is None:
        return None
    argument = inspect.signature(task).parameters.get("data")
    default = None if argument is None or argument.default is argument.empty else argument.default
    return _part(data, "task_args").get("data", default)
