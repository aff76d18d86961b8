"""gated_linear_attention's Triton kernels, compiled for absent GPUs."""

import itertools

import pytest
from tests.kernels.triton_processes import SHARED, assert_no_spills, compiled

pytest.importorskip("triton", reason="triton is not installed")

QUICK = ("gated_delta", "kda")
OTHERS = (
    "ssd",
    "gla",
    "narrow",
    "narrow_rows",
    "odd",
    "wide",
    "float32",
    "float32_rows",
    "float64",
)
KERNELS = {f"{name}_kernel" for name in ("pairs", "march", "march_back", "gradients", "step")}


def check(cases):
    records = compiled("compiled_linear_attention.py", *cases)
    for case, target in itertools.product(cases, SHARED):
        found = {r["kernel"] for r in records if (r["case"], r["target"]) == (case, target)}
        assert found == KERNELS, (case, target)
    assert_no_spills(records)


@pytest.mark.long
def test_kernels_of_model_shapes_compile_without_spills():
    check(QUICK)


@pytest.mark.slow
def test_kernels_of_every_other_kind_compile_without_spills():
    check(OTHERS)
