"""eidetic_attention's Triton kernels: interpreted, and compiled for absent GPUs."""

import itertools

import pytest
from tests.kernels.triton_processes import SHARED, assert_no_spills, compiled

pytest.importorskip("triton", reason="triton is not installed")

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


def check(cases):
    records = compiled("compiled_eidetic.py", *cases)
    for case, target in itertools.product(cases, SHARED):
        found = {r["kernel"] for r in records if (r["case"], r["target"]) == (case, target)}
        kernels = {"fwd_kernel"}
        if not case.startswith("decode"):
            kernels |= {"bwd_query_kernel", "bwd_band_kernel"}
            kernels |= set() if case == "plain" else {"bwd_memory_kernel"}
        assert found == kernels, (case, target)
    # what a block may use on sm_86, sm_89 and sm_120, whose code is that of sm_80
    assert_no_spills(records, dict.fromkeys(SHARED, 99 * 1024))


def test_kernels_of_model_shapes_compile_without_spills():
    check(QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_of_every_other_kind_compile_without_spills():
    check(OTHERS)
