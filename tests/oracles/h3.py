"""H3 in float64 numpy, from the paper alone (Fu, Dao et al., arXiv 2212.14052).

Both state spaces are stepped with their matrices, attention is a softmax for each query. What the
paper leaves open (the rule of ``disc``, direct terms, biases, the order of a head's features)
follows its published code. Nothing is fast and nothing of ours is imported.

Legend: B batch, L length, D hidden, d of a head, H = D / d heads, N order, n = N / 2 stored modes.
A trailing axis of 2 is (real, imaginary).

The names this file reads, under ``model.layers.{i}.mixer.``:

    q_proj, k_proj, v_proj, out_proj    weight [D, D], bias [D]
    shift_B, shift_C                    [D, N]      not where layer i attends, as all that follow
    shift_D                             [D]
    log_dt, D                           [H]
    A_log, A_imag                       [H, n]      A = -exp(A_log) + i A_imag
    B, C                                [H, n, 2]

and around the mixers:

    model.embed_tokens.weight                             [V, D]
    model.layers.{i}.norm.weight                          rms; and .bias: layer
    model.layers.{i}.mlp_norm.*, .mlp.up_proj.*, .mlp.down_proj.*    with intermediate_size
    model.norm.*
    lm_head.weight                                        [V, D]; the embedding where absent

Fields of the configuration: num_hidden_layers, rms_norm_eps, norm_type, intermediate_size;
head_dim, disc, attn_layer_idx, num_attention_heads, rotary_dim.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]
Config = Mapping[str, Any]


def as_complex(pairs: Array) -> Array:
    """Real pairs [..., 2] as complex numbers."""
    return pairs[..., 0] + 1j * pairs[..., 1]


# --- the two state spaces ---------------------------------------------------------------------


def shift_ssm(u: Array, B: Array, C: Array, D: Array) -> Array:
    """Section 3.1's shift: ``x_i = A x_{i-1} + B u_i`` with ``A[j, j - 1] = 1``; u [B, L, D]."""
    order = B.shape[1]
    A = np.eye(order, k=-1)
    x = np.zeros((u.shape[0], *B.shape))
    y = np.zeros(u.shape)
    for i in range(u.shape[1]):
        x = x @ A.T + B * u[:, i, :, None]
        y[:, i] = np.sum(C * x, axis=-1) + D * u[:, i]
    return y


def discretize(A: Array, B: Array, dt: Array, disc: str = "bilinear") -> tuple[Array, Array]:
    """The bilinear rule of a diagonal A [H, n], or held inputs: Abar and Bbar [H, n]."""
    if disc == "zoh":
        return np.exp(dt * A), (np.exp(dt * A) - 1) / A * B
    return (1 + dt / 2 * A) / (1 - dt / 2 * A), dt * B / (1 - dt / 2 * A)


def diagonal_ssm(u: Array, Abar: Array, Bbar: Array, C: Array, D: Array) -> Array:
    """S4D stepped, of modes and their conjugates; u [..., L, H], the others [H, n]."""
    x = np.zeros((*u.shape[:-2], *Abar.shape), dtype=complex)
    y = np.zeros(u.shape)
    for i in range(u.shape[-2]):
        x = Abar * x + Bbar * u[..., i, :, None]
        y[..., i, :] = np.sum(C * x + np.conj(C * x), axis=-1).real + D * u[..., i, :]
    return y


def kernel(Abar: Array, Bbar: Array, C: Array, length: int) -> Array:
    """The diagonal state space's answer to an impulse, tap by tap: [H, length]."""
    taps = [2 * np.sum(C * Abar**tap * Bbar, axis=-1).real for tap in range(length)]
    return np.stack(taps, axis=-1)


# --- the layer --------------------------------------------------------------------------------


def h3(
    q: Array, k: Array, v: Array, weights: Weights, prefix: str, size: int, disc: str = "bilinear"
) -> Array:
    """Algorithm 1 from the projections on, [B, L, D]; a head's features are neighbours.

    What the heads return stands with the feature first, then the head, as in the code.
    """
    w = {name: weights[prefix + name] for name in ("shift_B", "shift_C", "shift_D", "D")}
    A = -np.exp(weights[prefix + "A_log"]) + 1j * weights[prefix + "A_imag"]
    B, C = as_complex(weights[prefix + "B"]), as_complex(weights[prefix + "C"])
    Abar, Bbar = discretize(A, B, np.exp(weights[prefix + "log_dt"])[:, None], disc)
    k = shift_ssm(k, w["shift_B"], w["shift_C"], w["shift_D"])
    shape = (*q.shape[:2], -1, size)
    q, k, v = (x.reshape(shape) for x in (q, k, v))  # [B, L, H, d]
    outer = np.einsum("blhi,blhj->bijlh", k, v)
    read = diagonal_ssm(outer, Abar, Bbar, C, w["D"])
    y = np.einsum("blhi,bijlh->bljh", q, read)
    return y.reshape(*y.shape[:2], -1)


def rotated(x: Array, size: int) -> Array:
    """Rotary positions: features f and f + size / 2 of each head [B, L, H, d] turn as a pair."""
    x = x.copy()
    for position in range(x.shape[1]):
        for f in range(size // 2):
            angle = position * 10_000.0 ** (-2 * f / size)
            a, b = x[:, position, :, f].copy(), x[:, position, :, f + size // 2].copy()
            x[:, position, :, f] = a * np.cos(angle) - b * np.sin(angle)
            x[:, position, :, f + size // 2] = a * np.sin(angle) + b * np.cos(angle)
    return x


def attention(q: Array, k: Array, v: Array, heads: int, rotary_dim: int | None) -> Array:
    """Causal softmax attention of [B, L, D], query by query."""
    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q, k, v))
    if rotary_dim is not None:
        q, k = rotated(q, rotary_dim), rotated(k, rotary_dim)
    out = np.zeros(q.shape)
    for i in range(q.shape[1]):
        scores = np.einsum("bhd,bshd->bhs", q[:, i], k[:, : i + 1]) / np.sqrt(q.shape[3])
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        out[:, i] = np.einsum("bhs,bshd->bhd", shares, v[:, : i + 1])
    return out.reshape(*out.shape[:2], -1)


def mixer(weights: Weights, config: Config, layer: int, x: Array) -> Array:
    """Layer ``layer``'s mixer, [B, L, D] to [B, L, D]."""
    prefix = f"model.layers.{layer}.mixer."
    q, k, v = (linear(weights, f"{prefix}{name}_proj", x) for name in "qkv")
    if layer in (config["attn_layer_idx"] or []):
        y = attention(q, k, v, config["num_attention_heads"], config["rotary_dim"])
    else:
        y = h3(q, k, v, weights, prefix, config["head_dim"], config["disc"])
    return linear(weights, prefix + "out_proj", y)


# --- the network ------------------------------------------------------------------------------


def linear(weights: Weights, name: str, x: Array) -> Array:
    return x @ weights[name + ".weight"].T + weights[name + ".bias"]


def tanh_gelu(x: Array) -> Array:
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def norm(weights: Weights, config: Config, name: str, x: Array) -> Array:
    kind, eps, scale = config["norm_type"], config["rms_norm_eps"], weights[name + ".weight"]
    if kind == "rms":
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale
    assert kind == "layer", kind
    x = x - np.mean(x, axis=-1, keepdims=True)
    return x / np.sqrt(np.var(x, axis=-1, keepdims=True) + eps) * scale + weights[name + ".bias"]


def logits(weights: Weights, config: Config, input_ids: Array) -> Array:
    """Logits [B, L, V] of whole sequences [B, L]; the conformance kit's entry.

    Args:
        weights: The causal language model's state dict, as numpy arrays.
        config: The fields of its configuration.
        input_ids: Token ids.
    """
    weights = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    embedding = weights["model.embed_tokens.weight"]
    x = embedding[np.asarray(input_ids)]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        x = x + mixer(weights, config, i, norm(weights, config, layer + "norm", x))
        if config["intermediate_size"]:
            up = linear(
                weights, layer + "mlp.up_proj", norm(weights, config, layer + "mlp_norm", x)
            )
            x = x + linear(weights, layer + "mlp.down_proj", tanh_gelu(up))
    x = norm(weights, config, "model.norm", x)
    return x @ weights.get("lm_head.weight", embedding).T


# --- what golden checks compare with ----------------------------------------------------------


def linear_attention(q: Array, k: Array, v: Array) -> Array:
    """Section 2.2's, without feature maps and divisor: ``q_i (sum_{j <= i} k_j v_j^T)``."""
    out = np.zeros(q.shape)
    for i in range(q.shape[1]):
        for j in range(i + 1):
            out[:, i] += np.sum(q[:, i] * k[:, j], axis=-1, keepdims=True) * v[:, j]
    return out


def parameters(
    width: int, layers: int, attends: int, vocab_size: int = 50264, order: int = 64
) -> int:
    """Parameters of a paper's language model: heads of one feature, MLPs of 4 D, LayerNorms."""
    shift = 2 * width * order + width
    diagonal = width * (1 + 3 * order + 1)  # dt; A, B and C, n complex numbers each; D
    every = 4 * (width * width + width) + 8 * width * width + 5 * width + 4 * width
    return vocab_size * width + layers * every + (layers - attends) * (shift + diagonal) + 2 * width
