"""The SpaceTime oracle, judged by formulas that it does not use itself."""

import numpy as np
import pytest
from tests.oracles import spacetime
from tests.oracles.judging import IDS, network, numbers, relative


def spacetime_model(block, preprocess=False):
    mixer = {"a": (2, 3), "B": (2, 3), "C": (2, 3), "D": (6,), "out_proj.bias": (6,)}
    mixer["out_proj.weight"] = (6, 6)
    if block == "glu":
        mixer |= {"out_proj.weight": (12, 6), "out_proj.bias": (12,)}
    if preprocess:
        mixer["fixed"] = (6, 5)
    weights, fields = network(mixer)
    for name, value in weights.items():
        if name.endswith("mixer.a"):  # these signs leave no pole at a root of unity
            value[:] = np.abs(value) * [1, -1, 1]
    return weights, fields | {"block": block, "preprocess": preprocess}


@pytest.mark.parametrize("block", ["mlp", "glu"])
def test_the_spacetime_model_stepped_is_the_spacetime_model_of_algorithm_1(block):
    weights, config = spacetime_model(block, preprocess=block == "mlp")
    whole = spacetime.logits(weights, config, IDS)
    assert relative(spacetime.logits(weights, config, IDS, "convolution"), whole) <= 1e-12


def test_every_parameter_of_the_spacetime_oracle_moves_its_logits():
    weights, config = spacetime_model("mlp", preprocess=True)
    whole = spacetime.logits(weights, config, IDS)
    for name, value in weights.items():
        if name == "model.layers.1.mixer.fixed":
            continue
        step = np.linspace(0.05, 0.1, value.size).reshape(value.shape)  # no scale: a has none
        moved = spacetime.logits({**weights, name: value + step}, config, IDS)
        assert relative(moved, whole) > 1e-6, name


@pytest.mark.parametrize("order", [1, 2, 7])
def test_the_companion_matrix_has_the_characteristic_polynomial_of_its_column(order):
    """``z^d - a_(d-1) z^(d-1) - .. - a_0``, of which numpy finds the coefficients by itself."""
    a = numbers(order)
    assert relative(np.poly(spacetime.companion(a)), np.append(1, -a[::-1])) <= 1e-12


def test_a_column_of_norm_one_has_its_eigenvalues_in_the_unit_disc():
    for seed in range(20):
        a = spacetime.unit(numbers(6, seed=seed))
        assert np.abs(np.linalg.eigvals(spacetime.companion(a))).max() <= 1 + 1e-12


@pytest.mark.parametrize(("order", "length"), [(1, 5), (4, 3), (4, 20)])
def test_algorithm_1_unrolls_the_companion_matrix(order, length):
    a, B, C = (numbers(order, seed=seed) for seed in range(3))
    a = 0.9 * spacetime.unit(a)  # of order 1, a norm of 1 puts the pole on a root of unity
    expected = spacetime.unrolled(spacetime.companion(a), B, C, length)
    assert relative(spacetime.algorithm_1(a, B, C, length), expected) <= 1e-11


def test_a_shift_is_an_autoregressive_filter_and_its_loop_goes_on_with_the_process():
    """AR(3): with a = 0 and B = e_1 the state is the last inputs; C = K = phi foretells them."""
    phi, series = np.array([0.5, -0.3, 0.2]), [1.0, -2.0, 0.5]
    for _ in range(20):
        series.append(phi @ series[:-4:-1])
    shift = np.eye(3)[0]
    found = spacetime.closed_loop(np.zeros(3), shift, phi, phi, np.array(series[:10]), 13)
    assert relative(found, np.array(series[10:])) <= 1e-12


def test_fixed_filters_difference_and_take_means_away():
    line = np.arange(20.0)
    for feature in range(8):
        taps = spacetime.fixed_filter(feature, window=5)
        y = np.convolve(line, taps)[8:20]
        expected = [line[8:], 1, 0, 0][feature] if feature < 4 else 2.0
        np.testing.assert_allclose(y, np.broadcast_to(expected, 12), atol=1e-12)
