"""Decoding on a CPU: a token of a module in one call of C.

A program stands for a module's forward only where it was written for what the module is made of:
plain layers without hooks, in number formats that the kernel reads. It is used after it gave what
the module's own code gave for a first token, so code that we do not know stays as it is.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from ssmzoo.modeling.cache import LayerState
from ssmzoo.modeling.packing import PackedRow
from ssmzoo_kernels.dispatch import decodes_on_cpu, takes_kernels
from ssmzoo_kernels.few_rows_linear import rows_of_int8
from ssmzoo_kernels.token_step import MOST_ROWS, Program, Value

_log = logging.getLogger("ssmzoo")
FORMATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# how far a program's output may be from the module's own, by its greatest number
_ROUNDING = {
    torch.float64: 1e-5,  # stock code is float32 in places
    torch.float32: 1e-4,
    torch.bfloat16: 2.0**-5,
    torch.float16: 2.0**-8,
}


GAVE_OTHER_NUMBERS = "its program gave other numbers than its forward"

T = TypeVar("T")


class State(NamedTuple):
    """A state as a program knows it."""

    number: int
    like: Tensor  # [B, ...]


class UnservedError(Exception):
    """The module has something that no program is written for.

    Args:
        lasts: Tells whether that is still so.
        why: What it is.
    """

    def __init__(self, lasts: Callable[[], bool] = lambda: True, why: str = "") -> None:
        super().__init__(why)
        self.lasts = lasts


class ModuleParts:
    """The layers and weights that a program is made of, and whether they are still the same.

    Args:
        module: What layers are looked for in.
        dtype: What matrices are.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.root, self.dtype = module, dtype
        self._held: list[tuple[dict[str, Any], str, Any]] = []
        self._layers: list[nn.Module] = []
        self._weights: list[tuple[Tensor, int, torch.Size]] = []
        self._settings: list[tuple[Any, str, Any]] = []
        self._derived: list[tuple[Callable[[], Any], Any]] = []

    def layer(self, name: str, *kinds: type[nn.Module]) -> Any:
        """Return a submodule that nothing watches, of one of some classes or of any."""
        owner: Any = self.root
        *path, last = name.split(".")
        for part in path:
            owner = self._take(owner, part)
        layer = self._take(owner, last)
        if kinds and stock_class(layer) not in kinds:
            raise UnservedError(lambda: owner._modules.get(last) is layer)
        return layer

    def within(self, name: str) -> ModuleParts:
        """Return the same parts, with names that are looked for in a submodule."""
        inner = copy.copy(self)
        inner.root = self.layer(name)
        return inner

    def _take(self, owner: nn.Module, name: str) -> nn.Module:
        layer = owner._modules.get(name)
        if layer is None:
            raise UnservedError(why=f"{type(owner).__name__} has no layer {name!r}")
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

    def buffer(self, owner: nn.Module, name: str) -> Tensor | None:
        """Return a buffer of numbers that no gradient changes, None if there is none."""
        held = owner._buffers.get(name)
        self._held.append((owner._buffers, name, held))
        if held is not None:
            if held.dtype not in FORMATS or held.device.type != "cpu" or not held.is_contiguous():
                raise UnservedError(lambda: owner._buffers.get(name) is held)
            self._weights.append((held, held.data_ptr(), held.shape))
        return held

    def derived(self, make: Callable[[], T]) -> T:
        """Return a value that a function keeps for as long as it is right."""
        value = make()
        self._derived.append((make, value))
        return value

    def setting(self, owner: object, name: str) -> Any:
        """Return a plain attribute, None if there is none."""
        value = getattr(owner, name, None)
        self._settings.append((owner, name, value))
        return value

    def eps(self, layer: nn.Module) -> float:
        """Return what a norm adds to the mean square."""
        if not (name := name_of_eps(layer)):
            raise UnservedError
        return self.setting(layer, name)

    def matrix(self, layer: nn.Module) -> tuple[Any, Any]:
        """Return a linear layer's weight, and its scales if it is int8 with one a row."""
        kept: Any = layer._parameters.get("weight")
        scale = None
        if (rows := rows_of_int8(kept)) is None:
            weight = self.weight(layer)
        else:
            weight, scale = rows
            self._held.append((layer._parameters, "weight", kept))
            self._weights += [(part, part.data_ptr(), part.shape) for part in rows]
            for name, part in zip(("qdata", "scale"), rows, strict=True):
                self._derived.append((functools.partial(getattr, kept, name), part))
        if kept.dtype is not self.dtype:  # what its own code multiplies it with
            raise UnservedError(self.unchanged)
        return weight, scale

    def linear(self, program: Program, x: Value, name: str, into: Value | None = None) -> Value:
        """Write a linear layer's instruction."""
        layer = self.layer(name, nn.Linear)
        weight, scale = self.matrix(layer)
        if weight.shape[1] != x.width:
            raise UnservedError(self.unchanged)
        return program.linear(x, weight, self.weight(layer, "bias", optional=True), into, scale)

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
        return all(make() is value for make, value in self._derived)


def is_watched(layer: nn.Module) -> bool:
    """Return whether calling a layer does more than its class's forward."""
    held = layer.__dict__
    return bool(
        held["_forward_hooks"]
        or held["_forward_pre_hooks"]
        or held["_backward_hooks"]
        or held["_backward_pre_hooks"]
        or "forward" in held  # hooks of Accelerate
        or module_hooks._global_forward_hooks
        or module_hooks._global_forward_pre_hooks
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
        y: Tensor,
        matrices: torch.dtype,
    ) -> None:
        self.parts = ModuleParts(module, matrices)
        self.format, self.width = x.dtype, x.shape[-1]
        self.states = [(s.dtype, s.shape[1:]) for s in states]
        self.program = Program(torch.float64 if x.dtype is torch.float64 else torch.float32)
        if not self.program.applies(x):
            raise UnservedError  # the kernel cannot be built
        numbered = [State(i + 2, state) for i, state in enumerate(states)]
        try:
            value = self.program.input(0, x.dtype, self.width)
            value = write(self.program, self.parts, value, numbered)
            self.program.output(value, 1, y.dtype)
        except ValueError as error:  # a dtype that the kernel does not read
            raise UnservedError(self.parts.unchanged) from error
        self.outputs, self.dtype = value.width, y.dtype

    def fits(self, x: Tensor, states: Sequence[Tensor]) -> bool:
        """Return whether a call is of the kind that the program was written for."""
        return (
            x.dtype is self.format
            and x.shape[-1] == self.width
            and [(s.dtype, s.shape[1:]) for s in states] == self.states
            and self.parts.unchanged()
        )

    def __call__(self, x: Tensor, states: Sequence[Tensor]) -> Tensor:
        y = x.new_empty((*x.shape[:-1], self.outputs), dtype=self.dtype)
        rows = x.numel() // self.width
        self.program.run(rows, (x if x.is_contiguous() else x.contiguous(), y, *states))
        for state in states:
            if not state.is_inference():
                torch.autograd.graph.increment_version(state)  # as writing by torch does
        return y


Writer = Callable[[Program, ModuleParts, Value, Sequence[State]], Value]
LayerWriter = Callable[[Program, ModuleParts, Value, dict[str, State]], Value]
KEPT_AS = "_ssmzoo_decoding"  # the attribute of a module


class Decoding:
    """How a module decodes: by a program, one still to be written, or by its own code."""

    step: _Step | None = None
    refused: Callable[[Tensor], bool] | None = None  # whether an input is still its own code's
    why: str | None = None  # in words; None while a program serves it, or none was tried
    offset: float | None = None  # of a norm's weight, NaN if it is another norm: see ``norms``

    def __reduce__(self) -> Any:
        """Leave out of copies and files what has addresses of this module's weights."""
        return Decoding, ()


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
    own: Callable[[], Tensor],
    *,
    by_column: bool = False,
) -> Tensor:
    """Return a module's output for few rows, in one call where it may be.

    Args:
        module: The module.
        writers: What its program may be; the first counts that gives what its own code gives.
        x: ``[..., width]``, a token of each row.
        states: What the call changes, ``[B, ...]`` each.
        own: Its forward.
        by_column: Whether the nearest counts of those that give it, columns judged by themselves.
    """
    if not _may_decode(module, x, states):
        return own()
    step = kept(module).step  # which another thread may replace meanwhile
    if step is None or not step.fits(x, states):
        y, after = _prove(
            module, writers, x, states, own, lambda: states, x.dtype, by_column=by_column
        )
        for state, new in zip(states, after, strict=True):
            if state is not new:
                state.copy_(new)
        return y
    return step(x, states)


def token_of_layer(
    module: Any,
    writer: LayerWriter,
    x: Tensor,
    state: LayerState,
    own: Callable[[], Tensor],
    matrices: torch.dtype,
    *,
    names: Sequence[str] | None = None,
    in_place: frozenset[str] = frozenset(),
) -> Tensor:
    """Return a module's output where its states are a layer's, in one call where it may be.

    Args:
        module: The module.
        writer: What its program may be.
        x: As for :func:`token`.
        state: What its forward reads and leaves.
        own: Its forward.
        matrices: What the weights of linear layers are.
        names: The states that it has; all of the layer's.
        in_place: The states that may be written over; new ones take the place of the others.
    """
    names = sorted(state.initial) if names is None else names
    states = [state.initial[name] for name in names]
    if not _may_decode(module, x, states):
        return own()
    step = kept(module).step
    if step is None or not step.fits(x, states):

        def write(
            program: Program, parts: ModuleParts, x: Value, numbered: Sequence[State]
        ) -> Value:
            return writer(program, parts, x, dict(zip(names, numbered, strict=True)))

        def after() -> list[Tensor]:
            return [state.final[name] for name in names]

        y, states = _prove(module, (write,), x, states, own, after, matrices)
        state.final.update(zip(names, states, strict=True))
        return y
    for i, name in enumerate(names):
        if name not in in_place or not _writable(states[i]):
            states[i] = states[i].clone()
    try:
        y = step(x, states)
    except FloatingPointError:  # which its own code says better
        return own()
    state.final.update(zip(names, states, strict=True))
    return y


def is_token(module: nn.Module, x: Tensor, packing: PackedRow | None) -> bool:
    """Tell whether a layer reads one token ``[B, 1, D]`` of whole rows, outside training."""
    return (
        x.shape[1] == 1
        and packing is None
        and not module.training
        and not torch.compiler.is_compiling()
    )


def _writable(state: Tensor) -> bool:
    if state.requires_grad:
        return False
    return torch.is_inference_mode_enabled() or not state.is_inference()


def _may_decode(module: nn.Module, x: Tensor, states: Sequence[Tensor]) -> bool:
    """Tell whether a module's token may go by a program, as things are now."""
    known = kept(module)
    if known.refused is not None and known.refused(x):
        return False
    if (
        not decodes_on_cpu(x)
        or not 0 < x.numel() <= MOST_ROWS * x.shape[-1]
        or x.dtype not in FORMATS
        or not takes_kernels()
        or module_hooks._global_forward_hooks
        or module_hooks._global_forward_pre_hooks
    ):
        if x.device.type != "cpu":
            known.step = None  # which would keep what was moved in memory
        return False
    for state in states:  # noqa: SIM110 (a generator is a call a state)
        if not (state.is_cpu and state.is_contiguous()):
            return False
    return True


def _prove(
    module: nn.Module,
    writers: Sequence[Writer],
    x: Tensor,
    states: Sequence[Tensor],
    own: Callable[[], Tensor],
    after: Callable[[], Sequence[Tensor]],
    matrices: torch.dtype,
    *,
    by_column: bool = False,
) -> tuple[Tensor, Sequence[Tensor]]:
    """Run a module's own code, and find a program that gives the same.

    Returns:
        Output and states: the program's, so that a token has the same bits whenever it comes.
    """
    known = kept(module)
    known.step = None
    before = [state.clone() for state in states]
    y = own()
    if not y.any() or not y.isfinite().all():
        return y, after()  # from which nothing can be told
    lasting, differs, fitting = [], False, []
    for writer in writers:
        try:
            step = _Step(module, writer, x, states, y, matrices)
        except UnservedError as error:
            known.why = f"no program is written for it: {error}".removesuffix(": ")
            lasting.append(error.lasts)
            continue
        changed = [state.clone() for state in before]
        ours = step(x, changed)
        pairs = zip((ours, *changed), (y, *after()), strict=True)
        if all(agree(a, b, matrices) for a, b in pairs):
            fitting.append((step, ours, changed))
            if not by_column:
                break
        else:
            differs = True
            lasting.append(step.parts.unchanged)
    if fitting:
        known.step, ours, changed = min(fitting, key=lambda found: apart(found[1], y))
        known.refused = known.why = None
        return ours, changed
    if differs:
        known.why = GAVE_OTHER_NUMBERS
        _log.info("%s decodes by its own code: programs gave other numbers", type(module).__name__)
    kind = x.dtype
    if len(lasting) == 1:
        (lasts,) = lasting
        known.refused = lambda x: x.dtype is kind and lasts()
    else:
        known.refused = lambda x: x.dtype is kind and all(lasts() for lasts in lasting)
    return y, after()


def recurrent(program: Program, state: State) -> int:
    """Return the number of a recurrent state, which must be of the program's dtype."""
    if state.like.dtype is not program.dtype:
        raise UnservedError  # a state of fewer bits
    return state.number


def agree(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether two results of a module are one but for the roundings of a dtype."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    rounding = _ROUNDING[dtype]
    return not b.numel() or bool(((a - b).abs() <= rounding * b.abs().max()).all())


def apart(a: Tensor, b: Tensor) -> float:
    """Return how far ``a`` is from ``b``, relative to it in each column, as the columns' mean."""
    kind = torch.promote_types(b.dtype, torch.float32)
    difference, size = (x.reshape(-1, x.shape[-1]).abs().sum(0, dtype=kind) for x in (a - b, b))
    return (difference / size.clamp(min=torch.finfo(kind).tiny)).mean().item()
