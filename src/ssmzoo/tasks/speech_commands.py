"""Speech Commands v0.02: which of ten words is in a second of sound, read sample by sample?"""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from ssmzoo.tasks.common import at_least
from ssmzoo.tasks.data_sets import open_splits, require_datasets
from ssmzoo.tasks.supervised import Supervised, value_rows

WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
_RATE = 16_000


def load_speech_commands(split: str, seed: int, *, data: str, length: int = _RATE) -> Supervised:
    """Return the ten words as raw sound, standardised by the training clips' mean and deviation.

    Clips of another length than ``length`` are left out. 70 % of the rest are for training and 15 %
    each for validation and test, with every word in the same shares; the same ones always. The
    papers add 1e-5 to the deviation after a division by 2**15; here nothing is added.

    Args:
        data: The folder of the unpacked archive, one folder of wav files a word; or a Hub id or a
            folder with the columns ``audio`` and ``label``, all its splits taken together.
        length: Samples of a clip, 16000 a second.

    Raises:
        LookupError: No such split, no such data, or a word without a clip.
        ValueError: A file that is not 16-bit mono sound at 16 kHz.
    """
    at_least("length", length, 1)
    clips: list[np.ndarray] = []
    labels: list[int] = []
    names: list[tuple[int, str]] = []
    for name, content, word in _clips(data):
        samples = _samples(content, name)
        if len(samples) == length:
            clips.append(samples)
            labels.append(WORDS.index(word))
            names.append((labels[-1], name))
    absent = [word for number, word in enumerate(WORDS) if labels.count(number) < 3]
    if absent:
        raise LookupError(
            f"task speech_commands: {data!r} must hold at least 3 clips of {length} samples of "
            f"every word, and has fewer of {', '.join(absent)}"
        )
    order = sorted(range(len(names)), key=names.__getitem__)
    sound = np.stack([clips[i] for i in order])
    label = np.array([labels[i] for i in order])
    parts = _stratified(label)
    train = sound[parts["train"]].astype(np.float64)
    shift, scale = float(train.mean()), float(train.std())
    if not scale:
        raise ValueError(f"the training clips of {data!r} must not all be silent")
    chosen = parts[split]
    return value_rows(sound[chosen], label[chosen], shift=shift, scale=scale, label_names=WORDS)


def _clips(data: str) -> Iterator[tuple[str, bytes, str]]:
    """Yield name, content and word of every clip of the ten words."""
    folder = Path(data).expanduser()
    if (folder / WORDS[0]).is_dir():
        for word in WORDS:
            for path in sorted((folder / word).glob("*.wav")):
                yield path.name, path.read_bytes(), word
        return
    for part in open_splits("speech_commands", data, ("audio", "label")):
        rows = part.cast_column("audio", require_datasets().Audio(decode=False))
        words: Any = rows.features["label"]
        for row in cast("Iterator[dict[str, Any]]", iter(rows)):
            word = words.int2str(row["label"]) if hasattr(words, "int2str") else row["label"]
            if word in WORDS:
                audio = row["audio"]
                content = audio["bytes"] or Path(audio["path"]).read_bytes()
                yield Path(audio["path"] or "").name, content, word


def _samples(content: bytes, name: str) -> np.ndarray:
    try:
        with wave.open(io.BytesIO(content)) as sound:
            form = (sound.getnchannels(), sound.getsampwidth(), sound.getframerate())
            samples = np.frombuffer(sound.readframes(sound.getnframes()), dtype="<i2")
    except (wave.Error, EOFError, ValueError) as error:
        raise ValueError(f"{name} must be a wav file: {error}") from error
    if form != (1, 2, _RATE):
        raise ValueError(
            f"{name} must be 16-bit mono sound at {_RATE} Hz, got {form[0]} channels of "
            f"{8 * form[1]} bits at {form[2]} Hz"
        )
    return samples


def _stratified(labels: np.ndarray) -> dict[str, np.ndarray]:
    """Return which examples are in which split, 70 : 15 : 15 of every class."""
    rng = np.random.default_rng(0)
    order = rng.permutation(len(labels))
    left = order[np.argsort(labels[order], kind="stable")]
    parts = {}
    for split, size in (("train", int(0.7 * len(labels))), ("validation", None), ("test", None)):
        wanted = len(left) // 2 if split == "validation" else len(left) if size is None else size
        _, counts = np.unique(labels[left], return_counts=True)
        share = counts * wanted / len(left)
        quota = share.astype(np.int64)
        short = np.argsort(quota - share, kind="stable")[: wanted - quota.sum()]
        quota[short] += 1
        starts = np.cumsum(counts) - counts
        taken = np.zeros(len(left), dtype=bool)
        for start, number in zip(starts, quota, strict=True):
            taken[start : start + number] = True
        parts[split], left = np.sort(left[taken]), left[~taken]
    return parts
