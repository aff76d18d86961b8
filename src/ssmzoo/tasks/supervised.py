"""A task as a trainer reads it: batches of inputs, labels and lengths, and their meaning.

A batch is a pure function of the indices and the epoch, so a run resumes on the same examples.
Rows end at different places; they are padded on the right with zeros, and ``lengths`` says where
they end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ssmzoo.tasks.common import at_least

Kind = Literal["tokens", "values", "token_pairs", "images"]
Objective = Literal[
    "classification",
    "regression",
    "token_classification",
    "token_regression",
    "causal_lm",
    "forecast",
]
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
DIGITS = tuple("0123456789")  # the names of classes that are digits


@dataclass(frozen=True)
class Batch:
    """Some examples, padded to the longest of them.

    Attributes:
        inputs: Tokens int64 [B, L]; pairs of documents int64 [B, 2, L]; values float32 [B, L, C];
            images float32 [B, C, H, W].
        labels: Classes int64 [B] or values float32 [B]; for each token [B, L]. A class of -100 is
            ignored. A token's class is at the place that must predict it, but under ``causal_lm``
            one later, as Hugging Face's models expect. Of a ``forecast`` the values that follow,
            float32 [B, horizon, C].
        lengths: Places of each row that are no padding, int64 [B]; for pairs [B, 2]; an image's
            pixels.
    """

    inputs: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class Supervised:
    """One split of a task.

    Attributes:
        kind: The kind of the inputs.
        objective: The kind of the labels, which chooses head and loss.
        size: Examples an epoch.
        make: Examples by index and epoch; use :meth:`batch`.
        vocab_size: Ids the tokens are below; None for values and images. Id 0 is padding.
        num_labels: Classes, or values a label; None for ``causal_lm`` and ``forecast``.
        label_names: The names of the classes, in their order, where they have names.
        input_channels: Values a place; None for tokens and images.
        horizon: Places to predict; only for ``forecast``.
        image_shape: C, H, W of images.
        processor: The fields of ``preprocessor_config.json`` with which transformers' image
            processor gives a model these images.
        fresh: Every epoch has examples of its own; of a validation split, every validation.
        shuffle: Train in an order drawn anew every epoch, and not in that of the indices.
    """

    kind: Kind
    objective: Objective
    size: int
    make: Callable[[np.ndarray, int], Batch]
    vocab_size: int | None = None
    num_labels: int | None = None
    label_names: Sequence[str] | None = None
    input_channels: int | None = None
    horizon: int | None = None
    image_shape: tuple[int, int, int] | None = None
    processor: Mapping[str, Any] | None = None
    fresh: bool = False
    shuffle: bool = True

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int] | np.ndarray, epoch: int = 0) -> Batch:
        """Return the examples at these indices, in this order.

        Raises:
            IndexError: No index, or one outside of the split.
        """
        chosen = np.asarray(indices, dtype=np.int64)
        if chosen.ndim != 1 or not len(chosen):
            raise IndexError(f"indices must be a list of at least one, got shape {chosen.shape}")
        if chosen.min() < 0 or chosen.max() >= self.size:
            raise IndexError(
                f"indices must be between 0 and {self.size - 1}, "
                f"got {chosen.min()} to {chosen.max()}"
            )
        return self.make(chosen, epoch)


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths, end to end.

    Attributes:
        values: All rows [N].
        ends: Where each row ends [n].
    """

    values: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> Ragged:
        """Join rows."""
        return cls(np.concatenate(rows), np.cumsum([len(row) for row in rows]))

    def padded(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return rows padded with zeros, int64 [B, L], and their lengths [B]."""
        starts = np.concatenate([[0], self.ends[:-1]])[indices]
        lengths = self.ends[indices] - starts
        column = np.arange(max(1, lengths.max()))
        inside = column < lengths[:, None]
        places = np.where(inside, starts[:, None] + column, 0)
        return np.where(inside, self.values[places], 0).astype(np.int64), lengths


def drawn_examples(
    split: str,
    seed: int,
    size: int,
    fresh: bool,
    make: Callable[[list[np.random.Generator]], Batch],
    **meaning: Any,
) -> Supervised:
    """Return a task whose examples are each drawn by a generator of its own.

    Args:
        split: The split.
        seed: Same seed, same examples.
        size: Examples.
        fresh: Draw new training examples every epoch.
        make: One example for each generator.
        **meaning: The other fields of :class:`Supervised`.
    """
    anew = fresh and split == "train"

    def make_batch(indices: np.ndarray, epoch: int) -> Batch:
        place = SPLITS.index(split), epoch if anew else 0
        return make([np.random.default_rng([seed, *place, index]) for index in indices])

    return Supervised(size=size, make=make_batch, fresh=anew, **meaning)


def token_rows(
    rows: Ragged, labels: np.ndarray, *, vocab_size: int, label_names: Sequence[str]
) -> Supervised:
    """Return the classification of rows of tokens in memory."""

    def make(indices: np.ndarray, _epoch: int) -> Batch:
        inputs, lengths = rows.padded(indices)
        return Batch(inputs, labels[indices].astype(np.int64), lengths)

    return Supervised(
        "tokens",
        "classification",
        len(labels),
        make,
        vocab_size=vocab_size,
        num_labels=len(label_names),
        label_names=label_names,
    )


def value_rows(
    rows: np.ndarray,  # [n, L], any type
    labels: np.ndarray,  # [n]
    *,
    shift: float,
    scale: float,
    label_names: Sequence[str],
) -> Supervised:
    """Return the classification of rows of values, given to the model as (row - shift) / scale."""

    def make(indices: np.ndarray, _epoch: int) -> Batch:
        values = ((rows[indices].astype(np.float64) - shift) / scale).astype(np.float32)
        lengths = np.full(len(indices), rows.shape[1], dtype=np.int64)
        return Batch(values[..., None], labels[indices].astype(np.int64), lengths)

    return Supervised(
        "values",
        "classification",
        len(labels),
        make,
        num_labels=len(label_names),
        label_names=label_names,
        input_channels=1,
    )


def images(
    # indices, epoch -> [B, H, W] or [B, C, H, W], any type
    make_pixels: Callable[[np.ndarray, int], np.ndarray],
    labels: np.ndarray,  # [n]
    *,
    size: int,
    white: float,
    num_labels: int,
    label_names: Sequence[str] | None,
    channels: int = 1,
    fresh: bool = False,
    resize: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Supervised:
    """Return the classification of square images.

    A pixel is given to the model as ``pixel / white``, with a channel's mean and deviation as
    ``(pixel / white - mean) / std``. A grey image in three channels is the same in each.
    """
    shift, scale = (
        np.reshape(default if given is None else np.array(given), (-1, 1, 1))
        for given, default in ((mean, 0.0), (std, 1.0))
    )

    def make(indices: np.ndarray, epoch: int) -> Batch:
        pixels = make_pixels(indices, epoch)
        if pixels.ndim == 3:
            pixels = np.repeat(pixels[:, None], channels, axis=1)
        pixels = ((pixels / white - shift) / scale).astype(np.float32)
        lengths = np.full(len(indices), size * size, dtype=np.int64)
        return Batch(pixels, labels[indices].astype(np.int64), lengths)

    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": channels == 3,
        "size": {"shortest_edge": resize or size},
        "crop_size": {"height": size, "width": size},
        "resample": 3,  # bicubic
        "rescale_factor": 1 / 255,
        "do_normalize": mean is not None,
        "image_mean": shift.flatten().tolist(),
        "image_std": scale.flatten().tolist(),
    }

    return Supervised(
        "images",
        "classification",
        len(labels),
        make,
        num_labels=num_labels,
        label_names=label_names,
        image_shape=(channels, size, size),
        processor=processor,
        fresh=fresh,
    )


def size_of(split: str, *sizes: int) -> int:
    """Return the size of a split; check ``num_train``, ``num_validation`` and ``num_test``."""
    for name, size in zip(SPLITS, sizes, strict=True):
        at_least(f"num_{name}", size, 1)
    return sizes[SPLITS.index(split)]
