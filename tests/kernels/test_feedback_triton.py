"""feedback_scan's Triton kernels: interpreted, and compiled for absent GPUs."""

import pytest
from tests.kernels.triton_processes import SHARED, assert_no_spills, compiled

pytest.importorskip("triton", reason="triton is not installed")

QUICK = ("model", "small")
OTHERS = ("plain", "drive", "states1", "states100", "states256", "float64")


def check(cases):
    records = compiled("compiled_feedback.py", *cases)
    assert {(r["case"], r["kernel"], r["target"]) for r in records} == {
        (case, f"feedback_{kind}_kernel", target)
        for case in cases
        for kind in ("fwd", "bwd", "newton")
        for target in SHARED
    }
    assert_no_spills(records)


def test_kernels_of_model_shapes_compile_without_spills():
    check(QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_of_every_other_kind_compile_without_spills():
    check(OTHERS)
