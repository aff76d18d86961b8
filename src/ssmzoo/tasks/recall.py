"""Multi-query associative recall: pairs of a key and a value, then each key once as a query.

The paper puts the label on the query itself; here it sits one place later, as Hugging Face's
convention has it. No query is lost by that: the last even place is never the last place. Recall in
plain characters is for any language model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ssmzoo.tasks.common import (
    IGNORED,
    LETTERS,
    at_least,
    distinct,
    lm_eval_split,
    own_arguments,
    symbols,
)

if TYPE_CHECKING:
    from datasets import Dataset


def mqar(
    num_examples: int,
    *,
    seq_len: int = 64,
    num_pairs: int = 4,
    vocab_size: int = 8192,
    power: float = 0.01,
    random_filler: bool = False,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Make multi-query associative recall: pairs first, then each key once as a query.

    A row is ``k1 v1 ... kn vn`` and then ``seq_len - 2 n`` places of filler in which every key
    appears once, at an even place. Place ``2 i`` is drawn with weight ``power * (i + 1) **
    (power - 1)``, so most queries come soon after the pairs.

    Args:
        num_examples: Rows.
        seq_len: Length of a row.
        num_pairs: Keys a row holds, each asked once.
        vocab_size: Ids 1 .. V/2-1 are keys, V/2 .. V-1 values.
        power: Exponent parameter of the query places.
        random_filler: Fill with ids of the whole vocabulary instead of id 0.
        seed: Same seed, same rows.

    Returns:
        ``input_ids`` and ``labels``, int64 [num_examples, seq_len]. A label differs from the input
        at its place, which is filler, but by chance.

    Raises:
        ValueError: The pairs do not fit into the length or the vocabulary, or an argument is out of
            range.
    """
    at_least("num_examples", num_examples, 1)
    at_least("num_pairs", num_pairs, 1)
    at_least("seed", seed, 0)
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
    keys = distinct(rng, num_examples, num_pairs, 1, half)
    values = distinct(rng, num_examples, num_pairs, half, vocab_size)

    context = 2 * num_pairs
    slots = np.arange(1, (seq_len - context) // 2 + 1)
    # the largest k of log-weight plus Gumbel noise, in order, are k weighted draws in turn without
    # replacement; the constant factor of the weights does not matter
    score = (power - 1) * np.log(slots) + rng.gumbel(size=(num_examples, len(slots)))
    places = context + 2 * np.argsort(-score, axis=1)[:, :num_pairs]

    input_ids = np.zeros((num_examples, seq_len), dtype=np.int64)
    if random_filler:
        input_ids = rng.integers(vocab_size, size=input_ids.shape)
    input_ids[:, 0:context:2] = keys
    input_ids[:, 1:context:2] = values
    np.put_along_axis(input_ids, places, keys, axis=1)
    labels = np.full_like(input_ids, IGNORED)
    np.put_along_axis(labels, places + 1, values, axis=1)
    return input_ids, labels


def mqar_documents(
    *, num_examples: int, num_pairs: int, seed: int, **metadata: Any
) -> dict[str, Dataset]:
    """Return :func:`mqar` for lm-eval, in symbols: one document a row, asking one of its keys.

    The key is drawn evenly, so accuracy has the expectation of scoring every query, and documents
    are independent, as the standard error supposes. Other metadata of a task is ignored.
    """
    made = own_arguments(mqar, metadata)
    input_ids, labels = mqar(num_examples, num_pairs=num_pairs, seed=seed, **made)
    asked = np.random.default_rng([seed, 1]).integers(num_pairs, size=num_examples)
    answers = np.nonzero(labels != IGNORED)[1].reshape(num_examples, num_pairs)
    ends = answers[np.arange(num_examples), asked]
    return lm_eval_split(
        context=[symbols(row[:end]) for row, end in zip(input_ids, ends, strict=True)],
        answer=[f" t{row[end]}" for row, end in zip(labels, ends, strict=True)],
    )


def recall_text_documents(
    *, num_examples: int, num_pairs: int, seed: int, **_: Any
) -> dict[str, Dataset]:
    """Return key-value recall in plain characters, for any language model.

    A document is lines like ``kod = Q`` and then one of its keys; the choices are its letters,
    all different (so at most 26), and guessing scores ``1 / num_pairs``. A seed's documents must
    not change: published scores are of them.
    """
    at_least("num_examples", num_examples, 1)
    at_least("seed", seed, 0)
    if not 2 <= num_pairs <= 26:
        raise ValueError(f"num_pairs must be between 2 and 26, got {num_pairs}")
    consonants = "bcdfghjklmnpqrstvwxz"
    words = [a + b + c for a in consonants for b in "aeiou" for c in consonants]
    rng = np.random.default_rng(seed)
    keys = distinct(rng, num_examples, num_pairs, 0, len(words))
    values = distinct(rng, num_examples, num_pairs, 0, 26)
    asked = rng.integers(num_pairs, size=num_examples)
    contexts, choices = [], []
    for row_keys, row_values, index in zip(keys, values, asked, strict=True):
        letters = [LETTERS[value].upper() for value in row_values]
        lines = [f"{words[k]} = {v}\n" for k, v in zip(row_keys, letters, strict=True)]
        contexts.append("".join(lines) + f"{words[row_keys[index]]} =")
        choices.append(letters)
    return lm_eval_split(context=contexts, choices=choices, answer=asked.tolist())
