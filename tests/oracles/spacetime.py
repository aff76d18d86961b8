"""SpaceTime in float64 numpy (Zhang, Saab, Poli et al., arXiv 2303.09489).

Layers, decoder and Algorithm 1 are as in the paper and its published code. Matrices are dense,
transforms and convolutions are sums; nothing is fast and nothing of ours is imported. A layer's
output reads the state that its input has already entered.

Legend: B batch, L length, H features, K state spaces, d order, C channels.

The names this file reads, under ``model.layers.{i}.mixer.``:

    a, B, C         [K, d]      feature h has the state space h // (H / K); a before its norm
    D               [H]
    fixed           [H, 63]     layer 0 with "preprocess": the last tap meets the current input
    out_proj.weight [H, H], or [2 H, H] for the block "glu"; out_proj.bias

and around the mixers:

    model.embed_tokens.weight                          [V, H]
    model.layers.{i}.norm.weight, model.norm.weight    RMSNorm, absent where norm_type is "none"
    lm_head.weight                                     [V, H]; the embedding where absent

of a forecaster instead of the embedding and the head:

    model.embed_values.weight, .bias     [H, C]
    decoder.a, .B, .C, .K                [H, d], before their norms
    score.weight, .bias                  [C, H]

Fields of the configuration: num_hidden_layers, rms_norm_eps, norm_type ("rms" or "none"), block,
preprocess; a residual stream with prenorm and no MLP are taken for granted.
"""

from collections.abc import Mapping
from math import comb, erf, sqrt
from typing import Any

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]
Config = Mapping[str, Any]


# --- one state space --------------------------------------------------------------------------


def unit(x: Array) -> Array:
    """A vector divided by its 1-norm; a tiny one is left tiny."""
    return x / max(np.abs(x).sum(), 1e-4)


def companion(a: Array) -> Array:
    """The companion matrix: ones below the diagonal, and a in the last column."""
    A = np.eye(len(a), k=-1)
    A[:, -1] += a
    return A


def unrolled(A: Array, B: Array, C: Array, length: int) -> Array:
    """The output filter ``(CB, CAB, CA^2 B, ...)``, tap by tap."""
    taps, x = [], B
    for _ in range(length):
        taps.append(C @ x)
        x = A @ x
    return np.array(taps)


def algorithm_1(a: Array, B: Array, C: Array, length: int) -> Array:
    """Algorithm 1: the filter from its values at the roots of unity, without powers of A.

    ``C~ = C (I - A^L)`` is computed here, by a power. With the shift S, ``A = S + a e^T`` is the
    shift and a rank of one, and Woodbury's identity needs four forms ``x (z - S)^-1 y``.
    """
    order, A = len(a), companion(a)
    c_tilde = C @ (np.eye(order) - np.linalg.matrix_power(A, length))
    last = np.eye(order)[-1]
    values = np.zeros(length, dtype=complex)
    for k in range(length):
        z = np.exp(2j * np.pi * k / length)

        def form(x: Array, y: Array, z: complex = z) -> complex:
            return sum(
                x[i + j] * y[i] * z ** -(j + 1) for j in range(order) for i in range(order - j)
            )

        loop = form(c_tilde, a) * form(last, B) / (1 - form(last, a))
        values[k] = z * (form(c_tilde, B) + loop)
    angles = np.outer(np.arange(length), np.arange(length)) / length
    return (np.exp(2j * np.pi * angles) @ values / length).real


def closed_loop(a: Array, B: Array, C: Array, K: Array, u: Array, horizon: int) -> Array:
    """``C (A + B K)^h x`` for h = 0 .. horizon - 1, x the state after u [L]."""
    A, x = companion(a), np.zeros(len(a))
    for value in u:
        x = A @ x + B * value
    return unrolled(A + np.outer(B, K), x, C, horizon)


def fixed_filter(feature: int, window: int) -> Array:
    """The preprocessing of a feature, newest input first: a difference, or what is not the mean."""
    kind = feature % 8
    if kind < 4:
        return np.array([(-1.0) ** j * comb(kind, j) for j in range(kind + 1)])
    taps = np.full(window, -1 / window)
    taps[0] += 1
    return taps


# --- the network ------------------------------------------------------------------------------


def gelu(x: Array) -> Array:
    return x * (1 + np.vectorize(erf, otypes=[float])(x / sqrt(2))) / 2


def filtered(x: Array, taps: Array) -> Array:
    """Convolve columns [B, L, H] with [H, M], from zeros on."""
    y = np.zeros_like(x)
    for t in range(x.shape[1]):
        for j in range(min(t + 1, taps.shape[1])):
            y[:, t] += taps[:, j] * x[:, t - j]
    return y


def mixer(weights: Weights, config: Config, prefix: str, x: Array, form: str) -> Array:
    """A SpaceTime layer's filters and what mixes them, x [B, L, H]."""
    a, B, C, D = (weights[prefix + name] for name in "aBCD")
    (batch, length, width), y = x.shape, np.zeros_like(x)
    for h in range(width):
        k = h // (width // len(a))
        A = companion(unit(a[k]))
        if form == "recurrence":
            state = np.zeros((batch, len(A)))
            for t in range(length):
                state = state @ A.T + np.outer(x[:, t, h], B[k])
                y[:, t, h] = state @ C[k]
        else:
            taps = algorithm_1(unit(a[k]), B[k], C[k], length)
            y[:, :, h] = filtered(x[:, :, h, None], taps[None])[:, :, 0]
    y = y + D * x
    out = gelu(y) @ weights[prefix + "out_proj.weight"].T + weights[prefix + "out_proj.bias"]
    if config["block"] == "mlp":
        return y + out
    value, gate = np.split(out, 2, axis=-1)
    return value / (1 + np.exp(-gate))


def backbone(weights: Weights, config: Config, x: Array, form: str) -> Array:
    """The blocks, x [B, L, H]."""

    def norm(name: str, x: Array) -> Array:
        if config["norm_type"] == "none":
            return x
        size = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config["rms_norm_eps"])
        return x / size * weights[name + ".weight"]

    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        if config["preprocess"] and i == 0:  # the skip comes after the fixed filters
            x = filtered(x, weights[layer + "mixer.fixed"][:, ::-1])
        x = x + mixer(weights, config, layer + "mixer.", norm(layer + "norm", x), form)
    return norm("model.norm", x)


def arrays(weights: Weights) -> dict[str, Array]:
    return {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}


def logits(weights: Weights, config: Config, input_ids: Array, form: str = "recurrence") -> Array:
    """Logits [B, L, V] of whole sequences [B, L]; the conformance kit's entry.

    Args:
        weights: The causal language model's state dict, as numpy arrays.
        config: The fields of its configuration.
        input_ids: Token ids.
        form: "recurrence" steps through time, "convolution" takes Algorithm 1.
    """
    weights = arrays(weights)
    embedding = weights["model.embed_tokens.weight"]
    x = backbone(weights, config, embedding[np.asarray(input_ids)], form)
    return x @ weights.get("lm_head.weight", embedding).T


def forecast(weights: Weights, config: Config, values: Array, horizon: int) -> Array:
    """The next values [B, horizon, C] of series [B, L, C]."""
    weights = arrays(weights)
    x = values @ weights["model.embed_values.weight"].T + weights["model.embed_values.bias"]
    x = backbone(weights, config, x, "recurrence")
    y = np.zeros((len(x), horizon, x.shape[2]))
    for h in range(x.shape[2]):
        a, B, C, K = (unit(weights["decoder." + name][h]) for name in "aBCK")
        for row in range(len(x)):
            y[row, :, h] = closed_loop(a, B, C, K, x[row, :, h], horizon)
    return gelu(y) @ weights["score.weight"].T + weights["score.bias"]


# --- what golden checks compare with ----------------------------------------------------------


def layer_parameters(hidden: int, order: int, kernels: int, glu: bool) -> int:
    """Parameters of one layer without its norm: state spaces, skip and projection."""
    return 3 * kernels * order + hidden + (hidden + 1) * hidden * (2 if glu else 1)
