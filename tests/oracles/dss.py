"""DSS in float64 numpy, from the paper alone (Gupta, Gu, Berant, arXiv 2203.14343).

Equation numbers are the paper's. What the paper leaves open (the time step of the real and of the
imaginary part, the regularised reciprocals, the learned skip, the block) follows its published
code. No FFT, no closed form where a sum will do; nothing is fast and nothing of ours is imported.

Legend: B batch, L length, H hidden, N modes, C channels, V vocabulary, M norm length (the paper's
L in the softmax). A trailing axis of 2 is (real, imaginary).

The names this file reads, under ``model.layers.{i}.mixer.``:

    log_dt              [H], or [H, 2] for separate steps of the real and the imaginary part
    Lambda              [N, 2]     softmax, clip
    Lambda_log_neg_re   [N]        exp, exp_no_scale, exp_re_im: Re = -exp(.)
    Lambda_im           [N]        exp, exp_no_scale: Im = . ; exp_re_im: Im = exp(.)
    W                   [C, H, N, 2]; [2C, H, N, 2] if bidirectional, the future's kernels last
    D                   [C, H]
    out_proj.weight     [H, C * H], columns (c h); out_proj.bias [H]; twice H for the block "glu"

and around the mixers:

    model.embed_tokens.weight                             [V, H]
    model.layers.{i}.norm.weight                          rms; and .bias: layer, batch
    model.layers.{i}.norm.running_mean, .running_var      batch, as in evaluation
    model.layers.{i}.mlp_norm.*, .mlp.up_proj.weight, .bias, .mlp.down_proj.weight, .bias
                                                          where intermediate_size is set
    model.norm.*                                          only where prenorm
    lm_head.weight                                        [V, H]; the embedding where absent

Fields of the configuration: hidden_size, num_hidden_layers, rms_norm_eps (of all three norms),
norm_type, prenorm, intermediate_size, bidirectional; d_state, kernel_variant, kernel_norm_length,
max_kernel_length, softmax_eps, channels.
"""

from collections.abc import Callable, Mapping, Sequence
from math import erf, sqrt
from typing import Any

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]
Config = Mapping[str, Any]

CLIP = 1e-4  # the largest real part of the variant "clip"
EXP_FLOOR = 1e-7  # of |lambda|^2 in the exp variants' 1 / lambda


# --- the kernel -------------------------------------------------------------------------------


def as_complex(pairs: Array) -> Array:
    """Real pairs [..., 2] as complex numbers."""
    return pairs[..., 0] + 1j * pairs[..., 1]


def eigenvalues(weights: Weights, config: Config, prefix: str) -> Array:
    """The diagonal state matrix [N] as each variant parametrises it (Section 3.3)."""
    variant = config["kernel_variant"]
    if variant in ("softmax", "clip"):
        lam = as_complex(weights[prefix + "Lambda"])
        return lam if variant == "softmax" else np.minimum(lam.real, CLIP) + 1j * lam.imag
    im = weights[prefix + "Lambda_im"]
    im = np.exp(im) if variant == "exp_re_im" else im
    return -np.exp(weights[prefix + "Lambda_log_neg_re"]) + 1j * im


def exponents(lam: Array, log_dt: Array) -> Array:
    """``c = dt lambda``, [H, N]; with two time steps, one for each part of lambda."""
    dt = np.exp(log_dt)
    if dt.ndim == 1:
        return dt[:, None] * lam
    return dt[:, :1] * lam.real + 1j * dt[:, 1:] * lam.imag


def readout(w: Array, lam: Array, c: Array, variant: str, norm_length: int, eps: float) -> Array:
    """What multiplies mode n's exponential in the kernel: [C, H, N] from w [C, H, N].

    exp is Proposition 1(a), ``w (e^c - 1) / lambda``; softmax is Proposition 1(b), ``w / lambda``
    over the sum of the row's M exponentials, of a growing mode those of c' = -c read backwards.
    eps regularises the reciprocal of ``d = lambda (e^c' - 1) sum_r e^{c' r}``, that is of
    ``lambda (e^{c' M} - 1)``, as the published code does.
    """
    if variant == "exp_no_scale":
        return w.astype(complex)
    if variant in ("exp", "exp_re_im", "clip"):
        return w * np.expm1(c) * np.conj(lam) / np.maximum(np.abs(lam) ** 2, EXP_FLOOR)
    assert variant == "softmax", variant
    falling = np.where(lam.real > 0, -c, c)
    total = sum(np.exp(falling * r) for r in range(norm_length))
    d = lam * np.expm1(falling) * total
    size = np.abs(d) ** 2 + eps
    inverse = np.divide(np.conj(d), size, out=np.zeros_like(d), where=size > 0)
    return w * np.expm1(falling) * inverse


def kernel(
    w: Array,  # [C, H, N] complex
    lam: Array,  # [N] complex
    c: Array,  # [H, N] complex
    length: int,
    variant: str,
    norm_length: int | None = None,
    eps: float = 1e-7,
) -> Array:
    """The real kernel [C, H, length], tap by tap; norm_length is the length where absent."""
    norm_length = length if norm_length is None else norm_length
    rho = readout(w, lam, c, variant, norm_length, eps)
    growing = (lam.real > 0) & (variant == "softmax")
    if length > norm_length and growing.any():
        raise ValueError(f"a growing mode has no taps from {norm_length} on, asked {length}")
    falling = np.where(growing, -c, c)
    out = np.zeros((*w.shape[:2], length))
    for tap in range(length):
        lag = np.where(growing, norm_length - 1 - tap, tap)
        out[:, :, tap] = np.sum((rho * np.exp(falling * lag)).real, axis=-1)
    return out


def softmax(x: Array) -> Array:
    """Appendix A.2's complex softmax over the last axis, unregularised: shifted by the element of
    the largest real part."""
    shift = np.take_along_axis(x, np.argmax(x.real, axis=-1)[..., None], axis=-1)
    y = np.exp(x - shift)
    return y / np.sum(y, axis=-1, keepdims=True)


def softmax_kernel(w: Array, lam: Array, c: Array, length: int) -> Array:
    """Proposition 1(b) as printed: ``Re (w / lambda) row-softmax(c l)``; [C, H, length]."""
    rows = softmax(c[:, :, None] * np.arange(length))
    return np.einsum("chn,hnl->chl", w / lam, rows).real


def dense_kernel(A: Array, B: Array, C: Array, dt: float, length: int) -> Array:
    """Eqs. (2) and (4) of any diagonalisable state space: zero-order hold, then C Abar^k Bbar."""
    values, vectors = np.linalg.eig(A)
    discrete = (vectors * np.exp(values * dt)) @ np.linalg.inv(vectors)
    state = np.linalg.solve(A, (discrete - np.eye(len(A))) @ B)
    out = []
    for _ in range(length):
        out.append(C @ state)
        state = discrete @ state
    return np.array(out)


# --- the layer --------------------------------------------------------------------------------


def convolution(u: Array, taps: Array, future: Array | None = None) -> Array:
    """Eq. (5), and ``sum_j future_j u_{k+1+j}``: u [B, L, H], taps [H, K] give [B, L, H]."""
    out = np.zeros(np.broadcast_shapes(u.shape, (1, 1, taps.shape[0])))
    for k in range(u.shape[1]):
        for j in range(min(k + 1, taps.shape[1])):
            out[:, k] += taps[:, j] * u[:, k - j]
        if future is not None:
            for j in range(min(u.shape[1] - k - 1, future.shape[1])):
                out[:, k] += future[:, j] * u[:, k + 1 + j]
    return out


def recurrence(
    u: Array,  # [B, L, H]
    w: Array,  # [C, H, N]
    lam: Array,
    c: Array,
    variant: str,
    norm_length: int = 0,
    eps: float = 1e-7,
) -> Array:
    """Eq. (2) stepped, [B, L, C, H]: the state does not know w, nor the norm length.

    A growing mode of softmax sums ``e^{-c k} u_k`` and reads it back with ``e^{c (k - M + 1)}``
    (Section 3.4), which is defined up to k = M - 1.
    """
    rho = readout(w, lam, c, variant, norm_length, eps)
    growing = (lam.real > 0) & (variant == "softmax")
    assert not growing.any() or u.shape[1] <= norm_length
    state = np.zeros((u.shape[0], *c.shape), dtype=complex)
    out = np.zeros((*u.shape[:2], *w.shape[:2]))
    falling = np.where(growing, 0, c)
    rising = np.where(growing, c, 0)
    for k in range(u.shape[1]):
        state = np.exp(falling) * state + np.exp(-rising * k) * u[:, k, :, None]
        read = np.where(growing, np.exp(rising * (k - norm_length + 1)), 1) * state
        out[:, k] = np.einsum("chn,bhn->bch", rho, read).real
    return out


def mixer(weights: Weights, config: Config, prefix: str, x: Array, form: str) -> Array:
    """Section 3.2's layer: convolution, skip, GELU, position-wise mixing; x [B, L, H]."""
    length, cap = x.shape[1], config["max_kernel_length"]
    variant, eps = config["kernel_variant"], config["softmax_eps"]
    lam = eigenvalues(weights, config, prefix)
    c = exponents(lam, weights[prefix + "log_dt"])
    w = as_complex(weights[prefix + "W"])
    channels = config["channels"]
    assert len(w) == channels * (2 if config["bidirectional"] else 1)

    norm_length, taps = config["kernel_norm_length"] or length, length
    if cap is not None:  # the kernel is built over the cap, however short the sequence
        norm_length = min(config["kernel_norm_length"] or cap, cap)
        taps = min(length, cap)
    if form == "recurrence":
        assert cap is None
        assert not config["bidirectional"]
        y = recurrence(x, w, lam, c, variant, norm_length, eps)
    else:
        kernels = kernel(w, lam, c, taps, variant, norm_length, eps)
        futures = kernels[channels:] if config["bidirectional"] else [None] * channels
        both = zip(kernels[:channels], futures, strict=True)
        y = np.stack([convolution(x, past, future) for past, future in both], axis=2)
    y = gelu(y + weights[prefix + "D"] * x[:, :, None])
    y = linear(weights, prefix + "out_proj", y.reshape(*x.shape[:2], -1))
    if config["block"] == "linear":
        return y
    value, gate = np.split(y, 2, axis=-1)
    return value / (1 + np.exp(-gate))


# --- the network ------------------------------------------------------------------------------


def gelu(x: Array) -> Array:
    return x * (1 + np.vectorize(erf, otypes=[float])(x / sqrt(2))) / 2


def tanh_gelu(x: Array) -> Array:
    return x * (1 + np.tanh(sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def linear(weights: Weights, name: str, x: Array) -> Array:
    return x @ weights[name + ".weight"].T + weights[name + ".bias"]


def norm(weights: Weights, config: Config, name: str, x: Array) -> Array:
    """The norm that the configuration names, as in evaluation; over the last axis of x."""
    kind, eps, scale = config["norm_type"], config["rms_norm_eps"], weights[name + ".weight"]
    if kind == "rms":
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale
    if kind == "layer":
        mean, var = np.mean(x, axis=-1, keepdims=True), np.var(x, axis=-1, keepdims=True)
    else:
        assert kind == "batch", kind
        mean, var = weights[name + ".running_mean"], weights[name + ".running_var"]
    return (x - mean) / np.sqrt(var + eps) * scale + weights[name + ".bias"]


def mlp(weights: Weights, name: str, x: Array) -> Array:
    return linear(weights, name + "down_proj", tanh_gelu(linear(weights, name + "up_proj", x)))


def backbone(weights: Weights, config: Config, x: Array, form: str = "convolution") -> Array:
    """All blocks and, where the norms come first, the last norm: [B, L, H] to [B, L, H]."""
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


def skew_hippo(modes: int) -> Array:
    """Eigenvalues [N] of HiPPO's normal part (Section 3.3), Im > 0, falling, by a dense solver."""
    odd = 2 * np.arange(2 * modes) + 1
    size = np.sqrt(np.outer(odd, odd)) / 2
    matrix = np.triu(size, 1) - np.tril(size, -1) - np.eye(2 * modes) / 2
    values = np.linalg.eigvals(matrix)
    values = values[values.imag > 0]
    return values[np.argsort(-values.imag)]


def s4d_lin(modes: int) -> Array:
    """S4D-Lin's eigenvalues ``-1/2 + i pi n`` (Gu et al. 2022), [N]."""
    return -0.5 + 1j * np.pi * np.arange(modes)


def s4d_inv(modes: int) -> Array:
    """S4D-Inv's eigenvalues ``-1/2 + i N / pi (N / (2n + 1) - 1)``, whose N is 2 ``modes``."""
    n, order = np.arange(modes), 2 * modes
    return -0.5 + 1j * order / np.pi * (order / (2 * n + 1) - 1)


def s4d_kernel(A: Array, BC: Array, dt: Array, length: int) -> Array:
    """S4D's kernel under zero-order hold: twice the real part of conjugate pairs' first halves.

    A [N] or [H, N], BC [H, N], dt [H] give [H, length].
    """
    z = A * dt[:, None]
    taps = [
        2 * np.sum(BC * (np.exp(z) - 1) / A * np.exp(z * tap), axis=-1) for tap in range(length)
    ]
    return np.real(np.stack(taps, axis=-1))


def layer_parameters(hidden: int, modes: int, channels: int = 1, separate_dt: bool = True) -> int:
    """Parameters of one softmax or exp layer without its norm: kernel, skip and projection."""
    steps = hidden * (2 if separate_dt else 1)
    mixing = channels * hidden * hidden + hidden
    return 2 * modes + steps + 2 * channels * hidden * modes + channels * hidden + mixing


OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(np.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def listops_value(tokens: Sequence[str]) -> int:
    """Value of a ListOps expression in prefix form; "X" closes as "]" does.

    Raises:
        ValueError: It is no expression, or more than one.
    """
    return listops_tree(tokens)[0]


def listops_tree(tokens: Sequence[str]) -> tuple[int, int, list[int]]:
    """Value, number of nested operators and the arity of every operator of an expression."""
    stack: list[tuple[str, list[int]]] = [("root", [])]
    depth, arities = 0, []
    for token in tokens:
        if token in OPERATORS:
            stack.append((token, []))
            depth = max(depth, len(stack) - 1)
        elif token in ("]", "X"):
            name, values = stack.pop()
            if not stack or not values:
                raise ValueError(f"{token!r} closes nothing")
            arities.append(len(values))
            stack[-1][1].append(OPERATORS[name](values))
        elif len(token) == 1 and token in "0123456789":
            stack[-1][1].append(int(token))
        else:
            raise ValueError(f"no ListOps token: {token!r}")
    if len(stack) != 1 or len(stack[0][1]) != 1:
        raise ValueError("not one whole expression")
    return stack[0][1][0], depth, arities
