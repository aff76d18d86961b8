"""Kill one of several processes while they write a checkpoint, or let it hang; resume with all.

``python -m tests.training.killing_many RECIPE FOLDER PROCESSES RANK:POINT[:hang] ...`` forks the
processes of every run from this one, so that nothing goes to importing. Each run must leave the
checkpoint before, or the new one, whole, and end with the weights, moments and lines of one that
was left alone.
"""

import gc
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tests.training.runs import killed_before
from tests.training.test_many_processes import assert_same
from torch.distributed.checkpoint.filesystem import FileSystem

import ssmzoo.files
from ssmzoo import load_family
from ssmzoo.training import distributed, shards
from ssmzoo.training.checkpoint import checkpoints, damage_of, step_of
from ssmzoo.training.folder import RunFolder
from ssmzoo.training.run import train
from ssmzoo.training.shards import Snapshot
from ssmzoo.training.trainer import Run

torch.set_num_threads(1)
PATIENCE = timedelta(seconds=30)  # with a process that hangs; users have half an hour
# what is called, at which call it kills, before or after it, and the newest checkpoint then
POINTS = {
    "step": (Run, "take_step", 7, True, {4}),
    "before": (Snapshot, "write", 2, True, {4}),
    "opening": (FileSystem, "create_stream", 2, True, {4}),
    "written": (Snapshot, "write", 2, False, {4}),
    "naming": (ssmzoo.files, "_put", 2, True, {4}),
    "named": (ssmzoo.files, "_put", 2, False, {8}),
}


def end_at(point, number):
    """Send this process a signal at a point."""
    owner, name, call, first, _ = POINTS[point]
    function, calls = getattr(owner, name), []

    def die(*given, **named):
        if name == "_put" and not given[1].name.startswith("step-"):
            return function(*given, **named)
        calls.append(1)
        dying = len(calls) == call
        while dying and point == "step" and not checkpoints(given[0].folder.checkpoints):
            time.sleep(0.01)  # the last one is still being written
        if dying and first:
            os.kill(os.getpid(), number)
        done = function(*given, **named)
        if dying:
            os.kill(os.getpid(), number)
        return done

    pytest.MonkeyPatch().setattr(owner, name, die)


def run_all(recipe, folder, count, victim=None, point=None, *, hangs=False, stop=None, run=train):
    """Fork the processes of a run and return their exit codes; what hangs is killed at last."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(count):
        child = os.fork()
        if not child:
            status = 1
            try:
                sys.stdout = sys.stderr = folder.with_name(f"{folder.name}-{rank}.log").open("a")
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                os.environ |= {"WORLD_SIZE": str(count), "RANK": str(rank)}
                os.environ["LOCAL_RANK"] = str(rank)
                if stop is not None:
                    killed_before(pytest.MonkeyPatch(), stop)
                if hangs:
                    distributed.STEP = shards.STEP = PATIENCE
                if rank == victim:
                    end_at(point, signal.SIGSTOP if hangs else signal.SIGKILL)
                run(recipe, output_dir=folder, resume=True)
                status = 0
            except BaseException as error:
                sys.stdout.write(f"{type(error).__name__}: {error}\n")
                sys.stdout.flush()
            finally:
                os._exit(status)
        children.append(child)
    codes = {}
    for rank in sorted(range(count), key=lambda rank: rank == victim):  # the victim last
        if hangs and rank == victim:
            os.kill(children[rank], signal.SIGKILL)
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(children[rank], 0)[1])
    return [codes[rank] for rank in range(count)]


def main():
    recipe, root, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    RunFolder.draw = lambda *_, **__: None
    import_module("ssmzoo.auto")
    load_family("longhorn")
    gc.freeze()
    assert run_all(recipe, root / "alone", count) == [0] * count
    for case in sys.argv[4:]:
        rank, point, *how = case.split(":")
        folder, begin = root / case.replace(":", "-"), time.monotonic()
        codes = run_all(recipe, folder, count, int(rank), point, hangs=bool(how))
        seconds = time.monotonic() - begin
        assert codes[int(rank)] == -signal.SIGKILL, (case, codes)
        for other in {*range(count)} - {int(rank)} if how else ():
            said = folder.with_name(f"{folder.name}-{other}.log").read_text()
            assert "another process of this run has ended, or hangs: see" in said, (case, said)
            assert seconds < 2 * PATIENCE.total_seconds(), (case, seconds)
        found = checkpoints(folder / "checkpoints")
        assert all(damage_of(path) is None for path in found), case
        assert step_of(found[-1]) in POINTS[point][-1], (case, found)
        assert run_all(recipe, folder, count) == [0] * count, case
        assert_same(root / "alone", folder)
        sys.stdout.write(f"{case} {step_of(found[-1])} {seconds:.0f}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
