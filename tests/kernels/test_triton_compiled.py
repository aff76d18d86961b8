"""The Triton kernels compile for absent GPUs, within registers and shared memory."""

import pytest
from tests.kernels.triton_processes import ON_OTHERS, OTHERS, SHARED, assert_no_spills, compiled

pytest.importorskip("triton", reason="triton is not installed")

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
# one warp, 16 states or fewer: a lane has one channel and all of its states
A_CHANNEL_A_LANE = ("model_spans", "model_whole", "decode", "selective_spans", "selective_decode")
FULL = (
    "float32_whole",
    "float64_spans",
    "large_spans",
    "selective_large_spans",
    "zoh_large_spans",
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


def check(cases, shared=SHARED, options=()):
    records = compiled("compiled_triton.py", *cases, *options)
    for case in cases:
        kernels = CONV if case.startswith("conv") else SCAN
        if case.endswith("_whole"):
            kernels = {"scan_fwd_kernel", "scan_bwd_kernel"}
        if case.endswith("decode"):
            kernels = {"scan_fwd_kernel"}
        for target in shared:
            found = {r["kernel"] for r in records if (r["case"], r["target"]) == (case, target)}
            assert found == kernels, (case, target)
    assert_no_spills(records, shared)
    return records


@pytest.mark.long
def test_kernels_of_model_shapes_compile_without_spills_and_a_lane_has_a_channel():
    for record in check(QUICK):
        if record["case"] in A_CHANNEL_A_LANE:
            assert record["layouts"] == [[[1, 1], [1, 32]]], record


@pytest.mark.slow
def test_kernels_of_every_other_bucket_compile_without_spills():
    check(FULL)


@pytest.mark.slow
def test_kernels_of_large_models_compile_for_other_gpus():
    cases = ("large_spans", "selective_large_spans", "zoh_large_spans")
    check(cases, OTHERS, ON_OTHERS)
