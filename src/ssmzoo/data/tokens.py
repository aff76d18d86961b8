"""Documents as tokens: tokenised once into a folder, or in memory, and split.

- Local files and downloaded data sets are tokenised into the run's ``cache`` folder, from which
  processes read the parts that they need; streams are tokenised while training.
- Documents are held out by their content, so that the choice does not depend on order or
  seed, and no copy of a held-out document is trained on.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from ssmzoo.checkpoints.load import vocabulary_size
from ssmzoo.data.tokenizer import Encoder, token_dtype
from ssmzoo.data.workers import Workers
from ssmzoo.files import write_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH_CHARACTERS = 4_000_000
_SHORTEST_END = 64  # tokens; where ends would be shorter, whole documents are held out


class TokensOnDisk:
    """Tokens in a file, of which slices are read.

    They are not mapped into memory: pages that were read would count as this process's memory.
    """

    def __init__(self, file: Path, dtype: str) -> None:
        self._file, self._dtype = file, np.dtype(dtype)

    def __len__(self) -> int:
        """Return how many there are."""
        return self._file.stat().st_size // self._dtype.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return those from ``part.start`` to ``part.stop``."""
        offset = int(part.start) * self._dtype.itemsize
        return np.fromfile(self._file, self._dtype, int(part.stop - part.start), offset=offset)


@dataclass(frozen=True)
class TokenStore:
    """Documents as tokens, end to end.

    Attributes:
        tokens: [N].
        ends: Where each document ends [n].
        hashes: A hash of each document's text [n].
        names: Each document's file, where a document is a file.
    """

    tokens: np.ndarray | TokensOnDisk
    ends: np.ndarray
    hashes: np.ndarray
    names: list[str]

    @property
    def spans(self) -> np.ndarray:
        """Beginning and end of each document [n, 2]."""
        return np.stack([np.concatenate([[0], self.ends[:-1]]), self.ends], axis=1)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document [n]."""
        return np.diff(self.ends, prepend=0)

    def split(
        self, validation: float | int | list[str] | None, *, ends: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return the spans to train on, the held-out documents, and their spans if there are any.

        Documents without tokens are not counted. For held-out paths and splits see
        :meth:`without`.

        Args:
            validation: The recipe's ``data.validation``.
            ends: Whether a share is the end of every document; see :meth:`holds_out_ends`.

        Raises:
            ValueError: Nothing would be left to train on.
        """
        spans, none = self.spans, np.empty(0, np.int64)
        if validation is None or isinstance(validation, list):
            return spans, none, None
        if ends:
            begins, stops = spans[self.lengths > 0].T
            cuts = stops - np.maximum(1, ((stops - begins) * validation).astype(np.int64))
            kept, held_out = (np.stack(x, axis=1) for x in ((begins, cuts), (cuts, stops)))
            return kept[kept[:, 0] < kept[:, 1]], none, held_out
        chosen = self._chosen(validation)
        if self.lengths[~chosen].any():
            return spans[~chosen], np.flatnonzero(chosen), spans[chosen]
        raise ValueError(
            f"data.validation must leave documents to train on: {validation} holds out all of the "
            f"{np.count_nonzero(self.lengths)} there are"
        )

    def holds_out_ends(self, validation: float | int | list[str] | None) -> bool:
        """Tell whether the ends of documents are held out rather than whole documents.

        A single document, or copies of one, gives its end. So do several if the share is less than
        one of them, and the one that would be held out has more than twice the share of the tokens.
        Short documents do not: training would never see the mark of their end.
        """
        lengths = self.lengths
        hashes, documents = self.hashes[lengths > 0], np.count_nonzero(lengths)
        if not isinstance(validation, float) or not documents:
            return False
        if (hashes == hashes[0]).all():
            return True
        share = validation * lengths.sum()
        ends = np.median(validation * lengths[lengths > 0])
        too_much = lengths[self._chosen(validation)].sum() > 2 * share
        return bool(documents * validation < 1 and too_much and ends >= _SHORTEST_END)

    def _chosen(self, validation: float | int) -> np.ndarray:
        """Return which documents are held out whole [n]: those of the least hashes."""
        with_tokens = np.flatnonzero(self.lengths)
        hashes, documents = self.hashes[with_tokens], len(with_tokens)
        share = isinstance(validation, float)
        count = max(1, round(validation * documents)) if share else int(validation)
        chosen = np.zeros(len(self.ends), bool)
        least = hashes if count >= documents else np.partition(hashes, count - 1)[:count]
        chosen[with_tokens] = hashes <= least.max(initial=0)
        return chosen

    def without(self, held_out: TokenStore) -> np.ndarray:
        """Return the spans to train on, which are no copies of documents of another store.

        Raises:
            ValueError: Nothing would be left to train on.
        """
        copies = np.isin(self.hashes, held_out.hashes)
        if copies.all():
            raise ValueError(
                f"data.validation must leave documents to train on: it names all of the "
                f"{len(copies)} there are"
            )
        return self.spans[~copies]


def tokens_of(texts: Iterator[str], encode: Encoder, need: int | None) -> TokenStore:
    """Tokenise held-out documents in memory: all, or until there are ``need`` tokens.

    Raises:
        ValueError: No document at all.
    """
    parts: list[np.ndarray] = []
    hashes: list[int] = []
    total = 0
    for _, batch in _batches(("", text) for text in texts):
        parts += (documents := encode(batch))
        hashes += [text_hash(text) for text in batch]
        total += sum(map(len, documents))
        if need is not None and total >= need:
            break
    if not parts:
        raise ValueError("data.validation must hold text, got none")
    ends = np.cumsum([len(part) for part in parts])
    return TokenStore(np.concatenate(parts), ends, np.array(hashes, np.uint64), [])


def write_store(
    documents: Iterator[tuple[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    key: str,
    field: str,
    workers: int,
) -> None:
    """Tokenise named documents into a folder, which appears only when it is complete.

    Args:
        documents: Name and text; an empty name is not kept.
        tokenizer: The tokenizer.
        folder: The folder.
        key: Identifies the store's content; see :func:`is_store`.
        field: The recipe's field that names the documents, for errors.
        workers: Processes that tokenise beside this one; they change nothing in the result.

    Raises:
        ValueError: No text at all.
        RuntimeError: A worker was killed.
    """

    def write(folder: Path) -> None:
        names: list[str] = []
        hashes, lengths = array("Q"), array("q")
        with (
            (folder / "tokens").open("wb") as file,
            tqdm(desc="tokenise", unit=" tokens", unit_scale=True, disable=None) as bar,
            closing(Workers(tokenizer, workers)) as pool,
        ):
            for batch_names, result in _in_order(pool, documents):
                tokens, its_hashes = result()
                file.write(np.concatenate(tokens).tobytes())
                lengths.extend(map(len, tokens))
                bar.update(sum(map(len, tokens)))
                hashes.extend(its_hashes)
                names.extend(filter(None, batch_names))
        if not sum(lengths):
            raise ValueError(f"{field} must hold text, got none")
        np.save(folder / "ends.npy", np.cumsum(lengths, dtype=np.int64))
        np.save(folder / "hashes.npy", np.array(hashes, np.uint64))
        dtype = np.dtype(token_dtype(vocabulary_size(tokenizer))).name
        facts = {"key": key, "dtype": dtype, "tokens": sum(lengths), "names": names}
        (folder / "store.json").write_text(json.dumps(facts), encoding="utf-8")

    write_folder(folder, write)


def is_store(folder: Path, key: str) -> bool:
    """Return whether a folder holds the whole store of this key."""
    try:
        facts = json.loads((folder / "store.json").read_text(encoding="utf-8"))
        size = (folder / "tokens").stat().st_size
    except (OSError, ValueError):
        return False
    return facts["key"] == key and size == facts["tokens"] * np.dtype(facts["dtype"]).itemsize


def read_store(folder: Path) -> TokenStore:
    """Open the store in a folder, its tokens on disk."""
    facts = json.loads((folder / "store.json").read_text(encoding="utf-8"))
    return TokenStore(
        TokensOnDisk(folder / "tokens", facts["dtype"]),
        np.load(folder / "ends.npy"),
        np.load(folder / "hashes.npy"),
        facts["names"],
    )


def text_hash(text: str) -> int:
    """Return a 64-bit hash of a document's text."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def _tokenised(encode: Encoder, texts: Sequence[str]) -> tuple[list[np.ndarray], list[int]]:
    return encode(texts), [text_hash(text) for text in texts]


def _in_order(
    workers: Workers, documents: Iterable[tuple[str, str]]
) -> Iterator[tuple[list[str], Callable[[], tuple[list[np.ndarray], list[int]]]]]:
    """Yield names and tokens of batches in order, with two for each worker on the way."""
    ahead: deque[tuple[list[str], Callable[[], tuple[list[np.ndarray], list[int]]]]] = deque()
    for names, texts in _batches(documents):
        ahead.append((names, workers.submit(_tokenised, texts)))
        if len(ahead) > 2 * workers.count:
            yield ahead.popleft()
    yield from ahead


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[tuple[list[str], list[str]]]:
    names: list[str] = []
    texts: list[str] = []
    characters = 0
    for name, text in documents:
        names.append(name)
        texts.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield names, texts
            names, texts, characters = [], [], 0
    if texts:
        yield names, texts
