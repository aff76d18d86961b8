"""Longhorn in float64 numpy, from the paper alone (Liu et al., arXiv 2407.14207v5).

Equation numbers are the paper's. What the paper leaves open (the low-rank write strength and its
bias, the skip, the SiLU after the convolution, the tied head) follows its published code, as the
parameter names do not: those are ours. Nothing here is fast, and nothing of ours is imported.

Legend: B batch, L length, E hidden, D inner = expand * E, N state (the paper's m), K conv width,
R rank of the write strength, V vocabulary. ``u`` is the paper's x, the value that is stored.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]
Config = Mapping[str, Any]
State = list[tuple[Array, Array]]  # per layer: last K raw conv inputs [B, K, D], memory [B, D, N]


def sigmoid(a: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -a))


def silu(a: Array) -> Array:
    return a * sigmoid(a)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def write_strength(a: Array, k: Array) -> Array:
    """Eq. (6): ``eps = beta / (1 + beta k.k)``, ``beta = sigmoid(a)``; a [..., D], k [..., N]."""
    beta = sigmoid(a)
    return beta / (1 + beta * np.sum(k * k, axis=-1, keepdims=True))


def learn(state: Array, u: Array, k: Array, eps: Array, transition: str) -> Array:
    """One online step on the memory; state [B, D, N], u and eps [B, D], k [B, N]."""
    write = (eps * u)[:, :, None] * k[:, None, :]
    if transition == "diagonal":  # Eq. (7): A = 1 - eps (x) k^2
        return (1 - eps[:, :, None] * k[:, None, :] ** 2) * state + write
    if transition == "exact":  # Eq. (6), row by row: (I - eps_i k k^T) S_i + eps_i k u_i
        outer = k[:, :, None] * k[:, None, :]
        rows = np.eye(k.shape[-1]) - eps[:, :, None, None] * outer[:, None]
        return np.einsum("bdnm,bdm->bdn", rows, state) + write
    raise ValueError(f"transition must be 'diagonal' or 'exact', got {transition!r}")


def scan(
    u: Array,  # [B, L, D]
    q: Array,  # [B, L, N]
    k: Array,  # [B, L, N]
    a: Array,  # [B, L, D], beta before its sigmoid
    skip: Array | None = None,  # [D]
    gate: Array | None = None,  # [B, L, D], before its SiLU
    state: Array | None = None,  # [B, D, N]
    transition: str = "diagonal",
) -> tuple[Array, Array]:
    """Algorithm 1: learn, then read the new memory with the query; outputs and last memory."""
    batch, length, width = u.shape
    if state is None:
        state = np.zeros((batch, width, k.shape[-1]))
    out = np.zeros((batch, length, width))
    for t in range(length):
        eps = write_strength(a[:, t], k[:, t])
        state = learn(state, u[:, t], k[:, t], eps, transition)
        out[:, t] = np.einsum("bdn,bn->bd", state, q[:, t])
    if skip is not None:
        out = out + skip * u
    return (out if gate is None else out * silu(gate)), state


def short_conv(history: Array, weight: Array, bias: Array | float) -> Array:
    """Depthwise causal convolution, then SiLU; history [B, K - 1 + L, D] gives [B, L, D].

    Tap K - 1 meets the current token.
    """
    taps = weight.shape[-1]
    length = history.shape[1] - taps + 1
    y = sum(history[:, j : j + length] * weight[:, 0, j] for j in range(taps))
    return silu(y + bias)


def projections(weights: Weights, config: Config, prefix: str, u: Array) -> tuple[Array, ...]:
    """Algorithm 1's q, k and the logit of beta from u; the packed rows are R, then k, then q."""
    states = config["d_state"]
    packed = u @ weights[prefix + "x_proj.weight"].T
    rank = packed.shape[-1] - 2 * states
    if config["dt_rank"] in ("auto", None):
        assert rank == ceil(config["hidden_size"] / 16)
    else:
        assert rank == config["dt_rank"]
    low, k, q = np.split(packed, [rank, rank + states], axis=-1)
    return q, k, low @ weights[prefix + "dt_proj.weight"].T + weights[prefix + "dt_bias"]


def mixer(
    weights: Weights, config: Config, prefix: str, h: Array, state: tuple[Array, Array]
) -> tuple[Array, tuple[Array, Array]]:
    """Figure 3's block without its norm and residual; h [B, L, E], any L."""
    window, memory = state
    taps = config["d_conv"]
    xz = h @ weights[prefix + "in_proj.weight"].T
    if config["use_bias"]:
        xz = xz + weights[prefix + "in_proj.bias"]
    x, z = np.split(xz, 2, axis=-1)

    history = np.concatenate([window, x], axis=1)
    bias = weights[prefix + "conv1d.bias"] if config["conv_bias"] else 0.0
    u = short_conv(history[:, 1:], weights[prefix + "conv1d.weight"], bias)
    q, k, a = projections(weights, config, prefix, u)
    skip = weights[prefix + "D"]
    o, memory = scan(u, q, k, a, skip, state=memory, transition=config["transition"])
    if config["out_norm"]:
        o = rms_norm(o, weights[prefix + "out_norm.weight"], config["rms_norm_eps"])
    out = (o * silu(z)) @ weights[prefix + "out_proj.weight"].T
    if config["use_bias"]:
        out = out + weights[prefix + "out_proj.bias"]
    return out, (history[:, -taps:], memory)


def both_ways(weights: Weights, config: Config, prefix: str, h: Array) -> Array:
    """ViL's mixer (Section 5.5), norms, residual and biases of the projections left out.

    "both-shared" follows the authors' code: one convolution and one set of keys, queries and
    values, scanned from either end, each scan with a norm of its own. "both-separate" follows
    Vision Mamba, whose recipe the paper takes: the reversed input has weights of its own.
    """
    x, z = np.split(h @ weights[prefix + "in_proj.weight"].T, 2, axis=-1)
    shared = config["directions"] == "both-shared"

    def one_way(x: Array, at: str, norm: str, backwards: bool) -> Array:
        history = np.pad(x, ((0, 0), (config["d_conv"] - 1, 0), (0, 0)))
        u = short_conv(history, weights[at + "conv1d.weight"], weights[at + "conv1d.bias"])
        given = (u, *projections(weights, config, at, u))
        if backwards:
            given = tuple(a[:, ::-1] for a in given)
        o, _ = scan(*given, weights[at + "D"])
        return rms_norm(o, weights[norm], config["rms_norm_eps"])

    o = one_way(x, prefix, prefix + "out_norm.weight", False)
    if shared:
        back = one_way(x, prefix, prefix + "reverse_norm.weight", True)
    else:
        at = prefix + "reverse."
        back = one_way(x[:, ::-1], at, at + "out_norm.weight", False)
    return ((o + back[:, ::-1]) * silu(z)) @ weights[prefix + "out_proj.weight"].T


def image_logits(weights: Weights, config: Config, pixels: Array) -> Array:
    """ViL on images [B, C, H, W]: logits of the class token in the middle of the patches."""
    weights = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    side, eps = config["patch_size"], config["rms_norm_eps"]
    at = "model.embed_images."
    kernel, bias = weights[at + "projection.weight"], weights[at + "projection.bias"]
    tokens = [
        np.einsum("bchw,dchw->bd", pixels[:, :, i : i + side, j : j + side], kernel) + bias
        for i in range(0, config["image_size"], side)
        for j in range(0, config["image_size"], side)
    ]
    middle = len(tokens) // 2
    tokens.insert(middle, np.repeat(weights[at + "class_token"][0], len(pixels), axis=0))
    x = np.stack(tokens, axis=1) + weights[at + "positions"]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        h = rms_norm(x, weights[layer + "norm.weight"], eps)
        x = x + both_ways(weights, config, layer + "mixer.", h)
    x = rms_norm(x, weights["model.norm.weight"], eps)[:, middle]
    return x @ weights["score.weight"].T + weights["score.bias"]


def empty_state(config: Config, batch: int) -> State:
    width = config["expand"] * config["hidden_size"]
    window = np.zeros((batch, config["d_conv"], width))
    memory = np.zeros((batch, width, config["d_state"]))
    return [(window, memory)] * config["num_hidden_layers"]


def run(
    weights: Weights, config: Config, input_ids: Array, state: State | None = None
) -> tuple[Array, State]:
    """The language model from a state on; input_ids [B, L] gives logits [B, L, V] and the state."""
    weights = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    embedding = weights["model.embed_tokens.weight"]
    head = embedding if config["tie_word_embeddings"] else weights["lm_head.weight"]
    eps = config["rms_norm_eps"]
    if state is None:
        state = empty_state(config, len(input_ids))

    residual = embedding[np.asarray(input_ids)]
    after = []
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        h = rms_norm(residual, weights[layer + "norm.weight"], eps)
        out, new = mixer(weights, config, layer + "mixer.", h, state[i])
        residual = residual + out
        after.append(new)
    return rms_norm(residual, weights["model.norm.weight"], eps) @ head.T, after


def logits(weights: Weights, config: Config, input_ids: Array) -> Array:
    """Logits [B, L, V] of whole sequences [B, L]; the conformance kit's entry.

    Args:
        weights: The causal language model's state dict, as numpy arrays.
        config: The fields of its configuration.
        input_ids: Token ids.
    """
    return run(weights, config, input_ids)[0]


def step(weights: Weights, config: Config, token: Array, state: State) -> tuple[Array, State]:
    """Decode one token [B] from a state, at first :func:`empty_state`: logits [B, V], state."""
    out, state = run(weights, config, np.asarray(token)[:, None], state)
    return out[:, 0], state
