"""Copying and delay against their definitions, and the promise that an epoch can be made again."""

import numpy as np

from ssmzoo.tasks import IGNORED, load_task


def test_copying_asks_for_the_tokens_in_order_at_the_recall_tokens():
    task = load_task("copying", "train", 1, length=50, vocab_size=9, num_train=400)
    assert (task.kind, task.objective) == ("tokens", "token_classification")
    assert (task.vocab_size, task.num_labels, task.fresh, len(task)) == (9, 9, False, 400)
    batch = task.batch(range(400))
    assert batch.inputs.shape == batch.labels.shape == (400, 100)
    assert (batch.lengths == 100).all()
    for row, answers in zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True):
        assert row[50:] == [8] * 50
        assert max(row[:50]) < 8
        assert answers == [IGNORED] * 50 + row[:50]
    counts = np.bincount(batch.inputs[:, :50].reshape(-1), minlength=8)
    assert np.abs(counts / counts.sum() * 8 - 1).max() < 5 * np.sqrt(8 / counts.sum())


def test_delay_labels_are_the_signal_some_places_before():
    task = load_task("delay", "train", 1, length=200, delay=30, num_train=20)
    assert (task.kind, task.objective) == ("values", "token_regression")
    assert (task.vocab_size, task.num_labels, task.input_channels) == (None, 1, 1)
    batch = task.batch([4, 2, 0])
    assert batch.inputs.shape == (3, 200, 1)
    assert batch.inputs.dtype == batch.labels.dtype == np.float32
    assert (batch.labels[:, :30] == 0).all()
    assert (batch.labels[:, 30:] == batch.inputs[:, :170, 0]).all()
    assert (load_task("delay", "train", 1, length=200, delay=0).batch([4]).labels != 0).any()


def test_delay_signals_are_white_noise_of_the_band_that_begins_at_zero():
    task = load_task("delay", "train", 0)
    assert len(task) == 16_384
    signals = task.batch(range(200)).inputs[..., 0].astype(np.float64)
    assert signals.shape == (200, 4000)
    assert (signals[:, 0] == 0).all()
    power = (np.abs(np.fft.rfft(signals, axis=1)) ** 2).mean(axis=0)
    # dt = 2.5e-4 s: place k of the spectrum is k / (4000 dt) = k Hz
    inside, outside = power[1:1001], power[1001:]
    assert outside.max() < 1e-9 * inside.mean()
    eight = inside.reshape(8, -1).mean(axis=1) / inside.mean()
    assert np.abs(eight - 1).max() < 5 / np.sqrt(125 * 200)
    assert abs(signals.std(axis=1).mean() - 0.5) < 0.01
    # the shift is minus the noise's first sample, of the same deviation
    assert abs(signals.mean(axis=1).std() - 0.5) < 0.5 * 5 / np.sqrt(2 * 200)
