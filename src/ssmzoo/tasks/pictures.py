"""Any labelled pictures that ``datasets`` opens: ImageNet, CIFAR-10, a folder of folders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ssmzoo.environment.messages import first_line
from ssmzoo.tasks.common import at_least
from ssmzoo.tasks.data_sets import (
    class_labels,
    hold_out,
    open_split,
    require_datasets,
    require_pillow,
)
from ssmzoo.tasks.supervised import Supervised, images

_SCALES, _RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)  # of the part that training cuts out, as usual
_ATTEMPTS = 10


def load_pictures(
    split: str,
    seed: int,
    *,
    data: str,
    size: int = 224,
    resize: int | None = None,
    image: str = "image",
    label: str = "label",
    test: str = "test",
    num_validation: int = 10_000,
    mean: Sequence[float] = (0.485, 0.456, 0.406),
    std: Sequence[float] = (0.229, 0.224, 0.225),
    crop: bool = True,
    mirror: bool = True,
) -> Supervised:
    """Return pictures in three channels, decoded as they are needed.

    The shorter side is resized (bicubic) and the middle cut out, as the image processor of the
    trained model does. In training a random part of 8 to 100 % of the picture, of a ratio of 3/4 to
    4/3, is resized instead, and half of them are mirrored; every epoch draws anew.

    Args:
        seed: Of the parts and mirrored pictures in training.
        data: A Hub id or a folder that ``datasets`` loads, with a split train.
        size: Side of the square that the model gets.
        resize: Length of the shorter side before the middle is cut out; ``size`` by default.
        image: The column of pictures.
        label: The column of classes: numbers, of which there are as many as the column says, or as
            the training split has.
        test: The split to test on.
        num_validation: Pictures of the training split that are held out, at random.
        mean: Of each channel, taken off after pixels were scaled to 0 .. 1.
        std: Of each channel; divided by it.
        crop: Whether training cuts out random parts.
        mirror: Whether training mirrors.

    Raises:
        LookupError: No such data.
        ValueError: An argument is out of range, a label is not a class, or a picture is damaged.
        RuntimeError: ``datasets`` or Pillow is not installed.
    """
    require_pillow()
    at_least("size", size, 1)
    resize = size if resize is None else resize
    at_least("resize", resize, size)
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise ValueError(f"mean and std > 0 must be three numbers, got {list(mean)}, {list(std)}")
    rows = open_split("pictures", data, test if split == "test" else "train", (image, label))
    feature: Any = rows.features[label]
    classes = getattr(feature, "num_classes", None) or _count_classes(data, label)
    if split != "test":
        rows = hold_out(rows, split, num_validation, "num_validation")
    labels = class_labels(data, rows, label, classes)
    rows = rows.cast_column(image, require_datasets().Image())
    draws = split == "train" and (crop or mirror)

    def draw(index: int, epoch: int) -> np.ndarray:
        try:
            picture = rows[index][image].convert("RGB")
        except (OSError, AttributeError) as error:
            raise ValueError(
                f"picture {index} of the {split} split of {data!r} is damaged: {first_line(error)}"
            ) from error
        rng = np.random.default_rng([seed, epoch, index])
        if draws and crop:
            picture = picture.resize((size, size), 3, box=_part(picture.size, rng))
        else:
            picture = _middle(picture, size, resize)
        pixels = np.asarray(picture)
        return pixels[:, ::-1] if draws and mirror and rng.random() < 0.5 else pixels

    def make(indices: np.ndarray, epoch: int) -> np.ndarray:
        return np.stack([draw(i, epoch) for i in indices.tolist()]).transpose(0, 3, 1, 2)

    return images(
        make,
        labels,
        size=size,
        white=255.0,
        num_labels=classes,
        label_names=getattr(feature, "names", None),
        channels=3,
        fresh=draws,
        resize=resize,
        mean=mean,
        std=std,
    )


def _count_classes(data: str, label: str) -> int:
    labels = np.array(open_split("pictures", data, "train", (label,))[label])
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"column {label!r} of {data!r} must hold numbers, got {labels.dtype}")
    return int(labels.max()) + 1


def _middle(picture: Any, size: int, resize: int) -> Any:
    """Return the middle of a picture whose shorter side was resized, as CLIP's processor does."""
    width, height = picture.size
    shorter = min(width, height)
    if shorter != resize:
        width, height = (int(resize * side / shorter) for side in (width, height))
        picture = picture.resize((width, height), 3)
    left, top = (width - size) // 2, (height - size) // 2
    return picture.crop((left, top, left + size, top + size))


def _part(sides: tuple[int, int], rng: np.random.Generator) -> tuple[float, float, float, float]:
    """Draw a part of a picture: left, top, right and bottom; all of it if none fits."""
    width, height = sides
    for _ in range(_ATTEMPTS):
        area = width * height * rng.uniform(*_SCALES)
        ratio = np.exp(rng.uniform(*np.log(_RATIOS)))
        w, h = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if w <= width and h <= height:
            left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return left, top, left + w, top + h
    return 0, 0, width, height
