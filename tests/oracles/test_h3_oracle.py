"""The oracle of H3, judged by closed forms."""

import numpy as np
from tests.oracles import h3 as oracle
from tests.oracles.judging import numbers, relative

B, L, D, N = 2, 11, 6, 4


def test_the_shift_remembers_the_last_inputs():
    """With B = e_1 the state holds the last N inputs, and the output is a filter of taps C."""
    u, C, zero = numbers(B, L, D), numbers(D, N, seed=1), np.zeros(D)
    first = np.zeros((D, N))
    first[:, 0] = 1
    y = oracle.shift_ssm(u, first, C, zero)
    for i in range(L):
        past = [C[:, lag] * u[:, i - lag] for lag in range(min(N, i + 1))]
        np.testing.assert_allclose(y[:, i], np.sum(past, axis=0), rtol=1e-13, atol=1e-14)


def test_the_shift_of_any_input_vector_is_a_filter_of_n_taps():
    u, b, c, d = numbers(B, L, D), numbers(D, N, seed=1), numbers(D, N, seed=2), numbers(D, seed=3)
    taps = [np.sum(c[:, lag:] * b[:, : N - lag], axis=1) for lag in range(N)]
    expected = d * u
    for lag, tap in enumerate(taps):
        expected[:, lag:] += tap * u[:, : L - lag]
    assert relative(oracle.shift_ssm(u, b, c, d), expected) < 1e-13


def test_the_diagonal_state_space_is_its_kernel():
    A = -np.exp(numbers(D, 2)) + 1j * numbers(D, 2, seed=1)
    C = numbers(D, 2, seed=2) + 1j * numbers(D, 2, seed=3)
    Abar, Bbar = oracle.discretize(A, numbers(D, 2, seed=4), 0.3)
    u, direct = numbers(B, L, D, seed=5), numbers(D, seed=6)
    taps = oracle.kernel(Abar, Bbar, C, L)
    expected = direct * u
    for lag in range(L):
        expected[:, lag:] += taps[:, lag] * u[:, : L - lag]
    assert relative(oracle.diagonal_ssm(u, Abar, Bbar, C, direct), expected) < 1e-13


def test_the_bilinear_rule_is_of_second_order():
    """Halving the step divides the distance to the exact step by eight: its error is dt^3 / 12."""
    A, one = np.array([[-0.5 + 2j]]), np.ones((1, 1))
    errors = [abs(oracle.discretize(A, one, dt)[0] - np.exp(A * dt))[0, 0] for dt in (0.02, 0.01)]
    assert abs(errors[0] / errors[1] - 8) < 0.1


def test_a_held_input_is_the_solution_of_the_differential_equation():
    """``x' = A x + B u`` with u constant for a step, in many small ones."""
    A, B, dt, count = np.array([[-0.5 + 2j]]), np.array([[1.5 - 1j]]), 0.3, 4096
    x = np.array([[0.7 + 0.2j]])
    Abar, Bbar = oracle.discretize(A, B, dt, "zoh")
    expected = Abar * x + Bbar * 2.0
    for _ in range(count):  # the midpoint rule, of second order
        middle = x + dt / count / 2 * (A * x + B * 2.0)
        x = x + dt / count * (A * middle + B * 2.0)
    assert relative(x, expected) < 1e-7


def test_with_a_sum_for_its_diagonal_h3_is_linear_attention():
    """Section 3.1: no shift, A = 0 and C Bbar = 1 leave ``q (sum k v^T)``."""
    q, k, v = (numbers(B, L, D, seed=seed) for seed in range(3))
    weights = {
        **{"shift_B": np.zeros((D, N)), "shift_C": np.zeros((D, N)), "shift_D": np.ones(D)},
        **{"log_dt": np.zeros(1), "D": np.zeros(1)},
        **{"A_log": np.full((1, 1), -np.inf), "A_imag": np.zeros((1, 1))},
        **{"B": np.array([[[0.5, 0]]]), "C": np.array([[[1.0, 0]]])},
    }
    y = oracle.h3(q, k, v, weights, "", D)
    assert relative(y, oracle.linear_attention(q, k, v)) < 1e-13


def test_attention_with_rotary_positions_sees_distances_only():
    q, k = numbers(1, 1, 1, D), numbers(1, 1, 1, D, seed=1)
    scores = []
    for shift in range(3):
        places = np.zeros((1, 8, 1, D))
        places[0, 3 + shift], places[0, 1 + shift] = q[0, 0], k[0, 0]
        turned = oracle.rotated(places, 4)
        scores.append(np.sum(turned[0, 3 + shift] * turned[0, 1 + shift]))
        np.testing.assert_array_equal(turned[..., 4:], places[..., 4:])
    np.testing.assert_allclose(scores, scores[0], rtol=1e-13)
    assert abs(scores[0] - np.sum(q * k)) > 1e-3


def test_attention_without_scores_is_the_mean_of_the_past():
    v = numbers(B, L, D)
    mean = np.cumsum(v, axis=1) / np.arange(1, L + 1)[:, None]
    assert relative(oracle.attention(0 * v, v, v, 2, None), mean) < 1e-13
