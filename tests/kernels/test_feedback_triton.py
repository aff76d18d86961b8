"""feedback_scan's Triton kernels: interpreted, and compiled for absent GPUs."""

import pytest
from tests.kernels.triton_processes import ON_OTHERS, OTHERS, SHARED, assert_no_spills, compiled

pytest.importorskip("triton", reason="triton is not installed")

QUICK = ("model", "small")
FURTHER = ("plain", "drive", "states1", "states100", "states256", "float64")
# how many lanes share the states of a channel, and how many channels a warp has
LANES = {
    ("model", "fwd"): [1, 32],
    ("model", "bwd"): [2, 16],
    ("small", "fwd"): [4, 8],
    ("small", "bwd"): [4, 8],
}


def check(cases, shared=SHARED, options=()):
    records = compiled("compiled_feedback.py", *cases, *options)
    assert {(r["case"], r["kernel"], r["target"]) for r in records} == {
        (case, f"feedback_{kind}_kernel", target)
        for case in cases
        for kind in ("fwd", "bwd", "newton")
        for target in shared
    }
    assert_no_spills(records, shared)
    return records


@pytest.mark.long
def test_kernels_of_model_shapes_compile_without_spills_and_lanes_lie_along_channels():
    found = {(r["case"], r["kernel"], r["target"]): r["layouts"] for r in check(QUICK)}
    for (case, kind), lanes in LANES.items():
        for target in SHARED:
            assert found[case, f"feedback_{kind}_kernel", target] == [[[1, 1], lanes]]


@pytest.mark.slow
def test_kernels_of_every_other_kind_compile_without_spills():
    check(FURTHER)


@pytest.mark.slow
def test_kernels_compile_for_other_gpus():
    check(QUICK + FURTHER, OTHERS, ON_OTHERS)
