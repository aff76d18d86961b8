"""The DSS oracle, judged by formulas that it does not use itself."""

import numpy as np
import pytest
from tests.oracles import dss
from tests.oracles.judging import BACKBONES, IDS, judge_convolution, network, numbers, relative


def complexes(*shape, seed=0):
    return dss.as_complex(numbers(*shape, 2, seed=seed))


def dss_model(variant, channels=1, separate=True, sides=1, block="linear", **backbone):
    rows = 12 if block == "glu" else 6
    mixer = {
        "log_dt": (6, 2) if separate else (6,),
        "W": (sides * channels, 6, 4, 2),
        "D": (channels, 6),
        "out_proj.weight": (rows, channels * 6),
        "out_proj.bias": (rows,),
    }
    if variant in ("softmax", "clip"):
        mixer["Lambda"] = (4, 2)
    else:
        mixer |= {"Lambda_log_neg_re": (4,), "Lambda_im": (4,)}
    weights, fields = network(mixer, **backbone)
    for name, value in weights.items():
        if name.endswith("log_dt"):
            value -= 1
    own = {
        "d_state": 4,
        "kernel_variant": variant,
        "kernel_norm_length": None,
        "max_kernel_length": None,
        "softmax_eps": 1e-7,
        "channels": channels,
        "block": block,
        "bidirectional": sides == 2,
    }
    return weights, fields | own


@pytest.mark.parametrize("variant", ["exp", "exp_no_scale", "exp_re_im", "clip", "softmax"])
@pytest.mark.parametrize("backbone", BACKBONES, ids=lambda fields: ",".join(fields) or "default")
def test_the_dss_model_stepped_is_the_dss_model_convolved(variant, backbone):
    weights, config = dss_model(variant, channels=2, **backbone)
    for norm_length in (None, 14, 23):
        config["kernel_norm_length"] = norm_length
        whole = dss.logits(weights, config, IDS)
        assert relative(dss.logits(weights, config, IDS, "recurrence"), whole) <= 1e-11


def test_every_parameter_of_the_dss_oracle_moves_its_logits():
    for variant, block in (("exp_re_im", "linear"), ("softmax", "glu")):
        fields = {"norm_type": "batch", "intermediate_size": 9, "sides": 2, "block": block}
        weights, config = dss_model(variant, **fields)
        whole = dss.logits(weights, config, IDS)
        for name, value in weights.items():
            moved = dss.logits({**weights, name: value * 1.1}, config, IDS)
            assert relative(moved, whole) > 1e-6, name


def test_the_softmax_oracle_is_the_papers_softmax_for_both_signs():
    lam, w = complexes(5) * [0.3, -1, 2, 0.1, -0.5], complexes(2, 3, 5, seed=1)
    assert (lam.real > 0).any()
    assert (lam.real < 0).any()
    c = dss.exponents(lam, numbers(3, 2, seed=2))
    for length in (1, 2, 30, 400):
        exact = dss.kernel(w, lam, c, length, "softmax", eps=0)
        assert relative(exact, dss.softmax_kernel(w, lam, c, length)) <= 1e-11
    rows = dss.softmax(c[..., None] * np.arange(400))
    assert np.abs(rows.sum(-1) - 1).max() <= 1e-10
    with pytest.raises(ValueError, match="growing"):
        dss.kernel(w, lam, c, 31, "softmax", norm_length=30)


def test_the_exp_oracle_is_the_dense_state_space_that_it_diagonalises():
    A = numbers(4, 4, seed=3) - 2 * np.eye(4)
    B, C = numbers(4, seed=4), numbers(4, seed=5)
    lam, vectors = np.linalg.eig(A)
    w = (C @ vectors) * np.linalg.solve(vectors, B)  # Proposition 1(a), proof
    dense = dss.dense_kernel(A, B, C, 0.3, 20)
    got = dss.kernel(w[None, None], lam, 0.3 * lam[None], 20, "exp")[0, 0]
    assert relative(got, dense.real) <= 1e-11
    step = np.exp(0.3 * lam) - 1
    got = dss.kernel((w * step / lam)[None, None], lam, 0.3 * lam[None], 20, "exp_no_scale")
    assert relative(got[0, 0], dense.real) <= 1e-11


def test_the_exp_oracle_with_doubled_weights_is_s4d():
    A, dt, BC = dss.s4d_lin(5), np.exp(numbers(3)), complexes(3, 5)
    np.testing.assert_array_equal(A[2], -0.5 + 2j * np.pi)
    got = dss.kernel(2 * BC[None], A, dss.exponents(A, np.log(dt)), 12, "exp")[0]
    assert relative(got, dss.s4d_kernel(A, BC, dt, 12)) <= 1e-13


def test_the_double_sum_is_numpys_convolution_and_reads_the_future_strictly():
    judge_convolution(dss.convolution)


def test_a_capped_dss_kernel_is_normalised_over_the_cap():
    weights, config = dss_model("softmax")
    lam, w = complexes(4, seed=1), complexes(1, 6, 4, seed=2)
    c = dss.exponents(lam, numbers(6))
    short, full = (dss.kernel(w, lam, c, 5, "softmax", n) for n in (5, 14))
    assert relative(short, full) > 1e-2
    config["max_kernel_length"] = 5
    whole = dss.logits(weights, config, IDS)
    config["kernel_norm_length"] = 14
    np.testing.assert_array_equal(dss.logits(weights, config, IDS), whole)
    config["kernel_norm_length"] = None
    short = dss.logits(weights, config, IDS[:, :3])  # shorter than the cap
    np.testing.assert_allclose(short, whole[:, :3], rtol=1e-12)
    changed = IDS.copy()
    changed[:, 0] = (changed[:, 0] + 1) % 11
    moved = dss.logits(weights, config, changed)
    np.testing.assert_array_equal(moved[:, 9:], whole[:, 9:])  # 2 layers reach back 2 * 4
    assert relative(moved[:, 8], whole[:, 8]) > 1e-9


def test_the_skew_hippo_spectrum_has_its_published_values():
    four = dss.skew_hippo(4)
    np.testing.assert_allclose(four.real, -0.5, atol=1e-13)
    np.testing.assert_allclose(four.imag, [19.8574, 5.3542, 1.9578, 0.4275], atol=5e-5)
    many = dss.skew_hippo(64).imag
    assert many.shape == (64,)
    np.testing.assert_allclose(many[:5], [5214.67, 1736.83, 1040.42, 741.37, 574.77], atol=5e-3)
    np.testing.assert_allclose(many[-5:], [2.9709, 2.1693, 1.4360, 0.7827, 0.2352], atol=5e-5)
    assert many[0] == pytest.approx(128**2 / np.pi, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MAX 2 9 [MIN 4 7 X 0 X", 9),
        ("[MED 1 2 X", 1),
        ("[MED 9 1 5 ]", 5),
        ("[MED 8 3 9 4 ]", 6),
        ("[SM 9 9 [SM 5 6 ] ]", 9),
        ("[MIN [MAX 0 3 ] [MED 1 5 9 ] [SM 5 5 5 ] ]", 3),
    ],
)
def test_the_listops_judge_evaluates(text, value):
    assert dss.listops_value(text.split()) == value


def test_the_listops_judge_counts_nesting_and_refuses_invalid_expressions():
    nested = "[MAX 2 [MIN 4 7 [SM 1 2 X X 0 X"
    assert dss.listops_tree(nested.split()) == (3, 3, [2, 3, 3])
    for text in ("", "[MAX 1", "1 2", "X", "[MAX X", "[FIRST 1 2 X", "10", "( 1 )"):
        with pytest.raises(ValueError, match=r"expression|token|closes"):
            dss.listops_value(text.split())
