"""RTF in float64 numpy, from the paper alone (Parnichkun et al., arXiv 2405.06147v2).

Equation and lemma numbers are the paper's. What the paper leaves open (the norm before the
low-rank output, the biases, the S4 block) follows its published code. No FFT, no power series but
the recurrence itself; nothing is fast and nothing of ours is imported.

Legend: B batch, L length, D hidden, n order, A denominators (each shared by D / A neighbouring
channels), M trunc_len, V vocabulary. A filter has three parts: a (a_1 ... a_n), b (b_1 ... b_n)
and the direct gain h0; see Eq. (4).

The names this file reads, under ``model.layers.{i}.mixer.``:

    a                   [A, n]  before the constraint; bidirectional: [2A, n], the future's last
    b                   [D, n]  true numerator (exact) or b~ (truncated); bidirectional: [2D, n]
    D                   [D]     h0; bidirectional: [2D], the second half the future's tap of lag -1
    montel_slack        [A]     only where denominator_constraint is "l1_montel"; bidirectional [2A]
    out_proj.weight     block s4: [2D, D], values then gates; block hyena: [D, mixer_rank]; .bias
  block hyena also:
    in_proj.weight      [3D, D], rows of x0, then x1, then v; .bias
    short_conv.weight   [3D, 1, 3], tap 2 meets the current token; .bias
    filter_norm.weight  [D]
    down_proj.weight    [mixer_rank, D]; .bias

and around the mixers:

    model.embed_tokens.weight                             [V, D]
    model.layers.{i}.norm.weight                          rms; and .bias: layer, batch
    model.layers.{i}.norm.running_mean, .running_var      batch, as in evaluation
    model.layers.{i}.mlp_norm.*, .mlp.up_proj.weight, .bias, .mlp.down_proj.weight, .bias
                                                          where intermediate_size is set
    model.norm.*                                          only where prenorm
    lm_head.weight                                        [V, D]; the embedding where absent

Fields of the configuration: hidden_size, num_hidden_layers, rms_norm_eps (of all three norms),
norm_type, prenorm, intermediate_size, bidirectional; d_state, num_denominators, kernel_mode,
trunc_len, denominator_constraint, constraint_margin, block, mixer_rank.
"""

from collections.abc import Mapping
from math import erf, sqrt
from typing import Any

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]
Config = Mapping[str, Any]

FILTER_NORM_EPS = 1e-6
MONTEL_EPS = 1e-6


# --- the filter -------------------------------------------------------------------------------


def denominator(raw: Array, slack: Array | None = None, margin: float = 0.0) -> Array:
    """Montel's constraint ``sum |a_i| < 1`` as a reparametrisation, row by row; [A, n].

    margin keeps the sum off the boundary by its own share: ``|s| + margin S``.
    """
    if slack is None:
        return raw
    total = np.sum(np.abs(raw), axis=-1, keepdims=True)
    return raw / (total + np.abs(slack)[:, None] + margin * total + MONTEL_EPS)


def companion(a: Array, b: Array) -> tuple[Array, Array, Array]:
    """Eq. (16): the dense state space (A, B, C) of one filter's strictly proper part."""
    n = len(a)
    A = np.eye(n, k=-1)
    A[0] = -a
    return A, np.eye(n)[0], b


def impulse_response(a: Array, b: Array, length: int) -> Array:
    """Eq. (3) by stepping Lemma B.1 on an impulse: taps 0 ... length - 1 of b(z)/a(z).

    a [D, n] and b [D, n], one row a channel, give [D, length]; tap 0 is zero.
    """
    state = np.zeros_like(b)
    out = np.zeros((len(b), length))
    for t in range(length):
        out[:, t] = np.sum(b * state, axis=-1)
        newest = (t == 0) - np.sum(a * state, axis=-1)
        state = np.concatenate([newest[:, None], state[:, :-1]], axis=-1)
    return out


def truncated_kernel(a: Array, b: Array, grid: int) -> Array:
    """Algorithm 1 without h0: the inverse DFT of b/a on the M-th roots of unity, as sums.

    a and b~ [D, n] give [D, M]; the response's tap M has wrapped onto tap 0 (Lemma 3.2).
    """
    roots = np.exp(2j * np.pi * np.arange(grid) / grid)
    above = sum(b[:, i, None] * roots ** -(i + 1.0) for i in range(b.shape[1]))
    below = 1 + sum(a[:, i, None] * roots ** -(i + 1.0) for i in range(a.shape[1]))
    spectrum = above / below
    taps = [np.mean(spectrum * roots**t, axis=-1).real for t in range(grid)]
    return np.stack(taps, axis=-1)


def deployed(a: Array, kernel: Array) -> tuple[Array, Array]:
    """The recurrence behind a truncated kernel: b_m = sum_{i<m} a_i k_{m-i}, and the gain k_0.

    a [D, n], kernel [D, M] without h0, M > n; h0 adds to the gain returned.
    """
    n = a.shape[1]
    b = np.zeros_like(a)
    for m in range(1, n + 1):
        b[:, m - 1] = kernel[:, m]
        for i in range(1, m):
            b[:, m - 1] += a[:, i - 1] * kernel[:, m - i]
    return b, kernel[:, 0]


def step(u: Array, a: Array, b: Array, gain: Array, state: Array) -> tuple[Array, Array]:
    """Lemma B.1: one input [B, D] in, one output [B, D] and the new state [B, D, n] out."""
    y = gain * u + np.sum(b * state, axis=-1)
    newest = u - np.sum(a * state, axis=-1)
    return y, np.concatenate([newest[..., None], state[..., :-1]], axis=-1)


def recurrence(
    u: Array, a: Array, b: Array, gain: Array, state: Array | None = None
) -> tuple[Array, Array]:
    """Step through u [B, L, D]; outputs [B, L, D] and the last state [B, D, n]."""
    state = np.zeros((len(u), *b.shape)) if state is None else state
    out = np.zeros_like(u)
    for t in range(u.shape[1]):
        out[:, t], state = step(u[:, t], a, b, gain, state)
    return out, state


def convolution(u: Array, taps: Array, future: Array | None = None) -> Array:
    """``y_t = sum_j taps_j u_{t-j} + sum_j future_j u_{t+1+j}``; u [B, L, D], taps [D, K]."""
    out = np.zeros(u.shape)
    for t in range(u.shape[1]):
        for j in range(min(t + 1, taps.shape[1])):
            out[:, t] += taps[:, j] * u[:, t - j]
        if future is not None:
            for j in range(min(u.shape[1] - t - 1, future.shape[1])):
                out[:, t] += future[:, j] * u[:, t + 1 + j]
    return out


def coefficients(weights: Weights, config: Config, prefix: str) -> list[tuple[Array, Array, Array]]:
    """(a, b, h0) of the filter and, where bidirectional, of the future's; a spread over D rows."""
    slack = None
    if config["denominator_constraint"] == "l1_montel":
        slack = weights[prefix + "montel_slack"]
    else:
        assert config["denominator_constraint"] == "none"
    a = denominator(weights[prefix + "a"], slack, config["constraint_margin"])
    b, gain = weights[prefix + "b"], weights[prefix + "D"]
    a = np.repeat(a, len(b) // len(a), axis=0)  # channel c reads row c // (D / A)
    sides = 2 if config["bidirectional"] else 1
    split = (np.split(x, sides) for x in (a, b, gain))
    return list(zip(*split, strict=True))


def grid_of(config: Config) -> int:
    """Points of Algorithm 1's grid: trunc_len, made even."""
    return config["trunc_len"] + config["trunc_len"] % 2


def kernels(weights: Weights, config: Config, prefix: str, length: int) -> list[Array]:
    """The kernel [D, K] with h0, and the future's; K is the length, at most M if truncated."""
    out = []
    for a, b, gain in coefficients(weights, config, prefix):
        if config["kernel_mode"] == "exact":
            taps = impulse_response(a, b, length)
        else:
            assert config["kernel_mode"] == "truncated"
            taps = truncated_kernel(a, b, grid_of(config))[:, :length]
        taps[:, 0] += gain
        out.append(taps)
    return out


def filtered(weights: Weights, config: Config, prefix: str, u: Array, form: str) -> Array:
    """The filter's output [B, L, D]: a sum over its kernel, or the recurrence it deploys as."""
    if form == "recurrence":
        (a, b, gain), *more = coefficients(weights, config, prefix)
        assert not more
        if config["kernel_mode"] == "truncated":
            b, wrapped = deployed(a, truncated_kernel(a, b, grid_of(config)))
            gain = gain + wrapped
        return recurrence(u, a, b, gain)[0]
    return convolution(u, *kernels(weights, config, prefix, u.shape[1]))


# --- the mixers -------------------------------------------------------------------------------


def mixer(weights: Weights, config: Config, prefix: str, x: Array, form: str) -> Array:
    """The block's mixer without its norm and residual; x [B, L, D]."""
    if config["block"] == "s4":
        y = gelu(filtered(weights, config, prefix, x, form))
        value, gate = np.split(linear(weights, prefix + "out_proj", y), 2, axis=-1)
        return value / (1 + np.exp(-gate))
    assert config["block"] == "hyena"
    wide = short_conv(linear(weights, prefix + "in_proj", x), weights, prefix + "short_conv")
    x0, x1, v = np.split(wide, 3, axis=-1)
    y = filtered(weights, config, prefix, v * x1, form) * x0
    y = rms_norm(y, weights[prefix + "filter_norm.weight"], FILTER_NORM_EPS)
    return linear(weights, prefix + "out_proj", gelu(linear(weights, prefix + "down_proj", y)))


def short_conv(x: Array, weights: Weights, name: str) -> Array:
    """Depthwise causal convolution of width 3, nothing after it; x [B, L, 3D]."""
    weight = weights[name + ".weight"]
    taps = weight.shape[-1]
    history = np.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
    y = sum(history[:, j : j + x.shape[1]] * weight[:, 0, j] for j in range(taps))
    return y + weights[name + ".bias"]


# --- the network ------------------------------------------------------------------------------


def gelu(x: Array) -> Array:
    return x * (1 + np.vectorize(erf, otypes=[float])(x / sqrt(2))) / 2


def tanh_gelu(x: Array) -> Array:
    return x * (1 + np.tanh(sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def linear(weights: Weights, name: str, x: Array) -> Array:
    return x @ weights[name + ".weight"].T + weights[name + ".bias"]


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale


def norm(weights: Weights, config: Config, name: str, x: Array) -> Array:
    """The norm that the configuration names, as in evaluation; over the last axis of x."""
    kind, eps, scale = config["norm_type"], config["rms_norm_eps"], weights[name + ".weight"]
    if kind == "rms":
        return rms_norm(x, scale, eps)
    if kind == "layer":
        mean, var = np.mean(x, axis=-1, keepdims=True), np.var(x, axis=-1, keepdims=True)
    else:
        assert kind == "batch", kind
        mean, var = weights[name + ".running_mean"], weights[name + ".running_var"]
    return (x - mean) / np.sqrt(var + eps) * scale + weights[name + ".bias"]


def mlp(weights: Weights, name: str, x: Array) -> Array:
    return linear(weights, name + "down_proj", tanh_gelu(linear(weights, name + "up_proj", x)))


def backbone(weights: Weights, config: Config, x: Array, form: str = "convolution") -> Array:
    """All blocks and, where the norms come first, the last norm: [B, L, D] to [B, L, D]."""
    first = config["prenorm"]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        h = norm(weights, config, layer + "norm", x) if first else x
        x = x + mixer(weights, config, layer + "mixer.", h, form)
        x = x if first else norm(weights, config, layer + "norm", x)
        if config["intermediate_size"]:
            h = norm(weights, config, layer + "mlp_norm", x) if first else x
            x = x + mlp(weights, layer + "mlp.", h)
            x = x if first else norm(weights, config, layer + "mlp_norm", x)
    return norm(weights, config, "model.norm", x) if first else x


def logits(weights: Weights, config: Config, input_ids: Array, form: str = "convolution") -> Array:
    """Logits [B, L, V] of whole sequences [B, L]; the conformance kit's entry.

    Args:
        weights: The causal language model's state dict, as numpy arrays.
        config: The fields of its configuration.
        input_ids: Token ids.
        form: "convolution", or "recurrence" to step every layer through time.
    """
    weights = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    embedding = weights["model.embed_tokens.weight"]
    x = backbone(weights, config, embedding[np.asarray(input_ids)], form)
    return x @ weights.get("lm_head.weight", embedding).T


# --- what golden checks compare with ----------------------------------------------------------


def poles(a: Array) -> Array:
    """Roots [n] of z^n + a_1 z^{n-1} + ... + a_n, one filter."""
    return np.linalg.eigvals(companion(a, a)[0])


def poles_outside(a: Array) -> int:
    """How many poles of one filter lie outside the unit circle."""
    return int(np.sum(np.abs(poles(a)) > 1))


def corrected_numerator(a: Array, b: Array, grid: int) -> Array:
    """Section 3.2's C = C~ (I - A^M)^{-1} of one filter, by a dense solve."""
    A = companion(a, b)[0]
    return np.linalg.solve((np.eye(len(a)) - np.linalg.matrix_power(A, grid)).T, b)


def filter_parameters(hidden: int, order: int, denominators: int, montel: bool = False) -> int:
    """Coefficients of one filter bank: n (D + A) + D, and the slack."""
    return order * (hidden + denominators) + hidden + (denominators if montel else 0)


def hyena_lm_parameters(
    vocab_size: int,
    hidden: int,
    layers: int,
    order: int,
    denominators: int,
    rank: int,
    intermediate: int,
    montel: bool = True,
) -> int:
    """Parameters of the Hyena-RTF language model: tied head, LayerNorms, every linear biased."""

    def dense(rows: int, columns: int) -> int:
        return rows * columns + rows

    mixing = dense(3 * hidden, hidden) + 3 * hidden * 4 + hidden
    mixing += filter_parameters(hidden, order, denominators, montel)
    mixing += dense(rank, hidden) + dense(hidden, rank)
    feedforward = dense(intermediate, hidden) + dense(hidden, intermediate)
    return vocab_size * hidden + layers * (mixing + feedforward + 4 * hidden) + 2 * hidden
