"""Recall problems and local text, made from a seed: for training, and for scoring with lm-eval.

- ``mqar`` and ``induction_heads`` give token ids; recipes train on them.
- ``*_documents`` wrap the same problems as lm-eval data sets; ``eval/tasks/*.yaml`` name them.
- Labels follow Hugging Face's convention: ``labels[:, t]`` is what position ``t - 1`` must predict,
  -100 where nothing is asked. The papers put MQAR's label on the query itself; here it sits one
  later. No query is lost by that: the last even place is never the last place.
- In every problem, id 0 is filler: never a key, a value, a trigger or noise.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

IGNORED = -100
_CONSONANTS, _VOWELS, _LETTERS = "bcdfghjklmnpqrstvwxz", "aeiou", "abcdefghijklmnopqrstuvwxyz"


def mqar(
    num_examples: int,
    *,
    seq_len: int = 64,
    num_pairs: int = 4,
    vocab_size: int = 8192,
    power: float = 0.01,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Make multi-query associative recall: pairs first, then each key once, to be answered.

    A row is ``k1 v1 ... kn vn`` and then ``seq_len - 2 n`` places of filler in which every key
    appears once, at an even place. Place ``2 i`` is drawn with weight ``power * (i + 1) **
    (power - 1)``, so most queries come soon after the pairs.

    Args:
        num_examples: Rows.
        seq_len: Length of what a model reads.
        num_pairs: Keys a row holds, each asked once.
        vocab_size: Ids 1 .. V/2-1 are keys, V/2 .. V-1 values.
        power: Exponent parameter of the query places.
        seed: Same seed, same rows.

    Returns:
        ``input_ids`` and ``labels``, int64 [num_examples, seq_len]. A label differs from the input
        at its place, which is filler.

    Raises:
        ValueError: The pairs do not fit into the length or the vocabulary.
    """
    _at_least("num_examples", num_examples, 1)
    _at_least("num_pairs", num_pairs, 1)
    if seq_len < 4 * num_pairs:
        raise ValueError(
            f"seq_len must be at least 4 * num_pairs = {4 * num_pairs} to hold the pairs and an "
            f"even place for every query, got {seq_len}"
        )
    half = vocab_size // 2
    if num_pairs > half - 1:
        raise ValueError(
            f"vocab_size must be at least {2 * num_pairs + 2} for {num_pairs} distinct keys, "
            f"got {vocab_size}"
        )
    if not power > 0:
        raise ValueError(f"power must be positive, got {power}")
    rng = np.random.default_rng(seed)
    keys = _distinct(rng, num_examples, num_pairs, 1, half)
    values = _distinct(rng, num_examples, num_pairs, half, vocab_size)

    context = 2 * num_pairs
    slots = np.arange(1, (seq_len - context) // 2 + 1)
    # the largest k of log-weight plus Gumbel noise, in order, are k weighted draws in turn without
    # replacement; the constant factor of the weights does not matter
    score = (power - 1) * np.log(slots) + rng.gumbel(size=(num_examples, len(slots)))
    places = context + 2 * np.argsort(-score, axis=1)[:, :num_pairs]

    input_ids = np.zeros((num_examples, seq_len), dtype=np.int64)
    input_ids[:, 0:context:2] = keys
    input_ids[:, 1:context:2] = values
    np.put_along_axis(input_ids, places, keys, axis=1)
    labels = np.full_like(input_ids, IGNORED)
    np.put_along_axis(labels, places + 1, values, axis=1)
    return input_ids, labels


def induction_heads(
    num_examples: int, *, seq_len: int, vocab_size: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Make the induction problem: noise, trigger, target, noise, trigger; say the target.

    The trigger is always id ``vocab_size - 1``; target and noise are drawn from 1 ..
    vocab_size - 2, so guessing scores ``1 / (vocab_size - 2)``. The first trigger is equally
    likely at every place that leaves room for the target.

    Returns:
        ``input_ids`` and ``labels``, int64 [num_examples, seq_len + 1]. A model reads the first
        ``seq_len`` columns; the last one is the answer, and the only label.

    Raises:
        ValueError: ``seq_len`` or ``vocab_size`` below 3.
    """
    _at_least("num_examples", num_examples, 1)
    _at_least("seq_len", seq_len, 3)
    _at_least("vocab_size", vocab_size, 3)
    rng = np.random.default_rng(seed)
    trigger = vocab_size - 1
    rows = np.arange(num_examples)
    input_ids = rng.integers(1, trigger, size=(num_examples, seq_len + 1), dtype=np.int64)
    first = rng.integers(0, seq_len - 2, size=num_examples)
    input_ids[rows, first] = trigger
    input_ids[:, seq_len - 1] = trigger
    input_ids[:, seq_len] = input_ids[rows, first + 1]
    labels = np.full_like(input_ids, IGNORED)
    labels[:, seq_len] = input_ids[:, seq_len]
    return input_ids, labels


def symbol_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer of models trained on token ids: symbol ``t17`` is id 17.

    Its text is symbols between blanks. It holds nothing else, so a model's ``vocab_size`` is its
    length; padding and end of text are the filler, ``t0``.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    _at_least("vocab_size", vocab_size, 1)
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(vocab_size)}))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="t0")


def symbol_count(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return how many symbols a :func:`symbol_tokenizer` holds, None for any other tokenizer."""
    vocab = tokenizer.get_vocab()
    return len(vocab) if all(vocab.get(f"t{i}") == i for i in range(len(vocab))) else None


def mqar_documents(
    *,
    num_examples: int,
    seq_len: int,
    num_pairs: int,
    vocab_size: int,
    seed: int,
    power: float = 0.01,
    **_: Any,
) -> dict[str, Dataset]:
    """Return MQAR for lm-eval, in symbols: one document a row, asking one of its keys.

    The key is drawn evenly, so accuracy has the expectation of scoring every query, and documents
    are independent, as the standard error supposes. Other keywords (lm-eval passes all of a
    task's metadata) are ignored.
    """
    input_ids, labels = mqar(
        num_examples,
        seq_len=seq_len,
        num_pairs=num_pairs,
        vocab_size=vocab_size,
        power=power,
        seed=seed,
    )
    asked = np.random.default_rng([seed, 1]).integers(num_pairs, size=num_examples)
    answers = np.nonzero(labels != IGNORED)[1].reshape(num_examples, num_pairs)
    ends = answers[np.arange(num_examples), asked]
    return _test_split(
        context=[_symbols(row[:end]) for row, end in zip(input_ids, ends, strict=True)],
        answer=[f" t{row[end]}" for row, end in zip(labels, ends, strict=True)],
    )


def induction_documents(
    *, num_examples: int, seq_len: int, vocab_size: int, seed: int, **_: Any
) -> dict[str, Dataset]:
    """Return induction heads for lm-eval, in symbols: one document a row."""
    input_ids, _labels = induction_heads(
        num_examples, seq_len=seq_len, vocab_size=vocab_size, seed=seed
    )
    return _test_split(
        context=[_symbols(row[:-1]) for row in input_ids],
        answer=[f" t{row[-1]}" for row in input_ids],
    )


def recall_text_documents(
    *, num_examples: int, num_pairs: int, seed: int, **_: Any
) -> dict[str, Dataset]:
    """Return key-value recall in plain characters, for any language model.

    A document is lines like ``kod = Q`` and then a key that it holds; the choices are the
    letters that it holds, all different, so guessing scores ``1 / num_pairs``.
    """
    _at_least("num_examples", num_examples, 1)
    if not 2 <= num_pairs <= 26:
        raise ValueError(f"num_pairs must be between 2 and 26, got {num_pairs}")
    words = [a + b + c for a in _CONSONANTS for b in _VOWELS for c in _CONSONANTS]
    rng = np.random.default_rng(seed)
    keys = _distinct(rng, num_examples, num_pairs, 0, len(words))
    values = _distinct(rng, num_examples, num_pairs, 0, 26)
    asked = rng.integers(num_pairs, size=num_examples)
    contexts, choices = [], []
    for row_keys, row_values, index in zip(keys, values, asked, strict=True):
        letters = [_LETTERS[value].upper() for value in row_values]
        lines = [f"{words[k]} = {v}\n" for k, v in zip(row_keys, letters, strict=True)]
        contexts.append("".join(lines) + f"{words[row_keys[index]]} =")
        choices.append(letters)
    return _test_split(context=contexts, choices=choices, answer=asked.tolist())


def induction_text_documents(
    *, num_examples: int, seq_len: int, seed: int, **_: Any
) -> dict[str, Dataset]:
    """Return induction heads in plain characters: ``q w # v z ... #``, to be answered ``v``.

    The choices are the 26 letters, in every document.
    """
    input_ids, _labels = induction_heads(num_examples, seq_len=seq_len, vocab_size=28, seed=seed)
    alphabet = np.array([" ", *_LETTERS, "#"])
    return _test_split(
        context=[" ".join(alphabet[row[:-1]]) for row in input_ids],
        choices=[list(_LETTERS)] * num_examples,
        answer=(input_ids[:, -1] - 1).tolist(),
    )


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
    return _test_split(text=[pieces[i] for i in order])


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
    _at_least("window", window, 4)
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


def _distinct(rng: np.random.Generator, rows: int, count: int, low: int, high: int) -> np.ndarray:
    """Draw ``count`` different integers of low .. high-1 a row, every ordered choice alike."""
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


def _symbols(ids: np.ndarray) -> str:
    return " ".join(f"t{i}" for i in ids)


def _test_split(**columns: list[Any]) -> dict[str, Dataset]:
    from datasets import Dataset

    return {"test": Dataset.from_dict(columns)}


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
