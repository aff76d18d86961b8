"""Image of the Long Range Arena: CIFAR-10 in grey, pixel by pixel, row by row."""

from __future__ import annotations

from ssmzoo.tasks.data_sets import class_labels, grey_images, open_split
from ssmzoo.tasks.supervised import Supervised, value_rows

_SPLIT_SEED = 42
_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def load_cifar10(split: str, seed: int, *, data: str = "uoft-cs/cifar10") -> Supervised:
    """Return CIFAR-10 in grey (0.299 R + 0.587 G + 0.114 B), standardised as (x - 122.6) / 61.

    A tenth of the training images is the validation split, the same one always: torch's
    permutation of seed 42, as in the papers' code.

    Args:
        data: A Hub id or a folder with the splits train and test, columns ``img`` and ``label``.

    Raises:
        LookupError: No such data.
        ValueError: An image that is not 32 by 32, or a label that is not 0 .. 9.
        RuntimeError: ``datasets`` or Pillow is not installed.
    """
    import torch

    rows = open_split("cifar10", data, "test" if split == "test" else "train", ("img", "label"))
    if split != "test":
        kept = int(len(rows) * 0.9)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        rows = rows.select((order[:kept] if split == "train" else order[kept:]).tolist())
    pixels = grey_images(data, rows, "img", 32).reshape(len(rows), -1)
    labels = class_labels(data, rows, "label", 10)
    return value_rows(pixels, labels, shift=122.6, scale=61.0, label_names=_NAMES)
