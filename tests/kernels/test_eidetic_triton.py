"""eidetic_attention's Triton kernels: interpreted, and compiled for absent GPUs."""

import itertools

import pytest
from tests.kernels.triton_processes import OTHERS as OTHER_GPUS
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


# what a block may use on sm_86, sm_89 and sm_120
SMALLEST = 99 * 1024


def check(cases, targets=("sm_80", "sm_90")):
    names = [x.removeprefix("sm_") for x in targets]
    records = compiled("compiled_eidetic.py", *cases, "--targets", *names)
    for case, target in itertools.product(cases, targets):
        found = {r["kernel"] for r in records if (r["case"], r["target"]) == (case, target)}
        kernels = {"fwd_kernel"}
        if not case.startswith("decode"):
            kernels |= {"bwd_query_kernel", "bwd_band_kernel"}
            kernels |= set() if case == "plain" else {"bwd_memory_kernel"}
        assert found == kernels, (case, target)
    assert_no_spills(records, {x: min(SMALLEST, (SHARED | OTHER_GPUS)[x]) for x in targets})
    for record in records:
        if record["target"] != "gfx942":
            check_instructions(record)


def check_instructions(record):
    """What is met comes in asynchronously, and sm_90 multiplies 64 rows by HGMMA."""
    case, target = record["case"], record["target"]
    assert (record["copies"] > 0) == ("float64" not in case), record
    rows64 = "float" not in case and not case.startswith("decode")
    assert (record["wgmma"] > 0) == (rows64 and target == "sm_90"), record
    assert (record["mma"] > 0) == ("float32" not in case and record["wgmma"] == 0), record


@pytest.mark.long
def test_kernels_of_model_shapes_compile_without_spills():
    check(QUICK)


@pytest.mark.slow
def test_kernels_of_every_other_kind_compile_without_spills():
    check(OTHERS)


@pytest.mark.slow
def test_kernels_compile_for_other_gpus():
    check(QUICK + OTHERS, ("gfx942",))
    check(("model128", "wide"), [x for x in OTHER_GPUS if x != "gfx942"])
