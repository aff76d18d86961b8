"""MNIST as images, row by row: handwritten digits, turned a little in training, cropped."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from ssmzoo.tasks.data_sets import class_labels, grey_images, hold_out, open_split
from ssmzoo.tasks.supervised import DIGITS, Supervised, images

_SIDE = 28


def load_mnist(
    split: str,
    seed: int,
    *,
    data: str = "ylecun/mnist",
    crop: int = 25,
    rotation: float = 5.0,
    num_validation: int = 10_000,
) -> Supervised:
    """Return MNIST, pixels in 0 .. 1. The defaults are the COFFEE paper's.

    Training images are turned by an angle drawn anew every epoch. The paper also shifts them by at
    most a hundredth of their side, which is less than half a pixel and rounds to nothing. Which
    images are held out never changes.

    The image processor that a model is saved with cuts as the task does. Where it cannot, because
    it rounds another way (crops of 25, 21, 17 and so on), it gives images of 28 by 28, and the
    model must cut them as COFFEE's classifier does.

    Args:
        seed: Of the angles.
        data: A Hub id or a folder with the splits train and test, columns ``image`` and ``label``.
        crop: Side of the square that is cut from the middle.
        rotation: Largest angle in degrees, to either side; 0 does not turn.
        num_validation: Training images that are held out, at random.

    Raises:
        LookupError: No such data.
        ValueError: An argument is out of range, an image that is not 28 by 28, or a label that is
            not 0 .. 9.
        RuntimeError: ``datasets`` or Pillow is not installed.
    """
    if not 1 <= crop <= _SIDE:
        raise ValueError(f"crop must be between 1 and {_SIDE}, got {crop}")
    if not 0 <= rotation <= 180:
        raise ValueError(f"rotation must be between 0 and 180 degrees, got {rotation}")
    rows = open_split("mnist", data, "test" if split == "test" else "train", ("image", "label"))
    if split != "test":
        rows = hold_out(rows, split, num_validation, "num_validation")
    pixels, labels = grey_images(data, rows, "image", _SIDE), class_labels(data, rows, "label", 10)
    turns = split == "train" and rotation > 0

    @lru_cache(maxsize=1)
    def angles(epoch: int) -> np.ndarray:
        return np.random.default_rng([seed, epoch]).uniform(-rotation, rotation, size=len(pixels))

    def make(indices: np.ndarray, epoch: int) -> np.ndarray:
        degrees = angles(epoch)[indices] if turns else np.zeros(len(indices))
        return turned(pixels[indices], degrees, crop)

    task = images(
        make,
        labels,
        size=crop,
        resize=_SIDE,
        white=255.0,
        num_labels=10,
        label_names=DIGITS,
        fresh=turns,
    )
    if round((_SIDE - crop) / 2) == (_SIDE - crop) // 2:  # where an image processor begins
        return task
    whole = {"height": _SIDE, "width": _SIDE}
    return replace(task, processor={**(task.processor or {}), "crop_size": whole})


def turned(pixels: np.ndarray, degrees: np.ndarray, crop: int) -> np.ndarray:
    """Turn square images around their middle and cut out the middle.

    A pixel takes the value of the one nearest to where it came from, and 0 from outside.

    Args:
        pixels: [B, S, S].
        degrees: An angle an image, from the columns towards the rows [B].
        crop: Side of the part that is cut out.

    Returns:
        [B, crop, crop], of the same type.
    """
    side = pixels.shape[1]
    middle = (side - 1) / 2
    places = round((side - crop) / 2) + np.arange(crop) - middle
    angle = np.deg2rad(degrees)[:, None]
    cos, sin = np.cos(angle) * places, np.sin(angle) * places  # [B, crop]
    row = _nearest(cos[:, :, None] - sin[:, None, :] + middle, side)
    column = _nearest(sin[:, :, None] + cos[:, None, :] + middle, side)
    framed = np.pad(pixels, ((0, 0), (1, 1), (1, 1)))
    begin = np.arange(len(pixels), dtype=np.int32) * (side + 2) ** 2
    return framed.reshape(-1)[begin[:, None, None] + row * (side + 2) + column]


def _nearest(places: np.ndarray, side: int) -> np.ndarray:
    """Return which of ``side`` pixels and a frame around them lie nearest, the frame's first 0."""
    return np.rint(places).clip(-1, side).astype(np.int32) + 1
