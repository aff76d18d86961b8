"""The Triton kernels compile for absent GPUs, within registers and shared memory."""

import pytest
from tests.kernels.triton_processes import OTHERS, SHARED, assert_no_spills, compiled

pytest.importorskip("triton", reason="triton is not installed")

# cases of compiled.py: the shapes of models
QUICK = {
    "scans": (
        *("model_spans", "model_whole", "decode", "float32_spans", "selective_spans"),
        *("selective_decode", "zoh_whole", "zoh_narrow_spans", "conv", "conv_float32"),
    ),
    "linear": ("model", "whole", "complex"),
    "feedback": ("model", "small"),
    "linear_attention": ("gated_delta", "kda"),
    "eidetic": ("model64", "decode"),
    "diagonal": ("vandermonde", "vandermonde_ragged", "step", "step_ragged", "step_float64"),
    "innovation": ("model", "relative", "narrow", "float64"),
    "companion": ("hyena_rtf", "small", "path_x", "ragged", "float64"),
    "rms_norm": ("model", "small", "float64", "sum"),
}
# the kernels of a group, and those that only cases that are cut into spans have
KERNELS = {
    "scans": {"scan_fwd_kernel", "scan_bwd_kernel"},
    "linear": {"linear_scan_fwd_kernel", "linear_scan_bwd_kernel"},
    "feedback": {f"feedback_{kind}_kernel" for kind in ("fwd", "bwd", "newton")},
    "linear_attention": {
        f"{kind}_kernel" for kind in ("pairs", "march", "march_back", "gradients", "step")
    },
    "eidetic": {
        f"eidetic_attention_{kind}_kernel"
        for kind in ("fwd", "bwd_query", "bwd_band", "bwd_memory")
    },
    "diagonal": {"diagonal_step_kernel"},
    "innovation": {"innovation_fwd_kernel"},
    "companion": {"companion_step_kernel"},
    "rms_norm": {f"rms_norm_{kind}_kernel" for kind in ("fwd", "bwd", "weight")},
}
CUT = {
    "scans": {
        *("scan_fwd_carry_kernel", "scan_bwd_carry_kernel"),
        *("scan_combine_kernel", "scan_combine_kernel[reverse]"),
    },
    "linear": {
        f"linear_{kind}_kernel{way}" for kind in ("carry", "combine") for way in ("", "[reverse]")
    },
}
# bytes that a program may share, where it is less than what a GPU has
MOST_SHARED = {"linear": 48 * 1024, "companion": 48 * 1024, "eidetic": 99 * 1024}
# entries and lanes along states and channels
# in these scans a lane has one channel and all of its states
A_LANE_A_CHANNEL = ("model_spans", "model_whole", "decode", "selective_spans", "selective_decode")
LAYOUTS = {
    **{f"scans:{case}": [[[1, 1], [1, 32]]] for case in A_LANE_A_CHANNEL},
    **{f"linear:{case}": [[[1], [32]]] for case in QUICK["linear"]},
    ("feedback:model", "fwd"): [[[1, 1], [1, 32]]],
    ("feedback:model", "bwd"): [[[1, 1], [2, 16]]],
    ("feedback:small", "fwd"): [[[1, 1], [4, 8]]],
    ("feedback:small", "bwd"): [[[1, 1], [4, 8]]],
}


def expected(group, case):
    """Return the names of the kernels that a case launches."""
    if case.startswith("conv"):
        return {f"causal_conv1d_{kind}_kernel" for kind in ("fwd", "bwd")}
    if case.startswith("vandermonde"):
        return {f"vandermonde_{kind}_kernel" for kind in ("table", "fwd", "bwd")}
    found = KERNELS[group]
    if "decode" in case:
        return {x for x in found if "fwd" in x}
    if case == "plain":  # feedback's has all its kernels, eidetic's no memory
        found = found - {"eidetic_attention_bwd_memory_kernel"}
    return found if case.endswith("whole") else found | CUT.get(group, set())


def check(cases, targets):
    """Compile cases, all of them where none is named: none spills, and all kernels are there."""
    names = [x.removeprefix("sm_") for x in targets]
    limits = SHARED | OTHERS
    records = compiled(*cases, "--targets", *names)
    found = {}
    for record in records:
        group, _, case = record["case"].partition(":")
        most = min(limits[record["target"]], MOST_SHARED.get(group, 1 << 20))
        assert_no_spills([record], {record["target"]: most})
        found.setdefault((group, case, record["target"]), set()).add(record["kernel"])
        if group == "eidetic" and record["target"] in SHARED:
            check_instructions(case, record)
        kind = (record["case"], record["kernel"].split("_")[-2])
        layout = LAYOUTS.get(record["case"], LAYOUTS.get(kind))
        if layout and record["target"] in SHARED:
            assert record["layouts"] == layout, record
    assert {(f"{group}:{case}", target) for group, case, target in found} >= {
        (case, target) for case in cases for target in targets
    }
    for (group, case, target), kernels in found.items():
        assert kernels == expected(group, case), (group, case, target)


def check_instructions(case, record):
    """Keys come in asynchronously, and sm_90 multiplies 64 rows by HGMMA."""
    assert (record["copies"] > 0) == ("float64" not in case), record
    rows64 = "float" not in case and not case.startswith("decode")
    assert (record["wgmma"] > 0) == (rows64 and record["target"] == "sm_90"), record
    assert (record["mma"] > 0) == ("float32" not in case and record["wgmma"] == 0), record


@pytest.mark.long
def test_kernels_of_model_shapes_compile_without_spills():
    check([f"{group}:{case}" for group, cases in QUICK.items() for case in cases], SHARED)


@pytest.mark.slow
def test_kernels_of_every_kind_compile_without_spills():
    check([], SHARED)


@pytest.mark.slow
@pytest.mark.parametrize("group", ["scans", "feedback", "eidetic"])
def test_kernels_compile_for_other_gpus(group):
    large = ("large_spans", "selective_large_spans", "zoh_large_spans")
    cases = {
        "scans": large,
        "feedback": (*QUICK["feedback"], "plain", "drive", "states1", "states100", "float64"),
        "eidetic": ("model64", "model128", "wide", "decode"),
    }[group]
    check([f"{group}:{case}" for case in cases], OTHERS)
