"""How stock modules are written as programs: see ``ssmzoo.modeling.decoding``.

A writer that meets a layer, a width or a setting that it does not know raises ``UnservedError``,
and the module's own code runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers.activations import ACT2FN

from ssmzoo.modeling.decoding import TokenWriter, decoding_of
from ssmzoo.modeling.module_parts import ModuleParts, State, UnservedError, recurrent
from ssmzoo_kernels.token_step import Program, Value


def rms_norm(added: float) -> TokenWriter:
    """Return the writer of a norm by the root mean square whose weight is ``w + added``."""

    def write(program: Program, parts: ModuleParts, x: Value, states: Sequence[State]) -> Value:
        root = parts.root
        return program.rms_norm(x, parts.weight(root), parts.eps(root), added=added)

    return write


def gated_mlp(program: Program, parts: ModuleParts, x: Value, states: Sequence[State]) -> Value:
    """``down(silu(gate x) * up x)``, in Falcon-H1 with two multipliers."""
    parts.layer("act_fn", nn.SiLU, type(ACT2FN["silu"]))
    gate = parts.linear(program, x, "gate_proj")
    gate = _multiplied(program, parts, gate, "gate_multiplier")
    inner = program.gated(gate, parts.linear(program, x, "up_proj"))
    y = parts.linear(program, inner, "down_proj")
    return _multiplied(program, parts, y, "down_multiplier")


# by a block's norm, the names under which models keep the branch that reads it; a block whose
# forward reads others than _READS of blocks has no program
BRANCHES: dict[str, tuple[str, ...]] = {
    "norm": ("mixer",),
    "input_layernorm": ("linear_attn", "mamba", "self_attn"),
    "post_attention_layernorm": ("mlp", "shared_mlp"),
    "pre_ff_layernorm": ("feed_forward",),
}


def block(program: Program, parts: ModuleParts, x: Value, states: Sequence[State]) -> Value:
    """``x + mixer(norm(x))``, in some blocks ``x + mlp(norm(x))`` behind it.

    Granite multiplies both branches. The parts are written as their own programs are, which are
    proved before it.
    """
    parts.setting(parts.root, "residual_in_fp32")  # on which the dtype of its output depends
    for norm, branches in BRANCHES.items():
        if norm not in parts.root._modules:
            continue
        (branch,) = (name for name in branches if name in parts.root._modules)
        y = x
        for name in (norm, branch):
            part = parts.within(name)
            step = parts.setting(decoding_of(part.root), "step")
            if step is None:
                raise UnservedError
            y = step.write(program, part, y, states if step.states else ())
        x = program.add(x, _multiplied(program, parts, y, "residual_multiplier"))
    return x


def joined_mlp(program: Program, parts: ModuleParts, x: Value, states: Sequence[State]) -> Value:
    """The MLP of Granite, whose ``gate`` and ``up`` are one layer."""
    parts.layer("activation", nn.SiLU, type(ACT2FN["silu"]))
    gate, up = parts.linear(program, x, "input_linear").chunk(2)
    return parts.linear(program, program.gated(gate, up), "output_linear")


def mamba(program: Program, parts: ModuleParts, x: Value, states: Sequence[State]) -> Value:
    """A mixer of Mamba, Falcon-Mamba or Jamba."""
    mixer = parts.root
    conv, state = states
    if state.like.dim() != 3:
        raise UnservedError  # Zamba has heads
    inner, size = state.like.shape[1:]
    projected = parts.linear(program, x, "in_proj")
    u, gate = projected.split(inner, inner)
    u = _convolution(program, parts, u, conv)
    projected = parts.linear(program, u, "x_proj")
    dt, write, read = projected.split(projected.width - 2 * size, size, size)
    if "dt_layernorm" in mixer._modules:
        dt, write, read = (
            parts.norm(program, value, f"{name}_layernorm")
            for name, value in (("dt", dt), ("b", write), ("c", read))
        )
    layer = parts.layer("dt_proj", nn.Linear)
    weight, scale = parts.matrix(layer)
    step = program.linear(dt, weight, scale=scale)
    y = program.selective(
        u,
        step,
        write,
        read,
        gate,
        parts.weight(mixer, "A_log"),
        parts.weight(mixer, "D"),
        parts.weight(layer, "bias", optional=True),
        recurrent(program, state),
    )
    return parts.linear(program, y, "out_proj")


def mamba_of_heads(
    program: Program, parts: ModuleParts, x: Value, states: Sequence[State]
) -> Value:
    """A mixer of Zamba: Mamba's scan a head, whose parameters lie head by head."""
    mixer: Any = parts.root
    conv, state = states
    if state.like.dim() != 4:
        raise UnservedError
    heads, width, size = state.like.shape[1:]
    inner = heads * width
    projected = parts.linear(program, x, "in_proj")  # u and gate take turns
    u, gate = (program.map(part, step=2) for part in (projected, projected.split(1, 2 * inner)[1]))
    u = _convolution(program, parts, u, conv)
    names = ("x_proj_weight", "dt_proj_weight", "A_log", "D", "dt_proj_bias")
    weights = zip(*(parts.weight(mixer, name) for name in names), strict=True)
    y, number = program.value(inner), recurrent(program, state)
    pieces = zip(weights, u.chunk(heads), gate.chunk(heads), y.chunk(heads), strict=True)
    for head, (own, u_head, gate_head, y_head) in enumerate(pieces):
        x_proj, dt_proj, A_log, D, bias = own
        read = program.linear(u_head, x_proj)
        dt, B, C = read.split(dt_proj.shape[1], size, size)
        dt, rest = program.linear(dt, dt_proj), (A_log, D, bias, number)
        first = head * width
        program.selective(
            u_head, dt, B, C, gate_head, *rest, channels=inner, first=first, into=y_head
        )
    return parts.linear(program, y, "out_proj")


def mamba2(program: Program, parts: ModuleParts, x: Value, states: Sequence[State]) -> Value:
    """A mixer of Mamba2, or of a hybrid that has it."""
    mixer: Any = parts.root
    conv, state = states
    heads, width, size = state.like.shape[1:]
    inner, mixed = heads * width, conv.like.shape[1]
    x = _multiplied(program, parts, x, "ssm_in_multiplier")
    projected = parts.linear(program, x, "in_proj")
    if projected.width != inner + mixed + heads:
        raise UnservedError
    if (factors := parts.buffer(mixer, "mup_vector")) is not None:
        projected = program.map(projected, weight=factors)
    gate, u, dt = projected.split(inner, mixed, heads)
    groups = (mixed - inner) // (2 * size)
    u = _convolution(program, parts, u, conv)
    u, write, read = u.split(inner, groups * size, groups * size)
    least, most = parts.setting(mixer, "time_step_limit")
    y = program.ssd(
        u,
        dt,
        write,
        read,
        parts.weight(mixer, "A_log"),
        parts.weight(mixer, "D"),
        parts.weight(mixer, "dt_bias"),
        groups,
        recurrent(program, state),
        (float(least), float(most)),
    )
    norm = parts.layer("norm")
    if type(norm) is nn.Identity:  # Falcon-H1 may have none
        return parts.linear(program, program.gated(gate, y), "out_proj")
    group, groups = parts.setting(norm, "group_size"), parts.setting(norm, "n_groups")
    gating = "silu after" if parts.setting(norm, "norm_before_gate") else "silu before"
    group = group if groups is None else inner // groups
    y = parts.norm(program, y, "norm", group=group, gate=gate, gating=gating)
    return parts.linear(program, y, "out_proj")


def gated_delta(program: Program, parts: ModuleParts, x: Value, states: Sequence[State]) -> Value:
    """A mixer of Qwen3.5 (gated DeltaNet)."""
    mixed = parts.linear(program, x, "in_proj_qkv")
    gate = parts.linear(program, x, "in_proj_z")
    beta = parts.linear(program, x, "in_proj_b")
    dt = parts.linear(program, x, "in_proj_a")
    y = _delta_rule(program, parts, states, mixed, dt, beta)
    y = parts.norm(
        program, y, "norm", group=states[1].like.shape[3], gate=gate, gating="silu after"
    )
    return parts.linear(program, y, "out_proj")


def grouped_delta(program: Program, parts: ModuleParts, x: Value, states: Sequence[State]) -> Value:
    """A mixer of Qwen3-Next, whose projections lie group by group: q, k, v, z and beta, dt."""
    both, inner = _delta_widths(states)
    heads, keys = states[1].like.shape[1:3]
    groups = both // keys
    mixed, gate = program.value(2 * both + inner), program.value(inner)
    beta, dt = program.value(heads), program.value(heads)
    q, k, v = mixed.split(both, both, inner)
    for name, values in (("in_proj_qkvz", (q, k, v, gate)), ("in_proj_ba", (beta, dt))):
        weight, scale = parts.matrix(parts.layer(name, nn.Linear))
        pieces = [value.chunk(groups) for value in values]
        widths = [piece[0].width for piece in pieces] * groups
        if sum(widths) != len(weight):
            raise UnservedError
        wanted = [piece[group] for group in range(groups) for piece in pieces]
        scales = [None] * len(widths)
        if scale is not None:
            scales = scale.view(len(weight), -1).split(widths)
        for rows, own, piece in zip(weight.split(widths), scales, wanted, strict=True):
            program.linear(x, rows, into=piece, scale=own)
    y = _delta_rule(program, parts, states, mixed, dt, beta)
    y = parts.norm(
        program, y, "norm", group=states[1].like.shape[3], gate=gate, gating="silu after"
    )
    return parts.linear(program, y, "out_proj")


def olmo_delta(program: Program, parts: ModuleParts, x: Value, states: Sequence[State]) -> Value:
    """A mixer of OLMo hybrid (gated DeltaNet)."""
    mixed = _joined(program, parts, x, states)
    dt, beta = parts.linear(program, x, "a_proj"), parts.linear(program, x, "b_proj")
    gate = parts.linear(program, x, "g_proj")
    y = _delta_rule(program, parts, states, mixed, dt, beta)
    y = parts.norm(
        program, y, "o_norm", group=states[1].like.shape[3], gate=gate, gating="silu after"
    )
    return parts.linear(program, y, "o_proj")


def kimi_delta(program: Program, parts: ModuleParts, x: Value, states: Sequence[State]) -> Value:
    """A mixer of Kimi Linear (KDA)."""
    mixed = _joined(program, parts, x, states)
    decay = parts.layer("forget_gate")
    dt = parts.linear(program, x, "forget_gate.f_a_proj")
    dt = parts.linear(program, dt, "forget_gate.f_b_proj")
    beta = parts.linear(program, x, "b_proj")
    gate = parts.linear(program, x, "g_a_proj")
    gate = parts.linear(program, gate, "g_b_proj")
    y = _delta_rule(program, parts, states, mixed, dt, beta, decay)
    value = states[1].like.shape[3]
    y = parts.norm(program, y, "o_norm", group=value, gate=gate, gating="sigmoid after")
    return parts.linear(program, y, "o_proj")


def _multiplied(program: Program, parts: ModuleParts, x: Value, name: str) -> Value:
    """Write the multiplication by a number that a module has under a name, if it has it."""
    factor = parts.setting(parts.root, name)
    return x if factor in (None, 1) else program.map(x, factor=float(factor))


def _convolution(program: Program, parts: ModuleParts, x: Value, state: State) -> Value:
    """Write the instruction of ``conv1d`` with a silu."""
    layer = parts.layer("conv1d", nn.Conv1d)
    weight, bias = parts.weight(layer), parts.weight(layer, "bias", optional=True)
    silu = parts.setting(parts.root, "activation") in ("silu", "swish")
    _, width, kept = state.like.shape
    if not silu or width != x.width or weight.shape[:2] != (width, 1) or kept < weight.shape[2]:
        raise UnservedError
    return program.causal_conv1d(x, weight, bias, state.number, kept, state.like.dtype, silu=True)


def _delta_widths(states: Sequence[State]) -> tuple[int, int]:
    """Return the widths of all keys (or queries) and of all values."""
    conv, state = (state.like for state in states)
    inner = state.shape[1] * state.shape[3]
    return (conv.shape[1] - inner) // 2, inner


def _joined(program: Program, parts: ModuleParts, x: Value, states: Sequence[State]) -> Value:
    """Write the projections of q, k and v into one value."""
    both, inner = _delta_widths(states)
    mixed = program.value(2 * both + inner)
    for name, piece in zip("qkv", mixed.split(both, both, inner), strict=True):
        parts.linear(program, x, f"{name}_proj", into=piece)
    return mixed


def _delta_rule(
    program: Program,
    parts: ModuleParts,
    states: Sequence[State],
    mixed: Value,
    dt: Value,
    beta: Value,
    decay: nn.Module | None = None,
) -> Value:
    """Write the convolution and the delta rule; ``decay`` has A_log and the bias of dt."""
    both, inner = _delta_widths(states)
    mixed = _convolution(program, parts, mixed, states[0])
    q, k, v = mixed.split(both, both, inner)
    owner = decay or parts.root
    return program.delta_rule(
        q,
        k,
        v,
        dt,
        beta,
        parts.weight(owner, "A_log"),
        parts.weight(owner, "dt_bias"),
        both // states[1].like.shape[2],
        recurrent(program, states[1]),
        beta_factor=2.0 if parts.setting(parts.root, "allow_neg_eigval") else 1.0,
    )


# by the function that a mixer calls for one token
MIXERS: dict[str, tuple[TokenWriter, ...]] = {
    "mamba_selective_state_update": (mamba, mamba_of_heads),
    "mamba2_selective_state_update": (mamba2,),
    "torch_recurrent_gated_delta_rule": (gated_delta, grouped_delta, olmo_delta),
    "recurrent_kimi_delta_attention": (kimi_delta,),
}
