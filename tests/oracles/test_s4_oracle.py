"""The S4 oracle against closed forms and against itself: recurrence, Algorithm 1, HiPPO."""

import numpy as np
import pytest
from tests.oracles import s4 as oracle


def draw(order, seed=0):
    """A stable system of the full order: Lambda, P, B, C in conjugate pairs."""
    rng = np.random.default_rng(seed)
    half = rng.standard_normal((6, order // 2))
    lam = -np.exp(half[0] - 1) + 3j * half[1]
    p, b, c = (rng.standard_normal((2, order // 2)).T @ np.array([1, 1j]) for _ in range(3))
    return tuple(oracle.whole(x) for x in (lam, p, b, c))


def dense(lam, p):
    return np.diag(lam) - np.outer(p, p.conj())


@pytest.mark.parametrize("order", [2, 8, 64])
def test_hippo_is_normal_plus_rank_one(order):
    A, b = oracle.hippo(order)
    lam, V, p = oracle.nplr(order)
    rebuilt = (V * lam) @ V.conj().T - np.outer(p, p)
    # the largest entry is 2 N - 1, and a product sums N of that size
    np.testing.assert_allclose(rebuilt, A, atol=order**2 * 1e-15)
    np.testing.assert_allclose(V @ V.conj().T, np.eye(order), atol=order * 1e-15)
    np.testing.assert_allclose(b, np.sqrt(2) * p, rtol=1e-15)
    np.testing.assert_allclose(lam, lam[::-1].conj(), atol=order**2 * 1e-15)


def test_hippos_first_entries_and_eigenvalues_are_the_papers():
    A, _ = oracle.hippo(4)
    root = np.sqrt
    expected = [
        [-1, 0, 0, 0],
        [-root(3), -2, 0, 0],
        [-root(5), -root(15), -3, 0],
        [-root(7), -root(21), -root(35), -4],
    ]
    np.testing.assert_allclose(A, expected, rtol=1e-15)
    np.testing.assert_allclose(np.sort(np.linalg.eigvals(A)), [-4, -3, -2, -1], atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_algorithm_1_is_the_unrolled_kernel_at_every_length(length):
    lam, p, b, c = draw(6)
    Abar, Bbar = oracle.discretize(dense(lam, p), b, 0.3)
    expected = oracle.unrolled(Abar, Bbar, c, length)
    got = oracle.algorithm_1(lam, p, b, c, 0.3, length)
    np.testing.assert_allclose(got, expected, atol=1e-13 * np.abs(expected).max() * length)
    assert np.abs(expected.imag).max() <= 1e-14 * np.abs(expected).max()


def test_without_the_truncation_the_kernel_would_wrap_around():
    """The corrected C is what makes Algorithm 1 right: with C itself later taps are added."""
    lam, p, b, c = draw(6)
    Abar, Bbar = oracle.discretize(dense(lam, p), b, 0.3)
    length = 5
    taps = oracle.unrolled(Abar, Bbar, c, 400 * length).reshape(-1, length)
    untouched = c @ np.linalg.inv(np.eye(6) - np.linalg.matrix_power(Abar, length))
    wrapped = oracle.algorithm_1(lam, p, b, untouched, 0.3, length)
    np.testing.assert_allclose(wrapped, taps.sum(0), atol=1e-12 * np.abs(taps).max())


def test_one_real_mode_is_the_bilinear_exponential():
    """With P = 0 and a real Lambda the recurrence is a geometric series."""
    lam, one = np.array([-2.0, -2.0]), np.array([0.5, 0.5])
    Abar, Bbar = oracle.discretize(dense(lam, 0 * one), one, 0.5)
    got = oracle.unrolled(Abar, Bbar, np.ones(2), 6)
    np.testing.assert_allclose(got, 0.5 / 1.5 * (0.5 / 1.5) ** np.arange(6), rtol=1e-14)


def test_the_low_rank_part_makes_a_system_no_less_stable():
    lam, p, *_ = draw(8, seed=3)
    Abar, _ = oracle.discretize(dense(lam, p), p, 0.7)
    assert np.linalg.norm(Abar, 2) < 1  # Re x* A x < 0 for every x


def test_both_forms_of_the_network_agree():
    rng = np.random.default_rng(1)
    H, n, R, V = 4, 3, 2, 11
    mixer = "model.layers.0.mixer."
    shapes = {"log_dt": (H,), "A_log": (R, n), "A_imag": (R, n), "P": (R, n, 2), "B": (R, n, 2)}
    shapes |= {"C": (H, n, 2), "D": (H,), "out_proj.weight": (2 * H, H), "out_proj.bias": (2 * H,)}
    weights = {mixer + name: rng.standard_normal(shape) for name, shape in shapes.items()}
    weights |= {"model.embed_tokens.weight": rng.standard_normal((V, H))}
    weights |= {"model.layers.0.norm.weight": np.ones(H), "model.norm.weight": np.ones(H)}
    config = {"hidden_size": H, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "block": "glu"}
    ids = rng.integers(V, size=(2, 9))
    got, expected = (oracle.logits(weights, config, ids, f) for f in ("recurrence", "convolution"))
    np.testing.assert_allclose(got, expected, atol=1e-11)
