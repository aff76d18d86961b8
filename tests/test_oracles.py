"""The oracles judge the families; here they are judged, by formulas they do not use themselves."""

import numpy as np
import pytest
from tests.oracles import dss, rtf
from tests.oracles.judging import relative

SHARED = {"rms_norm_eps": 1e-5, "num_hidden_layers": 2, "hidden_size": 6, "bidirectional": False}


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def complexes(*shape, seed=0):
    return dss.as_complex(numbers(*shape, 2, seed=seed))


def network(mixer, norm_type="rms", prenorm=True, intermediate_size=None):
    """Random weights of a language model of two layers and width 6, and the shared fields."""
    rng = np.random.default_rng(7)
    names = {"model.embed_tokens.weight": (11, 6)}
    norms = ["model.norm"] if prenorm else []
    for i in range(2):
        layer = f"model.layers.{i}."
        names |= {f"{layer}mixer.{name}": shape for name, shape in mixer.items()}
        norms.append(layer + "norm")
        if intermediate_size:
            norms.append(layer + "mlp_norm")
            for name, shape in (
                ("up_proj", (intermediate_size, 6)),
                ("down_proj", (6, intermediate_size)),
            ):
                names[f"{layer}mlp.{name}.weight"] = shape
                names[f"{layer}mlp.{name}.bias"] = shape[:1]
    kinds = {
        "rms": ["weight"],
        "layer": ["weight", "bias"],
        "batch": ["weight", "bias", "running_mean", "running_var"],
    }
    names |= {f"{norm}.{kind}": (6,) for norm in norms for kind in kinds[norm_type]}
    weights = {name: 0.5 * rng.standard_normal(shape) for name, shape in names.items()}
    for name, value in weights.items():
        if name.endswith("running_var"):
            value[:] = np.exp(value)
    fields = {"norm_type": norm_type, "prenorm": prenorm, "intermediate_size": intermediate_size}
    return weights, SHARED | fields


BACKBONES = [
    {},
    {"norm_type": "layer", "intermediate_size": 9},
    {"norm_type": "batch", "prenorm": False},
    {"prenorm": False, "intermediate_size": 9},
]
IDS = np.random.default_rng(1).integers(11, size=(2, 14))


# --- DSS --------------------------------------------------------------------------------------


def dss_model(variant, channels=1, separate=True, sides=1, **backbone):
    mixer = {
        "log_dt": (6, 2) if separate else (6,),
        "W": (sides * channels, 6, 4, 2),
        "D": (channels, 6),
        "out_proj.weight": (6, channels * 6),
        "out_proj.bias": (6,),
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
    for variant in ("exp_re_im", "softmax"):
        weights, config = dss_model(variant, norm_type="batch", intermediate_size=9, sides=2)
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


@pytest.mark.parametrize("oracle", [dss, rtf], ids=["dss", "rtf"])
def test_the_double_sum_is_numpys_convolution_and_reads_the_future_strictly(oracle):
    u, past, future = numbers(1, 9, 2), numbers(2, 5, seed=1), numbers(2, 12, seed=2)
    got = oracle.convolution(u, past, future)
    for h in range(2):
        forward = np.convolve(u[0, :, h], past[h])[:9]
        backward = np.convolve(u[0, ::-1, h], np.pad(future[h], (1, 0)))[:9][::-1]
        assert relative(got[0, :, h], forward + backward) <= 1e-14


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


def test_the_parameter_totals_are_those_of_the_papers_classifiers():
    count = dss.classifier_parameters
    assert count(128, 6, 10, vocab_size=18, prenorm=False) == 205_578  # ListOps
    assert count(128, 4, 2, vocab_size=135) == 152_450  # Text
    assert count(256, 6, 2, vocab_size=98, pair=True) == 888_322  # Retrieval
    assert count(512, 6, 10, prenorm=False) == 1_991_434  # Image
    assert count(256, 6, 2) == 601_346  # Pathfinder, Path-X
    assert count(128, 6, 10) == 203_786  # Speech Commands
    weights, _ = dss_model("exp", channels=3, separate=False)
    layer = sum(x.size for name, x in weights.items() if "layers.0.mixer" in name)
    assert layer == dss.layer_parameters(6, 4, channels=3, separate_dt=False)


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


# --- RTF --------------------------------------------------------------------------------------


def rtf_model(block, mode, constraint="none", denominators=3, order=4, sides=1, **backbone):
    mixer = {
        "a": (sides * denominators, order),
        "b": (sides * 6, order),
        "D": (sides * 6,),
        "out_proj.weight": (12, 6) if block == "s4" else (6, 5),
        "out_proj.bias": (12,) if block == "s4" else (6,),
    }
    if constraint == "l1_montel":
        mixer["montel_slack"] = (sides * denominators,)
    if block == "hyena":
        mixer |= {
            "in_proj.weight": (18, 6),
            "in_proj.bias": (18,),
            "short_conv.weight": (18, 1, 3),
            "short_conv.bias": (18,),
            "filter_norm.weight": (6,),
            "down_proj.weight": (5, 6),
            "down_proj.bias": (5,),
        }
    weights, fields = network(mixer, **backbone)
    own = {
        "d_state": order,
        "num_denominators": denominators,
        "kernel_mode": mode,
        "trunc_len": 16,
        "denominator_constraint": constraint,
        "constraint_margin": 1e-3,
        "block": block,
        "mixer_rank": 5,
        "bidirectional": sides == 2,
    }
    return weights, fields | own


@pytest.mark.parametrize("block", ["s4", "hyena"])
@pytest.mark.parametrize("mode", ["exact", "truncated"])
@pytest.mark.parametrize("constraint", ["none", "l1_montel"])
@pytest.mark.parametrize("backbone", BACKBONES, ids=lambda fields: ",".join(fields) or "default")
def test_the_rtf_model_stepped_is_the_rtf_model_convolved(block, mode, constraint, backbone):
    weights, config = rtf_model(block, mode, constraint, **backbone)
    whole = rtf.logits(weights, config, IDS)
    assert relative(rtf.logits(weights, config, IDS, "recurrence"), whole) <= 1e-11


def test_every_parameter_of_the_rtf_oracle_moves_its_logits():
    for block in ("s4", "hyena"):
        weights, config = rtf_model(
            block, "truncated", "l1_montel", sides=2, norm_type="batch", intermediate_size=9
        )
        whole = rtf.logits(weights, config, IDS)
        for name, value in weights.items():
            moved = rtf.logits({**weights, name: value * 1.1}, config, IDS)
            assert relative(moved, whole) > 1e-6, name


def stable(filters, order, seed=0):
    raw = numbers(filters, order, seed=seed)
    return rtf.denominator(raw, np.full(filters, 0.1))


def test_the_impulse_response_is_that_of_the_companion_matrix():
    a, b = 0.6 * numbers(3, 5), numbers(3, 5, seed=1)
    got = rtf.impulse_response(a, b, 30)
    for row, (coefficients, numerator) in zip(got, zip(a, b, strict=True), strict=True):
        A, B, C = rtf.companion(coefficients, numerator)
        powers = [C @ np.linalg.matrix_power(A, t) @ B for t in range(29)]
        assert relative(row, np.array([0, *powers])) <= 1e-11


def test_filters_with_a_closed_form_have_it():
    t = np.arange(1, 20)
    one = rtf.impulse_response(np.array([[0.7]]), np.array([[2.0]]), 20)[0]
    assert relative(one[1:], 2 * (-0.7) ** (t - 1)) <= 1e-14
    double = rtf.impulse_response(np.array([[-1.8, 0.81]]), np.array([[1.0, 0.0]]), 20)[0]
    assert relative(double[1:], t * 0.9 ** (t - 1)) <= 1e-13  # not representable diagonally
    taps = numbers(1, 6)
    fir = rtf.impulse_response(np.zeros((1, 6)), taps, 20)[0]
    np.testing.assert_array_equal(fir, np.concatenate([[0], taps[0], np.zeros(13)]))


@pytest.mark.parametrize("order", [1, 2, 7, 15])
def test_the_truncated_kernel_is_the_aliased_response_and_numpys_fft(order):
    a, b = stable(3, order), numbers(3, order, seed=1)
    got = rtf.truncated_kernel(a, b, 16)
    response = rtf.impulse_response(a, b, 16 * 200)
    assert relative(got, response.reshape(3, 200, 16).sum(axis=1)) <= 1e-12
    above = np.fft.rfft(np.pad(b, ((0, 0), (1, 0))), 16)
    below = np.fft.rfft(np.pad(a, ((0, 0), (1, 0)), constant_values=1), 16)
    assert relative(got, np.fft.irfft(above / below, 16)) <= 1e-12


@pytest.mark.parametrize("scale", [0.1, 1.1])
def test_the_deployed_recurrence_gives_every_trained_tap_back(scale):
    a, b = scale * numbers(3, 6), numbers(3, 6, seed=1)
    assert (max(rtf.poles_outside(row) for row in a) > 0) == (scale > 1)
    kernel = rtf.truncated_kernel(a, b, 16)
    numerator, gain = rtf.deployed(a, kernel)
    impulse = np.zeros((1, 16, 3))
    impulse[:, 0] = 1
    assert relative(rtf.recurrence(impulse, a, numerator, gain)[0][0].T, kernel) <= 1e-9
    dense = np.stack([rtf.corrected_numerator(*row, 16) for row in zip(a, b, strict=True)])
    assert relative(numerator, dense) <= 1e-9
    wrong = [
        np.linalg.solve(np.eye(6) - np.linalg.matrix_power(rtf.companion(x, y)[0], 16), y)
        for x, y in zip(a, b, strict=True)
    ]
    assert relative(numerator, np.stack(wrong)) > 1e-4  # the untransposed solve


def test_montels_constraint_keeps_every_pole_inside():
    for scale in (0, 1e-8, 1, 1e8):
        a = rtf.denominator(scale * numbers(9, 12), 0.01 + numbers(9) ** 2, 1e-3)
        assert np.abs(a).sum(axis=-1).max() < 1
        assert max(rtf.poles_outside(row) for row in a) == 0
    tight = rtf.denominator(numbers(1, 12), np.zeros(1), 1e-3)
    assert np.abs(tight).sum() == pytest.approx(1 / 1.001, rel=1e-6)


@pytest.mark.parametrize("order", [1, 5, 32, 64])
def test_the_winding_number_counts_the_poles_outside(order):
    width = order**-0.5
    rows = np.random.default_rng(order).uniform(-width, width, size=(8, order)) * 1.5
    outside = [rtf.poles_outside(row) for row in rows]
    assert max(outside) > 0
    assert [rtf.winding_number(row) for row in rows] == [-n for n in outside]


def test_state_spaces_and_modes_convert_to_the_same_filter():
    A, B, C = 0.4 * numbers(6, 6), numbers(6, seed=1), numbers(6, seed=2)
    a, b = rtf.from_state_space(A, B, C)
    expected = [0.0] + [C @ np.linalg.matrix_power(A, t) @ B for t in range(39)]
    assert relative(rtf.impulse_response(a[None], b[None], 40)[0], np.array(expected)) <= 1e-10
    values, vectors = np.linalg.eig(A)
    residues = (C @ vectors) * np.linalg.solve(vectors, B)
    for got, same in zip(rtf.from_modes(values, residues), (a, b), strict=True):
        assert relative(got, same) <= 1e-10


def test_the_table_4_model_has_125_million_parameters():
    total = rtf.hyena_lm_parameters(50264, 768, 12, 64, 768, 384, 3072)
    assert total == 124_981_248
    weights, _ = rtf_model("hyena", "exact", "l1_montel", norm_type="layer", intermediate_size=9)
    small = sum(x.size for x in weights.values())
    assert small == rtf.hyena_lm_parameters(11, 6, 2, 4, 3, 5, 9)
    assert rtf.filter_parameters(6, 4, 3, montel=True) == 4 * (6 + 3) + 6 + 3
