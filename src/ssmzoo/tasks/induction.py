"""Induction heads: say what followed the trigger when it was seen first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ssmzoo.tasks.common import IGNORED, LETTERS, at_least, lm_eval_split, symbols

if TYPE_CHECKING:
    from datasets import Dataset


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
        ValueError: ``seq_len`` or ``vocab_size`` below 3, or a negative ``seed``.
    """
    at_least("num_examples", num_examples, 1)
    at_least("seq_len", seq_len, 3)
    at_least("vocab_size", vocab_size, 3)
    at_least("seed", seed, 0)
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


def induction_documents(
    *, num_examples: int, seq_len: int, vocab_size: int, seed: int, **_: Any
) -> dict[str, Dataset]:
    """Return induction heads for lm-eval, in symbols: one document a row."""
    input_ids, _labels = induction_heads(
        num_examples, seq_len=seq_len, vocab_size=vocab_size, seed=seed
    )
    return lm_eval_split(
        context=[symbols(row[:-1]) for row in input_ids],
        answer=[f" t{row[-1]}" for row in input_ids],
    )


def induction_text_documents(
    *, num_examples: int, seq_len: int, seed: int, **_: Any
) -> dict[str, Dataset]:
    """Return induction heads in plain characters: ``q w # v z ... #``, to be answered ``v``.

    The choices are the 26 letters, in every document.
    """
    input_ids, _labels = induction_heads(num_examples, seq_len=seq_len, vocab_size=28, seed=seed)
    alphabet = np.array([" ", *LETTERS, "#"])
    return lm_eval_split(
        context=[" ".join(alphabet[row[:-1]]) for row in input_ids],
        choices=[list(LETTERS)] * num_examples,
        answer=(input_ids[:, -1] - 1).tolist(),
    )
