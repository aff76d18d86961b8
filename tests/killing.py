"""Kill training runs at random instants, resume each, and compare with one that was left alone.

``python tests/killing.py RECIPE FOLDER KILLS SEED`` prints one JSON object. The runs to be killed
are forked from this process, which did the one that is left alone: no instant goes to importing.
Half of them are killed once more, while they resume.
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

import ssmzoo.files
from ssmzoo.checkpoint import checkpoints, damage_of, read_metrics
from ssmzoo.train import train

torch.set_num_threads(1)
INSTANTS = 0.02  # seconds that a held-open write waits before each file


def held_open():
    """Let the writing of a checkpoint take long, so that many kills fall into it."""
    flush = ssmzoo.files._flush

    def slowly(path):
        time.sleep(INSTANTS)
        flush(path)

    ssmzoo.files._flush = slowly


def start(recipe, folder, *, resume, slow):
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        sys.stdout = sys.stderr = log_of(folder).open("a")
        if slow:
            held_open()
        train(recipe, output_dir=folder, resume=resume)
        status = 0
    except BaseException as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        sys.stdout.flush()
    finally:
        os._exit(status)


def log_of(folder):
    return folder.with_name(f"{folder.name}.log")


def finish(recipe, folder, *, resume):
    _, status = os.waitpid(start(recipe, folder, resume=resume, slow=False), 0)
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
    for folder in (root / "first", alone):  # the first one imports
        begin = time.perf_counter()
        train(recipe, output_dir=folder)
        seconds = time.perf_counter() - begin
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
        folder, slow = root / f"{number}", number % 2 == 1
        for again in range(1 + number // 2 % 2):
            earlier = set(folder.glob("checkpoints/.*.unfinished"))
            resumes = folder.exists()
            child = start(recipe, folder, resume=resumes, slow=slow)
            time.sleep(rng.uniform(0, seconds * (1.5 if slow else 1.0) / (1 + again)))
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
