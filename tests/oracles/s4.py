"""S4 in float64 numpy, from the paper alone (Gu, Goel, Re, arXiv 2111.00396).

Equation, theorem and algorithm numbers are the paper's. States are vectors of complex numbers of
the full order N, matrices are dense, transforms and convolutions are sums; nothing is fast and
nothing of ours is imported.

Legend: B batch, L length, H features, N order, n = N / 2 stored modes, R sets of Lambda, P and B.
A trailing axis of 2 is (real, imaginary). Q is P (as in arXiv 2202.09729, so that A is stable).

The names this file reads, under ``model.layers.{i}.mixer.``:

    log_dt          [H]
    A_log, A_imag   [R, n]      Lambda = -exp(A_log) + i A_imag; feature h has set h mod R
    P, B            [R, n, 2]
    C               [H, n, 2]
    D               [H]
    out_proj.weight [H, H], or [2 H, H] for the block "glu"; out_proj.bias

and around the mixers:

    model.embed_tokens.weight                          [V, H]
    model.layers.{i}.norm.weight, model.norm.weight    RMSNorm before a mixer, and at the end
    lm_head.weight                                     [V, H]; the embedding where absent

Fields of the configuration: hidden_size, num_hidden_layers, rms_norm_eps; block; norm_type "rms",
prenorm and no MLP are taken for granted.
"""

from collections.abc import Mapping
from math import erf, sqrt
from typing import Any

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]
Config = Mapping[str, Any]


# --- HiPPO ------------------------------------------------------------------------------------


def hippo(order: int) -> tuple[Array, Array]:
    """Eq. (2): HiPPO-LegS, A [N, N], and its input vector b [N]."""
    A = np.zeros((order, order))
    for n in range(order):
        for k in range(n):
            A[n, k] = -sqrt((2 * n + 1) * (2 * k + 1))
        A[n, n] = -(n + 1)
    return A, np.sqrt(2 * np.arange(order) + 1.0)


def nplr(order: int) -> tuple[Array, Array, Array]:
    """Theorem 1, normal plus low rank: Lambda [N], V [N, N] unitary and p [N] with
    ``A = V diag(Lambda) V* - p p^T``; eigenvalues rise with their imaginary parts."""
    A, _ = hippo(order)
    p = np.sqrt(np.arange(order) + 0.5)
    frequencies, V = np.linalg.eigh(-1j * (A + np.outer(p, p) + np.eye(order) / 2))
    return -0.5 + 1j * frequencies, V, p


# --- one feature's state space ----------------------------------------------------------------


def whole(half: Array) -> Array:
    """Both halves of conjugate pairs, [N], from the stored one, [n]."""
    return np.concatenate([half, half.conj()])


def discretize(A: Array, b: Array, dt: float) -> tuple[Array, Array]:
    """Eq. (3): the bilinear rule, Abar and Bbar."""
    one = np.eye(len(A))
    implicit = np.linalg.inv(one - dt / 2 * A)
    return implicit @ (one + dt / 2 * A), implicit @ b * dt


def unrolled(Abar: Array, Bbar: Array, c: Array, length: int) -> Array:
    """Eq. (5): the kernel ``C Abar^l Bbar``, tap by tap."""
    taps, x = [], Bbar
    for _ in range(length):
        taps.append(c @ x)
        x = Abar @ x
    return np.array(taps)


def algorithm_1(lam: Array, p: Array, b: Array, c: Array, dt: float, length: int) -> Array:
    """Algorithm 1: truncated generating function at the roots of unity by four Cauchy sums.

    All vectors have the full order. ``C~ = C (I - Abar^L)`` is computed here, by a power; the paper
    learns it instead, and so fixes L.
    """
    A = np.diag(lam) - np.outer(p, p.conj())
    Abar, _ = discretize(A, b, dt)
    c_tilde = c @ (np.eye(len(lam)) - np.linalg.matrix_power(Abar, length))
    values = np.zeros(length, dtype=complex)
    for k in range(length):
        z = np.exp(-2j * np.pi * k / length)
        if 2 * k == length:  # z = -1: the limit of what stands below is dt C~ b / 2
            values[k] = dt * (c_tilde @ b) / 2
            continue
        node = 2 / dt * (1 - z) / (1 + z)
        cb, cp, pb, pp = (
            sum(left * right / (node - lam))
            for left, right in ((c_tilde, b), (c_tilde, p), (p.conj(), b), (p.conj(), p))
        )
        values[k] = 2 / (1 + z) * (cb - cp * pb / (1 + pp))
    angles = np.outer(np.arange(length), np.arange(length)) / length
    return np.exp(2j * np.pi * angles) @ values / length


def systems(weights: Weights, prefix: str) -> list[tuple[Array, Array, Array, Array, float]]:
    """Lambda, P, B, C of the full order, and the time step, of every feature."""
    lam = -np.exp(weights[prefix + "A_log"]) + 1j * weights[prefix + "A_imag"]
    P, B, C = (weights[prefix + name] @ np.array([1, 1j]) for name in "PBC")
    steps = np.exp(weights[prefix + "log_dt"])
    sets = len(lam)
    return [
        (whole(lam[h % sets]), whole(P[h % sets]), whole(B[h % sets]), whole(C[h]), float(dt))
        for h, dt in enumerate(steps)
    ]


# --- the network ------------------------------------------------------------------------------


def gelu(x: Array) -> Array:
    return x * (1 + np.vectorize(erf, otypes=[float])(x / sqrt(2))) / 2


def mixer(weights: Weights, config: Config, prefix: str, x: Array, form: str) -> Array:
    """Section 3.4's layer, x [B, L, H]: features apart, then mixed position by position."""
    batch, length, _ = x.shape
    y = np.zeros_like(x)
    for h, (lam, p, b, c, dt) in enumerate(systems(weights, prefix)):
        if form == "convolution":
            taps = algorithm_1(lam, p, b, c, dt, length).real
            for t in range(length):
                y[:, t, h] = sum(taps[j] * x[:, t - j, h] for j in range(t + 1))
            continue
        Abar, Bbar = discretize(np.diag(lam) - np.outer(p, p.conj()), b, dt)
        state = np.zeros((batch, len(lam)), dtype=complex)
        for t in range(length):
            state = state @ Abar.T + np.outer(x[:, t, h], Bbar)
            y[:, t, h] = (state @ c).real
    y = y + weights[prefix + "D"] * x
    if config["block"] == "filter":
        return y
    y = gelu(y) @ weights[prefix + "out_proj.weight"].T + weights[prefix + "out_proj.bias"]
    if config["block"] == "linear":
        return y
    value, gate = np.split(y, 2, axis=-1)
    return value / (1 + np.exp(-gate))


def logits(weights: Weights, config: Config, input_ids: Array, form: str = "recurrence") -> Array:
    """Logits [B, L, V] of whole sequences [B, L]; the conformance kit's entry.

    Args:
        weights: The causal language model's state dict, as numpy arrays.
        config: The fields of its configuration.
        input_ids: Token ids.
        form: "recurrence" steps through time by Eq. (3), "convolution" takes Algorithm 1.
    """
    weights = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}

    def norm(name: str, x: Array) -> Array:
        size = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config["rms_norm_eps"])
        return x / size * weights[name + ".weight"]

    embedding = weights["model.embed_tokens.weight"]
    x = embedding[np.asarray(input_ids)]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        x = x + mixer(weights, config, layer + "mixer.", norm(layer + "norm", x), form)
    return norm("model.norm", x) @ weights.get("lm_head.weight", embedding).T


# --- what golden checks compare with ----------------------------------------------------------


def layer_parameters(hidden: int, order: int, sets: int | None = None, glu: bool = False) -> int:
    """Parameters of one layer without its norm: state spaces, skip and projection."""
    own = hidden * (order + 2)  # C in pairs, D, time step
    shared = (hidden if sets is None else sets) * 3 * order  # Lambda, P and B in pairs
    return own + shared + (hidden + 1) * hidden * (2 if glu else 1)
