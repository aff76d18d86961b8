"""Local text for lm-eval, cut into windows."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

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
    pieces = [piece for document in read_documents(text) for piece in cut(document, window)]
    order = np.random.default_rng(seed).permutation(len(pieces))
    return lm_eval_split(text=[pieces[i] for i in order])


def read_documents(text: str | Path) -> list[str]:
    """Read a text file, or every text file below a folder in the order of their names.

    A ``.jsonl`` file holds one document a line, in the field ``text``; any other file is one
    document. Empty documents, hidden files, and files in a folder that are not UTF-8 are left out.

    Raises:
        ValueError: There is no such file or folder, or no text in it.
    """
    root = Path(text).expanduser()
    if root.is_dir():
        files = [p for p in sorted(root.rglob("*")) if p.is_file() and not _hidden(p, root)]
    elif root.is_file():
        files = [root]
    else:
        raise ValueError(f"text must name a file or a folder, and there is none at {str(text)!r}")
    documents = []
    for path in files:
        try:
            documents += [d for d in _documents_in(path) if d.strip()]
        except UnicodeDecodeError as error:
            if path == root:
                raise ValueError(f"text must be UTF-8, and {str(text)!r} is not") from error
            logging.getLogger("ssmzoo").warning("left out %s: it is not UTF-8 text", path)
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


def _documents_in(path: Path) -> Iterator[str]:
    content = path.read_bytes().decode()
    if path.suffix != ".jsonl":
        yield content
        return
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"line {number} of {path} must be a JSON object with a field 'text'"
            ) from error


def _hidden(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    return any(part.startswith(".") or part == "__pycache__" for part in parts)
