"""Triton's kernels in processes of their own: interpreted, or compiled for absent GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}  # bytes a block may use
OTHERS = {"sm_86": 99 * 1024, "sm_89": 99 * 1024, "sm_120": 99 * 1024, "gfx942": 64 * 1024}
REGISTERS = {"gfx942": 512}  # of a lane, where a program has no more than four warps
# CPU seconds of one kernel's compilation, ptxas included: six times what the slowest took, so that
# a busy machine, whose shared caches and hyperthreads make CPU seconds longer, passes
COMPILE_SECONDS = 10


def run(command, **environment):
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *command],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def assert_interpreted(*names):
    """Run files of tests that interpret kernels: all pass, none is skipped."""
    options = ("-q", "-p", "no:cacheprovider", "--tb=short")
    files = [str(HERE / name) for name in names]
    out = run(["-m", "pytest", *files, *options], TRITON_INTERPRET="1")
    assert " passed" in out
    assert "skipped" not in out, out


def compiled(*arguments):
    """Return what ``compiled.py`` tells of every kernel of some cases, a record each.

    No kernel may take long to compile. Triton's cache may have one that was compiled before.
    """
    lines = run([str(HERE / "compiled.py"), *arguments]).splitlines()
    records = [json.loads(line) for line in lines]
    slow = [record for record in records if record["seconds"] > COMPILE_SECONDS]
    assert not slow, f"more than {COMPILE_SECONDS} CPU seconds to compile: {slow}"
    return records


def assert_no_spills(records, shared=SHARED):
    """Compare records with what a GPU has; ``shared`` is bytes by target."""
    for record in records:
        assert record["stack"] == record["local"] == 0, f"registers spilled: {record}"
        assert record["registers"] <= REGISTERS.get(record["target"], 255), record
        assert record["shared"] <= shared[record["target"]], record
