"""Pathfinder and Path-X of the Long Range Arena: are the two discs ends of one dashed curve?

An image has two dashed curves that touch nowhere, shorter distractors, and two discs. The first
disc lies at the beginning of one of the two curves, the second at the far end of the same curve
(label 1) or of the other (label 0). Curves grow dash by dash, many images at once.

- Lengths and places are in pixels, a place is (x, y), and pixel (0, 0) reaches from (0, 0) to
  (1, 1).
- Images are made in rounds, each with a generator of its own, so the first n images do not depend
  on how many are asked for.
- An image in which something finds no room is thrown away before its label is drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ssmzoo.files import appears_whole
from ssmzoo.tasks.common import at_least
from ssmzoo.tasks.supervised import SPLITS, Supervised, size_of, value_rows

_SCALE = 2  # drawn at twice the size
_CANDIDATES = 256  # images tried together; part of what a seed means
_DIRECTIONS = 32
_TRIALS = 8


@dataclass(frozen=True)
class _Settings:
    """The arena's settings for one size of image."""

    size: int
    margins: tuple[float, ...]  # free space around a dash, one is drawn an image
    length: float
    thickness: float
    radius: float  # of a disc
    seed_distance: float
    continuity: float  # higher is straighter
    distractor_dashes: int  # of all distractors together
    contrast: float
    padding: float = 1.0


_SETTINGS = {
    32: _Settings(32, (1.0,), 2.0, 0.5, 1.5, 7.0, 1.0, 20, min(1.0, 2 * 0.75)),
    128: _Settings(128, (2.0, 3.0), 5.0, 1.5, 3.0, 20.0, 1.8, 35, 0.9),
}


@dataclass(frozen=True)
class Pathfinder:
    """Drawn images and their contents.

    Attributes:
        images: Grey values, uint8 [n, S, S].
        labels: Whether the discs are on one curve [n].
        curves: Both curves' dashes, each as x, y of its beginning and end [n, 2, K, 4].
        distractors: The same of the other curves [n, M, J, 4].
        discs: Centres [n, 2, 2].
    """

    images: np.ndarray
    labels: np.ndarray
    curves: np.ndarray
    distractors: np.ndarray
    discs: np.ndarray


def pathfinder_images(
    num_images: int, *, resolution: int = 32, contour_length: int = 14, seed: int
) -> Pathfinder:
    """Draw Pathfinder images.

    Args:
        num_images: Images; about half of their labels are 1.
        resolution: 32, or 128 for Path-X.
        contour_length: Dashes of the two curves: 6, 9 or 14, from easy to hard.
        seed: Same seed, same images.

    Raises:
        ValueError: An argument is out of range.
    """
    _check(resolution, contour_length)
    at_least("num_images", num_images, 1)
    at_least("seed", seed, 0)
    rounds = list(_rounds(_SETTINGS[resolution], contour_length, seed, num_images))
    return Pathfinder(
        *(
            np.concatenate([getattr(made, name) for made in rounds])[:num_images]
            for name in ("images", "labels", "curves", "distractors", "discs")
        )
    )


def load_pathfinder(
    split: str,
    seed: int,
    *,
    resolution: int = 32,
    contour_length: int = 14,
    num_train: int = 160_000,
    num_validation: int = 20_000,
    num_test: int = 20_000,
    cache: str | None = None,
) -> Supervised:
    """Return Pathfinder as rows of pixels in [-1, 1], row by row.

    Args:
        resolution: As for :func:`pathfinder_images`.
        contour_length: As for :func:`pathfinder_images`.
        num_train: Training images.
        num_validation: Validation images.
        num_test: Test images.
        cache: A folder to keep the images in; the next call reads them there.

    Raises:
        ValueError: An argument is out of range.
    """
    _check(resolution, contour_length)
    size = size_of(split, num_train, num_validation, num_test)
    drawn = int(np.random.SeedSequence([seed, SPLITS.index(split)]).generate_state(1)[0])
    settings = _SETTINGS[resolution]
    if cache is None:
        rows = np.empty((size, resolution**2 + 1), dtype=np.uint8)
        _fill(rows, settings, contour_length, drawn)
    else:
        rows = _cached(Path(cache).expanduser(), settings, contour_length, drawn, size)
    return value_rows(
        rows[:, :-1], rows[:, -1], shift=127.5, scale=127.5, label_names=("apart", "connected")
    )


def _check(resolution: int, contour_length: int) -> None:
    if resolution not in _SETTINGS:
        raise ValueError(f"resolution must be 32 or 128, got {resolution}")
    if contour_length not in (6, 9, 14):
        raise ValueError(f"contour_length must be 6, 9 or 14, got {contour_length}")


def _rounds(
    settings: _Settings, contour_length: int, seed: int, num_images: int
) -> Iterator[Pathfinder]:
    """Yield images, some at a time, until there are enough."""
    number = found = 0
    while found < num_images:
        rng = np.random.default_rng([seed, number])
        two, others = _grow(settings, contour_length, rng)
        number += 1
        found += len(two)
        if len(two):
            yield _draw(settings, two, others, rng)


def _fill(rows: np.ndarray, settings: _Settings, contour_length: int, seed: int) -> None:
    """Write images, flat and followed by their label, into rows."""
    start = 0
    for made in _rounds(settings, contour_length, seed, len(rows)):
        part = rows[start : start + len(made.images)]
        part[:, :-1] = made.images.reshape(len(made.images), -1)[: len(part)]
        part[:, -1] = made.labels[: len(part)]
        start += len(part)


def _cached(
    folder: Path, settings: _Settings, contour_length: int, seed: int, size: int
) -> np.ndarray:
    meaning = [asdict(settings), contour_length, seed, size, _CANDIDATES]
    digest = hashlib.sha256(json.dumps(meaning).encode()).hexdigest()[:16]
    path = folder / f"pathfinder-{settings.size}-{digest}.npy"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with appears_whole(path) as unfinished:
            shape = (size, settings.size**2 + 1)
            rows = np.lib.format.open_memmap(unfinished, mode="w+", dtype=np.uint8, shape=shape)
            _fill(rows, settings, contour_length, seed)
            rows.flush()
    return np.load(path, mmap_mode="r")


def _draw(
    settings: _Settings, two: np.ndarray, others: np.ndarray, rng: np.random.Generator
) -> Pathfinder:
    """Draw labels, discs and images for curves that are there, half of the labels 1."""
    count = len(two)
    every = np.arange(count)
    labels = rng.permutation(every % 2)
    first = rng.integers(0, 2, size=count)
    second = np.where(labels == 1, first, 1 - first)
    discs = np.stack([two[every, first, 0, :2], two[every, second, -1, 2:]], axis=1)

    large = settings.size * _SCALE
    pad = _window(settings.length / 2 + settings.thickness + settings.radius)
    canvas = np.zeros((count, large + 2 * pad, large + 2 * pad), dtype=np.float32)
    dashes = np.concatenate([two.reshape(count, -1, 4), others.reshape(count, -1, 4)], axis=1)
    thick = np.full(count, settings.thickness / 2, dtype=np.float32)
    for dash in dashes.transpose(1, 0, 2):
        where, inside = _covered(every, dash, thick, pad)
        canvas[where] = np.maximum(canvas[where], settings.contrast * inside)
    round_ = np.full(count, settings.radius, dtype=np.float32)
    for disc in discs.transpose(1, 0, 2):
        where, inside = _covered(every, np.tile(disc, 2), round_, pad)
        canvas[where] = np.maximum(canvas[where], inside)
    shrink = _lanczos(settings.size)
    small = shrink @ canvas[:, pad:-pad, pad:-pad] @ shrink.T
    images = np.rint(np.clip(small, 0, 1) * 255).astype(np.uint8)
    return Pathfinder(images, labels, two, others, discs)


def _grow(
    settings: _Settings, contour_length: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the curves and distractors of ``_CANDIDATES`` images, without those lacking room."""
    room = _Room(settings, rng)
    two, alive = room.grow_two(contour_length)
    others, alive = room.grow_distractors(alive, contour_length // 3)
    return two[alive], others[alive]


class _Room:
    """The free places of ``_CANDIDATES`` images, in which curves grow dash by dash."""

    def __init__(self, settings: _Settings, rng: np.random.Generator) -> None:
        self.settings, self.rng, self.count = settings, rng, _CANDIDATES
        self.margin = rng.choice(settings.margins, size=self.count).astype(np.float32)
        self.reach = self.margin + settings.thickness  # between the axes of two dashes
        self.pad = _window(settings.length / 2 + float(self.reach.max())) + 2 * _SCALE
        side = settings.size * _SCALE + 2 * self.pad
        # how many dashes forbid a place
        self.taken = np.zeros((self.count, side, side), dtype=np.int8)
        steps = np.linspace(0, 1, 1 + 2 * int(np.ceil(settings.length)), dtype=np.float32)
        self.steps = steps[:, None]

    def grow_two(self, contour_length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return two curves an image [n, 2, K, 4], and which images had room for them."""
        size, distance = self.settings.size, self.settings.seed_distance
        middle = self.rng.uniform(2 * distance, size - 2 * distance, size=(self.count, 2))
        apart = distance * _unit(self.rng.uniform(0, 2 * np.pi, size=self.count))
        two = np.zeros((self.count, 2, contour_length, 4), dtype=np.float32)
        two[:, 0, 0], two[:, 1, 0] = self._dashes_at(middle), self._dashes_at(middle + apart)
        alive = np.arange(self.count)
        self._stamp(alive, two[:, 1, 0])
        for curve in (0, 1):
            if curve:
                self._stamp(alive, two[alive, 1, 0], -1)
            for step in range(1, contour_length):
                # the newest dash is not stamped yet: the next one may be near it, and near no other
                dash, room = self._extend(alive, two[alive, curve, step - 1])
                alive, dash = alive[room], dash[room]
                self._stamp(alive, two[alive, curve, step - 1])
                two[alive, curve, step] = dash
            self._stamp(alive, two[alive, curve, -1])
        return two, alive

    def grow_distractors(self, alive: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return distractors of ``length`` dashes [n, M, J, 4], and which images had room."""
        number = self.settings.distractor_dashes // length
        others = np.zeros((self.count, number, length, 4), dtype=np.float32)
        for i in range(number):
            missing = alive
            for _ in range(_TRIALS):
                missing = np.setdiff1d(missing, self._grow_one(missing, others[:, i]))
                if not len(missing):
                    break
            alive = np.setdiff1d(alive, missing)
        return others, alive

    def _grow_one(self, missing: np.ndarray, curve: np.ndarray) -> np.ndarray:
        """Try to grow a distractor [n, J, 4] in images; return in which it has room."""
        seeds = self._dashes_at(
            self.rng.uniform(0, self.settings.size, size=(len(missing), _DIRECTIONS, 2))
        )
        room = self._free(missing, seeds)
        ids = missing[room.any(axis=1)]
        grown = [seeds[np.arange(len(missing)), room.argmax(axis=1)][room.any(axis=1)]]
        for _ in range(curve.shape[1] - 1):
            dash, room = self._extend(ids, grown[-1])
            ids = ids[room]
            grown = [*(before[room] for before in grown), dash[room]]
        clear = _apart(np.stack(grown, axis=1), self.reach[ids], self.steps)
        ids = ids[clear]
        for step, dash in enumerate(grown):
            curve[ids, step] = dash[clear]
            self._stamp(ids, dash[clear])
        return ids

    def _stamp(self, ids: np.ndarray, dash: np.ndarray, sign: int = 1) -> None:
        where, inside = _covered(ids, dash, self.reach[ids], self.pad)
        self.taken[where] += sign * inside.astype(np.int8)

    def _free(self, ids: np.ndarray, dash: np.ndarray) -> np.ndarray:  # [n], [n, K, 4] -> [n, K]
        size, padding = self.settings.size, self.settings.padding
        places = dash[..., None, :2] * (1 - self.steps) + dash[..., None, 2:] * self.steps
        inside = (places >= padding) & (places <= size - padding)
        cell = (places.clip(0, size - 0.5) * _SCALE).astype(np.int32) + self.pad
        clear = self.taken[ids[:, None, None], cell[..., 1], cell[..., 0]] == 0
        return (inside.all(axis=3) & clear).all(axis=2)

    def _extend(self, ids: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw a dash behind the last one of each image; return them and which have room."""
        angle = np.arctan2(last[:, 3] - last[:, 1], last[:, 2] - last[:, 0])
        gap = self.margin[ids, None] / 2
        pivot = last[:, 2:] + gap * _unit(angle)
        jitter = self.rng.random((len(ids), 1), dtype=np.float32)
        bend = ((np.arange(_DIRECTIONS) + jitter) / _DIRECTIONS * 2 - 1) * np.pi / 2
        ahead = _unit(angle[:, None] + bend / self.settings.continuity)
        start = pivot[:, None] + gap[:, None] * ahead
        dashes = np.concatenate([start, start + self.settings.length * ahead], axis=2)
        total = (np.cos(bend) ** 2 * self._free(ids, dashes)).cumsum(axis=1)
        drawn = self.rng.random((len(ids), 1), dtype=np.float32) * total[:, -1:]
        chosen = (total <= drawn).sum(axis=1).clip(max=_DIRECTIONS - 1)
        return dashes[np.arange(len(ids)), chosen], total[:, -1] > 0

    def _dashes_at(self, middle: np.ndarray) -> np.ndarray:
        turn = _unit(self.rng.uniform(0, 2 * np.pi, size=middle.shape[:-1]))
        half = self.settings.length / 2 * turn
        return np.concatenate([middle - half, middle + half], axis=-1).astype(np.float32)


def _apart(curve: np.ndarray, reach: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return which curves [n, J, 4] keep their distance from themselves."""
    places = curve[:, :, None, :2] * (1 - steps) + curve[:, :, None, 2:] * steps
    good = np.ones(len(curve), dtype=bool)
    for later in range(2, curve.shape[1]):
        for former in range(later - 1):
            between = places[:, later, :, None] - places[:, former, None]
            good &= ((between**2).sum(axis=3) >= reach[:, None, None] ** 2).all(axis=(1, 2))
    return good


def _covered(
    ids: np.ndarray, dash: np.ndarray, radius: np.ndarray, pad: int
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """Return the places around each image's dash [n, 4], and which lie within the radius."""
    middle = (dash[:, :2] + dash[:, 2:]) / 2
    half = (dash[:, 2:] - dash[:, :2]) / 2
    squared = (half**2).sum(axis=1)
    window = _window(float(np.sqrt(squared).max(initial=0) + radius.max(initial=0)))
    offset = np.arange(-window, window + 1)
    cell = np.floor(middle * _SCALE).astype(np.int32)
    columns, rows = cell[:, 0, None] + offset, cell[:, 1, None] + offset  # [n, w]
    x = ((columns + 0.5) / _SCALE - middle[:, 0, None]).astype(np.float32)
    y = ((rows + 0.5) / _SCALE - middle[:, 1, None]).astype(np.float32)
    scale = 1 / np.maximum(squared, 1e-9)[:, None]
    along = (y * half[:, 1, None] * scale)[:, :, None] + (x * half[:, 0, None] * scale)[:, None, :]
    along.clip(-1, 1, out=along)
    away = (x[:, None, :] - along * half[:, 0, None, None]) ** 2
    away += (y[:, :, None] - along * half[:, 1, None, None]) ** 2
    where = (ids[:, None, None], (rows + pad)[:, :, None], (columns + pad)[:, None, :])
    return where, away <= radius[:, None, None] ** 2


def _window(extent: float) -> int:
    """Return how many places to each side an extent in pixels reaches, at most."""
    return int(np.ceil(extent * _SCALE)) + 1


def _unit(angle: np.ndarray) -> np.ndarray:
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1)


def _lanczos(size: int) -> np.ndarray:
    """Return the matrix that shrinks ``_SCALE * size`` places to ``size`` with three lobes."""
    middle = (np.arange(size)[:, None] + 0.5) * _SCALE
    at = (np.arange(size * _SCALE) + 0.5 - middle) / _SCALE
    weight = np.where(np.abs(at) < 3, np.sinc(at) * np.sinc(at / 3), 0)
    return (weight / weight.sum(axis=1, keepdims=True)).astype(np.float32)
