"""COFFEE in float64 numpy, from the paper alone (Zattra et al., arXiv 2510.14027v2).

Equation, remark and appendix numbers are the paper's. What the paper leaves open (the sigmoid map
of lambda, all of the language model around the recurrence) follows our specification. Nothing is
fast and nothing of ours is imported.

Legend: B batch, L length, D features of the recurrence, N state, E hidden, K conv width, V
vocabulary. ``u`` [B, L, D] goes in, ``x`` [B, D, N] is the state, ``y`` [B, L, D] comes out; a lane
is one (b, i, j) of the state. ``s`` is the paper's gate Delta and ``q = lambda x + u``.

The names this file reads, under ``model.layers.{i}.mixer.``, of a core module (Appendix F):

    lam                 [D, N]  the diagonal of A; or lam_raw: lam = -lambda_max sigmoid(lam_raw)
    w, C                [D, N]
    w_gamma             [D, N]  where output_filter
    B                   [D, N]  variants "token_gate" and "input_matrix"
    dt_proj.weight      [D, D]  W_D: variants "token_gate", which has no w, and "s6"
    A_log               [D, N]  "s6" only, mu: lambda = -exp(mu)
    x_proj.weight       [2N, D] "s6" only, the rows of W_B, then of W_C
    D                   [D]     the skip, where present

and, where there is an in_proj, of the language model's block also:

    in_proj.weight      [2D, E] rows of the recurrence's branch, then of the gate
    conv1d.weight       [D, 1, K], tap K - 1 meets the current token; conv1d.bias where present
    out_proj.weight     [E, D]

and around the mixers:

    model.embed_tokens.weight           [V, E]; the frozen row is left out
    model.layers.{i}.norm.weight        [E] and, for norm_type "layer", .bias
    model.layers.{i}.mlp_norm.*, .mlp.up_proj.weight, .mlp.down_proj.weight
                                        where intermediate_size is set; with .mlp.gate_proj.weight
                                        for mlp_type "swiglu", with biases for "gelu"
    model.norm.*                        only where prenorm
    lm_head.weight                      [V, E], the embedding where absent

Fields of the configuration: num_hidden_layers, norm_type ("rms", "layer" or "none"), rms_norm_eps,
prenorm, residual, intermediate_size, mlp_type; lambda_max, variant ("coffee", "input_matrix",
"no_feedback", "token_gate", "linear_feedback" or "s6", the rows of Table 6 and Eq. (6)), head
("linear" or "nearest_embedding"), frozen_embedding_index (of the row that is all ones, or None).

The classifier of images (Appendix I) is ``scans.{0..3}.`` with a core module's names, then
``hidden.weight`` [25, 100], ``.bias``, ``score.weight`` [10, 25], ``.bias``.
"""

from collections.abc import Mapping, Sequence
from math import erf, sqrt
from typing import Any

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]
Config = Mapping[str, Any]
State = list[tuple[Array | None, Array]]  # per layer: K - 1 raw conv inputs [B, K - 1, D], x


def sigmoid(a: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -a))


def softplus(a: Array) -> Array:
    return np.logaddexp(0.0, a)


def silu(a: Array) -> Array:
    return a * sigmoid(a)


def gelu(a: Array) -> Array:
    return a * (1 + np.vectorize(erf, otypes=[float])(a / sqrt(2))) / 2


def tanh_gelu(a: Array) -> Array:
    return a * (1 + np.tanh(sqrt(2 / np.pi) * (a + 0.044715 * a**3))) / 2


def linear(weights: Weights, name: str, x: Array) -> Array:
    return x @ weights[name + ".weight"].T + weights[name + ".bias"]


def mlp(weights: Weights, config: Config, prefix: str, x: Array) -> Array:
    if config["mlp_type"] == "swiglu":
        gate, up, down = (weights[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T
    assert config["mlp_type"] == "gelu", config["mlp_type"]
    return linear(weights, prefix + "down_proj", tanh_gelu(linear(weights, prefix + "up_proj", x)))


def norm(weights: Weights, config: Config, name: str, x: Array) -> Array:
    """The norm that the configuration names, over the last axis of x."""
    if config["norm_type"] == "none":
        return x
    eps, scale = config["rms_norm_eps"], weights[name + ".weight"]
    if config["norm_type"] == "rms":
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale
    assert config["norm_type"] == "layer", config["norm_type"]
    mean, var = np.mean(x, axis=-1, keepdims=True), np.var(x, axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(var + eps) * scale + weights[name + ".bias"]


# --- the recurrence ---------------------------------------------------------------------------


def gate(x: Array, w: Array, drive: Array | None = None, kind: str = "sigmoid") -> Array:
    """Eq. (5), ``s = sigmoid(w x)`` of the previous state; without feedback ``sigmoid(w drive)``.

    x [B, D, N], drive [B, D]. Kind "linear" leaves the sigmoid out (Table 6, "lin. fb.").
    """
    before = w * (x if drive is None else drive[:, :, None])
    if kind == "linear":
        return before
    assert kind == "sigmoid", kind
    return sigmoid(before)


def update(x: Array, s: Array, u: Array, lam: Array, B: Array | float = 1.0) -> Array:
    """The state line of Eqs. (4), (6) and, where B is one, (7); x and s [B, D, N], u [B, D]."""
    return (1 + lam * s) * x + s * B * u[:, :, None]


def states(
    u: Array,  # [B, L, D]
    lam: Array,  # [D, N]
    w: Array,  # [D, N]
    *,
    drive: Array | None = None,  # [B, L, D]
    B: Array | float = 1.0,  # [D, N]
    kind: str = "sigmoid",
    state: Array | None = None,  # [B, D, N], x before the first step
) -> Array:
    """Every state x(0) ... x(L - 1), [B, L, D, N]; Eqs. (5) and (7)."""
    x = np.zeros((len(u), *lam.shape)) if state is None else state
    out = []
    for k in range(u.shape[1]):
        s = gate(x, w, None if drive is None else drive[:, k], kind)
        x = update(x, s, u[:, k], lam, B)
        out.append(x)
    return np.stack(out, axis=1)


def read(x: Array, C: Array, w_gamma: Array | None = None) -> Array:
    """Eq. (7)'s output line and, with w_gamma, Remark 2: gamma C x; x [..., D, N] to [..., D]."""
    y = np.sum(C * x, axis=-1)
    return y if w_gamma is None else sigmoid(np.sum(w_gamma * x, axis=-1)) * y


def scan(
    u: Array,
    lam: Array,
    w: Array,
    C: Array,
    w_gamma: Array | None = None,
    skip: Array | None = None,  # [D]
    **options: Any,
) -> tuple[Array, Array]:
    """Outputs [B, L, D] and the last state [B, D, N]; options are those of :func:`states`."""
    x = states(u, lam, w, **options)
    y = read(x, C, w_gamma)
    return (y if skip is None else y + skip * u), x[:, -1]


def s6(
    u: Array,  # [B, L, D]
    mu: Array,  # [D, N]
    W_B: Array,  # [N, D]
    W_C: Array,  # [N, D]
    W_D: Array,  # [D, D]
    state: Array | None = None,
) -> tuple[Array, Array]:
    """Eqs. (2), (3) and (13): the time step of the token, zero-order hold, B and C of the token."""
    lam = -np.exp(mu)
    x = np.zeros((len(u), *lam.shape)) if state is None else state
    out = []
    for k in range(u.shape[1]):
        dt = softplus(u[:, k] @ W_D.T)[:, :, None]
        B, C = u[:, k] @ W_B.T, u[:, k] @ W_C.T
        x = hold(x, dt, u[:, k], lam, B[:, None, :])
        out.append(np.sum(C[:, None, :] * x, axis=-1))
    return np.stack(out, axis=1), x


def hold(x: Array, dt: Array, u: Array, lam: Array, B: Array | float) -> Array:
    """Eq. (13)'s state line; x [B, D, N], dt [B, D, 1], u [B, D]."""
    return np.exp(lam * dt) * x + np.expm1(lam * dt) / lam * B * u[:, :, None]


# --- derivatives and Newton's method ----------------------------------------------------------


def derivatives(
    x: Array,  # the state before the step, [B, D, N]
    u: Array,  # [B, D]
    lam: Array,
    w: Array,
    drive: Array | None = None,  # [B, D]
    kind: str = "sigmoid",
) -> dict[str, Array]:
    """Partial derivatives, lane by lane, of one step of Eq. (7): by "x", "u", "lam", "w", "drive".

    That by "x" is the diagonal of the Jacobian; off it there is nothing.
    """
    s = gate(x, w, drive, kind)
    slope = s * (1 - s) if kind == "sigmoid" else np.ones_like(s)
    q = lam * x + u[:, :, None]
    source = x if drive is None else drive[:, :, None]
    back, aside = (w * slope * q, 0 * q) if drive is None else (0 * q, w * slope * q)
    return {"x": 1 + lam * s + back, "u": s, "lam": s * x, "w": slope * source * q, "drive": aside}


def gradients(
    y_bar: Array,  # [B, L, D], the loss by y
    u: Array,
    lam: Array,
    w: Array,
    C: Array,
    w_gamma: Array | None = None,
    skip: Array | None = None,
    *,
    drive: Array | None = None,
    kind: str = "sigmoid",
    state: Array | None = None,
    final_bar: Array | float = 0.0,  # [B, D, N], the loss by the last state
) -> dict[str, Array]:
    """The loss by every input, by the adjoint ``a_k = g_k + J_{k+1} a_{k+1}`` over exact states.

    Keys: u, lam, w, C, state and, where given, w_gamma, skip, drive.
    """
    x = states(u, lam, w, drive=drive, kind=kind, state=state)
    first = np.zeros_like(x[:, 0]) if state is None else state
    names = ("u", "lam", "w", "C", "w_gamma", "skip", "drive")
    given = (u, lam, w, C, w_gamma, skip, drive)
    out = {n: np.zeros_like(v) for n, v in zip(names, given, strict=True) if v is not None}
    a = np.zeros_like(first) + final_bar
    for k in reversed(range(u.shape[1])):
        bar = y_bar[:, k, :, None]
        if w_gamma is None:
            out["C"] += np.sum(bar * x[:, k], axis=0)
            a = a + bar * C
        else:
            gamma = sigmoid(np.sum(w_gamma * x[:, k], axis=-1, keepdims=True))
            plain = np.sum(C * x[:, k], axis=-1, keepdims=True)
            out["C"] += np.sum(bar * gamma * x[:, k], axis=0)
            out["w_gamma"] += np.sum(bar * plain * gamma * (1 - gamma) * x[:, k], axis=0)
            a = a + bar * gamma * (C + (1 - gamma) * plain * w_gamma)
        if skip is not None:
            out["skip"] += np.sum(y_bar[:, k] * u[:, k], axis=0)
            out["u"][:, k] += skip * y_bar[:, k]
        before = first if k == 0 else x[:, k - 1]
        by = derivatives(before, u[:, k], lam, w, None if drive is None else drive[:, k], kind)
        out["u"][:, k] += np.sum(a * by["u"], axis=-1)
        if drive is not None:
            out["drive"][:, k] += np.sum(a * by["drive"], axis=-1)
        out["lam"] += np.sum(a * by["lam"], axis=0)
        out["w"] += np.sum(a * by["w"], axis=0)
        a = a * by["x"]
    return out | {"state": a}


def newton_update(
    x: Array,  # [B, L, D, N], a trajectory
    u: Array,
    lam: Array,
    w: Array,
    state: Array,  # [B, D, N]
) -> tuple[Array, Array]:
    """Appendix D, one iteration: the better trajectory, and the relative residual of this one.

    The residual of a lane is the largest ``|r_k| / max(1, |x_k|)``. Its Jacobian at step k is that
    of f_k at x(k - 1), as in the recurrence for Delta x; the pair e_k is printed with x(k).
    """
    delta, worst, after = np.zeros_like(state), np.zeros_like(state), []
    for k in range(u.shape[1]):
        before = state if k == 0 else x[:, k - 1]
        r = x[:, k] - update(before, gate(before, w), u[:, k], lam)
        worst = np.maximum(worst, np.abs(r) / np.maximum(1, np.abs(x[:, k])))
        delta = derivatives(before, u[:, k], lam, w)["x"] * delta - r
        after.append(x[:, k] + delta)
    return np.stack(after, axis=1), worst


def newton(
    u: Array,
    lam: Array,
    w: Array,
    state: Array | None = None,
    *,
    guess: Array | None = None,  # [B, L, D, N], zeros where absent
    tolerance: float = 1e-6,
    max_iterations: int | None = None,
) -> tuple[Array, Array, list[Array]]:
    """Solve for the trajectory lane by lane until the relative residual is within tolerance.

    Returns:
        The trajectory [B, L, D, N]; the number of updates each lane took [B, D, N], -1 where it did
        not converge in max_iterations (L where absent); the residuals before every update.
    """
    state = np.zeros((len(u), *lam.shape)) if state is None else state
    limit = u.shape[1] if max_iterations is None else max_iterations
    x = np.zeros((*u.shape, lam.shape[1])) if guess is None else guess
    count, history = np.full(state.shape, -1), []
    for iteration in range(limit + 1):
        better, residual = newton_update(x, u, lam, w, state)
        history.append(residual)
        count[(count < 0) & (residual <= tolerance)] = iteration
        if (count >= 0).all():
            break
        if iteration < limit:
            x = np.where(count[:, None] < 0, better, x)
    return x, count, history


# --- the read-out of Appendix F ---------------------------------------------------------------


def distances(y: Array, embedding: Array) -> Array:
    """Euclidean distance of every output to every embedding: y [..., E] gives [..., V]."""
    return np.stack([np.sqrt(np.sum((y - row) ** 2, axis=-1)) for row in embedding], axis=-1)


def nearest_logits(d: Array) -> Array:
    """``logit(softmin(d))`` in closed form: ``-d_m - log sum_{m' != m} exp(-d_m')``; d [..., V]."""
    out = np.empty_like(d)
    for m in range(d.shape[-1]):
        others = -np.delete(d, m, axis=-1)
        top = np.max(others, axis=-1, keepdims=True)
        total = top[..., 0] + np.log(np.sum(np.exp(others - top), axis=-1))
        out[..., m] = -d[..., m] - total
    return out


# --- models -----------------------------------------------------------------------------------


def eigenvalues(weights: Weights, config: Config, prefix: str) -> Array:
    """The diagonal of A, [D, N]: the parameter itself, or -lambda_max times its sigmoid."""
    if prefix + "lam" in weights:
        return weights[prefix + "lam"]
    return -config["lambda_max"] * sigmoid(weights[prefix + "lam_raw"])


def recurrence(
    weights: Weights, config: Config, prefix: str, u: Array, state: Array | None = None
) -> tuple[Array, Array]:
    """The variant that the configuration names: y [B, L, D] and the last state [B, D, N]."""
    variant = config["variant"]
    skip = weights.get(prefix + "D")
    if variant == "s6":
        W_B, W_C = np.split(weights[prefix + "x_proj.weight"], 2)
        W_D = weights[prefix + "dt_proj.weight"]
        y, state = s6(u, weights[prefix + "A_log"], W_B, W_C, W_D, state)
        return (y if skip is None else y + skip * u), state
    lam, drive = eigenvalues(weights, config, prefix), None
    if variant == "token_gate":  # Appendix C.1: sigmoid(W_D u), one gate a feature
        w, drive = np.ones_like(lam), u @ weights[prefix + "dt_proj.weight"].T
    else:
        w = weights[prefix + "w"]
    if variant == "no_feedback":
        drive = u
    with_B = variant in ("token_gate", "input_matrix")
    assert with_B == (prefix + "B" in weights)
    return scan(
        u,
        lam,
        w,
        weights[prefix + "C"],
        weights.get(prefix + "w_gamma"),
        skip,
        drive=drive,
        B=weights[prefix + "B"] if with_B else 1.0,
        kind="linear" if variant == "linear_feedback" else "sigmoid",
        state=state,
    )


def short_conv(history: Array, weight: Array, bias: Array | float) -> Array:
    """Depthwise causal convolution, then SiLU; history [B, K - 1 + L, D] gives [B, L, D]."""
    taps = weight.shape[-1]
    length = history.shape[1] - taps + 1
    terms = [history[:, j : j + length] * weight[:, 0, j] for j in range(taps)]
    return silu(np.sum(terms, axis=0) + bias)


def mixer(
    weights: Weights, config: Config, prefix: str, h: Array, state: tuple[Array | None, Array]
) -> tuple[Array, tuple[Array | None, Array]]:
    """The recurrence alone or, with projections, inside a gated block; h [B, L, E], any L."""
    window, x = state
    if prefix + "in_proj.weight" not in weights:
        y, x = recurrence(weights, config, prefix, h, x)
        return y, (None, x)
    assert window is not None
    branch, z = np.split(h @ weights[prefix + "in_proj.weight"].T, 2, axis=-1)
    history = np.concatenate([window, branch], axis=1)
    bias = weights.get(prefix + "conv1d.bias", 0.0)
    u = short_conv(history, weights[prefix + "conv1d.weight"], bias)
    y, x = recurrence(weights, config, prefix, u, x)
    out = (y * silu(z)) @ weights[prefix + "out_proj.weight"].T
    return out, (history[:, history.shape[1] - window.shape[1] :], x)


def empty_state(weights: Weights, config: Config, batch: int) -> State:
    out: State = []
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}.mixer."
        names = [prefix + name for name in ("lam", "lam_raw", "A_log")]
        (shape,) = (weights[name].shape for name in names if name in weights)
        window = None
        if prefix + "conv1d.weight" in weights:
            window = np.zeros((batch, weights[prefix + "conv1d.weight"].shape[-1] - 1, shape[0]))
        out.append((window, np.zeros((batch, *shape))))
    return out


def run(
    weights: Weights, config: Config, input_ids: Array, state: State | None = None
) -> tuple[Array, State]:
    """The model from a state on; input_ids [B, L] gives logits [B, L, V] and the state."""
    weights = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    embedding = table(weights, config, "model.embed_tokens.weight")
    head = table(weights, config, "lm_head.weight") if "lm_head.weight" in weights else embedding
    if state is None:
        state = empty_state(weights, config, len(input_ids))

    h = embedding[np.asarray(input_ids)]
    first = config["prenorm"]
    after: State = []
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        x = norm(weights, config, layer + "norm", h) if first else h
        x, new = mixer(weights, config, layer + "mixer.", x, state[i])
        h = h + x if config["residual"] else x
        h = h if first else norm(weights, config, layer + "norm", h)
        if config["intermediate_size"]:
            x = norm(weights, config, layer + "mlp_norm", h) if first else h
            x = mlp(weights, config, layer + "mlp.", x)
            h = h + x if config["residual"] else x
            h = h if first else norm(weights, config, layer + "mlp_norm", h)
        after.append(new)
    h = norm(weights, config, "model.norm", h) if first else h
    if config["head"] == "nearest_embedding":
        return nearest_logits(distances(h, head)), after
    assert config["head"] == "linear", config["head"]
    return h @ head.T, after


def table(weights: Weights, config: Config, name: str) -> Array:
    """An embedding [V, E], with the row of ones that is no parameter put in where it belongs."""
    frozen = config["frozen_embedding_index"]
    return weights[name] if frozen is None else np.insert(weights[name], frozen, 1.0, axis=0)


def logits(weights: Weights, config: Config, input_ids: Array) -> Array:
    """Logits [B, L, V] of whole sequences [B, L]; the conformance kit's entry.

    The names expected in weights stand at the head of this file.

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


def image_logits(weights: Weights, config: Config, images: Array) -> Array:
    """Appendix I: rows, columns, rows reversed, columns reversed; images [B, P, P] to [B, 10].

    What a direction says is the output at its last row or column; two linear maps with a GELU
    between them judge the four together.
    """
    weights = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    rows, columns = images, images.transpose(0, 2, 1)
    directions = (rows, columns, rows[:, ::-1], columns[:, ::-1])
    last = [
        recurrence(weights, config, f"scans.{i}.", u)[0][:, -1] for i, u in enumerate(directions)
    ]
    h = np.concatenate(last, axis=-1) @ weights["hidden.weight"].T + weights["hidden.bias"]
    return gelu(h) @ weights["score.weight"].T + weights["score.bias"]


# --- parameter counts -------------------------------------------------------------------------


# --- the induction heads of Appendix E --------------------------------------------------------


def induction_target(
    sequence: Sequence[int],
    trigger: Sequence[int],
    target_length: int = 1,
    gap: int = 0,
    symbols: Sequence[int] = (1, 2, 3, 4, 5, 6, 7),
) -> tuple[int, ...]:
    """The target of a sequence as Appendix E builds them, Eq. (19).

    gap is the length of the noise between trigger and target (Table 3). A target longer than one
    symbol is followed, after the last trigger, by zeros that do not count as sequence (Remark 5).

    Raises:
        ValueError: The sequence is not one of the task's.
    """
    sequence, trigger = tuple(sequence), tuple(trigger)
    padding = target_length - 1
    body = sequence[: len(sequence) - padding]
    if sequence[len(body) :] != (0,) * padding:
        raise ValueError(f"a target of {target_length} needs {padding} zeros at the end")
    if not set(body) <= set(symbols):
        raise ValueError("a symbol outside the vocabulary")
    if len(body) - 2 * len(trigger) - target_length < 1:
        raise ValueError("too short for any noise")
    at = [p for p in range(len(body)) if body[p : p + len(trigger)] == trigger]
    if len(at) != 2:
        raise ValueError(f"the trigger must occur exactly twice, it does {len(at)} times")
    if at[1] + len(trigger) != len(body):
        raise ValueError("the sequence must end with the trigger")
    start = at[0] + len(trigger) + gap
    if start + target_length > at[1]:
        raise ValueError("no room for the target between the triggers")
    return body[start : start + target_length]
