"""S5 and the LRU in float64 numpy, from the papers alone.

S5: Smith, Warrington, Linderman, arXiv 2208.04933; the LRU: Orvieto et al., arXiv 2303.06349. Loops
run over tokens, and dense real matrices stand beside the diagonal complex ones that the models
have; nothing is fast and nothing of ours is imported.

Legend: B batch, L length, H features, P order of the state, N stored modes (P / 2 for S5, P for the
LRU), J blocks. A trailing axis of 2 is (real, imaginary).

The names this file reads, under ``model.layers.{i}.mixer.``:

    Lambda_re, Lambda_im, log_dt   [N]   S5
    nu_log, theta_log, gamma_log   [N]   the LRU
    B                              [N, H, 2]
    C                              [H, N, 2]; [H, 2 N, 2] if the model looks both ways
    D                              [H]
    out_proj.weight, .bias         [H, H] of half GLUs, [2 H, H] of the full one, not for "gelu"

and around the mixers:

    model.embed_tokens.weight                          [V, H]
    model.layers.{i}.norm.weight, model.norm.weight    RMSNorm before a mixer, and at the end
    lm_head.weight                                     [V, H]; the embedding where absent

Fields of the configuration: hidden_size, num_hidden_layers, rms_norm_eps; variant, activation,
bidirectional, clip_eigs; norm_type "rms", prenorm and no MLP are taken for granted.
"""

from collections.abc import Mapping
from math import pi, sqrt
from typing import Any

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]
Config = Mapping[str, Any]


# --- HiPPO ------------------------------------------------------------------------------------


def hippo_legs(order: int) -> Array:
    """HiPPO-LegS, [P, P]."""
    A = np.zeros((order, order))
    for n in range(order):
        for k in range(n):
            A[n, k] = -sqrt((2 * n + 1) * (2 * k + 1))
        A[n, n] = -(n + 1)
    return A


def hippo_normal(order: int, blocks: int = 1) -> Array:
    """The normal part of HiPPO-LegS, in equal blocks (S5's Appendix B.1.1), [P, P]."""
    size = order // blocks
    p = np.sqrt(np.arange(size) + 0.5)
    return np.kron(np.eye(blocks), hippo_legs(size) + np.outer(p, p))


# --- the state spaces -------------------------------------------------------------------------


def hold(A: Array, B: Array, dt: float) -> tuple[Array, Array]:
    """Zero-order hold of a dense system: ``e^(A dt)`` and ``A^-1 (e^(A dt) - 1) B``."""
    values, vectors = np.linalg.eig(A)
    Abar = (vectors * np.exp(values * dt)) @ np.linalg.inv(vectors)
    return Abar, np.linalg.solve(A, (Abar - np.eye(len(A))) @ B)


def run(pole: Array, drive: Array) -> Array:
    """The recurrence ``x[t] = pole[t] x[t-1] + drive[t]``, each [L, N], from zero."""
    x, states = np.zeros(drive.shape[1], dtype=complex), []
    for factor, entering in zip(pole, drive, strict=True):
        x = factor * x + entering
        states.append(x)
    return np.array(states)


def ssm(weights: Weights, config: Config, prefix: str, u: Array, steps: Array) -> Array:
    """One sequence [L, H], whose time steps are multiplied by steps [L].

    A state that looks back from what comes later holds an input until the token before it: its step
    is the one after a token, and 1 at the last one.
    """
    x = states(weights, config, prefix, u, steps)
    if config["bidirectional"]:
        after = np.append(steps[1:], 1.0)
        later = states(weights, config, prefix, u[::-1], after[::-1])[::-1]
        x = np.concatenate([x, later], axis=1)
    C = weights[prefix + "C"] @ np.array([1, 1j])
    pairs = 2 if config["variant"] == "s5" else 1
    return pairs * (x @ C.T).real + weights[prefix + "D"] * u


def states(weights: Weights, config: Config, prefix: str, u: Array, steps: Array) -> Array:
    """The states [L, N] after each token of one sequence read forwards."""
    B = weights[prefix + "B"] @ np.array([1, 1j])
    if config["variant"] == "lru":  # the exponential parameters and gamma
        nu, theta, gamma = (np.exp(weights[prefix + n + "_log"]) for n in ("nu", "theta", "gamma"))
        poles = np.exp(-nu + 1j * theta)
        pole = np.array([poles for _ in u])
        drive = np.array([gamma * (B @ row) for row in u])
    else:  # zero-order hold, the step multiplied by a token's number
        real, imag = weights[prefix + "Lambda_re"], weights[prefix + "Lambda_im"]
        eigenvalues = (np.minimum(real, -1e-4) if config["clip_eigs"] else real) + 1j * imag
        dt = np.exp(weights[prefix + "log_dt"])
        pole = np.array([np.exp(eigenvalues * dt * step) for step in steps])
        drive = np.array(
            [(factor - 1) / eigenvalues * (B @ row) for factor, row in zip(pole, u, strict=True)]
        )
    return run(pole, drive)


# --- the network ------------------------------------------------------------------------------


def gelu(x: Array) -> Array:
    """GELU by the hyperbolic tangent, as both papers' code has it."""
    return x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def mixer(weights: Weights, config: Config, prefix: str, x: Array, steps: Array) -> Array:
    """A layer, x [B, L, H], steps [B, L]."""
    pairs = zip(x, steps, strict=True)
    y = np.array([ssm(weights, config, prefix, row, step) for row, step in pairs])
    kind = config["activation"]
    if kind == "gelu":
        return gelu(y)
    gate = gelu(y) @ weights[prefix + "out_proj.weight"].T + weights[prefix + "out_proj.bias"]
    if kind == "full_glu":
        value, gate = np.split(gate, 2, axis=-1)
        return value * sigmoid(gate)
    return (gelu(y) if kind == "half_glu1" else y) * sigmoid(gate)


def logits(
    weights: Weights, config: Config, input_ids: Array, time_steps: Array | None = None
) -> Array:
    """Logits [B, L, V] of whole sequences [B, L]; the conformance kit's entry.

    Args:
        weights: The causal language model's state dict, as numpy arrays.
        config: The fields of its configuration.
        input_ids: Token ids.
        time_steps: What each token's time step is multiplied by, [B, L]; None: 1.
    """
    weights = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    steps = np.ones(np.shape(input_ids)) if time_steps is None else time_steps

    def norm(name: str, x: Array) -> Array:
        size = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config["rms_norm_eps"])
        return x / size * weights[name + ".weight"]

    embedding = weights["model.embed_tokens.weight"]
    x = embedding[np.asarray(input_ids)]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        x = x + mixer(weights, config, layer + "mixer.", norm(layer + "norm", x), steps)
    return norm("model.norm", x) @ weights.get("lm_head.weight", embedding).T


# --- what golden checks compare with ----------------------------------------------------------


def layer_parameters(
    hidden: int, order: int, variant: str, activation: str, bidirectional: bool
) -> int:
    """Parameters of one layer without its norm."""
    modes = order // 2 if variant == "s5" else order
    matrices = 2 * modes * hidden * (3 if bidirectional else 2)
    projections = {"gelu": 0, "full_glu": 2}.get(activation, 1)
    return matrices + 3 * modes + hidden + projections * (hidden + 1) * hidden
