"""The S5 and LRU oracle against closed forms: HiPPO-N, the hold, white noise through a ring."""

import numpy as np
import pytest
from tests.oracles import s5 as oracle


@pytest.mark.parametrize("order", [2, 8, 64])
def test_hippo_n_is_minus_a_half_and_skew(order):
    """It is normal, and every eigenvalue lies on the line -1/2, in conjugate pairs."""
    A = oracle.hippo_normal(order)
    np.testing.assert_allclose(A + A.T, -np.eye(order), atol=order * 1e-14)
    values = np.linalg.eigvals(A)
    np.testing.assert_allclose(values.real, -0.5, atol=order**2 * 1e-15)
    rising = np.sort(values.imag)
    np.testing.assert_allclose(rising, -rising[::-1], atol=order**2 * 1e-15)


def test_hippo_legs_is_the_papers_and_blocks_stand_apart():
    root = np.sqrt
    expected = [[-1, 0, 0], [-root(3), -2, 0], [-root(5), -root(15), -3]]
    np.testing.assert_allclose(oracle.hippo_legs(3), expected, rtol=1e-15)
    A = oracle.hippo_normal(8, blocks=2)
    np.testing.assert_array_equal(A[:4, :4], oracle.hippo_normal(4))
    np.testing.assert_array_equal(A[4:, 4:], oracle.hippo_normal(4))
    assert not A[:4, 4:].any()
    assert not A[4:, :4].any()


def test_the_hold_solves_the_equation_for_a_constant_input():
    """Many short steps of Euler's rule tend to one held step, with an error of the step's size."""
    A, B, dt = oracle.hippo_normal(4), np.arange(4.0)[:, None], 0.3
    Abar, Bbar = oracle.hold(A, B, dt)
    x, start, count = np.ones((4, 1)), np.ones((4, 1)), 20_000
    for _ in range(count):
        x = x + dt / count * (A @ x + B)
    np.testing.assert_allclose(x, Abar @ start + Bbar, atol=1e-4)


def draw(variant, bidirectional, activation, seed=1, H=4, N=3, V=11):
    """Weights of one layer, and its configuration."""
    rng = np.random.default_rng(seed)
    names = ("Lambda_re", "Lambda_im", "log_dt")
    if variant == "lru":
        names = ("nu_log", "theta_log", "gamma_log")
    rows = {"full_glu": 2 * H}.get(activation, H)
    shapes = dict.fromkeys(names, (N,)) | {"B": (N, H, 2), "D": (H,)}
    shapes |= {"C": (H, N * (1 + bidirectional), 2)}
    shapes |= {"out_proj.weight": (rows, H), "out_proj.bias": (rows,)}
    mixer = "model.layers.0.mixer."
    weights = {mixer + name: rng.standard_normal(shape) for name, shape in shapes.items()}
    weights |= {"model.embed_tokens.weight": rng.standard_normal((V, H))}
    weights |= {"model.layers.0.norm.weight": np.ones(H), "model.norm.weight": np.ones(H)}
    config = {"hidden_size": H, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "clip_eigs": True}
    config |= {"variant": variant, "bidirectional": bidirectional, "activation": activation}
    return weights, config, mixer, rng


def test_the_diagonal_system_is_the_dense_one_it_came_from():
    """HiPPO-N, diagonalised, with V* B and C V, half of it stored, at irregular steps."""
    weights, config, mixer, rng = draw("s5", False, "gelu", N=3)
    A, B, C = oracle.hippo_normal(6), rng.standard_normal((6, 4)), rng.standard_normal((4, 6))
    values, vectors = np.linalg.eigh(1j * (A + np.eye(6) / 2))  # of -i times frequencies
    half = vectors[:, :3]
    weights[mixer + "Lambda_re"], weights[mixer + "Lambda_im"] = np.full(3, -0.5), -values[:3]
    weights[mixer + "log_dt"][:] = np.log(0.2)
    for name, matrix in (("B", half.conj().T @ B), ("C", C @ half)):
        weights[mixer + name] = np.stack([matrix.real, matrix.imag], axis=-1)
    u, steps = rng.standard_normal((9, 4)), rng.uniform(0.1, 3, 9)
    x, expected = np.zeros(6), []
    for row, step in zip(u, steps, strict=True):
        Abar, Bbar = oracle.hold(A, B, 0.2 * step)
        x = (Abar @ x + Bbar @ row).real
        expected.append(C @ x + weights[mixer + "D"] * row)
    got = oracle.ssm(weights, config, mixer, u, steps)
    np.testing.assert_allclose(got, expected, atol=1e-12)


def test_a_step_of_two_is_two_steps_with_the_same_input():
    weights, config, mixer, rng = draw("s5", False, "gelu")
    u = rng.standard_normal((1, 4))
    twice = oracle.ssm(weights, config, mixer, np.repeat(u, 2, axis=0), np.ones(2))
    once = oracle.ssm(weights, config, mixer, u, np.array([2.0]))
    np.testing.assert_allclose(once[0], twice[1], atol=1e-13)


def test_gamma_keeps_the_size_of_white_noise():
    """The LRU's Section 3.4: with gamma = sqrt(1 - |lambda|^2) states have the input's variance."""
    rng, pole = np.random.default_rng(0), 0.9 * np.exp(0.4j)
    states = oracle.run(
        np.full((4000, 50), pole), np.sqrt(1 - abs(pole) ** 2) * rng.standard_normal((4000, 50))
    )
    # 200,000 values that forget each other after 1 / (1 - 0.81) steps: a deviation of 1 %
    assert np.mean(np.abs(states[200:]) ** 2) == pytest.approx(1, abs=0.04)


def test_looking_both_ways_reads_the_reversed_sequence_by_the_second_readout():
    weights, config, mixer, rng = draw("lru", True, "gelu")
    u, steps = rng.standard_normal((7, 4)), np.ones(7)
    weights[mixer + "D"][:] = 0
    one_way = {**config, "bidirectional": False}
    first, second = weights[mixer + "C"][:, :3], weights[mixer + "C"][:, 3:]
    past = oracle.ssm({**weights, mixer + "C": first}, one_way, mixer, u, steps)
    future = oracle.ssm({**weights, mixer + "C": second}, one_way, mixer, u[::-1], steps)[::-1]
    got = oracle.ssm(weights, config, mixer, u, steps)
    np.testing.assert_allclose(got, past + future, atol=1e-14)
