"""Kill training runs at random instants, resume each, and compare with one that was left alone.

``python tests/killing.py RECIPE FOLDER KILLS SEED`` prints one JSON object. The runs to be killed
are forked from this process, which did the one that is left alone: no instant goes to importing.
Of every two, one is killed at a random time and one at a random operation on a checkpoint's files,
however these are written. Half of them are killed once more, while they resume.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from ssmzoo.checkpoint import checkpoints, damage_of, read_metrics
from ssmzoo.train import train

torch.set_num_threads(1)
OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "shutil.rmtree")


class Operations:
    """What this process does to files of checkpoints, counted from now on."""

    def __init__(self):
        self.count, self.last = 0, float("inf")
        sys.addaudithook(self._see)

    def _see(self, event, arguments):
        if event in OPERATIONS and "/checkpoints/" in str(arguments[0]):
            self.count += 1
            if self.count > self.last:
                os.kill(os.getpid(), signal.SIGKILL)


def start(recipe, folder, *, resume, operation=None):
    """Fork a run, which is killed before an operation if one is given."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        sys.stdout = sys.stderr = log_of(folder).open("a")
        operations = Operations()
        if operation is not None:
            operations.last = operation
        train(recipe, output_dir=folder, resume=resume)
        log_of(folder).with_suffix(".operations").write_text(str(operations.count))
        status = 0
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


def timeless(folder):
    drop = ("tokens_per_second", "seconds")
    lines = read_metrics(folder / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in drop} for line in lines]


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def main():
    recipe, root = Path(sys.argv[1]), Path(sys.argv[2])
    kills, rng = int(sys.argv[3]), random.Random(int(sys.argv[4]))
    alone = root / "alone"
    train(recipe, output_dir=root / "first")  # it imports
    begin = time.perf_counter()
    finish(recipe, alone, resume=False)
    seconds = time.perf_counter() - begin
    operations = int(log_of(alone).with_suffix(".operations").read_text())
    weights, lines = load_file(alone / "model" / "model.safetensors"), timeless(alone)
    counts = {
        "kills": 0,
        "before_the_first_checkpoint": 0,
        "inside_a_checkpoint": 0,
        "while_resuming": 0,
        "runs": 0,
        "too_late": 0,
    }
    while counts["kills"] < kills:
        number = counts["runs"]
        folder, writes = root / f"{number}", number % 2 == 1
        for again in range(1 + number // 2 % 2):
            earlier = set(folder.glob("checkpoints/.*.unfinished"))
            resumes, part = folder.exists(), rng.random() / (1 + again)
            operation = int(part * operations) if writes else None
            child = start(recipe, folder, resume=resumes, operation=operation)
            if not writes:
                time.sleep(part * seconds)
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            killed = os.WIFSIGNALED(status)
            counts["kills" if killed else "too_late"] += 1
            found = checkpoints(folder / "checkpoints")
            for checkpoint in found:  # what has its final name is whole
                assert damage_of(checkpoint) is None, damage_of(checkpoint)
            inside = set(folder.glob("checkpoints/.*.unfinished")) - earlier
            counts["before_the_first_checkpoint"] += killed and not found
            counts["inside_a_checkpoint"] += killed and bool(inside)
            counts["while_resuming"] += killed and resumes
        finish(recipe, folder, resume=folder.exists())
        assert same(load_file(folder / "model" / "model.safetensors"), weights), folder
        assert timeless(folder) == lines, folder
        shutil.rmtree(folder)
        counts["runs"] += 1
    sys.stdout.write(json.dumps(counts))


main()
