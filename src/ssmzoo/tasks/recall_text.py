"""Key-value recall in plain characters, for any language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ssmzoo.tasks.common import LETTERS, at_least, distinct, lm_eval_split

if TYPE_CHECKING:
    from datasets import Dataset

_CONSONANTS, _VOWELS = "bcdfghjklmnpqrstvwxz", "aeiou"


def recall_text_documents(
    *, num_examples: int, num_pairs: int, seed: int, **_: Any
) -> dict[str, Dataset]:
    """Return key-value recall in plain characters, for any language model.

    A document is lines like ``kod = Q`` and then a key that it holds; the choices are the
    letters that it holds, all different, so guessing scores ``1 / num_pairs``.
    """
    at_least("num_examples", num_examples, 1)
    at_least("seed", seed, 0)
    if not 2 <= num_pairs <= 26:
        raise ValueError(f"num_pairs must be between 2 and 26, got {num_pairs}")
    words = [a + b + c for a in _CONSONANTS for b in _VOWELS for c in _CONSONANTS]
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
