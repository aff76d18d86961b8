"""Copying: read random tokens, then as many recall tokens, and say the first ones in order."""

from __future__ import annotations

import numpy as np

from ssmzoo.tasks.common import IGNORED, at_least
from ssmzoo.tasks.supervised import SPLITS, Batch, Supervised, require_split


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
        split: ``train``, ``validation`` or ``test``.
        seed: Same seed, same rows.
        length: Tokens to remember.
        vocab_size: The recall token counted.
        num_train: Training rows an epoch.
        num_validation: Validation rows.
        num_test: Test rows.
        fresh: Draw new training rows every epoch.

    Raises:
        LookupError: No such split.
        ValueError: A size below 1, ``vocab_size`` below 2, or a negative ``seed``.
    """
    require_split(split)
    sizes = {"train": num_train, "validation": num_validation, "test": num_test}
    for name, size in [("length", length), *((f"num_{k}", v) for k, v in sizes.items())]:
        at_least(name, size, 1)
    at_least("vocab_size", vocab_size, 2)
    at_least("seed", seed, 0)
    anew = fresh and split == "train"

    def make(indices: np.ndarray, epoch: int) -> Batch:
        inputs = np.full((len(indices), 2 * length), vocab_size - 1, dtype=np.int64)
        for row, index in zip(inputs, indices, strict=True):
            rng = np.random.default_rng([seed, SPLITS.index(split), epoch if anew else 0, index])
            row[:length] = rng.integers(0, vocab_size - 1, size=length)
        labels = np.full_like(inputs, IGNORED)
        labels[:, length:] = inputs[:, :length]
        return Batch(inputs, labels, np.full(len(indices), 2 * length))

    return Supervised(
        "tokens",
        "token_classification",
        sizes[split],
        make,
        vocab_size=vocab_size,
        num_labels=vocab_size,
        fresh=anew,
    )
