"""Suites: named sets of tasks, each entry an lm-eval group member that states its metric."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ssmzoo.environment.messages import suggestion
from ssmzoo.evaluation.results import Score
from ssmzoo.files import package_data, parse_yaml


@dataclass(frozen=True)
class Suite:
    """A named set of tasks; each entry is an lm-eval group member that states its metric."""

    name: str
    entries: tuple[dict[str, Any], ...]
    average: bool

    @property
    def metrics(self) -> dict[str, str]:
        """The metric that counts, by task."""
        return {entry["task"]: entry["metric_list"][0]["metric"] for entry in self.entries}


def suites() -> dict[str, Path]:
    """Return the files of the shipped suites by name."""
    return {path.stem: path for path in sorted(package_data("eval/suites").glob("*.yaml"))}


def load_suite(name: str) -> Suite:
    """Read a suite by name, or from a YAML file.

    Raises:
        LookupError: No such suite; the message suggests and lists.
        ValueError: The file is no suite.
    """
    known = suites()
    path = Path(name) if name.endswith((".yaml", ".yml")) else known.get(name)
    if path is None or not path.is_file():
        raise LookupError(
            f"no suite named {name!r}{suggestion(name, known)}; suites: {', '.join(known)}"
        )
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"), path.name)
    except (OSError, ValueError) as error:
        raise ValueError(f"suite {str(path)!r} cannot be read: {error}") from error
    where = f"suite {str(path)!r}"
    entries = content.get("task") if isinstance(content, dict) else None
    if not isinstance(entries, list) or "group" not in content:
        raise ValueError(f"{where} must be an lm-eval group: keys 'group' and 'task'")
    for entry in entries:
        _check_entry(where, entry)
    names = [entry["task"] for entry in entries]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{where} names task {twice!r} twice; an entry's metric counts alone")
    metadata = content.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"metadata of {where} must be a mapping, got {metadata!r}")
    return Suite(content["group"], tuple(entries), bool(metadata.get("average")))


def _check_entry(where: str, entry: Any) -> None:
    """Fail unless a suite's entry names a task and how its metrics are computed."""
    if not (isinstance(entry, dict) and "task" in entry and entry.get("metric_list")):
        raise ValueError(
            f"every entry of {where} must hold 'task' and 'metric_list', got {entry!r}"
        )
    if not isinstance(entry["task"], str):
        raise ValueError(f"{where}: task must be a name, got {entry['task']!r}")
    metrics = entry["metric_list"]
    if not isinstance(metrics, list) or not all(
        isinstance(metric, dict) and isinstance(metric.get("metric"), str) for metric in metrics
    ):
        raise ValueError(
            f"{where}: metric_list of {entry['task']!r} must be a list of mappings, each with "
            f"'metric', got {metrics!r}"
        )


def average_score(suite: Suite, rows: list[Score]) -> Score:
    """Average a suite's tasks, every one counting alike, as the papers' tables do."""
    metrics = suite.metrics
    counted: dict[str, Score] = {}
    for row in rows:  # lm-eval names a metric "acc,FILTER"; the first filter's counts
        if metrics.get(row["task"]) == row["metric"].partition(",")[0]:
            counted.setdefault(row["task"], row)
    values = [row["value"] for row in counted.values() if row["value"] is not None]
    errors = [row["stderr"] for row in counted.values() if row["stderr"] is not None]
    directions = {row["higher_is_better"] for row in counted.values()}
    whole = len(values) == len(suite.entries)
    stderr = math.hypot(*errors) / len(errors) if whole and len(errors) == len(values) else None
    return {
        "task": suite.name,
        "metric": "average",
        "value": float(np.mean(values)) if whole else None,
        "stderr": stderr,
        "n": sum(row["n"] for row in counted.values()),
        "seed": rows[0]["seed"],
        "num_fewshot": max(row["num_fewshot"] for row in counted.values()),
        "higher_is_better": directions.pop() if len(directions) == 1 else None,
        "settings": {"tasks": len(counted)},
        "suite": suite.name,
    }
