"""Existing data sets, opened through ``datasets`` from the Hub or from a folder."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ssmzoo.environment.messages import first_line, missing

if TYPE_CHECKING:
    from datasets import Dataset

_SPLIT_SEED = 42
_SPECIAL = 3  # padding, unknown, end of text
_UNKNOWN, _END = 1, 2
_TOGETHER = 1000


def open_split(task: str, data: str, split: str, columns: Sequence[str]) -> Dataset:
    """Open a split of a data set on the Hub, or of a folder that ``datasets`` can load.

    Args:
        task: The task's name, for errors.
        data: A Hub id, a folder of data files, or one that ``save_to_disk`` wrote.
        split: The split's name there.
        columns: The columns that it must have.

    Raises:
        LookupError: There is no such data, split or column.
        RuntimeError: ``datasets`` is not installed.
    """
    rows = _opened(task, data, split, columns)
    _require_columns(task, data, rows, columns)
    return rows


def open_splits(task: str, data: str, columns: Sequence[str]) -> list[Dataset]:
    """Open all splits of a data set; see :func:`open_split`."""
    opened = list(_opened(task, data, None, columns).values())
    for rows in opened:
        _require_columns(task, data, rows, columns)
    return opened


def _opened(task: str, data: str, split: str | None, columns: Sequence[str]) -> Any:
    datasets = require_datasets()
    from datasets.exceptions import DatasetsError

    folder = Path(data).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(str(folder))
            return saved if split is None else saved[split]
        with caching():
            return datasets.load_dataset(str(folder) if folder.is_dir() else data, split=split)
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        what = "data" if split is None else f"split {split!r} of the data"
        raise LookupError(
            f"task {task}: no {what} {data!r}: {first_line(error)}; "
            "give the argument data a folder or a data "
            f"set on the Hub with the columns {', '.join(columns)}"
        ) from error


def _require_columns(task: str, data: str, rows: Dataset, columns: Sequence[str]) -> None:
    for column in columns:
        if column not in rows.column_names:
            raise LookupError(
                f"task {task}: the data {data!r} has no column {column!r}, "
                f"it has {', '.join(rows.column_names)}"
            )
    if not len(rows):
        raise LookupError(f"task {task}: the data {data!r} has an empty split")


@contextmanager
def caching() -> Iterator[None]:
    """Turn an error inside about writing a cache into one that names the cache's variable.

    Raises:
        RuntimeError: The cache of ``datasets`` or of the Hub cannot be written.
    """
    try:
        yield
    except Exception as error:
        from datasets import config
        from huggingface_hub.constants import HF_HUB_CACHE

        caches = {"HF_DATASETS_CACHE": config.HF_DATASETS_CACHE, "HF_HUB_CACHE": HF_HUB_CACHE}
        causes = [error, error.__cause__, error.__context__]  # datasets' own error comes last
        for refused in (cause for cause in causes if isinstance(cause, OSError)):
            full = refused.errno in (errno.ENOSPC, errno.EDQUOT)
            for name, place in caches.items():
                if (full and refused.filename is None) or _around(refused.filename, str(place)):
                    raise RuntimeError(
                        f"the cache {place} cannot be written: {refused.strerror}; set {name} to a "
                        "folder that can, or make it writable"
                    ) from error
        raise


def _around(path: Any, folder: str) -> bool:
    """Tell whether a path lies in a folder, or is one of those around it."""
    path = path if isinstance(path, str) else "?"
    return f"{path}/".startswith(f"{folder}/") or f"{folder}/".startswith(f"{path}/")


def require_datasets():
    """Return the module ``datasets``; the error tells how to install it."""
    try:
        import datasets
    except ImportError as error:
        raise missing("data sets need datasets", "train", error) from error
    return datasets


def require_pillow() -> None:
    """Raise an error that tells how to install Pillow if it is not installed."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise missing("images need Pillow", "train", error) from error


def hold_out(rows: Dataset, split: str, count: int, argument: str) -> Dataset:
    """Return the training or the validation part of a training split, the same rows each time.

    Args:
        rows: The training split.
        split: Which part: ``train`` or ``validation``.
        count: How many rows are for validation.
        argument: Which argument of the task gave the count, for errors.

    Raises:
        ValueError: One of the parts would be empty.
    """
    if not 0 < count < len(rows):
        raise ValueError(
            f"{argument} must hold out some of the {len(rows)} training examples, not all, "
            f"got {count}"
        )
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(rows))
    return rows.select(np.sort(order[:count] if split == "validation" else order[count:]))


def class_labels(data: str, rows: Dataset, column: str, classes: int) -> np.ndarray:
    """Return the labels of all rows, int64 [n].

    Raises:
        ValueError: A label that is not one of the classes 0, 1, ...
    """
    labels = np.array(rows[column])
    if not (known := np.isin(labels, np.arange(classes))).all():
        raise ValueError(
            f"column {column!r} of {data!r} must hold classes 0 to {classes - 1}, "
            f"got {labels[~known][0]}"
        )
    return labels.astype(np.int64)


def grey_images(data: str, rows: Dataset, column: str, size: int) -> np.ndarray:
    """Return square images in grey, uint8 [n, size, size].

    Raises:
        ValueError: An image of another size.
        RuntimeError: Pillow is not installed.
    """
    require_pillow()
    pixels = np.empty((len(rows), size, size), dtype=np.uint8)
    for index, row in enumerate(rows.cast_column(column, require_datasets().Image())):
        image = row[column]  # pyright: ignore[reportArgumentType, reportCallIssue]
        if image.size != (size, size):
            raise ValueError(f"images of {data!r} must be {size} by {size}, got {image.size}")
        pixels[index] = np.asarray(image.convert("L"))
    return pixels


def texts(rows: Dataset, column: str) -> Iterator[str]:
    """Yield the texts of a column; a missing text is empty."""
    for some in rows.select_columns([column]).iter(batch_size=_TOGETHER):
        for text in cast("dict[str, list[str | None]]", some)[column]:
            yield text or ""


class Characters:
    """A vocabulary of characters: 0 padding, 1 unknown, 2 end of text, then by frequency.

    Args:
        corpus: The texts whose characters count.
        min_frequency: How often a character must occur to have an id of its own.
    """

    def __init__(self, corpus: Iterable[str], *, min_frequency: int) -> None:
        counts = np.zeros(0x110000, dtype=np.int64)
        waiting: list[str] = []

        def count() -> None:
            found, times = np.unique(_codes("".join(waiting)), return_counts=True)
            counts[found] += times
            waiting.clear()

        for text in corpus:
            waiting.append(text)
            if len(waiting) == _TOGETHER:
                count()
        count()
        known = np.flatnonzero(counts >= max(1, min_frequency))
        known = known[np.argsort(-counts[known], kind="stable")]
        self.vocab_size = _SPECIAL + len(known)
        kind = np.uint8 if self.vocab_size <= 256 else np.uint32
        self._ids = np.full(len(counts), _UNKNOWN, dtype=kind)
        self._ids[known] = np.arange(_SPECIAL, self.vocab_size)

    def encode(self, text: str, max_length: int) -> np.ndarray:
        """Return the ids of a text and its end, at most ``max_length`` together."""
        ids = self._ids[_codes(text[: max_length - 1])]
        return np.append(ids, ids.dtype.type(_END))


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
