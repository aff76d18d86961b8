"""Digits: 1,797 handwritten digits of 8 by 8 pixels that scikit-learn ships; nothing to download.

They are the test set of the UCI Optical Recognition of Handwritten Digits data.
"""

from __future__ import annotations

import numpy as np

from ssmzoo.tasks.supervised import DIGITS, SPLITS, Supervised, images, require_split

_SPLIT_SEED = 42
_HELD_OUT = 300  # in each of validation and test


def load_digits(split: str, seed: int, *, rgb: bool = False) -> Supervised:
    """Return the digits, pixels in 0 .. 1: 1,197 to train on, 300 to validate, 300 to test.

    Args:
        split: ``train``, ``validation`` or ``test``; always the same, drawn once.
        seed: Not used.
        rgb: Give every image in three equal channels, as transformers' pipelines do.

    Raises:
        LookupError: No such split.
        RuntimeError: scikit-learn is not installed.
    """
    require_split(split)
    try:
        from sklearn import datasets
    except ImportError as error:
        raise RuntimeError(
            "the digits come with scikit-learn: pip install 'ssmzoo[digits]'"
        ) from error
    pixels, labels = map(np.asarray, datasets.load_digits(return_X_y=True))
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))
    parts = np.split(order, [len(order) - 2 * _HELD_OUT, len(order) - _HELD_OUT])
    chosen = parts[SPLITS.index(split)]
    pixels, labels = pixels[chosen].reshape(-1, 8, 8), labels[chosen]
    channels = 3 if rgb else 1
    return images(
        lambda i, _epoch: pixels[i],
        labels,
        size=8,
        white=16.0,
        num_labels=10,
        label_names=DIGITS,
        channels=channels,
    )
