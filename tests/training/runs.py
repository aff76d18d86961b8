"""What the tests of training share: runs that stop in the middle, and when two are the same."""

import gc
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ssmzoo.checkpoints.weights import SHARDS
from ssmzoo.training.metrics import read_metrics
from ssmzoo.training.run import train
from ssmzoo.training.shards import read_all
from ssmzoo.training.trainer import Run


class KilledError(Exception):
    pass


def killed_before(patch, step):
    """Stop a run as if it were killed when it is about to take a step."""
    take_step = Run.take_step

    def stop(run, read):
        if run.progress.step == step - 1:
            raise KilledError
        return take_step(run, read)

    patch.setattr(Run, "take_step", stop)


def killed(recipe, folder, step, **options):
    """Train until a run is killed when it is about to take a step; return its folder."""
    with pytest.MonkeyPatch.context() as patch:
        killed_before(patch, step)
        with pytest.raises(KilledError):
            train(recipe, output_dir=folder, **options)
    return folder


def signalled_at(patch, owner, name, call, number):
    """Let a function send a signal to its own process, at one of its calls."""
    function, calls = getattr(owner, name), []

    def send(*given, **named):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return function(*given, **named)

    patch.setattr(owner, name, send)


@pytest.fixture(scope="module", autouse=True)
def quick_runs():
    """Leave out what takes longer than the steps of a tiny run.

    That is its picture, and the garbage collection at its end, which looks through all that was
    ever imported.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssmzoo.training.folder.draw_curves", lambda *_, **__: None)
        yield


def write_texts(folder):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(30):
        words = rng.choice(["ant", "bee", "cat", "dodo"], size=60)
        (folder / f"{i}.txt").write_text(" ".join(words), encoding="utf-8")
    return folder


def lines(run):
    """Return the lines of a run's metrics without times and speeds."""
    drop = ("tokens_per_second", "seconds")
    found = read_metrics(run / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in drop} for line in found]


def weights(run):
    return load_file(run / "model" / "model.safetensors")


def saved(run, step):
    """Return what a checkpoint of a run holds: weights, moments, carried states."""
    return read_all(run / f"checkpoints/step-{step:08d}" / SHARDS)


def assert_model_of_step(run, step):
    """Fail unless a run's model has the weights of a checkpoint."""
    tensors = saved(run, step)
    assert_same_tensors(weights(run), {name: tensors[name] for name in weights(run)})


def shard_of(run, step):
    """Return the file of tensors in a checkpoint of one process."""
    (file,) = (run / f"checkpoints/step-{step:08d}" / SHARDS).iterdir()
    return file


def assert_same_tensors(one, two):
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


def assert_same_run(one, two):
    """Fail unless two runs have the same lines and the same weights, bit for bit."""
    assert lines(one) == lines(two)
    assert_same_tensors(weights(one), weights(two))
