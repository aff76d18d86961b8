"""Forecast: predict how a piece of a time series goes on; its channels are columns of a CSV file.

Each column is given as ``(x - mean) / deviation`` of its training rows, and the errors are in this
unit too, as in the papers' tables of ETT, Weather and their like.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

import numpy as np

from ssmzoo.environment.messages import suggestion
from ssmzoo.tasks.common import at_least
from ssmzoo.tasks.supervised import SPLITS, Batch, Supervised


def load_forecast(
    split: str,
    seed: int,
    *,
    data: str,
    columns: Sequence[str],
    lag: int = 336,
    horizon: int = 720,
    rows: Sequence[int] | None = None,
    center: bool = False,
) -> Supervised:
    """Return every window of a split: ``lag`` rows to read, ``horizon`` rows after them to predict.

    The rows to predict are within the split. Windows of validation and test may begin before it.

    Args:
        data: A CSV file in UTF-8 whose first line names the columns; a row is a step of time.
        columns: The columns to read and to predict, one channel each.
        lag: Rows that the model reads.
        horizon: Rows that it predicts.
        rows: How many rows train, validation and test have, from the first row on; absent, all in
            the proportion 60 : 20 : 20.
        center: Subtract a window's mean over ``lag`` from it and from the rows to predict.

    Raises:
        LookupError: No such file or column.
        ValueError: A cell is no finite number, a column is constant, a size is below 1, or a split
            has too few rows for one window.
    """
    at_least("lag", lag, 1)
    at_least("horizon", horizon, 1)
    values = _columns(data, columns)
    counts = _counts(data, len(values), rows)
    for name, count, least in zip(SPLITS, counts, (lag + horizon, horizon, horizon), strict=True):
        if count < least:
            raise ValueError(
                f"data: {data!r} must have at least {least} rows to {name} on, got {count} of "
                f"{len(values)}; shorten lag = {lag} or horizon = {horizon}"
            )
    trained, place = values[: counts[0]], SPLITS.index(split)
    mean, deviation = trained.mean(axis=0), trained.std(axis=0)
    varies = np.ptp(trained, axis=0) > 0  # the deviation of equal numbers may be a rounding
    if not varies.all():
        constant = columns[int(varies.argmin())]
        raise ValueError(f"column {constant!r} of {data!r} must vary over the training rows")
    end = sum(counts[: place + 1])
    begin = end - counts[place] - (lag if place else 0)
    series = ((values[begin:end] - mean) / deviation).astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(series, lag + horizon, axis=0)  # [n, C, L]

    def make(indices: np.ndarray, _epoch: int) -> Batch:
        some = windows[indices].transpose(0, 2, 1)
        if center:
            some = some - some[:, :lag].mean(axis=1, keepdims=True)
        return Batch(some[:, :lag], some[:, lag:], np.full(len(indices), lag))

    return Supervised(
        "values",
        "forecast",
        len(windows),
        make,
        input_channels=len(columns),
        horizon=horizon,
    )


def _counts(data: str, total: int, rows: Sequence[int] | None) -> list[int]:
    """Return how many rows each split has."""
    if rows is None:
        train, validation = total * 6 // 10, total * 2 // 10
        return [train, validation, total - train - validation]
    if len(rows) != len(SPLITS) or not all(type(n) is int for n in rows) or sum(rows) > total:
        raise ValueError(
            f"rows must be three whole numbers of the {total} rows of {data!r}, "
            f"for {', '.join(SPLITS)}, got {list(rows)}"
        )
    return list(rows)


def _columns(data: str, columns: Sequence[str]) -> np.ndarray:
    """Return the numbers of some columns of a CSV file, float64 [n, C]."""
    if not columns:
        raise ValueError("columns must name at least one column, got none")
    try:
        with Path(data).expanduser().open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file)
            header = next(lines, [])
            for column in columns:
                if column not in header:
                    hint = (
                        suggestion(str(column), header) or f"; it has {', '.join(header) or 'none'}"
                    )
                    raise LookupError(f"task forecast: {data!r} has no column {column!r}{hint}")
            places = [header.index(column) for column in columns]
            found = [
                [_number(data, lines.line_num, header[i], cells[i : i + 1]) for i in places]
                for cells in lines
                if cells
            ]
    except OSError as error:
        raise LookupError(f"task forecast: no CSV file {data!r}: {error.strerror}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"task forecast: {data!r} is not a CSV file in UTF-8: {error}") from error
    return np.array(found, dtype=np.float64).reshape(-1, len(columns))


def _number(data: str, line: int, column: str, cell: list[str]) -> float:
    """Return the number in a cell, which is absent where a row is short."""
    try:
        value = float(*cell) if cell else float("nan")
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise ValueError(
            f"line {line}, column {column!r} of {data!r} must be a finite number, "
            f"got {cell[0] if cell else ''!r}"
        )
    return value
