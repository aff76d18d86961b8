"""Mamba-3 (SISO) in float64 numpy, from its paper (arXiv 2603.15569), token by token.

States are complex here, as where the paper derives its rotations: a pair of B's features is a
complex number, and a state turns back by its angle at each token. The exponential-trapezoidal
rule is ``h[t] = a h[t-1] + b B[t-1] x[t-1] + c B[t] x[t]`` with ``a = exp(-rate dt)``,
``b = (1 - m) dt a`` and ``c = m dt``. The parameters' names, the layer's order of inputs and
``angle = pi tanh(.)`` are those of the authors' code.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softplus(x: Array) -> Array:
    return np.logaddexp(0, x)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def head(
    k: Array, q: Array, v: Array, dt: Array, rate: Array, m: Array, angle: Array
) -> tuple[Array, Array]:
    """Return the outputs ``[L, P]`` of a head and its last state, a complex number a pair of k.

    ``k`` and ``q`` are ``[L, N]``, ``v [L, P]``, ``dt``, ``rate`` and ``m [L]``; ``angle [L, S]``
    are turns a unit of time of the first S pairs.
    """
    turns = np.zeros((len(k), k.shape[1] // 2))
    turns[:, : angle.shape[1]] = angle
    k, q = (x[:, 0::2] + 1j * x[:, 1::2] for x in (k, q))
    h = np.zeros((k.shape[1], v.shape[1]), dtype=complex)
    before, y = np.zeros_like(h), np.zeros_like(v)
    for t in range(len(k)):
        written = np.outer(k[t], v[t])
        a = np.exp(-rate[t] * dt[t])
        passed = a * h + (1 - m[t]) * dt[t] * a * before
        h = np.exp(-1j * turns[t] * dt[t])[:, None] * passed + m[t] * dt[t] * written
        y[t] = (np.conj(q[t]) @ h).real
        before = written
    return y, h


def mixer(x: Array, p: Mapping[str, Array], config: Mapping[str, Any]) -> Array:
    """Map ``[L, D]`` to ``[L, D]``."""
    eps, N, P, G = (config[f] for f in ("rms_norm_eps", "d_state", "head_dim", "n_groups"))
    H, S = config["expand"] * x.shape[1] // P, int(N * config["rope_fraction"]) // 2
    widths = np.cumsum([H * P, H * P, G * N, G * N, H, H, H])
    z, v, B, C, dt, rate, m, angle = np.split(x @ p["in_proj.weight"].T, widths, axis=1)
    assert angle.shape[1] == S
    dt, m, angle = softplus(dt + p["dt_bias"]), sigmoid(m), np.pi * np.tanh(angle)
    if config["rate"] == "softplus":
        rate = softplus(rate)
    else:
        rate = np.where(rate < 0, 1 / (1 - np.minimum(rate, 0)), 1 + rate)
    rate = np.maximum(rate, config["rate_floor"])
    y = np.zeros_like(v)
    for h in range(H):
        key, own = slice(h * G // H * N, (h * G // H + 1) * N), slice(h * P, (h + 1) * P)
        k = rms_norm(B[:, key], p["B_norm.weight"], eps) + p["B_bias"][h]
        q = rms_norm(C[:, key], p["C_norm.weight"], eps) + p["C_bias"][h]
        y[:, own], _ = head(k, q, v[:, own], dt[:, h], rate[:, h], m[:, h], angle)
        y[:, own] += p["D"][h] * v[:, own]
        if config["out_norm"]:
            y[:, own] = rms_norm(y[:, own], p["norm.weight"][own], eps)
    return (y * z * sigmoid(z)) @ p["out_proj.weight"].T


def logits(weights: Mapping[str, Array], config: Mapping[str, Any], input_ids: Array) -> Array:
    """Return the logits ``[B, L, V]`` of the language model."""
    eps, rows = config["rms_norm_eps"], []
    for ids in input_ids:
        x = weights["model.embed_tokens.weight"][ids]
        for i in range(config["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            p = {n.removeprefix(f"{layer}mixer."): w for n, w in weights.items() if layer in n}
            x = x + mixer(rms_norm(x, p[f"{layer}norm.weight"], eps), p, config)
            if config["intermediate_size"] is not None:
                y = rms_norm(x, p[f"{layer}mlp_norm.weight"], eps)
                gate = y @ p[f"{layer}mlp.gate_proj.weight"].T
                up = y @ p[f"{layer}mlp.up_proj.weight"].T
                x = x + (gate * sigmoid(gate) * up) @ p[f"{layer}mlp.down_proj.weight"].T
        x = rms_norm(x, weights["model.norm.weight"], eps)
        rows.append(x @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T)
    return np.array(rows)
