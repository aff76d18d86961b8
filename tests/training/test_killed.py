"""Runs killed, or told to stop, at random instants: nothing is lost.

Some of these instants lie inside the writing of a checkpoint.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

# one worker runs the process that two tests judge
pytestmark = pytest.mark.xdist_group("killed")

RECIPE = {
    "model": {
        "family": "longhorn",
        # dropout, so that a resume must restore the random state too
        "config": {"hidden_size": 16, "num_hidden_layers": 1, "dropout": 0.1},
    },
    "train": {"steps": 12, "batch_size": 4, "seq_len": 32, "lr": 0.01, "warmup": 3},
    "eval": {"every": 4, "batches": 2},
    "checkpoint": {"every": 3, "keep": 2},
    "log": {"every": 2},
}


def killed(tmp_path, *series):
    """Return what each series of killed runs counted; ``killing.py`` has their words."""
    (tmp_path / "text.txt").write_text("ant bee cat dodo " * 500, encoding="utf-8")
    data = {"text": str(tmp_path / "text.txt"), "validation": 0.2}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "data": data}), encoding="utf-8")
    command = [sys.executable, "-m", "tests.training.killing", recipe, tmp_path / "runs"]
    command += " -- ".join(series).split()
    (tmp_path / "runs").mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """What few runs counted that were killed, and what few that were told to stop."""
    return killed(tmp_path_factory.mktemp("killed"), "8 0", "4 0 SIGTERM SIGUSR1 SIGINT SIGHUP")


@pytest.mark.long
def test_runs_killed_anywhere_end_with_the_weights_and_lines_of_one_left_alone(counts):
    assert counts[0]["kills"] >= 8
    assert counts[0]["while_resuming"] >= 1
    assert counts[0]["inside_a_checkpoint"] >= 1


@pytest.mark.long
def test_runs_told_to_stop_anywhere_are_saved_and_end_as_one_left_alone(counts):
    assert counts[1]["kills"] >= 4
    assert counts[1]["while_resuming"] >= 1


@pytest.mark.slow
def test_a_hundred_stopped_runs_resume_to_the_same_weights(tmp_path):
    [counts] = killed(tmp_path, "110 1 SIGTERM SIGUSR1 SIGINT SIGHUP SIGUSR2 SIGXCPU")
    sys.stdout.write(f"{counts}\n")
    assert counts["kills"] >= 110
    assert counts["while_resuming"] >= 20


@pytest.mark.slow
def test_a_hundred_killed_runs_resume_to_the_same_weights_and_lines(tmp_path):
    [counts] = killed(tmp_path, "110 1")
    sys.stdout.write(f"{counts}\n")
    assert counts["kills"] >= 110
    assert counts["inside_a_checkpoint"] >= 10
    assert counts["before_the_first_checkpoint"] >= 5
    assert counts["while_resuming"] >= 20
