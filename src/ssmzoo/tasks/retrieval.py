"""Retrieval of the Long Range Arena: does one of two papers of AAN cite the other?"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from ssmzoo.tasks.common import at_least
from ssmzoo.tasks.data_sets import (
    Characters,
    caching,
    class_labels,
    open_split,
    require_datasets,
    texts,
)
from ssmzoo.tasks.supervised import Batch, Ragged, Supervised

if TYPE_CHECKING:
    from datasets import Dataset

_FILES = {"train": "train", "validation": "eval", "test": "test"}
_COLUMNS = ("label", "text1", "text2")


def load_retrieval(split: str, seed: int, *, data: str, max_length: int = 4000) -> Supervised:
    """Return pairs of papers as characters.

    The vocabulary is that of both papers of all training pairs.

    Args:
        data: The folder of the arena's ``new_aan_pairs.train.tsv``, ``.eval.tsv``, ``.test.tsv``;
            or a Hub id or a folder with the three splits, columns ``label``, ``text1``, ``text2``.
        max_length: Characters of a paper that are read, the end of the text counted.

    Raises:
        LookupError: No such data.
        ValueError: ``max_length`` below 1, or a label that is not 0 or 1.
    """
    at_least("max_length", max_length, 1)
    train = _open(data, "train")
    characters = Characters(
        (text for column in ("text1", "text2") for text in texts(train, column)), min_frequency=1
    )
    rows = train if split == "train" else _open(data, split)
    first, second = (
        Ragged.of([characters.encode(text, max_length) for text in texts(rows, column)])
        for column in ("text1", "text2")
    )
    labels = class_labels(data, rows, "label", 2)

    def make(indices: np.ndarray, _epoch: int) -> Batch:
        sides = [side.padded(indices) for side in (first, second)]
        longest = max(tokens.shape[1] for tokens, _ in sides)
        inputs = np.zeros((len(indices), 2, longest), dtype=np.int64)
        for number, (tokens, _) in enumerate(sides):
            inputs[:, number, : tokens.shape[1]] = tokens
        lengths = np.stack([lengths for _, lengths in sides], axis=1)
        return Batch(inputs, labels[indices], lengths)

    return Supervised(
        "token_pairs",
        "classification",
        len(labels),
        make,
        vocab_size=characters.vocab_size,
        num_labels=2,
    )


def _open(data: str, split: str) -> Dataset:
    folder = Path(data).expanduser()
    files = {name: folder / f"new_aan_pairs.{part}.tsv" for name, part in _FILES.items()}
    if not any(file.is_file() for file in files.values()):
        return open_split("aan", data, split, _COLUMNS)
    if not files[split].is_file():
        raise LookupError(f"task aan: {files[split].name} is missing in {data!r}")
    # a quotation mark is a character like any other in these files: a line is a pair
    with caching():
        opened = require_datasets().load_dataset(
            "csv",
            data_files=str(files[split]),
            split="train",
            delimiter="\t",
            column_names=["label", "id1", "id2", "text1", "text2"],
            quoting=csv.QUOTE_NONE,
            keep_default_na=False,
        )
    return cast("Dataset", opened)
