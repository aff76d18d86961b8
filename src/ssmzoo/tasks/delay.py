"""Delay: predict the signal's value of some places ago, which is zero at the beginning.

The signal is periodic white noise of a limited band, shifted as a whole so that it begins at zero,
as in the code that the papers share. A model without memory of the delay can therefore still do
better than the signal's deviation, by the mean.
"""

from __future__ import annotations

import numpy as np

from ssmzoo.tasks.common import at_least
from ssmzoo.tasks.supervised import Batch, Supervised, drawn_examples, size_of


def load_delay(
    split: str,
    seed: int,
    *,
    length: int = 4000,
    delay: int = 1000,
    cutoff: float = 0.25,
    rms: float = 0.5,
    num_train: int = 16_384,
    num_validation: int = 1_024,
    num_test: int = 1_024,
    fresh: bool = True,
) -> Supervised:
    """Return the delay task, made when it is asked for. The defaults are the RTF paper's.

    Args:
        length: Samples of a signal.
        delay: Samples between input and label.
        cutoff: Highest frequency, in cycles a sample: 1 kHz at 4000 samples a second is 0.25.
        rms: Root mean square of the noise before it is shifted.
        num_train: Training signals an epoch.
        num_validation: Validation signals.
        num_test: Test signals.
        fresh: Draw new training signals every epoch.

    Raises:
        ValueError: A size below 1, a delay outside of the signal, or a band without a frequency.
    """
    size = size_of(split, num_train, num_validation, num_test)
    at_least("length", length, 2)
    if not 0 <= delay < length:
        raise ValueError(f"delay must be between 0 and length - 1 = {length - 1}, got {delay}")
    if not 1 / length <= cutoff <= 0.5:
        raise ValueError(f"cutoff must be between 1 / length and 0.5, got {cutoff}")
    if not rms > 0:
        raise ValueError(f"rms must be positive, got {rms}")
    # half the sampling rate is left out: a wave of that frequency has no phase
    band = min(int(cutoff * length), (length - 1) // 2)
    at_least("frequencies below cutoff", band, 1)
    deviation = rms * length / np.sqrt(4 * band)

    def make(generators: list[np.random.Generator]) -> Batch:
        spectrum = np.zeros((len(generators), length // 2 + 1), dtype=np.complex128)
        for row, rng in zip(spectrum, generators, strict=True):
            real, imaginary = rng.normal(scale=deviation, size=(2, band))
            row[1 : band + 1] = real + 1j * imaginary
        signals = np.fft.irfft(spectrum, n=length, axis=1)
        signals = (signals - signals[:, :1]).astype(np.float32)
        labels = np.zeros_like(signals)
        labels[:, delay:] = signals[:, : length - delay]
        return Batch(signals[..., None], labels, np.full(len(generators), length))

    return drawn_examples(
        split,
        seed,
        size,
        fresh,
        make,
        kind="values",
        objective="token_regression",
        num_labels=1,
        input_channels=1,
    )
