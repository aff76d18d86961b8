"""Hybrids in float64 numpy: attention from its papers, other layers by their families' oracles.

Attention (Vaswani et al., arXiv 1706.03762, Eq. 1) to a window of tokens, with keys shared by
groups of queries (Ainslie et al., 2305.13245) and RMSNorm of queries and keys, no positions. Nothing
here is fast, and nothing of ours is imported.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from tests.oracles import linear_attention, longhorn, s4

Array = np.ndarray
Weights = Mapping[str, Array]
Config = Mapping[str, Any]


def attention(weights: Weights, config: Config, prefix: str, x: Array) -> Array:
    """``[L, D]`` to ``[L, D]``: each token attends to itself and those just before it."""
    assert config["rope_parameters"] is None
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    q, k, v = (
        np.split(x @ weights[f"{prefix}{name}_proj.weight"].T, count, axis=1)
        for name, count in (("q", heads), ("k", groups), ("v", groups))
    )
    out = []
    for h in range(heads):
        q_h, k_h, v_h = q[h], k[h * groups // heads], v[h * groups // heads]
        if config["qk_norm"]:
            q_h, k_h = (
                longhorn.rms_norm(y, weights[f"{prefix}{name}_norm.weight"], config["rms_norm_eps"])
                for y, name in ((q_h, "q"), (k_h, "k"))
            )
        scores = q_h @ k_h.T / np.sqrt(config["head_dim"])
        behind = np.subtract.outer(np.arange(len(x)), np.arange(len(x)))
        scores[(behind < 0) | (behind >= config["sliding_window"])] = -np.inf
        share = np.exp(scores - scores.max(axis=1, keepdims=True))
        out.append(share / share.sum(axis=1, keepdims=True) @ v_h)
    return np.concatenate(out, axis=1) @ weights[prefix + "o_proj.weight"].T


def mixer(weights: Weights, config: Config, prefix: str, x: Array) -> Array:
    """A layer without its norm and residual, ``[L, D]`` to ``[L, D]``."""
    family = config["family"]
    if family == "attention":
        return attention(weights, config, prefix, x)
    if family == "linear_attention":
        return linear_attention.mixer(weights, config, prefix, x)
    if family == "longhorn":
        (state,) = longhorn.empty_state({**config, "num_hidden_layers": 1}, 1)
        return longhorn.mixer(weights, config, prefix, x[None], state)[0][0]
    assert family == "s4"
    return s4.mixer(weights, config, prefix, x[None], "recurrence")[0]


def mlp(weights: Weights, prefix: str, x: Array) -> Array:
    """GPT-2's feed-forward layer, with the tanh form of GELU."""
    up = x @ weights[prefix + "up_proj.weight"].T + weights[prefix + "up_proj.bias"]
    up = up / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    return up @ weights[prefix + "down_proj.weight"].T + weights[prefix + "down_proj.bias"]


def logits(weights: Weights, config: Config, input_ids: Array) -> Array:
    """Logits [B, L, vocabulary] of whole sequences [B, L]; the conformance kit's entry.

    Args:
        weights: The causal language model's state dict, as numpy arrays.
        config: The fields of its configuration.
        input_ids: Token ids.
    """
    weights = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    embedding, eps = weights["model.embed_tokens.weight"], config["rms_norm_eps"]
    rows = []
    for ids in np.asarray(input_ids):
        x = embedding[ids]
        for i, kind in enumerate(config["mixers"]):
            layer, fields = f"model.layers.{i}.", {**config, **config["kinds"][kind]}
            h = longhorn.rms_norm(x, weights[layer + "norm.weight"], eps)
            x = x + mixer(weights, fields, layer + "mixer.", h)
            h = longhorn.rms_norm(x, weights[layer + "mlp_norm.weight"], eps)
            x = x + mlp(weights, layer + "mlp.", h)
        rows.append(longhorn.rms_norm(x, weights["model.norm.weight"], eps) @ embedding.T)
    return np.stack(rows)
