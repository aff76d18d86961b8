"""Decoding: a token of a stock module in one call of C.

A program stands for a module's forward only where it was written for what the module is made of:
plain layers without hooks, in number formats that the kernel reads. It is used after it gave what
the stock code gave for a first token, so code that we do not know stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from transformers.activations import ACT2FN

from ssmzoo.modeling.layers import Linear
from ssmzoo_kernels.dispatch import decodes_on_cpu, takes_kernels
from ssmzoo_kernels.token_step import MOST_ROWS, Program, Value

_log = logging.getLogger("ssmzoo")
OFFSETS = (0.0, 1.0)  # what models add to a norm's weight
FORMATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# how far the program's output may be from the stock code's, by its greatest number
_ROUNDING = {
    torch.float64: 1e-5,  # stock code is float32 in places
    torch.float32: 1e-4,
    torch.bfloat16: 2.0**-5,
    torch.float16: 2.0**-8,
}


class UnservedError(Exception):
    """The module has something that no program is written for; ``lasts``: whether still so."""

    def __init__(self, lasts: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self.lasts = lasts


class _Parts:
    """The layers and weights that a program is made of, and whether they are still the same."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.root, self.dtype = module, dtype
        self._held: list[tuple[dict[str, Any], str, Any]] = []
        self._layers: list[nn.Module] = []
        self._weights: list[tuple[Tensor, int, torch.Size]] = []
        self._settings: list[tuple[nn.Module, str, Any]] = []

    def layer(self, name: str, *kinds: type[nn.Module]) -> Any:
        """Return a submodule that nothing watches, of one of some classes or of any."""
        owner: Any = self.root
        *path, last = name.split(".")
        for part in path:
            owner = self._take(owner, part)
        layer = self._take(owner, last)
        if kinds and type(layer) is not Linear and stock_class(layer) not in kinds:
            raise UnservedError(lambda: owner._modules.get(last) is layer)
        return layer

    def _take(self, owner: nn.Module, name: str) -> nn.Module:
        layer = owner._modules.get(name)
        if layer is None:
            raise UnservedError
        if is_watched(layer):
            raise UnservedError(lambda: owner._modules.get(name) is layer and is_watched(layer))
        self._held.append((owner._modules, name, layer))
        self._layers.append(layer)
        return layer

    def weight(self, owner: nn.Module, name: str = "weight", optional: bool = False) -> Any:
        """Return a parameter."""
        kept = owner._parameters.get(name)
        if kept is None and optional and getattr(owner, name, None) is None:
            self._held.append((owner._parameters, name, None))
            return None
        if (
            type(kept) is not nn.Parameter  # quantised or made anew for each call, perhaps
            or kept.dtype not in FORMATS
            or kept.device.type != "cpu"
            or not kept.is_contiguous()
        ):
            raise UnservedError(lambda: owner._parameters.get(name) is kept)
        self._held.append((owner._parameters, name, kept))
        self._weights.append((kept, kept.data_ptr(), kept.shape))
        return kept.detach()

    def setting(self, owner: nn.Module, name: str) -> Any:
        """Return a plain attribute, None if there is none."""
        value = getattr(owner, name, None)
        self._settings.append((owner, name, value))
        return value

    def eps(self, layer: nn.Module) -> float:
        """Return what a norm adds to the mean square."""
        if not (name := name_of_eps(layer)):
            raise UnservedError
        return self.setting(layer, name)

    def matrix(self, layer: nn.Module) -> Any:
        """Return a linear layer's weight, of the dtype of what stock code multiplies it with."""
        weight = self.weight(layer)
        if weight.dtype is not self.dtype:
            raise UnservedError(self.unchanged)
        return weight

    def linear(self, program: Program, x: Value, name: str, into: Value | None = None) -> Value:
        """Write a linear layer's instruction."""
        layer = self.layer(name, nn.Linear)
        weight, bias = self.matrix(layer), self.weight(layer, "bias", optional=True)
        if weight.shape[1] != x.width:
            raise UnservedError(self.unchanged)
        return program.linear(x, weight, bias, into)

    def convolution(self, program: Program, x: Value, state: int, like: Tensor) -> Value:
        """Write the instruction of ``conv1d`` with a silu; its state is like a tensor."""
        layer = self.layer("conv1d", nn.Conv1d)
        weight, bias = self.weight(layer), self.weight(layer, "bias", optional=True)
        silu = self.setting(self.root, "activation") in ("silu", "swish")
        kept, taps = like.shape[-1], weight.shape[-1]
        if not silu or like.shape[1] != x.width or weight.shape[:2] != (x.width, 1) or kept < taps:
            raise UnservedError(self.unchanged)
        return program.causal_conv1d(x, weight, bias, state, kept, like.dtype, silu=True)

    def norm(self, program: Program, x: Value, name: str, **gating: Any) -> Value:
        """Write the instruction of a normalisation by the root mean square."""
        layer = self.layer(name)
        weight = None
        if "Weightless" not in type(layer).__name__:
            weight = self.weight(layer)
        return program.rms_norm(x, weight, self.eps(layer), **gating)

    def unchanged(self) -> bool:
        """Return whether nothing was replaced, moved, or hooked since."""
        for holder, name, kept in self._held:
            if holder.get(name) is not kept:
                return False
        for layer in self._layers:
            if is_watched(layer):
                return False
        for owner, name, value in self._settings:
            if getattr(owner, name, None) != value:
                return False
        for weight, address, shape in self._weights:
            if weight.data_ptr() != address or weight.shape != shape or not weight.is_contiguous():
                return False
        return True


def is_watched(layer: nn.Module) -> bool:
    """Return whether calling a layer does more than its class's forward."""
    held = layer.__dict__
    return bool(
        held["_forward_hooks"]
        or held["_forward_pre_hooks"]
        or held["_backward_hooks"]
        or held["_backward_pre_hooks"]
        or "forward" in held  # hooks of Accelerate
    )


def stock_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's class, or the one that ours stands for."""
    kind = type(module)
    return kind.__dict__.get("stock_class", kind)


def name_of_eps(layer: nn.Module) -> str:
    """Return the attribute that has what a norm adds to the mean square, or an empty string."""
    names = ("variance_epsilon", "eps")
    return next((name for name in names if isinstance(getattr(layer, name, None), float)), "")


class _Step:
    """A module's program, and what it was written for."""

    def __init__(
        self,
        module: nn.Module,
        write: Writer,
        x: Tensor,
        states: Sequence[Tensor],
    ) -> None:
        self.parts = _Parts(module, x.dtype)
        self.formats = (x.dtype, *(s.dtype for s in states))
        self.width, self.shapes = x.shape[-1], [s.shape[1:] for s in states]
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        if states and states[-1].dtype is not wide:
            raise UnservedError  # a recurrent state of fewer bits
        self.program = Program(wide)
        if not self.program.applies(x):
            raise UnservedError  # the kernel cannot be built
        try:
            y = write(self.program, self.parts, self.program.input(0, x.dtype, self.width), states)
        except ValueError as error:  # a dtype that the kernel does not read
            raise UnservedError(self.parts.unchanged) from error
        self.program.output(y, 1, x.dtype)
        self.outputs = y.width

    def fits(self, x: Tensor, states: Sequence[Tensor]) -> bool:
        """Return whether a call is of the kind that the program was written for."""
        return (
            self.formats == (x.dtype, *[s.dtype for s in states])
            and x.shape[-1] == self.width
            and all(s.shape[1:] == shape for s, shape in zip(states, self.shapes, strict=True))
            and self.parts.unchanged()
        )

    def __call__(self, x: Tensor, states: Sequence[Tensor]) -> Tensor:
        y = x.new_empty((*x.shape[:-1], self.outputs))
        rows = x.numel() // self.width
        self.program.run(rows, (x if x.is_contiguous() else x.contiguous(), y, *states))
        for state in states:
            if not state.is_inference():
                torch.autograd.graph.increment_version(state)  # as writing by torch does
        return y


Writer = Callable[[Program, _Parts, Value, Sequence[Tensor]], Value]
KEPT_AS = "_ssmzoo_decoding"  # the attribute of a module


class Decoding:
    """How a module decodes: by a program, one still to be written, or by the stock code."""

    step: _Step | None = None
    refused: Callable[[Tensor], bool] | None = None  # whether an input is still the stock code's
    offset: float | None = None  # of a norm's weight, NaN if it is another norm: see ``norms``


def kept(module: nn.Module) -> Decoding:
    """Return what is known of a module."""
    known = module.__dict__.get(KEPT_AS)
    if known is None:
        known = module.__dict__[KEPT_AS] = Decoding()
    return known


def token(
    module: Any,
    writers: Sequence[Writer],
    x: Tensor,
    states: Sequence[Tensor],
    stock: Callable[[], Tensor],
) -> Tensor:
    """Return a module's output for few rows, in one call where it may be.

    Args:
        module: The module.
        writers: What its program may be; the first counts that gives what the stock code gives.
        x: ``[..., width]``, a token of each row.
        states: What the call changes, ``[B, ...]`` each.
        stock: Its forward.
    """
    if (
        not decodes_on_cpu(x)
        or not 0 < x.numel() <= MOST_ROWS * x.shape[-1]
        or x.dtype not in FORMATS
        or not takes_kernels()
        or module_hooks._global_forward_hooks
        or module_hooks._global_forward_pre_hooks
    ):
        if x.device.type != "cpu" and KEPT_AS in module.__dict__:
            module.__dict__[KEPT_AS].step = None  # which would keep what was moved in memory
        return stock()
    known = kept(module)
    if known.refused is not None and known.refused(x):
        return stock()
    if not all(state.is_contiguous() and state.device.type == "cpu" for state in states):
        return stock()
    step = known.step  # which another thread may replace meanwhile
    if step is None or not step.fits(x, states):
        return _prove(module, known, writers, x, states, stock)
    return step(x, states)


def _prove(
    module: nn.Module,
    known: Decoding,
    writers: Sequence[Writer],
    x: Tensor,
    states: Sequence[Tensor],
    stock: Callable[[], Tensor],
) -> Tensor:
    """Run the stock code, and find a program that gives the same."""
    known.step = None
    before = [state.clone() for state in states]
    y = stock()
    if not y.any() or not y.isfinite().all():
        return y  # from which nothing can be told
    lasting, differs = [], False
    for writer in writers:
        try:
            step = _Step(module, writer, x, states)
        except UnservedError as error:
            lasting.append(error.lasts)
            continue
        changed = [state.clone() for state in before]
        ours = step(x, changed)
        pairs = zip((ours, *changed), (y, *states), strict=True)
        if all(agree(a, b, x.dtype) for a, b in pairs):
            known.step, known.refused = step, None
            return y
        differs = True
        lasting.append(step.parts.unchanged)
    if differs:
        _log.info("%s decodes by its own code: programs gave other numbers", type(module).__name__)
    kind = x.dtype
    known.refused = lambda x: x.dtype is kind and all(lasts() for lasts in lasting)
    return y


def agree(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether two results of a module are one but for the roundings of a dtype."""
    if a.dtype is not b.dtype:
        return False
    rounding = _ROUNDING[dtype]
    return a.shape == b.shape and bool(((a - b).abs() <= rounding * b.abs().max()).all())


def rms_norm(added: float) -> Writer:
    """Return what writes a normalisation by the root mean square whose weight is ``w + added``."""

    def write(program: Program, parts: _Parts, x: Value, states: Sequence[Tensor]) -> Value:
        root = parts.root
        return program.rms_norm(x, parts.weight(root), parts.eps(root), added=added)

    return write


def gated_mlp(program: Program, parts: _Parts, x: Value, states: Sequence[Tensor]) -> Value:
    """``down(silu(gate x) * up x)``."""
    parts.layer("act_fn", nn.SiLU, type(ACT2FN["silu"]))
    gate = parts.linear(program, x, "gate_proj")
    inner = program.gated(gate, parts.linear(program, x, "up_proj"))
    return parts.linear(program, inner, "down_proj")


def mamba(program: Program, parts: _Parts, x: Value, states: Sequence[Tensor]) -> Value:
    """A mixer of Mamba, Falcon-Mamba or Jamba."""
    mixer = parts.root
    conv, state = states
    if state.dim() != 3:
        raise UnservedError  # Zamba's heads
    inner, size = state.shape[1:]
    projected = parts.linear(program, x, "in_proj")
    u, gate = projected.split(inner, inner)
    u = parts.convolution(program, u, 2, conv)
    projected = parts.linear(program, u, "x_proj")
    dt, write, read = projected.split(projected.width - 2 * size, size, size)
    if "dt_layernorm" in mixer._modules:
        dt, write, read = (
            parts.norm(program, value, f"{name}_layernorm")
            for name, value in (("dt", dt), ("b", write), ("c", read))
        )
    layer = parts.layer("dt_proj", nn.Linear)
    step = program.linear(dt, parts.matrix(layer))
    y = program.selective(
        u,
        step,
        write,
        read,
        gate,
        parts.weight(mixer, "A_log"),
        parts.weight(mixer, "D"),
        parts.weight(layer, "bias", optional=True),
        3,
    )
    return parts.linear(program, y, "out_proj")


def mamba2(program: Program, parts: _Parts, x: Value, states: Sequence[Tensor]) -> Value:
    """A mixer of Mamba2, or of a hybrid that has it."""
    mixer: Any = parts.root
    conv, state = states
    heads, width, size = state.shape[1:]
    inner, mixed = heads * width, conv.shape[1]
    projected = parts.linear(program, x, "in_proj")
    if projected.width != inner + mixed + heads:
        raise UnservedError
    gate, u, dt = projected.split(inner, mixed, heads)
    groups = (mixed - inner) // (2 * size)
    u = parts.convolution(program, u, 2, conv)
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
        3,
        (float(least), float(most)),
    )
    group = parts.setting(parts.layer("norm"), "group_size")
    y = parts.norm(program, y, "norm", group=group, gate=gate, gating="silu before")
    return parts.linear(program, y, "out_proj")


def gated_delta(program: Program, parts: _Parts, x: Value, states: Sequence[Tensor]) -> Value:
    """A mixer of Qwen3.5 (gated DeltaNet)."""
    mixed = parts.linear(program, x, "in_proj_qkv")
    gate = parts.linear(program, x, "in_proj_z")
    beta = parts.linear(program, x, "in_proj_b")
    dt = parts.linear(program, x, "in_proj_a")
    y = _delta_rule(program, parts, states, mixed, dt, beta)
    y = parts.norm(program, y, "norm", group=states[1].shape[3], gate=gate, gating="silu after")
    return parts.linear(program, y, "out_proj")


def grouped_delta(program: Program, parts: _Parts, x: Value, states: Sequence[Tensor]) -> Value:
    """A mixer of Qwen3-Next, whose projections lie group by group: q, k, v, z and beta, dt."""
    both, inner = _delta_widths(states)
    heads, keys = states[1].shape[1:3]
    groups = both // keys
    mixed, gate = program.value(2 * both + inner), program.value(inner)
    beta, dt = program.value(heads), program.value(heads)
    q, k, v = mixed.split(both, both, inner)
    for name, values in (("in_proj_qkvz", (q, k, v, gate)), ("in_proj_ba", (beta, dt))):
        weight = parts.matrix(parts.layer(name, nn.Linear))
        pieces = [value.split(*[value.width // groups] * groups) for value in values]
        widths = [piece[0].width for piece in pieces] * groups
        if sum(widths) != len(weight):
            raise UnservedError
        wanted = [piece[group] for group in range(groups) for piece in pieces]
        for rows, piece in zip(weight.split(widths), wanted, strict=True):
            program.linear(x, rows, into=piece)
    y = _delta_rule(program, parts, states, mixed, dt, beta)
    y = parts.norm(program, y, "norm", group=states[1].shape[3], gate=gate, gating="silu after")
    return parts.linear(program, y, "out_proj")


def olmo_delta(program: Program, parts: _Parts, x: Value, states: Sequence[Tensor]) -> Value:
    """A mixer of OLMo hybrid (gated DeltaNet)."""
    mixed = _joined(program, parts, x, states)
    dt, beta = parts.linear(program, x, "a_proj"), parts.linear(program, x, "b_proj")
    gate = parts.linear(program, x, "g_proj")
    y = _delta_rule(program, parts, states, mixed, dt, beta)
    y = parts.norm(program, y, "o_norm", group=states[1].shape[3], gate=gate, gating="silu after")
    return parts.linear(program, y, "o_proj")


def kimi_delta(program: Program, parts: _Parts, x: Value, states: Sequence[Tensor]) -> Value:
    """A mixer of Kimi Linear (KDA)."""
    mixed = _joined(program, parts, x, states)
    decay = parts.layer("forget_gate")
    dt = parts.linear(program, x, "forget_gate.f_a_proj")
    dt = parts.linear(program, dt, "forget_gate.f_b_proj")
    beta = parts.linear(program, x, "b_proj")
    gate = parts.linear(program, x, "g_a_proj")
    gate = parts.linear(program, gate, "g_b_proj")
    y = _delta_rule(program, parts, states, mixed, dt, beta, decay)
    group = states[1].shape[3]
    y = parts.norm(program, y, "o_norm", group=group, gate=gate, gating="sigmoid after")
    return parts.linear(program, y, "o_proj")


def _delta_widths(states: Sequence[Tensor]) -> tuple[int, int]:
    """Return the widths of all keys (or queries) and of all values."""
    conv, state = states
    inner = state.shape[1] * state.shape[3]
    return (conv.shape[1] - inner) // 2, inner


def _joined(program: Program, parts: _Parts, x: Value, states: Sequence[Tensor]) -> Value:
    """Write the projections of q, k and v into one value."""
    both, inner = _delta_widths(states)
    mixed = program.value(2 * both + inner)
    for name, piece in zip("qkv", mixed.split(both, both, inner), strict=True):
        parts.linear(program, x, f"{name}_proj", into=piece)
    return mixed


def _delta_rule(
    program: Program,
    parts: _Parts,
    states: Sequence[Tensor],
    mixed: Value,
    dt: Value,
    beta: Value,
    decay: nn.Module | None = None,
) -> Value:
    """Write the convolution and the delta rule; ``decay`` is what has A_log and the bias of dt."""
    both, inner = _delta_widths(states)
    q, k, v = parts.convolution(program, mixed, 2, states[0]).split(both, both, inner)
    owner = decay or parts.root
    return program.delta_rule(
        q,
        k,
        v,
        dt,
        beta,
        parts.weight(owner, "A_log"),
        parts.weight(owner, "dt_bias"),
        both // states[1].shape[2],
        3,
        beta_factor=2.0 if parts.setting(parts.root, "allow_neg_eigval") else 1.0,
    )


# by the function that a mixer calls for one token
MIXERS: dict[str, tuple[Writer, ...]] = {
    "mamba_selective_state_update": (mamba,),
    "mamba2_selective_state_update": (mamba2,),
    "torch_recurrent_gated_delta_rule": (gated_delta, grouped_delta, olmo_delta),
    "recurrent_kimi_delta_attention": (kimi_delta,),
}
