"""Kill training runs at random instants, resume each, and compare with one that was left alone.

``python -m tests.training.killing RECIPE FOLDER KILLS SEED [SIGNAL ...]`` prints a JSON list of one
object; after ``--`` follow KILLS, SEED and signals of another series, which has an object
too. The runs to be killed are forked from this process, which did the one that is left alone: no
instant goes to importing. Of every two, one is killed at a random time and one at a random
operation on a checkpoint's files. Half of them are killed once more, while they resume.

Where signals are named, runs get these by turns, and not SIGKILL. Then they must stop in order, and
each of the POINTS is tried as well.
"""

import gc
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.training.runs import assert_same_run, signalled_at

import ssmzoo.data.tokens
import ssmzoo.training.folder
from ssmzoo.files import appears_whole
from ssmzoo.training.checkpoint import checkpoints, damage_of, step_of
from ssmzoo.training.folder import RunFolder
from ssmzoo.training.objectives import CausalLM
from ssmzoo.training.run import train
from ssmzoo.training.stopping import Stopped
from ssmzoo.training.trainer import Run

torch.set_num_threads(1)
# what sends a signal to its own process, at which call, and the newest checkpoint afterwards
POINTS = {
    "tokenising": (ssmzoo.data.tokens, "text_hash", 1, None),
    "writing what describes the run": (RunFolder, "describe", 1, None),
    "a step": (CausalLM, "loss_of", 5, 5),
    "an evaluation": (CausalLM, "measure", 3, 8),
    "writing a checkpoint": (Run, "save", 2, 6),
    "the last checkpoint": (Run, "save", 4, 12),
    "writing the model": (RunFolder, "finish", 1, 12),
}
OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "shutil.rmtree")


class Operations:
    """What this process does to files of checkpoints, counted from now on."""

    def __init__(self, number):
        self.count, self.last, self.number = 0, float("inf"), number
        sys.addaudithook(self._see)

    def _see(self, event, arguments):
        if event in OPERATIONS and "/checkpoints/" in str(arguments[0]):
            self.count += 1
            if self.count > self.last:
                self.last = float("inf")
                os.kill(os.getpid(), self.number)


def draw(metrics, target, **_):
    """Write a picture as a run does, without the time that drawing takes."""
    with appears_whole(target) as unfinished:
        unfinished.write_bytes(metrics.read_bytes())


def start(recipe, folder, *, resume, operation=None, number=signal.SIGKILL, point=None):
    """Fork a run, which gets a signal before an operation, or at a point, if one is given."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        sys.stdout = sys.stderr = log_of(folder).open("a")
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job may run without it
        operations = Operations(number)
        if operation is not None:
            operations.last = operation
        if point is not None:
            owner, name, call, _ = POINTS[point]
            signalled_at(pytest.MonkeyPatch(), owner, name, call, number)
        train(recipe, output_dir=folder, resume=resume)
        log_of(folder).with_suffix(".operations").write_text(str(operations.count))
        status = 0
    except Stopped as stopped:
        status = stopped.status
    except BaseException as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        sys.stdout.flush()
    finally:
        os._exit(status)


def log_of(folder):
    return folder.with_name(f"{folder.name}.log")


def finish(recipe, folder, *, resume):
    _, status = os.waitpid(start(recipe, folder, resume=resume), 0)
    if status:
        raise SystemExit(f"{folder.name}: {log_of(folder).read_text()}")


def stop_at_points(recipe, root, alone, signals):
    """Stop a run at each of the points, and resume it."""
    for turn, (point, (*_, newest)) in enumerate(POINTS.items()):
        folder, number = root / point.replace(" ", "-"), signals[turn % len(signals)]
        child = start(recipe, folder, resume=False, number=number, point=point)
        _, status = os.waitpid(child, 0)
        told = log_of(folder).read_text()
        assert os.WIFEXITED(status), (point, status, told)
        assert os.WEXITSTATUS(status) == 128 + number, (point, told)
        found = checkpoints(folder / "checkpoints")
        assert newest == (step_of(found[-1]) if found else None), (point, found)
        (line,) = [line for line in told.splitlines() if "stopped by" in line]
        assert line.startswith(f"stopped by {signal.Signals(number).name} "), (point, line)
        if point == "writing the model":
            assert "when the run was finished" in line
        else:
            assert "--resume" in line, (point, line)
        log_of(folder).unlink()
        finish(recipe, folder, resume=True)
        assert_same_run(alone, folder)


def series(recipe, root, alone, seconds, kills, seed, *names):
    """Kill runs until so many were killed; return what was counted."""
    signals, rng = [getattr(signal, name) for name in names], random.Random(int(seed))
    operations = int(log_of(alone).with_suffix(".operations").read_text())
    root.mkdir()
    counts = {
        "kills": 0,
        "before_the_first_checkpoint": 0,
        "inside_a_checkpoint": 0,
        "while_resuming": 0,
        "runs": 0,
        "too_late": 0,
        "too_early": 0,
    }
    if signals:
        stop_at_points(recipe, root, alone, signals)
    while counts["kills"] < int(kills):
        number = counts["runs"]
        folder, writes = root / f"{number}", number % 2 == 1
        sent = signals[number % len(signals)] if signals else signal.SIGKILL
        for again in range(1 + number // 2 % 2):
            earlier = set(folder.glob("checkpoints/.*.unfinished"))
            resumes, part = folder.exists(), rng.random() / (1 + again)
            operation = int(part * operations) if writes else None
            child = start(recipe, folder, resume=resumes, operation=operation, number=sent)
            if not writes:
                time.sleep(part * seconds)
                os.kill(child, sent)
            _, status = os.waitpid(child, 0)
            early = bool(signals) and (os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 1)
            killed = not early and os.waitstatus_to_exitcode(status) in (-sent, 128 + sent)
            outcome = "kills" if killed else "too_early" if early else "too_late"
            counts[outcome] += 1  # early: before the run listens
            found = checkpoints(folder / "checkpoints")
            for checkpoint in found:  # what has its final name is whole
                assert damage_of(checkpoint) is None, damage_of(checkpoint)
            inside = set(folder.glob("checkpoints/.*.unfinished")) - earlier
            counts["before_the_first_checkpoint"] += killed and not found
            counts["inside_a_checkpoint"] += killed and bool(inside)
            counts["while_resuming"] += killed and resumes
        finish(recipe, folder, resume=folder.exists())
        assert_same_run(alone, folder)
        shutil.rmtree(folder)
        counts["runs"] += 1
    return counts


def main():
    recipe, root = Path(sys.argv[1]), Path(sys.argv[2])
    alone = root / "alone"
    ssmzoo.training.folder.draw_curves = draw
    train(recipe, output_dir=root / "first")  # it imports
    gc.freeze()  # what a run's end need not look through
    begin = time.perf_counter()
    finish(recipe, alone, resume=False)
    seconds = time.perf_counter() - begin
    found = [
        series(recipe, root / f"series-{i}", alone, seconds, *words.split())
        for i, words in enumerate(" ".join(sys.argv[3:]).split(" -- "))
    ]
    sys.stdout.write(json.dumps(found))


main()
