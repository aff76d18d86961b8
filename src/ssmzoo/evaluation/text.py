"""Local text for lm-eval, cut into windows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmzoo.data.paths import expand
from ssmzoo.data.readers import read_files
from ssmzoo.files import kind_of_records
from ssmzoo.tasks.common import at_least, lm_eval_split

if TYPE_CHECKING:
    from datasets import Dataset


def text_documents(
    *, text: str | None = None, window: int = 2048, seed: int = 0, **_: Any
) -> dict[str, Dataset]:
    """Return a local text for lm-eval, cut into windows, in an order drawn from the seed.

    The order lets a limited run see a sample of the whole text instead of its beginning.

    Raises:
        ValueError: No text is named, or there is nothing in it.
    """
    if not text:
        raise ValueError(
            "ssmzoo_bits_per_byte needs a text: give text=FILE_OR_FOLDER to evaluate(), or "
            '\'{"text": "FILE_OR_FOLDER"}\' as --metadata to lm_eval'
        )
    at_least("seed", seed, 0)
    pieces = [piece for document in read_documents(text) for piece in cut(document, window)]
    order = np.random.default_rng(seed).permutation(len(pieces))
    return lm_eval_split(text=[pieces[i] for i in order])


def read_documents(text: str | Path) -> list[str]:
    """Read a text file, or every text file below a folder in the order of their names.

    A ``.jsonl`` (or ``.jsonl.gz``) or ``.parquet`` file holds one document a line or row, in the
    field ``text``; any other file is one document. Blank documents, hidden files, and files in a
    folder that are not UTF-8 are left out.

    Raises:
        ValueError: There is no such file or folder, or no text in it.
        LookupError: Records of a file have no field ``text``.
    """
    root = Path(text).expanduser()
    if not root.exists():
        raise ValueError(f"text must name a file or a folder, and there is none at {str(text)!r}")
    documents = []
    for file in expand([str(text)], "text"):
        kind = kind_of_records(file.name) or "text"
        found = read_files(kind, [file], "text", skip_binary=root.is_dir())
        documents += [document for _, document in found if document.strip()]
    if not documents:
        raise ValueError(f"text must hold something to score, and {str(text)!r} is empty")
    return documents


def cut(document: str, window: int) -> list[str]:
    """Cut a document into pieces of at most ``window`` bytes of UTF-8, no character in two.

    Raises:
        ValueError: ``window`` below 4, the bytes of the longest character.
    """
    at_least("window", window, 4)
    data = document.encode()
    pieces, start = [], 0
    while start < len(data):
        end = min(start + window, len(data))
        while end < len(data) and data[end] & 0xC0 == 0x80:
            end -= 1
        pieces.append(data[start:end].decode())
        start = end
    return pieces
