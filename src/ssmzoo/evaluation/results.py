"""Results files: one a model, merged by (task, metric), complete or not there.

Read with :func:`read_results`, joined with :func:`merge`, written with :func:`write_results`.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, TypeGuard, cast

from ssmzoo.environment.credentials import without_credentials
from ssmzoo.environment.portable import portable
from ssmzoo.files import parse_yaml, read_json, write_json

if TYPE_CHECKING:
    from ssmzoo_kernels.machine import Environment

LOG = logging.getLogger("ssmzoo")


class ModelInfo(TypedDict):
    """Which model was scored.

    ``revision`` is the Hub commit, or a digest of the local weights. ``place`` tells folders of one
    name apart: a digest of the way to them from the results' folder; a model of the Hub has none.
    """

    name: str
    source: str
    place: NotRequired[str]
    revision: str | None
    model_type: str
    parameters: int


class Benchmark(TypedDict):
    """A benchmark on the Hub: its data set, and the task's id in the data set's ``eval.yaml``."""

    dataset: str
    task_id: str


class TokensRead(TypedDict):
    """How many tokens a task's requests took, and would take if each were read alone.

    ``shared_states`` is False where a model keeps no state: then only equal rows were read once.
    Of one call: requests that a killed call had answered do not count.
    """

    shared_states: bool
    read: int
    alone: int


class Score(TypedDict):
    """One number; ``settings`` define the task's data.

    ``versions``, ``hardware``, ``environment``, ``date`` and ``command`` are there only where they
    differ from those of the file, because the score is from an earlier call; ``environment`` is
    None where that call did not record it. ``benchmark`` is there where the score is one of a
    benchmark on the Hub.
    """

    task: str
    metric: str
    value: float | None
    stderr: float | None
    n: int
    seed: int
    num_fewshot: int
    higher_is_better: bool | None
    settings: dict[str, Any]
    reading: NotRequired[TokensRead]
    suite: NotRequired[str]
    benchmark: NotRequired[Benchmark]
    versions: NotRequired[dict[str, str]]
    hardware: NotRequired[str]
    environment: NotRequired[Environment | None]
    date: NotRequired[str]
    command: NotRequired[str]


class Results(TypedDict):
    """A results file.

    ``environment`` is absent where it was not recorded, ``recipe`` where the run that trained the
    model is not known.
    """

    model: ModelInfo
    recipe: NotRequired[dict[str, Any]]
    results: list[Score]
    versions: dict[str, str]
    hardware: str
    environment: NotRequired[Environment | None]
    date: str
    command: str


# facts of a whole call; a score of an earlier call keeps its own
_OF_THE_CALL = ("versions", "hardware", "environment", "date", "command")


def is_number(value: object) -> TypeGuard[int | float]:
    """Say whether a value is a finite number; a truth value is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _is_benchmark(value: object) -> bool:
    return value is None or (
        isinstance(value, dict)
        and all(isinstance(value.get(key), str) for key in ("dataset", "task_id"))
    )


_FIELDS: tuple[tuple[str, Callable[[object], bool], tuple[str, ...]], ...] = (
    ("a string", lambda x: isinstance(x, str), ("task", "metric")),
    ("a finite number or null", lambda x: x is None or is_number(x), ("value", "stderr")),
    ("a whole number or null", _is_whole, ("n", "num_fewshot", "seed")),
    ("true, false or null", lambda x: isinstance(x, bool | None), ("higher_is_better",)),
    ("an object or null", lambda x: isinstance(x, dict | None), ("settings",)),
    ("an object with dataset and task_id", _is_benchmark, ("benchmark",)),
)


def read_results(path: str | Path) -> Results:
    """Read a results file and check it.

    A score needs only ``task`` and ``metric``, the file ``results`` and ``model`` with ``name``,
    ``source`` and ``revision``; all other fields must have their types.

    Raises:
        ValueError: It is missing or none; the message names the file and the field.
    """
    content = read_json(Path(path))
    try:
        _check(content)
    except ValueError as error:
        raise ValueError(
            f"{path} is no results file of `ssmzoo eval`: {error}; move it away, or measure again"
        ) from error
    return cast("Results", content)


def _check(content: dict[str, Any]) -> None:
    model, scores, recipe = (content.get(key) for key in ("model", "results", "recipe"))
    model = model if isinstance(model, dict) else {}
    for key, kinds in (("name", str), ("source", str), ("revision", str | None)):
        if key not in model or not isinstance(model[key], kinds):
            raise ValueError(f"model.{key} must be a string, got {model.get(key)!r}")
    if recipe is not None and not (
        isinstance(recipe, dict) and isinstance(recipe.get("train"), dict)
    ):
        raise ValueError(f"recipe must be an object with train, got {recipe!r}")
    if not isinstance(scores, list):
        raise ValueError(f"results must be a list, got {scores!r}")
    for index, score in enumerate(scores):
        where = f"results[{index}]"
        if not isinstance(score, dict):
            raise ValueError(f"{where} must be an object, got {score!r}")
        for words, holds, fields in _FIELDS:
            for field in fields:
                if not holds(score.get(field)):
                    raise ValueError(f"{where}.{field} must be {words}, got {score.get(field)!r}")


def recipe_of(path: Path) -> dict[str, Any]:
    """Read a run's recipe as results hold it: without folders of this machine.

    Raises:
        ValueError: The file is no YAML mapping.
    """
    try:
        recipe = parse_yaml(path.read_text(encoding="utf-8"), path.name)
    except ValueError as error:
        raise ValueError(f"{path} is corrupt: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{path} is corrupt: it must hold a mapping, got {type(recipe).__name__}")
    return cast("dict[str, Any]", portable(recipe))


def source_of(model: str | Path) -> str:
    """Return a model's name in results: as it was given, of an absolute path the last part.

    Of a run's model that is ``RUN/model``.
    """
    place = Path(model).expanduser()
    if not place.is_absolute():
        return str(model)
    return "/".join(place.parts[-2:] if place.name in ("model", "adapter") else place.parts[-1:])


def place_digest(target: Path, *parts: Path | str) -> str:
    """Return a digest of a model's places, whichever way they are named.

    Args:
        target: The results file.
        parts: The folder or the Hub id of the model, and the folder of its state adapter.
    """
    around = target.expanduser().resolve().parent
    ways = [
        os.path.relpath(part.expanduser().resolve(), around) if isinstance(part, Path) else part
        for part in parts
    ]
    return hashlib.sha256(os.fsencode("\0".join(ways))).hexdigest()[:16]


def adapted(source: str, adapter: str, revision: object, digest: str) -> tuple[str, str]:
    """Return source and revision of a model with a state adapter, which counts as another model."""
    return f"{source} with {adapter}", f"{revision}+{digest[:12]}"


def write_results(path: str | Path, results: Results) -> None:
    """Write a results file; it appears under its name only when it is complete.

    Credentials in it, of an address that was read say, are struck out.
    """
    write_json(Path(path), without_credentials(results), indent=2)


def require_same_model(earlier: Results, new: Results) -> None:
    """Fail if scores of one name are of two models; one model's may be of other weights."""
    old, now = earlier["model"], new["model"]
    unequal = old["revision"] != now["revision"] or now["revision"] is None
    places = [model.get("place") for model in (old, now)]
    same = places[0] == places[1] if any(places) else old["source"] == now["source"]
    if unequal and not same:
        where = "" if old["source"] != now["source"] else ", of another folder"
        raise ValueError(
            f"results named {now['name']!r} are of another model, {old['source']!r}{where}; "
            f"give those of {now['source']!r} another name (--name), or remove the old file"
        )


def _asked(row: Score) -> dict[str, Any]:
    """Return the facts in which two scores of one task and metric must agree."""
    settings = row.get("settings") or {}
    return {**settings, **{name: row.get(name) for name in ("n", "num_fewshot", "seed")}}


def merge(earlier: Results | None, new: Results) -> Results:
    """Return ``new`` with the earlier scores that it does not replace.

    Those that stay keep the versions, hardware, environment, date and command of their own call.
    Scores of other weights from the same place are dropped, and a score of other settings
    (another text) is replaced, each with a warning. A suite's average goes when a score that it
    averages is replaced.

    Raises:
        ValueError: The earlier scores are another model's.
    """
    if earlier is None:
        return new
    require_same_model(earlier, new)
    if earlier["model"]["revision"] != new["model"]["revision"]:
        if earlier["results"]:
            LOG.warning(
                "dropped %d results of %s: they are of other weights",
                *(len(earlier["results"]), new["model"]["source"]),
            )
        return new
    replaced = {(row["task"], row["metric"]): row for row in new["results"]}
    stale = {  # suites with a replaced score
        row.get("suite") for row in earlier["results"] if (row["task"], row["metric"]) in replaced
    }
    rows = []
    for row in earlier["results"]:
        kept = replaced.pop((row["task"], row["metric"]), None)
        if kept is None and row["metric"] == "average" and row["task"] in stale:
            continue
        if kept is None:
            own = {
                key: earlier.get(key)
                for key in _OF_THE_CALL
                if key not in row and earlier.get(key) != new.get(key)
            }
            kept = cast("Score", {**row, **own})
        elif (was := _asked(row)) != (now := _asked(kept)):
            other = [name for name in was | now if was.get(name) != now.get(name)]
            LOG.warning(
                "replaced %s of %s with %s by one with %s; another name keeps both",
                *(row["metric"], row["task"]),
                *({name: found.get(name) for name in other} for found in (was, now)),
            )
        rows.append(kept)
    return {**new, "results": [*rows, *replaced.values()]}
