"""The linear recurrences' oracle, judged by parallel forms, closed forms and each other."""

import numpy as np
from tests.oracles import linear_attention
from tests.oracles.judging import numbers, relative

L, K, V = 9, 4, 3
Q, KEYS, VALUES = numbers(L, K), numbers(L, K, seed=1), numbers(L, V, seed=2)
BETA = 1 / (1 + np.exp(-numbers(L, seed=3)))
ALPHA = 1 / (1 + np.exp(-numbers(L, K, seed=4)))
STATE = numbers(K, V, seed=5)
UNIT = KEYS / np.linalg.norm(KEYS, axis=1, keepdims=True)


def quadratic(q, k, v, decay):
    """All outputs at once: the masked matrix of scores times the values (attention's form)."""
    mask = np.array(
        [[np.prod(decay[j + 1 : i + 1]) * (j <= i) for j in range(L)] for i in range(L)]
    )
    return (q @ k.T * mask) @ v


def test_ssd_is_its_quadratic_form():
    dt = np.exp(numbers(L, seed=6))
    y, _ = linear_attention.ssd(VALUES, dt, -0.3, KEYS, Q)
    assert relative(y, quadratic(Q, KEYS, dt[:, None] * VALUES, np.exp(-0.3 * dt))) < 1e-13


def test_retention_is_its_parallel_representation():
    o, _ = linear_attention.retention(Q, KEYS, VALUES, 0.8)
    assert relative(o, quadratic(Q, KEYS, VALUES, np.full(L, 0.8))) < 1e-13


def test_gla_is_its_parallel_form():
    """``((Q * b) (K / b)^T, masked) V`` with ``b`` the cumulated gates."""
    b = np.cumprod(ALPHA, axis=0)
    o, _ = linear_attention.gla(Q, KEYS, VALUES, ALPHA)
    assert relative(o, np.tril((Q * b) @ (KEYS / b).T) @ VALUES) < 1e-12


def test_equal_gates_make_gla_retention_and_kda_the_gated_delta_net():
    found = linear_attention.gla(Q, KEYS, VALUES, np.full((L, K), 0.7), STATE)
    expected = linear_attention.retention(Q, KEYS, VALUES, 0.7, STATE)
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) < 1e-13
    alpha = ALPHA[:, 0]
    o, S = linear_attention.kda(Q, UNIT, VALUES, np.repeat(alpha[:, None], K, axis=1), BETA, STATE)
    expected = linear_attention.gated_delta_net(Q, UNIT, VALUES, alpha, BETA, STATE.T)
    assert relative(o, expected[0]) < 1e-13
    assert relative(S, expected[1].T) < 1e-13


def test_gates_of_one_make_the_gated_delta_net_delta_net():
    found = linear_attention.gated_delta_net(Q, UNIT, VALUES, np.ones(L), BETA, STATE.T)
    expected = linear_attention.delta_net(Q, UNIT, VALUES, BETA, STATE.T)
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) < 1e-13


def test_the_delta_rule_recalls_what_it_wrote_last_under_a_key():
    """With beta = 1 and orthonormal keys, each written twice."""
    keys = np.linalg.qr(KEYS[:K])[0]
    keys = np.concatenate([keys, keys])
    values = numbers(2 * K, V, seed=7)
    _, S = linear_attention.delta_net(keys, keys, values, np.ones(2 * K))
    assert relative(S @ keys[K:].T, values[K:].T) < 1e-13


def test_the_delta_rule_is_a_step_down_the_error_of_its_key():
    """Finite differences of ``|S k - v|^2 / 2`` in S."""
    S, k, v = STATE.T, KEYS[0], VALUES[0]
    slope, step = np.zeros_like(S), 1e-6
    for i in np.ndindex(*S.shape):
        moved = [S.copy(), S.copy()]
        for x, sign in zip(moved, (1, -1), strict=True):
            x[i] += sign * step
        up, down = (((x @ k - v) ** 2).sum() / 2 for x in moved)
        slope[i] = (up - down) / (2 * step)
    _, after = linear_attention.delta_net(Q[:1], KEYS[:1], VALUES[:1], BETA[:1], S)
    assert relative(after, S - BETA[0] * slope) < 1e-9


def test_the_linear_transformer_is_its_masked_quadratic_form():
    """Outputs are means of the values, weighted by ``phi(q_i) . phi(k_j)`` for ``j <= i``."""

    def phi(x):
        return np.where(x > 0, x + 1, np.exp(x))

    y, (s, z) = linear_attention.linear_transformer(Q, KEYS, VALUES)
    weights = np.tril(phi(Q) @ phi(KEYS).T)
    divisor = weights.sum(axis=1, keepdims=True) + 1e-6
    assert relative(y, weights @ VALUES / divisor) < 1e-13
    assert relative(s, phi(KEYS).T @ VALUES) < 1e-13
    assert relative(z, phi(KEYS).sum(axis=0)) < 1e-13


def test_rotary_products_depend_on_the_distance_alone():
    """By ``Re sum_j conj(q_j) k_j e^(i (n - m) theta_j)`` of the complex halves."""
    same = np.ones((L, 1))
    q, k = linear_attention.rotary(same * Q[:1]), linear_attention.rotary(same * KEYS[:1])
    a, b = (x[0, :2] + 1j * x[0, 2:] for x in (Q, KEYS))
    theta, distance = np.array([1.0, 0.01]), np.subtract.outer(np.arange(L), np.arange(L))
    turned = np.exp(-1j * distance[..., None] * theta)
    assert relative(q @ k.T, (a.conj() * b * turned).real.sum(axis=-1)) < 1e-13


def test_the_short_convolution_is_numpys():
    taps = numbers(K, 1, 3, seed=8)
    y = linear_attention.short_conv(Q, taps, 0.5)
    expected = [np.convolve(Q[:, c], taps[c, 0, ::-1])[:L] for c in range(K)]
    assert relative(y, np.stack(expected, axis=1) + 0.5) < 1e-13


def test_hgrn2_is_gla_with_the_gates_complement_as_key():
    y, h = linear_attention.hgrn2(VALUES, ALPHA, Q, STATE)
    expected = linear_attention.gla(Q, 1 - ALPHA, VALUES, ALPHA, STATE)
    assert relative(y, expected[0]) < 1e-13
    assert relative(h, expected[1]) < 1e-13


def test_lower_bounds_rise_from_zero_by_the_softmaxs_shares():
    """Of two equal numbers half; the last bound is what the first share leaves of 1."""
    assert relative(linear_attention.lower_bounds(np.zeros((2, 3)))[1], np.full(3, 0.5)) < 1e-15
    gamma = numbers(5, 3, seed=9)
    bounds = linear_attention.lower_bounds(gamma)
    assert not bounds[0].any()
    assert (np.diff(bounds, axis=0) > 0).all()
    assert relative(bounds[-1], 1 - np.exp(gamma[0]) / np.exp(gamma).sum(axis=0)) < 1e-14


def test_mlstm_is_its_recurrence_without_a_stabiliser():
    """``h = C q / max(|n . q|, 1)`` with ``C = sigmoid(f) C + exp(i) v k^T`` and n likewise.

    Both sides of the maximum are met, and a state goes on from that of the first tokens.
    """
    i, f = 2 * numbers(L, seed=10), 3 * numbers(L, seed=11)
    C, n, expected, above = np.zeros((V, K)), np.zeros(K), np.zeros((L, V)), set()
    for t in range(L):
        kept, written = 1 / (1 + np.exp(-f[t])), np.exp(i[t])
        C = kept * C + written * np.outer(VALUES[t], KEYS[t])
        n = kept * n + written * KEYS[t]
        above.add(abs(n @ Q[t]) > 1)
        expected[t] = C @ Q[t] / max(abs(n @ Q[t]), 1)
    assert above == {True, False}
    h, (state, weights, m) = linear_attention.mlstm(Q, KEYS, VALUES, i, f)
    assert relative(h, expected) < 1e-13
    assert relative(np.exp(m) * state, C) < 1e-13
    assert relative(np.exp(m) * weights, n) < 1e-13
    _, half = linear_attention.mlstm(Q[:4], KEYS[:4], VALUES[:4], i[:4], f[:4])
    rest, _ = linear_attention.mlstm(Q[4:], KEYS[4:], VALUES[4:], i[4:], f[4:], half)
    assert relative(rest, expected[4:]) < 1e-13


def test_the_gated_delta_product_is_as_many_steps_of_the_gated_delta_rule():
    """Only the first of a token's steps decays the state, and the last one is read."""
    k, v, beta = UNIT.reshape(3, 3, K), VALUES.reshape(3, 3, V), BETA.reshape(3, 3)
    alpha = np.where(np.arange(L) % 3 == 0, ALPHA[:, 0], 1.0)
    o, S = linear_attention.gated_delta_net(Q, UNIT, VALUES, alpha, BETA, STATE.T)
    found = linear_attention.gated_delta_product(Q[2::3], k, v, ALPHA[::3, 0], beta, STATE)
    assert relative(found[0], o[2::3]) < 1e-13
    assert relative(found[1], S.T) < 1e-13
