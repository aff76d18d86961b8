"""Ten linear recurrences with a matrix state in float64 numpy, each from its paper's equations.

One head at a time, from a zero state or a given one. The state lies as the paper has it, and so do
the vectors. :func:`logits` is a language model of them: the layer around each recurrence is that of
its paper, too, the parameter names are ours. Nothing is fast and nothing of ours is imported.

Legend: L length, D hidden, H heads, G heads of keys, K width of keys, V width of values.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]
Config = Mapping[str, Any]
Found = tuple[Array, Array]  # outputs [L, V], the last state


def linear_transformer(
    Q: Array, K: Array, V: Array, state: tuple[Array, Array] | None = None
) -> tuple[Array, tuple[Array, Array]]:
    """Linear Transformer (Katharopoulos et al., arXiv 2006.16236), Eqs. (16) to (20).

    ``s_i = s_{i-1} + phi(k_i) v_i^T``, ``z_i = z_{i-1} + phi(k_i)`` and ``y_i = phi(q_i)^T s_i /
    (phi(q_i)^T z_i)`` with ``phi(x) = elu(x) + 1``; as in its code, 1e-6 is added to the divisor.
    """
    s, z = (np.zeros((K.shape[1], V.shape[1])), np.zeros(K.shape[1])) if state is None else state
    y = np.zeros_like(V)
    for i in range(len(V)):
        q, k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (Q[i], K[i]))
        s, z = s + np.outer(k, V[i]), z + k
        y[i] = q @ s / (q @ z + 1e-6)
    return y, (s, z)


def ssd(x: Array, dt: Array, A: float, B: Array, C: Array, state: Array | None = None) -> Found:
    """Mamba-2 (Dao and Gu, arXiv 2405.21060), the recurrence of SSD.

    ``h_t = a_t h_{t-1} + B_t (dt_t x_t)^T`` with ``a_t = exp(dt_t A)`` and ``y_t = h_t^T C_t``;
    h is [K, V], x [L, V], dt [L], B and C [L, K].
    """
    h = np.zeros((B.shape[1], x.shape[1])) if state is None else state
    y = np.zeros_like(x)
    for t in range(len(x)):
        h = np.exp(dt[t] * A) * h + np.outer(B[t], dt[t] * x[t])
        y[t] = h.T @ C[t]
    return y, h


def retention(Q: Array, K: Array, V: Array, gamma: float, state: Array | None = None) -> Found:
    """RetNet (Sun et al., arXiv 2307.08621), the recurrent representation of retention.

    ``S_n = gamma S_{n-1} + K_n^T V_n`` and ``o_n = Q_n S_n`` with rows Q_n, K_n, V_n; S is [K, V].
    """
    S = np.zeros((K.shape[1], V.shape[1])) if state is None else state
    o = np.zeros_like(V)
    for n in range(len(V)):
        S = gamma * S + K[n][:, None] @ V[n][None, :]
        o[n] = Q[n][None, :] @ S
    return o, S


def gla(q: Array, k: Array, v: Array, alpha: Array, state: Array | None = None) -> Found:
    """Gated linear attention (Yang et al., arXiv 2312.06635).

    ``S_t = (alpha_t^T 1) * S_{t-1} + k_t^T v_t`` and ``o_t = q_t S_t``, * elementwise; S is [K, V],
    alpha [L, K].
    """
    S = np.zeros((k.shape[1], v.shape[1])) if state is None else state
    o = np.zeros_like(v)
    for t in range(len(v)):
        gate = np.outer(alpha[t], np.ones(v.shape[1]))
        S = gate * S + np.outer(k[t], v[t])
        o[t] = q[t] @ S
    return o, S


def delta_net(q: Array, k: Array, v: Array, beta: Array, state: Array | None = None) -> Found:
    """DeltaNet (Yang et al., arXiv 2406.06484): a step on ``|S k_t - v_t|^2 / 2`` of size beta_t.

    ``S_t = S_{t-1} - beta_t (S_{t-1} k_t - v_t) k_t^T`` and ``o_t = S_t q_t``; S is [V, K].
    """
    S = np.zeros((v.shape[1], k.shape[1])) if state is None else state
    o = np.zeros_like(v)
    for t in range(len(v)):
        S = S - beta[t] * np.outer(S @ k[t] - v[t], k[t])
        o[t] = S @ q[t]
    return o, S


def gated_delta_net(
    q: Array, k: Array, v: Array, alpha: Array, beta: Array, state: Array | None = None
) -> Found:
    """Gated DeltaNet (Yang et al., arXiv 2412.06464), the gated delta rule.

    ``S_t = S_{t-1} (alpha_t (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T``; S is [V, K], alpha [L].
    """
    S = np.zeros((v.shape[1], k.shape[1])) if state is None else state
    o = np.zeros_like(v)
    for t in range(len(v)):
        S = S @ (alpha[t] * (np.eye(k.shape[1]) - beta[t] * np.outer(k[t], k[t])))
        S = S + beta[t] * np.outer(v[t], k[t])
        o[t] = S @ q[t]
    return o, S


def kda(
    q: Array, k: Array, v: Array, alpha: Array, beta: Array, state: Array | None = None
) -> Found:
    """Kimi delta attention (Kimi team, arXiv 2510.26692).

    ``S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T`` and
    ``o_t = S_t^T q_t``; S is [K, V], alpha [L, K].
    """
    S = np.zeros((k.shape[1], v.shape[1])) if state is None else state
    o = np.zeros_like(v)
    for t in range(len(v)):
        S = (np.eye(k.shape[1]) - beta[t] * np.outer(k[t], k[t])) @ np.diag(alpha[t]) @ S
        S = S + beta[t] * np.outer(k[t], v[t])
        o[t] = S.T @ q[t]
    return o, S


def hgrn2(i: Array, f: Array, o: Array, state: Array | None = None) -> Found:
    """HGRN2 (Qin et al., arXiv 2404.07904): the forget gate's complement is the input gate.

    ``h_t = Diag(f_t) h_{t-1} + (1 - f_t) i_t^T`` and ``y_t = h_t^T o_t``; h is [K, V], i [L, V], f
    and o [L, K].
    """
    h = np.zeros((f.shape[1], i.shape[1])) if state is None else state
    y = np.zeros_like(i)
    for t in range(len(i)):
        h = np.diag(f[t]) @ h + np.outer(1 - f[t], i[t])
        y[t] = h.T @ o[t]
    return y, h


def lower_bounds(gamma: Array) -> Array:
    """The bounds of HGRN2's forget gates, ``[layers, width]`` of as many numbers.

    The softmax over layers is summed up over them, the first layer's share left out (HGRN, arXiv
    2311.04823): the first layer's bound is 0, and the last one's below 1.
    """
    shares = np.exp(gamma - gamma.max(axis=0))
    shares = shares / shares.sum(axis=0)
    return np.cumsum(shares, axis=0) - shares[0]


def mlstm(
    q: Array,
    k: Array,
    v: Array,
    i: Array,
    f: Array,
    state: tuple[Array, Array, float] | None = None,
) -> tuple[Array, tuple[Array, Array, float]]:
    """mLSTM (Beck et al., arXiv 2405.04517), stabilised as in xLSTM 7B (arXiv 2503.13427).

    ``m_t = max(log sigmoid(f_t) + m_{t-1}, i_t)``, and with ``f' = exp(log sigmoid(f_t) + m_{t-1} -
    m_t)``, ``i' = exp(i_t - m_t)``: ``C_t = f' C_{t-1} + i' v_t k_t^T``, ``n_t = f' n_{t-1} + i'
    k_t`` and ``h_t = C_t q_t / max(|n_t . q_t|, exp(-m_t))``; q comes divided by the root of K. C
    is [V, K], i and f [L] are what the gates get.
    """
    start = (np.zeros((v.shape[1], k.shape[1])), np.zeros(k.shape[1]), 0.0)
    C, n, m = start if state is None else state
    h = np.zeros_like(v)
    for t in range(len(v)):
        kept = -np.logaddexp(0.0, -f[t]) + m
        m = max(kept, i[t])
        forget, write = np.exp(kept - m), np.exp(i[t] - m)
        C = forget * C + write * np.outer(v[t], k[t])
        n = forget * n + write * k[t]
        h[t] = C @ q[t] / max(abs(n @ q[t]), np.exp(-m))
    return h, (C, n, m)


def gated_delta_product(
    q: Array, k: Array, v: Array, alpha: Array, beta: Array, state: Array | None = None
) -> Found:
    """Gated DeltaProduct (Siems et al., arXiv 2502.10297): several steps on a token's loss.

    ``H_t = alpha_t A_t H_{t-1} + B_t`` with ``A_t = prod_j (I - beta_tj k_tj k_tj^T)``, the last j
    leftmost, and ``B_t = sum_j (prod_{i>j} (I - beta_ti k_ti k_ti^T)) beta_tj k_tj v_tj^T``;
    ``o_t = H_t^T q_t``. H is [K, V], k [L, J, K], v [L, J, V], alpha [L], beta [L, J].
    """
    length, steps, width = k.shape
    H = np.zeros((width, v.shape[2])) if state is None else state
    o = np.zeros((length, v.shape[2]))
    for t in range(length):
        A, B = np.eye(width), np.zeros_like(H)
        for j in reversed(range(steps)):
            B = B + beta[t, j] * np.outer(A @ k[t, j], v[t, j])
            A = A @ (np.eye(width) - beta[t, j] * np.outer(k[t, j], k[t, j]))
        H = alpha[t] * A @ H + B
        o[t] = H.T @ q[t]
    return o, H


# --- the language model -----------------------------------------------------------------------


def sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def unit(x: Array) -> Array:
    """Vectors of length 1; 1e-6 is added to the squared length, as in the papers' code."""
    return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)


def centred(x: Array) -> Array:
    """LayerNorm is RMSNorm of these."""
    return x - np.mean(x, axis=-1, keepdims=True)


def soft_cap(x: Array, cap: float | None) -> Array:
    return x if cap is None else cap * np.tanh(x / cap)


def short_conv(x: Array, weight: Array, bias: Array | float) -> Array:
    """Depthwise causal convolution of ``[L, C]``; the last tap meets the current token."""
    taps, y = weight.shape[-1], np.zeros_like(x) + bias
    history = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    for j in range(taps):
        y += history[j : j + len(x)] * weight[:, 0, j]
    return y


def rotary(x: Array) -> Array:
    """RetNet's ``x_n e^(i n theta)``: pairs are the two halves, ``theta_j = 10000^(-2j / K)``."""
    half = x.shape[1] // 2
    turn = np.arange(len(x))[:, None] * 10_000.0 ** (-np.arange(half) / half)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * turn)
    return np.concatenate([turned.real, turned.imag], axis=1)


def recurrence(config: Config, h: int, q: Array, k: Array, v: Array, a: Any, beta: Any) -> Array:
    """The outputs ``[L, V]`` of head h, by the paper that has these decays and this rule.

    a is the decay ``[L]`` or ``[L, K]`` or, of Mamba2, the head's A at every token; beta is its dt.
    Of mLSTM both are what the gates get; of several writes k, v and beta are ``[L, J, .]``.
    """
    if config["feature_map"] == "elu":
        assert config["decay"] == "none"
        assert not config["delta_rule"]
        return linear_transformer(q, k, v)[0]
    if config["beta"] == "dt":
        return ssd(v, beta, a[0], k, q)[0]
    q = q / np.sqrt(q.shape[1])
    if config["feature_map"] == "complement":
        return hgrn2(v, a, q)[0]
    if config["num_writes"] > 1:
        alpha = np.ones(len(v)) if config["decay"] == "none" else a
        assert config["decay"] in ("none", "scalar")
        return gated_delta_product(q, k, v, alpha, beta)[0]
    if config["beta"] == "exp":
        assert config["decay"] == "scalar"
        return mlstm(q, k, v, beta, a)[0]
    if config["delta_rule"]:
        beta = np.ones(len(v)) if beta is None else beta
        if config["decay"] == "channel":
            return kda(q, k, v, a, beta)[0]
        if config["decay"] == "scalar":
            return gated_delta_net(q, k, v, a, beta)[0]
        assert config["decay"] == "none"
        return delta_net(q, k, v, beta)[0]
    assert config["beta"] == "none"
    if config["decay"] == "fixed":
        return retention(q, k, v, 1 - 2.0 ** (-5 - h))[0]
    assert config["decay"] == "channel"
    return gla(q, k, v, a)[0]


def mixer(weights: Weights, config: Config, prefix: str, x: Array) -> Array:
    """A layer without its norm and residual, ``[L, D]`` to ``[L, D]``."""
    H, G = config["num_heads"], config["num_key_heads"] or config["num_heads"]
    K, V = config["head_k_dim"], config["head_v_dim"]
    decays = {"scalar": H, "channel": H * K}.get(config["decay"], 0)
    gates = 0 if config["out_gate"] == "none" else H * V
    J, own_keys = config["num_writes"], config["feature_map"] == "complement"
    betas = H * J if config["beta"] in ("sigmoid", "exp") else 0
    keys = 0 if own_keys else J * G * K
    widths = [
        G * K + keys + J * H * V,
        config["decay_rank"] or decays,
        betas,
        config["gate_rank"] or gates,
    ]
    projected = x @ weights[prefix + "in_proj.weight"].T
    assert projected.shape[1] == sum(widths)
    mixed, a, b, g = np.split(projected, np.cumsum(widths)[:-1], axis=1)
    if config["qk_norm"]:  # each head before the convolution, as in hybrid-model-factory
        for first, width, name in ((0, G * K, "q_norm"), (G * K, keys, "k_norm")):
            part = mixed[:, first : first + width].reshape(len(x), -1, K)
            normed = rms_norm(part, weights[f"{prefix}{name}.weight"], config["rms_norm_eps"])
            mixed[:, first : first + width] = normed.reshape(len(x), width)
    if config["d_conv"] is not None:
        bias = weights[prefix + "conv1d.bias"] if config["conv_bias"] else 0.0
        mixed = short_conv(mixed, weights[prefix + "conv1d.weight"], bias)
    if config["feature_map"] in ("silu", "silu_l2"):
        mixed = silu(mixed)
    q, k, v = np.split(mixed, [G * K, G * K + keys], axis=1)
    if own_keys:
        q, gamma = silu(q), weights["model.lower_bounds.weight"]
        bound = lower_bounds(gamma)[int(prefix.split(".")[2])]
        a = bound + (1 - bound) * sigmoid(a)
    if config["decay_rank"]:
        a = a @ weights[prefix + "decay_proj.weight"].T
    if config["gate_rank"]:
        bias = weights[prefix + "gate_proj.bias"] if config["gate_bias"] else 0.0
        g = g @ weights[prefix + "gate_proj.weight"].T + bias
    if decays and not own_keys:
        a = a + weights[prefix + "dt_bias"]
    if config["beta"] == "exp":
        a, b = soft_cap(a, 15.0), soft_cap(b + weights[prefix + "beta_bias"], 15.0)
    eps = config["out_norm_eps"]
    eps = config["rms_norm_eps"] if eps is None else eps
    out = np.zeros((len(x), H * V))
    for h in range(H):
        own = slice(h // (H // G) * K, (h // (H // G) + 1) * K)
        q_h = q[:, own]
        k_h = None if own_keys else k.reshape(len(x), J, G * K)[:, :, own]
        v_h = v.reshape(len(x), J, H, V)[:, :, h]
        beta = b.reshape(len(x), J, H)[:, :, h] if betas else None
        if J == 1:
            v_h, k_h = v_h[:, 0], None if own_keys else k_h[:, 0]
            beta = beta[:, 0] if betas else None
        if config["feature_map"] == "silu_l2":
            q_h, k_h = unit(q_h), unit(k_h)
        if config["rotary"]:
            q_h, k_h = rotary(q_h), rotary(k_h)
        a_h = a[:, h * K : (h + 1) * K] if config["decay"] == "channel" else a[:, h : h + 1]
        if config["beta"] == "sigmoid":
            beta = config["beta_scale"] * sigmoid(beta)
        if config["beta"] == "exp" or own_keys:
            pass  # the recurrence takes what the gates get; the decays are known
        elif config["gate_logit_normalizer"] is not None:
            a_h = sigmoid(a_h) ** (1 / config["gate_logit_normalizer"])
        elif decays:
            dt, A = np.logaddexp(0.0, a_h), -np.exp(weights[prefix + "A_log"][h])
            a_h = np.exp(dt * A)
            if config["beta"] == "dt":  # the recurrence of SSD makes the decay of these
                a_h, beta = np.full_like(dt, A), dt[:, 0]
        if config["decay"] == "scalar":
            a_h = a_h[:, 0]
        y = recurrence(config, h, q_h, k_h, v_h, a_h, beta)
        if config["skip"]:
            y = y + weights[prefix + "D"][h] * v_h
        if config["out_norm"] == "head":
            y = rms_norm(y, weights[prefix + "out_norm.weight"], eps)
        if config["out_norm"] == "head_layer":
            own = weights[prefix + "out_norm.weight"][h * V : (h + 1) * V]
            y = rms_norm(centred(y), own, eps)
        out[:, h * V : (h + 1) * V] = y
    if gates:
        out = out * (silu(g) if config["out_gate"] == "silu" else sigmoid(g))
    if config["out_norm"].startswith("gated"):  # of all heads, or of those that share keys
        groups = G if config["out_norm"] == "gated_group" else 1
        apart = np.split(out, groups, axis=1)
        own = np.split(weights[prefix + "out_norm.weight"], groups)
        pairs = zip(apart, own, strict=True)
        out = np.hstack([rms_norm(x, weight, eps) for x, weight in pairs])
    return out @ weights[prefix + "out_proj.weight"].T


def logits(weights: Weights, config: Config, input_ids: Array) -> Array:
    """Logits [B, L, vocabulary] of whole sequences [B, L]; the conformance kit's entry.

    Args:
        weights: The causal language model's state dict, as numpy arrays.
        config: The fields of its configuration.
        input_ids: Token ids.
    """
    weights = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    embedding, eps = weights["model.embed_tokens.weight"], config["rms_norm_eps"]
    head = embedding if config["tie_word_embeddings"] else weights["lm_head.weight"]
    rows = []
    for ids in np.asarray(input_ids):
        x = embedding[ids]
        for i in range(config["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            h = rms_norm(x, weights[layer + "norm.weight"], eps)
            x = x + mixer(weights, config, layer + "mixer.", h)
        found = rms_norm(x, weights["model.norm.weight"], eps) @ head.T
        rows.append(soft_cap(found, config["logit_soft_cap"]))
    return np.stack(rows)
