"""Six linear recurrences with a matrix state in float64 numpy, each from its paper's equations.

One head at a time, from a zero state or a given one. The state lies as the paper has it, and so do
the vectors. Nothing is fast and nothing of ours is imported.

Legend: L length, K width of keys and queries, V width of values.
"""

import numpy as np

Array = np.ndarray
Found = tuple[Array, Array]  # outputs [L, V], the last state


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
