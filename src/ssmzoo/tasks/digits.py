"""Digits: 1,797 handwritten digits of 8 by 8 pixels that scikit-learn ships; nothing to download.

They are the test set of the UCI Optical Recognition of Handwritten Digits data.
"""

from __future__ import annotations

import numpy as np

from ssmzoo.environment.messages import missing
from ssmzoo.tasks.supervised import DIGITS, SPLITS, Ragged, Supervised, images, token_rows

_SPLIT_SEED = 42
_HELD_OUT = 300  # in each of validation and test


def load_digits(split: str, seed: int, *, rgb: bool = False, pixels: bool = False) -> Supervised:
    """Return the digits, pixels in 0 .. 1: always the same 1,197 to train on, 300 and 300.

    Args:
        rgb: Give every image in three equal channels, as transformers' pipelines do.
        pixels: Give every image as 64 tokens, row by row: a grey of 0 .. 16 is id 1 .. 17.

    Raises:
        ValueError: Both ``rgb`` and ``pixels``.
        RuntimeError: scikit-learn is not installed.
    """
    if rgb and pixels:
        raise ValueError("rgb and pixels must not both be true: a token is one grey")
    try:
        from sklearn import datasets
    except ImportError as error:
        raise missing("the digits need scikit-learn", "digits", error) from error
    greys, labels = map(np.asarray, datasets.load_digits(return_X_y=True))
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))
    parts = np.split(order, [len(order) - 2 * _HELD_OUT, len(order) - _HELD_OUT])
    chosen = parts[SPLITS.index(split)]
    greys, labels = greys[chosen], labels[chosen]
    if pixels:
        rows = Ragged.of(list(greys.astype(np.int64) + 1))
        return token_rows(rows, labels, vocab_size=18, label_names=DIGITS)
    squares = greys.reshape(-1, 8, 8)
    channels = 3 if rgb else 1
    return images(
        lambda i, _epoch: squares[i],
        labels,
        size=8,
        white=16.0,
        num_labels=10,
        label_names=DIGITS,
        channels=channels,
    )
