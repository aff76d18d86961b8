"""Results files: one a model, merged by (task, metric), complete or not there.

Read with :func:`read_results`, joined with :func:`merge`, written with :func:`write_results`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from ssmzoo.credentials import without_credentials
from ssmzoo.files import write_json

LOG = logging.getLogger("ssmzoo")


class ModelInfo(TypedDict):
    """Which model was scored; ``revision`` is the Hub commit, or a digest of the local weights."""

    name: str
    source: str
    revision: str | None
    model_type: str
    parameters: int


class Score(TypedDict):
    """One number; ``settings`` is what defines the task's data.

    ``versions``, ``hardware``, ``date`` and ``command`` are there only where they differ from those
    of the file, because the score is from an earlier call.
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
    suite: NotRequired[str]
    versions: NotRequired[dict[str, str]]
    hardware: NotRequired[str]
    date: NotRequired[str]
    command: NotRequired[str]


class Results(TypedDict):
    """A results file."""

    model: ModelInfo
    results: list[Score]
    versions: dict[str, str]
    hardware: str
    date: str
    command: str


# of a validation's metrics; of loss and rmse less is
HIGHER_IS_BETTER = frozenset({"accuracy", "exact_match"})


def read_results(path: str | Path) -> Results:
    """Read a results file.

    Raises:
        ValueError: It is not one, for instance because it was cut short.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content["model"]["source"], str):
            raise TypeError("model.source must be a string")
        _ = {(row["task"], row["metric"]): row["value"] for row in content["results"]}
        _ = [content[key] for key in ("versions", "hardware", "date", "command")]
        _ = content["model"]["revision"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"results file {str(path)!r} is corrupt ({type(error).__name__}: {error}); move it "
            f"away, or give another name"
        ) from error
    return content


def write_results(path: str | Path, results: Results) -> None:
    """Write a results file; it appears under its name only when it is complete.

    Credentials in it, of an address that was read say, are struck out.
    """
    write_json(Path(path), without_credentials(results), indent=2)


def merge(earlier: Results | None, new: Results) -> Results:
    """Return ``new`` with the earlier scores that it does not replace.

    Those that stay keep the versions, hardware, date and command of their own call. Scores of other
    weights from the same source are dropped, with a warning.

    Raises:
        ValueError: The earlier scores are another model's.
    """
    if earlier is None:
        return new
    if earlier["model"]["revision"] != new["model"]["revision"]:
        old, now = earlier["model"]["source"], new["model"]["source"]
        if old != now:
            raise ValueError(
                f"results named {new['model']['name']!r} are of another model, {old!r}; "
                f"give those of {now!r} another name"
            )
        if earlier["results"]:
            LOG.warning(
                "dropped %d results of %s: they are of other weights", len(earlier["results"]), now
            )
        return new
    replaced = {(row["task"], row["metric"]): row for row in new["results"]}
    rows = []
    for row in earlier["results"]:
        kept = replaced.pop((row["task"], row["metric"]), None)
        if kept is None:
            own = {
                key: earlier[key]
                for key in ("versions", "hardware", "date", "command")
                if key not in row and earlier[key] != new[key]
            }
            kept = cast("Score", {**row, **own})
        rows.append(kept)
    return {**new, "results": [*rows, *replaced.values()]}
