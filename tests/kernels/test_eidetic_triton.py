"""eidetic_attention's Triton kernels: interpreted, and compiled for absent GPUs."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

HERE = Path(__file__).parent
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}  # bytes a block may use
QUICK = ("model64", "decode")
OTHERS = (
    "model128",
    "carried",
    "carried128",
    "plain",
    "narrow",
    "wide",
    "float32",
    "float32_128",
    "float64",
    "float64_128",
    "decode_late",
    "decode_wide",
    "decode_float32",
    "decode_float64",
)


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
    file = str(HERE / "interpreted_eidetic.py")
    options = ("-q", "-p", "no:cacheprovider", "--tb=short")
    out = run(["-m", "pytest", file, *options], TRITON_INTERPRET="1")
    assert " passed" in out
    assert "skipped" not in out


def check(cases):
    lines = run([str(HERE / "compiled_eidetic.py"), *cases]).splitlines()
    records = [json.loads(line) for line in lines]
    for case, target in itertools.product(cases, SHARED):
        found = {r["kernel"] for r in records if (r["case"], r["target"]) == (case, target)}
        kernels = {"fwd_kernel"}
        if not case.startswith("decode"):
            kernels |= {"bwd_query_kernel", "bwd_band_kernel"}
            kernels |= set() if case == "plain" else {"bwd_memory_kernel"}
        assert found == kernels, (case, target)
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
