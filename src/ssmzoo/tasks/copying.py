"""Copying: read random tokens, then as many recall tokens, and predict the first ones in order."""

from __future__ import annotations

import numpy as np

from ssmzoo.tasks.common import IGNORED, at_least
from ssmzoo.tasks.supervised import Batch, Supervised, drawn_examples, size_of


def load_copying(
    split: str,
    seed: int,
    *,
    length: int = 1024,
    vocab_size: int = 64,
    num_train: int = 10_000,
    num_validation: int = 1_000,
    num_test: int = 1_000,
    fresh: bool = False,
) -> Supervised:
    """Return the copying task, made when it is asked for. The defaults are the RTF paper's.

    A row is ``length`` tokens of 0 .. ``vocab_size - 2`` and then ``length`` times the recall token
    ``vocab_size - 1``; the i-th recall token is to be answered with the i-th token.

    Args:
        length: Tokens to remember.
        vocab_size: The recall token counted.
        num_train: Training rows an epoch.
        num_validation: Validation rows.
        num_test: Test rows.
        fresh: Draw new training rows every epoch.

    Raises:
        ValueError: A size below 1, or ``vocab_size`` below 2.
    """
    size = size_of(split, num_train, num_validation, num_test)
    at_least("length", length, 1)
    at_least("vocab_size", vocab_size, 2)

    def make(generators: list[np.random.Generator]) -> Batch:
        inputs = np.full((len(generators), 2 * length), vocab_size - 1, dtype=np.int64)
        for row, rng in zip(inputs, generators, strict=True):
            row[:length] = rng.integers(0, vocab_size - 1, size=length)
        labels = np.full_like(inputs, IGNORED)
        labels[:, length:] = inputs[:, :length]
        return Batch(inputs, labels, np.full(len(generators), 2 * length))

    return drawn_examples(
        split,
        seed,
        size,
        fresh,
        make,
        kind="tokens",
        objective="token_classification",
        vocab_size=vocab_size,
        num_labels=vocab_size,
    )
