"""B'MOJO in float64 numpy, from the paper alone (Zancato et al., arXiv 2407.06324).

Equation and algorithm numbers are the paper's. What the paper leaves open (the error's form, what
fades and what stays per chunk, heads, the wiring of the block) follows our specification. Nothing
is fast and nothing of ours is imported. One sequence at a time: only :func:`logits` has a batch.

Legend: T length, E hidden, D inner width of the SSM, N its state, R rank of its time step, Q conv
width, H query heads, G key-value heads, P head width, V vocabulary; w window = chunk length, m_f
fading tokens, m_e eidetic tokens, k span of the predictor. ``a`` is what attention reads of a
token, ``y`` the SSM's output, ``f`` what is kept of y.

The names this file reads, under ``model.layers.{i}.``:

    norm.weight                     [E] before the SSM; the only one of layers mamba, swa, attention
                                    and of the parallel wiring; .bias where norm_type is "layer"
    mlp_norm.*, mlp.{up_proj,down_proj}.weight  where intermediate_size is set; with gate_proj for
                                    mlp_type "swiglu", with biases for "gelu"
    mixer.attn_norm.weight          [E] serial wiring, before the attention
    mixer.ssm.in_proj.weight        [2D, E] rows of x, then of z
    mixer.ssm.conv1d.weight, .bias  [D, 1, Q], tap Q - 1 meets the current token; [D]
    mixer.ssm.x_proj.weight         [R + 2N, D] rows of the time step, of B, of C
    mixer.ssm.dt_proj.weight        [D, R];  mixer.ssm.dt_bias [D]
    mixer.ssm.A_log                 [D, N];  mixer.ssm.D [D]
    mixer.ssm.out_proj.weight       [E, D]
    mixer.attention.q_proj.weight   [H P, E]
    mixer.attention.{k,v}_proj.weight           [G P, E]
    mixer.attention.memory_{k,v}_proj.weight    [G P, E] of fading tokens; k_proj, v_proj if absent
    mixer.attention.o_proj.weight   [E, H P]
    mixer.attention.fading_norm.weight          [E] of y as a memory; no norm where absent
    mixer.attention.{q,k}_norm.weight           [P] of each head before rotation; none where absent
    and .bias of these projections where there are biases

and ``model.embed_tokens.weight``, ``model.norm.*``, ``lm_head.weight`` (the embedding's if absent).

Fields of the configuration: num_hidden_layers, prenorm and residual (both true), rms_norm_eps,
norm_type ("rms", "layer"; the mixer's own norms are always of the first kind), intermediate_size,
mlp_type ("gelu", "swiglu"), mixer_types (of "bmojo", "bmojo_f", "mamba", "swa", "attention"),
wiring ("serial", "parallel"), sliding_window, num_fading_tokens, num_eidetic_tokens, fading_mode
("chunk", "offset"), eidetic_overlap ("allow", "mask"), innovation_span, innovation_weights
("uniform", "exp"), innovation_error ("absolute", "relative"), num_attention_heads,
num_key_value_heads, head_dim, use_rope, rope_theta. Where ssm names the family linear_attention,
the SSM of whole sequences is that family's oracle; its names are below ``mixer.ssm.``.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import numpy as np
from tests.oracles import linear_attention

Array = np.ndarray
Weights = Mapping[str, Array]
Config = Mapping[str, Any]
Cache = dict[str, Any]


def sigmoid(a: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -a))


def silu(a: Array) -> Array:
    return a * sigmoid(a)


def tanh_gelu(a: Array) -> Array:
    return a * (1 + np.tanh(sqrt(2 / np.pi) * (a + 0.044715 * a**3))) / 2


def softplus(a: Array) -> Array:
    return np.logaddexp(0.0, a)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


# --- the fading branch ------------------------------------------------------------------------


def mamba(
    weights: Weights, prefix: str, u: Array, state: tuple[Array, Array] | None = None
) -> tuple[Array, tuple[Array, Array]]:
    """The selective SSM of Appendix E with Mamba's convolution and gate: u [T, E] to y [T, E].

    y_t has seen u_t. The state is the last Q - 1 raw inputs of the convolution and h [D, N].
    """
    W_in, kernel = weights[prefix + "in_proj.weight"], weights[prefix + "conv1d.weight"][:, 0]
    A, skip = -np.exp(weights[prefix + "A_log"]), weights[prefix + "D"]
    width, n = A.shape
    taps = kernel.shape[-1]
    tail, h = (np.zeros((taps - 1, width)), np.zeros((width, n))) if state is None else state
    out = []
    for t in range(len(u)):
        x, z = np.split(W_in @ u[t], 2)
        tail = np.concatenate([tail, x[None]])
        x = silu(np.sum(kernel.T * tail, axis=0) + weights[prefix + "conv1d.bias"])
        tail = tail[1:]
        low, B, C = np.split(weights[prefix + "x_proj.weight"] @ x, [-2 * n, -n])
        dt = softplus(weights[prefix + "dt_proj.weight"] @ low + weights[prefix + "dt_bias"])
        h = np.exp(dt[:, None] * A) * h + (dt * x)[:, None] * B
        out.append(weights[prefix + "out_proj.weight"] @ ((h @ C + skip * x) * silu(z)))
    return np.stack(out), (tail, h)


# --- innovation and selection -----------------------------------------------------------------


def predictor(config: Config) -> Array:
    """The weights [k] of the running average that predicts y_t from y_{t-1} ... y_{t-k}."""
    span = config["innovation_span"]
    if config["innovation_weights"] == "exp":
        alpha = 0.5 ** np.arange(1, span + 1)
    else:
        assert config["innovation_weights"] == "uniform", config["innovation_weights"]
        alpha = np.ones(span)
    return alpha / alpha.sum()


def innovation(y: Array, alpha: Array, error: str = "absolute") -> Array:
    """Algorithm 1's epsilon, [T]: how far each y [T, E] is from what its past predicts.

    Before the sequence y is zero. "relative" divides by the energy of y.
    """
    out = np.zeros(len(y))
    for t in range(len(y)):
        guess = np.zeros_like(y[t])
        for i in range(1, min(len(alpha), t) + 1):
            guess = guess + alpha[i - 1] * y[t - i]
        miss = np.sum((y[t] - guess) ** 2)
        if error == "relative":
            out[t] = miss / (np.sum(y[t] ** 2) + 1e-6)
        else:
            assert error == "absolute", error
            out[t] = miss / y.shape[1]
    return out


def prefix_top(scores: Array, m: int, end: int) -> list[int]:
    """The m positions before ``end`` with the largest scores; of equals the older. Ascending."""
    return sorted(sorted(range(end), key=lambda s: (-scores[s], s))[:m])


def merge_top(scores: Array, m: int, w: int, end: int) -> list[int]:
    """The same by a recursion over chunks: ``E_{c+1} = top_m (E_c u {cw ... cw + w - 1})``."""
    kept: list[int] = []
    for start in range(0, end, w):
        pool = kept + list(range(start, min(start + w, end)))
        kept = sorted(sorted(pool, key=lambda s: (-scores[s], s))[:m])
    return kept


def insert(
    kept: list[tuple[float, int]], score: float, position: int, m: int, evict: str = "youngest"
) -> list[tuple[float, int]]:
    """Algorithm 1's update of M, made bounded: fill first, then only what exceeds the minimum.

    Of tied minima the youngest leaves, or the older token would not win.
    """
    if m == 0:
        return kept
    if len(kept) < m:
        return [*kept, (score, position)]
    lowest = min(kept)[0]
    if not score > lowest:
        return kept
    tied = [s for value, s in kept if value == lowest]
    leaves = max(tied) if evict == "youngest" else min(tied)
    return [pair for pair in kept if pair[1] != leaves] + [(score, position)]


# --- what a query reads -----------------------------------------------------------------------


def local_set(t: int, w: int) -> list[int]:
    """Always the last w tokens, the current one among them."""
    return list(range(max(0, t - w + 1), t + 1))


def fading_set(t: int, w: int, m_f: int, mode: str) -> list[int]:
    """Positions of the outputs that a query reads: before its chunk, or w tokens behind itself."""
    if mode == "chunk":
        start = t // w * w
        return list(range(max(0, start - m_f), start))
    assert mode == "offset", mode
    return list(range(max(0, t - w - m_f + 1), max(0, t - w + 1)))


def eidetic_set(t: int, w: int, m_e: int, scores: Array, overlap: str) -> list[int]:
    """The m_e most surprising tokens before the chunk; "mask" hides those in the window."""
    kept = prefix_top(scores, m_e, t // w * w)
    if overlap == "mask":
        return [s for s in kept if s <= t - w]
    assert overlap == "allow", overlap
    return kept


def visibility(
    scores: Array, w: int, m_f: int, m_e: int, mode: str = "chunk", overlap: str = "allow"
) -> Array:
    """Which of [local | fading | eidetic] each query reads: booleans [T, 3T]."""
    length = len(scores)
    mask = np.zeros((length, 3 * length), dtype=bool)
    for t in range(length):
        mask[t, local_set(t, w)] = True
        mask[t, [length + j for j in fading_set(t, w, m_f, mode)]] = True
        mask[t, [2 * length + s for s in eidetic_set(t, w, m_e, scores, overlap)]] = True
    return mask


# --- attention --------------------------------------------------------------------------------


def rope(x: Array, positions: Sequence[int], theta: float) -> Array:
    """Rotate the pairs (i, i + P/2) of x [T, heads, P] by position times theta^(-2i/P)."""
    half = x.shape[-1] // 2
    out = np.empty_like(x)
    for row, position in enumerate(positions):
        for i in range(half):
            angle = position * theta ** (-i / half)
            a, b = x[row, :, i], x[row, :, i + half]
            out[row, :, i] = a * np.cos(angle) - b * np.sin(angle)
            out[row, :, i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out


def softmax(scores: Array) -> Array:
    weights = np.exp(scores - np.max(scores))
    return weights / np.sum(weights)


def attend(q: Array, k: Array, v: Array) -> Array:
    """One softmax over all rows given: q [H, P], k and v [rows, G, P] give [H, P]."""
    heads, width = q.shape
    out = np.zeros_like(q)
    for head in range(heads):
        group = head // (heads // k.shape[1])
        out[head] = softmax(k[:, group] @ q[head] / sqrt(width)) @ v[:, group]
    return out


def joint_attention(q: Array, keys: Array, values: Array, mask: Array) -> Array:
    """Query t reads the rows that mask [T, rows] shows it; q [T, H, P] gives [T, H, P]."""
    return np.stack(
        [attend(one, keys[seen], values[seen]) for one, seen in zip(q, mask, strict=True)]
    )


def interleaved_attention(
    q: Array,  # [T, H, P]
    k: Array,  # [T, G, P], of raw tokens, and so v
    v: Array,
    fading_k: Array,  # [T, G, P], of every output, and so fading_v
    fading_v: Array,
    scores: Array,  # [T]
    w: int,
    m_f: int,
    m_e: int,
) -> Array:
    """Appendix B.2: chunks behind their memories in one row, a sliding window of w + m_f + m_e.

    Without any other mask; holds for m_f <= w and m_e <= w.
    """
    rows: list[tuple[str, int]] = []
    for start in range(0, len(q), w):
        if start:
            rows += [("eidetic", s) for s in prefix_top(scores, m_e, start)]
            rows += [("fading", j) for j in range(max(0, start - m_f), start)]
        rows += [("raw", t) for t in range(start, min(start + w, len(q)))]
    keys = np.stack([fading_k[at] if kind == "fading" else k[at] for kind, at in rows])
    values = np.stack([fading_v[at] if kind == "fading" else v[at] for kind, at in rows])
    span = w + m_f + m_e
    out = []
    for row, (kind, at) in enumerate(rows):
        if kind == "raw":
            seen = slice(max(0, row - span + 1), row + 1)
            out.append(attend(q[at], keys[seen], values[seen]))
    return np.stack(out)


def affine(weights: Weights, name: str, x: Array) -> Array:
    return x @ weights[name + ".weight"].T + weights.get(name + ".bias", 0)


def heads(weights: Weights, name: str, x: Array, width: int) -> Array:
    """Project x [T, E] and part it: [T, heads, P]."""
    return affine(weights, name, x).reshape(len(x), -1, width)


def turned(
    weights: Weights, config: Config, norm: str, x: Array, positions: Sequence[int]
) -> Array:
    """Queries or keys [T, heads, P]: normed where there is a norm, rotated where configured."""
    if norm in weights:
        x = rms_norm(x, weights[norm], config["rms_norm_eps"])
    return rope(x, positions, config["rope_theta"]) if config["use_rope"] else x


def keys_and_values(
    weights: Weights, config: Config, prefix: str, x: Array, positions: Sequence[int], memory: bool
) -> tuple[Array, Array]:
    """Keys as :func:`turned`, and values [T, G, P] of raw tokens or of fading ones."""
    untied = memory and prefix + "memory_k_proj.weight" in weights
    names = ("memory_k_proj", "memory_v_proj") if untied else ("k_proj", "v_proj")
    k, v = (heads(weights, f"{prefix}{name}", x, config["head_dim"]) for name in names)
    assert k.shape[1] == config["num_key_value_heads"]
    return turned(weights, config, prefix + "k_norm.weight", k, positions), v


def queries(
    weights: Weights, config: Config, prefix: str, a: Array, positions: Sequence[int]
) -> Array:
    q = heads(weights, prefix + "q_proj", a, config["head_dim"])
    assert q.shape[1] == config["num_attention_heads"]
    return turned(weights, config, prefix + "q_norm.weight", q, positions)


def attention(
    weights: Weights, config: Config, prefix: str, a: Array, f: Array, mask: Array
) -> Array:
    """Read [a | f | a again as eidetic memory] under a mask [T, 3T]; a and f [T, E] give [T, E]."""
    places = range(len(a))
    q = queries(weights, config, prefix, a, places)
    k, v = keys_and_values(weights, config, prefix, a, places, memory=False)
    fading_k, fading_v = keys_and_values(weights, config, prefix, f, places, memory=True)
    keys, values = np.concatenate([k, fading_k, k]), np.concatenate([v, fading_v, v])
    out = joint_attention(q, keys, values, mask)
    return affine(weights, prefix + "o_proj", out.reshape(len(a), -1))


# --- two streams merged by their normalisers --------------------------------------------------


def stream(q: Array, k: Array, v: Array, mask: Array) -> tuple[Array, Array]:
    """One head over one stream: outputs [T, P] and log-sum-exps [T]; 0 and -inf where nothing."""
    scores = np.where(mask, q @ k.T / sqrt(q.shape[1]), -np.inf)
    top = np.max(scores, axis=1, initial=-np.inf)
    total = np.sum(np.exp(scores - np.where(top > -np.inf, top, 0)[:, None]), axis=1)
    lse = np.full(len(q), -np.inf)
    lse[total > 0] = top[total > 0] + np.log(total[total > 0])
    return probabilities(scores, lse) @ v, lse


def probabilities(scores: Array, lse: Array) -> Array:
    """``exp(scores - lse)``, nothing where there is nothing to read."""
    return np.exp(scores - np.where(lse > -np.inf, lse, 0)[:, None])


def merge(streams: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Outputs and log-sum-exps of all streams' rows under one softmax."""
    lse = np.logaddexp.reduce([one for _, one in streams])
    out = np.zeros_like(streams[0][0])
    for one, its_lse in streams:
        out = out + probabilities(its_lse[:, None], lse) * one
    return out, lse


def stream_backward(
    q: Array, k: Array, v: Array, mask: Array, out: Array, lse: Array, out_bar: Array
) -> tuple[Array, Array, Array]:
    """A stream's share of the gradient by q, k, v from the merged output and log-sum-exps."""
    scale = 1 / sqrt(q.shape[1])
    p = probabilities(np.where(mask, q @ k.T * scale, -np.inf), lse)
    by_score = p * (out_bar @ v.T - np.sum(out_bar * out, axis=1, keepdims=True)) * scale
    return by_score @ k, by_score.T @ q, p.T @ out_bar


# --- the model --------------------------------------------------------------------------------


def memory_sizes(config: Config, kind: str) -> tuple[int, int]:
    """m_f and m_e of a layer."""
    if kind not in ("bmojo", "bmojo_f"):
        return 0, 0
    return config["num_fading_tokens"], config["num_eidetic_tokens"] if kind == "bmojo" else 0


def fading(weights: Weights, config: Config, layer: str, y: Array) -> Array:
    """What attention reads of the SSM's outputs."""
    scale = weights.get(layer + "mixer.attention.fading_norm.weight")
    return y if scale is None else rms_norm(y, scale, config["rms_norm_eps"])


def normed(weights: Weights, config: Config, name: str, x: Array) -> Array:
    """The norm that the configuration names, over the last axis of x."""
    eps, scale = config["rms_norm_eps"], weights[name + ".weight"]
    if config["norm_type"] == "rms":
        return rms_norm(x, scale, eps)
    assert config["norm_type"] == "layer", config["norm_type"]
    mean, var = np.mean(x, axis=-1, keepdims=True), np.var(x, axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(var + eps) * scale + weights[name + ".bias"]


def mlp(weights: Weights, config: Config, layer: str, x: Array) -> Array:
    """``x + MLP(norm(x))`` where there is one."""
    if not config["intermediate_size"]:
        return x
    h = normed(weights, config, layer + "mlp_norm", x)
    up, down = (f"{layer}mlp.{name}_proj." for name in ("up", "down"))
    if config["mlp_type"] == "swiglu":
        gate = h @ weights[layer + "mlp.gate_proj.weight"].T
        return x + (silu(gate) * (h @ weights[up + "weight"].T)) @ weights[down + "weight"].T
    assert config["mlp_type"] == "gelu", config["mlp_type"]
    h = tanh_gelu(h @ weights[up + "weight"].T + weights[up + "bias"])
    return x + h @ weights[down + "weight"].T + weights[down + "bias"]


def block(weights: Weights, config: Config, index: int, x: Array) -> Array:
    """A layer of any type on a whole sequence [T, E]."""
    layer, kind = f"model.layers.{index}.", config["mixer_types"][index]
    ssm, reader = layer + "mixer.ssm.", layer + "mixer.attention."
    m_f, m_e = memory_sizes(config, kind)
    w = len(x) if kind == "attention" else config["sliding_window"]
    u = normed(weights, config, layer + "norm", x)
    y, scores, a = np.zeros_like(u), np.zeros(len(x)), u
    if kind not in ("swa", "attention"):
        if config.get("ssm"):
            assert config["ssm"]["family"] == "linear_attention"
            y = linear_attention.mixer(weights, {**config, **config["ssm"]}, ssm, u)
        else:
            y = mamba(weights, ssm, u)[0]
        scores = innovation(y, predictor(config), config["innovation_error"])
    if kind == "mamba":
        return mlp(weights, config, layer, x + y)
    if kind in ("bmojo", "bmojo_f") and config["wiring"] == "serial":
        x = x + y
        a = rms_norm(x, weights[layer + "mixer.attn_norm.weight"], config["rms_norm_eps"])
    mask = visibility(scores, w, m_f, m_e, config["fading_mode"], config["eidetic_overlap"])
    f = fading(weights, config, layer, y)
    return mlp(weights, config, layer, x + attention(weights, config, reader, a, f, mask))


def sequence_logits(weights: Weights, config: Config, tokens: Array) -> Array:
    """Logits [T, V] of one sequence [T]."""
    embedding = weights["model.embed_tokens.weight"]
    x = embedding[np.asarray(tokens)]
    for i in range(config["num_hidden_layers"]):
        x = block(weights, config, i, x)
    x = normed(weights, config, "model.norm", x)
    return x @ weights.get("lm_head.weight", embedding).T


def logits(weights: Weights, config: Config, input_ids: Array) -> Array:
    """Logits [B, L, V] of whole sequences [B, L]; the conformance kit's entry.

    The names expected in weights stand at the head of this file.

    Args:
        weights: The causal language model's state dict, as numpy arrays.
        config: The fields of its configuration.
        input_ids: Token ids.
    """
    assert config["prenorm"]
    assert config["residual"]
    weights = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    return np.stack([sequence_logits(weights, config, row) for row in np.asarray(input_ids)])


# --- token by token, in bounded memory --------------------------------------------------------


def empty_cache(weights: Weights, config: Config) -> list[Cache]:
    """What one sequence leaves behind, layer by layer; only full attention's part ever grows."""
    shape = (config["num_key_value_heads"], config["head_dim"])
    hidden = weights["model.embed_tokens.weight"].shape[1]
    caches: list[Cache] = []
    for i, kind in enumerate(config["mixer_types"]):
        m_f, m_e = memory_sizes(config, kind)
        w = 0 if kind in ("mamba", "attention") else config["sliding_window"]
        kept = m_f + (w if config["fading_mode"] == "offset" and m_f else 0)
        cache: Cache = {"seen": 0, "eidetic": 0, "fading": 0}
        for name, rows in (("ring", w), ("eidetic", m_e), ("fading", kept)):
            cache |= {f"{name}_{x}": np.zeros((rows, *shape)) for x in ("k", "v")}
        if kind not in ("swa", "attention"):
            A = weights[f"model.layers.{i}.mixer.ssm.A_log"]
            taps = weights[f"model.layers.{i}.mixer.ssm.conv1d.weight"].shape[-1]
            cache["ssm"] = (np.zeros((taps - 1, len(A))), np.zeros(A.shape))
        if kind in ("bmojo", "bmojo_f"):
            cache["scores"], cache["positions"] = np.zeros(m_e), np.zeros(m_e, dtype=int)
            cache["pending"] = np.zeros(w)
            cache["outputs"] = np.zeros((max(config["innovation_span"], m_f), hidden))
        caches.append(cache)
    return caches


def commit(weights: Weights, config: Config, index: int, cache: Cache) -> None:
    """At the start of a chunk: choose among memory and the finished chunk, and freeze the outputs.

    The ring then holds exactly that chunk.
    """
    layer, kind = f"model.layers.{index}.", config["mixer_types"][index]
    m_f, m_e = memory_sizes(config, kind)
    t, w = cache["seen"], config["sliding_window"]
    pool = [
        (-cache["scores"][i], cache["positions"][i], cache["eidetic_k"][i], cache["eidetic_v"][i])
        for i in range(cache["eidetic"])
    ]
    pool += [
        (-cache["pending"][i], t - w + i, cache["ring_k"][i], cache["ring_v"][i]) for i in range(w)
    ]
    best = sorted(pool, key=lambda one: one[:2])[:m_e]
    best = [(score, at, k.copy(), v.copy()) for score, at, k, v in best]
    cache["eidetic"] = len(best)
    for i, (score, at, k, v) in enumerate(sorted(best, key=lambda one: one[1])):
        cache["scores"][i], cache["positions"][i] = -score, at
        cache["eidetic_k"][i], cache["eidetic_v"][i] = k, v
    if config["fading_mode"] == "chunk" and m_f:
        n = min(m_f, t)
        f = fading(weights, config, layer, cache["outputs"][-n:])
        reader = layer + "mixer.attention."
        k, v = keys_and_values(weights, config, reader, f, range(t - n, t), memory=True)
        cache["fading"], cache["fading_k"][:n], cache["fading_v"][:n] = n, k, v


def push_output(weights: Weights, config: Config, index: int, cache: Cache, y: Array) -> None:
    """Score the newest output and keep it."""
    layer, kind = f"model.layers.{index}.", config["mixer_types"][index]
    t, w = cache["seen"], config["sliding_window"]
    alpha, outputs = predictor(config), cache["outputs"]
    recent = np.concatenate([outputs[len(outputs) - len(alpha) :], y[None]])
    cache["pending"][t % w] = innovation(recent, alpha, config["innovation_error"])[-1]
    cache["outputs"] = np.concatenate([outputs[1:], y[None]])
    if config["fading_mode"] == "offset" and memory_sizes(config, kind)[0]:
        reader, f = layer + "mixer.attention.", fading(weights, config, layer, y[None])
        slot = t % len(cache["fading_k"])
        k, v = keys_and_values(weights, config, reader, f, [t], memory=True)
        cache["fading_k"][slot], cache["fading_v"][slot] = k[0], v[0]


def attention_step(weights: Weights, config: Config, index: int, cache: Cache, a: Array) -> Array:
    """Attend from one token [E] over ring, fading and eidetic memory."""
    kind, reader = config["mixer_types"][index], f"model.layers.{index}.mixer.attention."
    t = cache["seen"]
    q = queries(weights, config, reader, a[None], [t])[0]
    k, v = keys_and_values(weights, config, reader, a[None], [t], memory=False)
    if kind == "attention":
        cache["ring_k"] = np.concatenate([cache["ring_k"], k])
        cache["ring_v"] = np.concatenate([cache["ring_v"], v])
        return attend(q, cache["ring_k"], cache["ring_v"]).ravel()
    w = config["sliding_window"]
    cache["ring_k"][t % w], cache["ring_v"][t % w] = k[0], v[0]
    shown = list(range(cache["eidetic"]))
    if config["eidetic_overlap"] == "mask":
        shown = [i for i in shown if cache["positions"][i] <= t - w]
    read = list(range(cache["fading"]))
    if config["fading_mode"] == "offset":
        m_f, slots = memory_sizes(config, kind)[0], len(cache["fading_k"])
        read = [j % slots for j in fading_set(t, w, m_f, "offset")]
    both = [
        np.concatenate(
            [
                cache[f"ring_{x}"][: min(t + 1, w)],
                cache[f"fading_{x}"][read],
                cache[f"eidetic_{x}"][shown],
            ]
        )
        for x in ("k", "v")
    ]
    return attend(q, *both).ravel()


def step(weights: Weights, config: Config, token: int, caches: list[Cache]) -> Array:
    """Decode one token of one sequence: logits [V]; the caches go on to the next token."""
    embedding = weights["model.embed_tokens.weight"]
    x = embedding[token]
    for i, cache in enumerate(caches):
        layer, kind, t = f"model.layers.{i}.", config["mixer_types"][i], cache["seen"]
        remembers = kind in ("bmojo", "bmojo_f")
        if remembers and t > 0 and t % config["sliding_window"] == 0:
            commit(weights, config, i, cache)
        u = normed(weights, config, layer + "norm", x)
        y, a = np.zeros_like(u), u
        if kind not in ("swa", "attention"):
            (y,), cache["ssm"] = mamba(weights, layer + "mixer.ssm.", u[None], cache["ssm"])
        if kind == "mamba" or (remembers and config["wiring"] == "serial"):
            x = x + y
        if kind != "mamba":
            if remembers and config["wiring"] == "serial":
                a = rms_norm(x, weights[layer + "mixer.attn_norm.weight"], config["rms_norm_eps"])
            out = attention_step(weights, config, i, cache, a)
            x = x + affine(weights, layer + "mixer.attention.o_proj", out)
        if remembers:
            push_output(weights, config, i, cache, y)
        x = mlp(weights, config, layer, x)
        cache["seen"] += 1
    x = normed(weights, config, "model.norm", x)
    return weights.get("lm_head.weight", embedding) @ x


# --- associative recall (Section 4.1, as Zoology defines it) ----------------------------------


def mqar_gap_weights(slots: int, power: float = 0.01) -> Array:
    """How likely a query is to stand i slots of two tokens after the pairs: ``~ i^(power - 1)``."""
    weights = power * np.arange(1, slots + 1) ** (power - 1)
    return weights / weights.sum()


def mqar_queries(
    sequence: Sequence[int],
    labels: Sequence[int],
    num_pairs: int,
    vocab_size: int,
    shift: int = 0,
    ignored: int = -100,
) -> list[tuple[int, int, int]]:
    """Place, key and value of every query of a sequence, in order of place.

    A label stands on its query or, in generators for models that predict the next token, ``shift``
    places later. Fillers may be any id, so only labels tell queries.

    Raises:
        ValueError: The sequence is not one of the task's.
    """
    sequence, labels = list(sequence), list(labels)
    half, context = vocab_size // 2, 2 * num_pairs
    keys, values = sequence[0:context:2], sequence[1:context:2]
    if not all(1 <= key < half for key in keys) or len(set(keys)) < num_pairs:
        raise ValueError("keys must be distinct ids of the lower half, without 0")
    if not all(half <= value < vocab_size for value in values) or len(set(values)) < num_pairs:
        raise ValueError("values must be distinct ids of the upper half")
    answer = dict(zip(keys, values, strict=True))
    found = []
    for at, label in enumerate(labels):
        if label == ignored:
            continue
        place = at - shift
        if place < context or (place - context) % 2:
            raise ValueError(f"no query may stand at {place}")
        if answer.get(sequence[place]) != label:
            raise ValueError(f"the label at {at} is not the value of the key at {place}")
        found.append((place, sequence[place], label))
    if sorted(key for _, key, _ in found) != sorted(keys):
        raise ValueError("every key must be asked once")
    return found
