"""RWKV-7 in float64 numpy, from its paper (arXiv 2503.14456, Section 4) alone, token by token.

One vector at a time; vectors are rows, as in the paper, and so is ``wkv [N, N]``. The parameter
names are ours. Directions of mixtures with the first layer's values are those of the authors' code.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    centred = x - x.mean()
    return centred / np.sqrt((centred**2).mean() + eps) * weight + bias


def delta_rule(
    r: Array, w: Array, k: Array, v: Array, a: Array, b: Array, state: Array | None = None
) -> tuple[Array, Array]:
    """``wkv_t = wkv_{t-1} (diag(w_t) + a_t^T b_t) + v_t^T k_t`` and ``y_t = r_t wkv_t^T``.

    All are [L, N]; wkv is [N of v, N of k].
    """
    wkv = np.zeros((v.shape[1], k.shape[1])) if state is None else state
    y = np.zeros_like(v)
    for t in range(len(r)):
        wkv = wkv @ (np.diag(w[t]) + np.outer(a[t], b[t])) + np.outer(v[t], k[t])
        y[t] = wkv @ r[t]
    return y, wkv


def time_mixing(
    x: Array, p: Mapping[str, Array], N: int, eps: float, first: Array | None
) -> tuple[Array, Array]:
    """Return the outputs ``[L, D]`` of a layer's first branch, and its values."""
    before = np.vstack([np.zeros_like(x[:1]), x[:-1]])
    xr, xw, xk, xv, xa, xg = (x + (before - x) * mu for mu in p["time_shift"])
    a = sigmoid(p["rate_bias"] + xa @ p["rate.down.weight"].T @ p["rate.up.weight"].T)
    k = xk @ p["k_proj.weight"].T
    kappa = k * p["removal_scale"]  # the removal key
    replacement = k * (1 + (a - 1) * p["rate_scale"])
    v = xv @ p["v_proj.weight"].T
    if first is not None:
        nu = sigmoid(p["value_bias"] + xv @ p["value.down.weight"].T @ p["value.up.weight"].T)
        v = v + (first - v) * nu
    d = p["decay_bias"] + np.tanh(xw @ p["decay.down.weight"].T) @ p["decay.up.weight"].T
    w = np.exp(-np.exp(-0.5) * sigmoid(d))
    r = xr @ p["r_proj.weight"].T
    g = sigmoid(xg @ p["gate.down.weight"].T) @ p["gate.up.weight"].T
    out = np.zeros_like(x)
    for h in range(x.shape[1] // N):
        own = slice(h * N, (h + 1) * N)
        unit = kappa[:, own] / np.linalg.norm(kappa[:, own], axis=1, keepdims=True)
        head = (r[:, own], w[:, own], replacement[:, own], v[:, own])
        y, _ = delta_rule(*head, -unit, a[:, own] * unit)
        for t in range(len(x)):
            norm = layer_norm(y[t], p["norm_weight"][own], p["norm_bias"][own], N * eps)
            bonus = (r[t, own] * p["bonus"][own]) @ replacement[t, own]
            out[t, own] = norm + bonus * v[t, own]
    return (g * out) @ p["out_proj.weight"].T, v


def channel_mixing(x: Array, p: Mapping[str, Array]) -> Array:
    """Return the outputs ``[L, D]`` of a layer's second branch."""
    before = np.vstack([np.zeros_like(x[:1]), x[:-1]])
    mixed = x + (before - x) * p["channel_shift"]
    return np.maximum(mixed @ p["up_proj.weight"].T, 0) ** 2 @ p["down_proj.weight"].T


def logits(weights: Mapping[str, Array], config: Mapping[str, Any], input_ids: Array) -> Array:
    """Return the logits ``[B, L, V]`` of the language model."""
    eps, N = config["rms_norm_eps"], config["head_dim"]
    rows = []
    for ids in input_ids:
        norm = (*(weights[f"model.embed_norm.{n}"] for n in ("weight", "bias")), eps)
        x = np.array([layer_norm(t, *norm) for t in weights["model.embed_tokens.weight"][ids]])
        first = None
        for i in range(config["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            p = {n.removeprefix(f"{layer}mixer."): w for n, w in weights.items() if layer in n}
            norm = (p[f"{layer}norm.weight"], p[f"{layer}norm.bias"], eps)
            y, v = time_mixing(np.array([layer_norm(t, *norm) for t in x]), p, N, eps, first)
            x, first = x + y, v if first is None else first
            norm = (p["channel_norm.weight"], p["channel_norm.bias"], eps)
            x = x + channel_mixing(np.array([layer_norm(t, *norm) for t in x]), p)
        norm = (weights["model.norm.weight"], weights["model.norm.bias"], eps)
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        rows.append(np.array([layer_norm(t, *norm) for t in x]) @ head.T)
    return np.array(rows)
