"""The RTF oracle, judged by formulas that it does not use itself."""

import numpy as np
import pytest
from tests.oracles import rtf
from tests.oracles.judging import BACKBONES, IDS, judge_convolution, network, numbers, relative


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


def test_the_double_sum_is_numpys_convolution_and_reads_the_future_strictly():
    judge_convolution(rtf.convolution)


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
