"""Helpers of generated tasks: the ignored label, checks, draws, symbols as text."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from datasets import Dataset

IGNORED = -100  # of classes; the heads' own is in modeling/losses.py, which travels without this
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def counted(labels: np.ndarray) -> np.ndarray:
    """Return which labels count: classes but for ``IGNORED``, values but for nan."""
    return ~np.isnan(labels) if labels.dtype.kind == "f" else labels != IGNORED


def at_least(name: str, value: int, least: int) -> None:
    """Raise unless an argument is a whole number and at least ``least``."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def distinct(rng: np.random.Generator, rows: int, count: int, low: int, high: int) -> np.ndarray:
    """Draw ``count`` different integers of low .. high-1 a row; all orders are equally likely."""
    if 4 * count >= high - low:
        return low + np.argsort(rng.random((rows, high - low)), axis=1)[:, :count]
    drawn = rng.integers(low, high, size=(rows, count))
    while True:
        order = np.argsort(drawn, axis=1, kind="stable")
        ranked = np.take_along_axis(drawn, order, axis=1)
        repeated = np.zeros_like(drawn, dtype=bool)
        np.put_along_axis(repeated, order[:, 1:], ranked[:, 1:] == ranked[:, :-1], axis=1)
        if not repeated.any():
            return drawn
        drawn[repeated] = rng.integers(low, high, size=int(repeated.sum()))


def symbols(ids: np.ndarray) -> str:
    """Write token ids as the text of :func:`symbol_tokenizer`."""
    return " ".join(f"t{i}" for i in ids)


def own_arguments(function: Callable[..., Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function in the metadata of an lm-eval task."""
    return {k: v for k, v in metadata.items() if k in inspect.signature(function).parameters}


def lm_eval_split(**columns: list[Any]) -> dict[str, Dataset]:
    """Return the columns as the data set that lm-eval scores."""
    from datasets import Dataset

    return {"test": Dataset.from_dict(columns)}
