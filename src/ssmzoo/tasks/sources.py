"""Data sets that exist: opened through ``datasets``, from the Hub or from a folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

if TYPE_CHECKING:
    from datasets import Dataset

_SPECIAL = 3  # padding, unknown, end of text
UNKNOWN, END = 1, 2
_TOGETHER = 1000


def open_data(
    task: str, data: str, split: str, columns: Iterable[str], *, config: str | None = None
) -> Dataset:
    """Open a split of a data set on the Hub, or of a folder that ``datasets`` can load.

    Args:
        task: Whose data it is, for errors.
        data: A Hub id, a folder of data files, or one that ``save_to_disk`` wrote.
        split: The split's name there.
        columns: What it must hold.
        config: The Hub data set's configuration.

    Raises:
        LookupError: There is no such data, split or column.
        RuntimeError: ``datasets`` is not installed.
    """
    datasets = require_datasets()
    folder = Path(data).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file():
            opened = datasets.load_from_disk(str(folder))[split]
        else:
            name = str(folder) if folder.is_dir() else data
            opened = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, KeyError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise LookupError(
            f"task {task}: no split {split!r} of the data {data!r}: {why}; give the argument data "
            f"a folder or a data set on the Hub with the columns {', '.join(columns)}"
        ) from error
    rows = cast("Dataset", opened)
    for column in columns:
        if column not in rows.column_names:
            raise LookupError(
                f"task {task}: the data {data!r} has no column {column!r}, "
                f"it has {', '.join(rows.column_names)}"
            )
    if not len(rows):
        raise LookupError(f"task {task}: the split {split!r} of the data {data!r} is empty")
    return rows


def require_datasets():
    """Return the module ``datasets``, or say how to install it."""
    try:
        import datasets
    except ImportError as error:
        raise RuntimeError("data sets need datasets: pip install 'ssmzoo[train]'") from error
    return datasets


def texts(rows: Dataset, column: str) -> Iterator[str]:
    """Yield the texts of a column, an absent one as the empty text."""
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
        self._ids = np.full(len(counts), UNKNOWN, dtype=kind)
        self._ids[known] = np.arange(_SPECIAL, self.vocab_size)

    def encode(self, text: str, max_length: int) -> np.ndarray:
        """Return the ids of a text and its end, at most ``max_length`` together."""
        ids = self._ids[_codes(text[: max_length - 1])]
        return np.append(ids, ids.dtype.type(END))


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
