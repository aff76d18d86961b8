"""The Triton kernels compile for absent GPUs, within registers and shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}  # bytes a block may use
QUICK = (
    "model_spans",
    "model_whole",
    "decode",
    "float32_spans",
    "selective_spans",
    "selective_decode",
    "zoh_whole",
    "zoh_narrow_spans",
    "conv",
    "conv_float32",
)
FULL = (
    "float32_whole",
    "float64_spans",
    "large_spans",
    "ragged_spans",
    "ragged16_spans",
    "states32_spans",
    "states1_spans",
    "states64_spans",
    "states128_spans",
    "states256_spans",
    "selective_whole",
    "selective_float32_spans",
    "selective_float64_spans",
    "selective_ragged_spans",
    "selective_states1_spans",
    "selective_states64_spans",
    "selective_states128_spans",
    "zoh_spans",
    "zoh_float32_spans",
    "zoh_float64_spans",
    "zoh_states1_spans",
    "zoh_states64_spans",
    "conv_ragged",
)
SCAN = {
    "scan_fwd_carry_kernel",
    "scan_combine_kernel",
    "scan_fwd_kernel",
    "scan_bwd_carry_kernel",
    "scan_combine_kernel[reverse]",
    "scan_bwd_kernel",
}
CONV = {"causal_conv1d_fwd_kernel", "causal_conv1d_bwd_kernel"}


def compile_cases(cases):
    script = Path(__file__).with_name("compiled_triton.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), *cases]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def check(records, cases):
    for case in cases:
        kernels = CONV if case.startswith("conv") else SCAN
        if case.endswith("_whole"):
            kernels = {"scan_fwd_kernel", "scan_bwd_kernel"}
        if case.endswith("decode"):
            kernels = {"scan_fwd_kernel"}
        for target in SHARED:
            found = {r["kernel"] for r in records if (r["case"], r["target"]) == (case, target)}
            assert found == kernels, (case, target)
    for record in records:
        assert record["stack"] == record["local"] == 0, f"registers spilled: {record}"
        assert record["registers"] <= 255, record
        assert record["shared"] <= SHARED[record["target"]], record


def test_kernels_of_model_shapes_compile_without_spills():
    check(compile_cases(QUICK), QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_of_every_other_bucket_compile_without_spills():
    check(compile_cases(FULL), FULL)
