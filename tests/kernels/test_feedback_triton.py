"""feedback_scan's Triton kernels: interpreted, and compiled for absent GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

HERE = Path(__file__).parent
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}  # bytes a block may use
QUICK = ("model", "small")
OTHERS = ("plain", "drive", "states1", "states100", "states256", "float64")


def run(command, **environment):
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *command],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_interpreted_kernels_equal_the_reference():
    file = str(HERE / "interpreted_feedback.py")
    options = ("-q", "-p", "no:cacheprovider", "--tb=short")
    out = run(["-m", "pytest", file, *options], TRITON_INTERPRET="1")
    assert " passed" in out
    assert "skipped" not in out


def check(cases):
    lines = run([str(HERE / "compiled_feedback.py"), *cases]).splitlines()
    records = [json.loads(line) for line in lines]
    assert {(r["case"], r["kernel"], r["target"]) for r in records} == {
        (case, f"feedback_{kind}_kernel", target)
        for case in cases
        for kind in ("fwd", "bwd", "newton")
        for target in SHARED
    }
    for record in records:
        assert record["stack"] == record["local"] == 0, f"registers spilled: {record}"
        assert record["registers"] <= 255, record
        assert record["shared"] <= SHARED[record["target"]], record


def test_kernels_of_model_shapes_compile_without_spills():
    check(QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_of_every_other_kind_compile_without_spills():
    check(OTHERS)
