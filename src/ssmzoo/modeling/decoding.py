"""Decoding on a CPU: a token of a module in one call of C.

A program stands for a module's forward only where it was written for what the module is made of:
plain layers without hooks, in number formats that the kernel reads. It is used after it gave what
the module's own code gave for a first token, so code that we do not know stays as it is. Where a
layer, a weight or a setting changes, the next token is a first one. Where code is replaced, of a
class, of one object or of a function, it runs itself, as long as it is not what it was: one token
cannot prove what somebody wrote to be different.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from ssmzoo.modeling.cache import LayerState
from ssmzoo.modeling.forward_code import ForwardCode, current_code
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

_HOOKS = operator.itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)

GAVE_OTHER_NUMBERS = "its program gave other numbers than its forward"

T = TypeVar("T")


class State(NamedTuple):
    """A state as a program knows it."""

    number: int
    like: Tensor  # [B, ...]


class UnservedError(Exception):
    """The module has something that no program is written for; it is asked again when it changes.

    Its text says what that is.
    """


class ModuleParts:
    """The layers and weights that a program is made of, and whether they are still the same.

    Args:
        module: What layers are looked for in.
        dtype: What matrices are.

    Attributes:
        watched: Whether a layer has hooks or methods of its own.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.root: Any = module
        self.dtype = dtype
        self._layers = [*module.modules()]
        self._children = [
            (layer._modules, [*layer._modules.values()]) for layer in self._layers if layer._modules
        ]
        self._attributes = [layer.__dict__ for layer in self._layers]
        self._sizes = [*map(len, self._attributes)]
        self._classes = [*map(type, self._layers)]
        self._code = current_code(self._classes)
        self._hooked = self._hooks()
        # who watches the root sees its output; hooks of Accelerate are an object's own forward
        own = any(not self._code.methods.isdisjoint(held) for held in self._attributes[1:])
        inner = self._code.methods - {"forward"}
        self.watched = self._hooked or own or not inner.isdisjoint(module.__dict__)
        self._held: list[tuple[dict[str, Any], str, Any]] = []
        self._weights: list[tuple[Tensor, int, torch.Size]] = []
        self._settings: list[tuple[Any, str, Any]] = []
        self._derived: list[tuple[Callable[[], Any], Any]] = []

    def layer(self, name: str, *kinds: type[nn.Module]) -> Any:
        """Return a submodule, of one of some classes or of any."""
        layer = self.root
        for part in name.split("."):
            owner, layer = layer, layer._modules.get(part)
            if layer is None:
                raise UnservedError(f"{type(owner).__name__} has no layer {part!r}")
        if kinds and stock_class(layer) not in kinds:
            raise UnservedError
        return layer

    def within(self, name: str, *kinds: type[nn.Module]) -> ModuleParts:
        """Return the same parts, with names that are looked for in :meth:`layer`."""
        inner = copy.copy(self)
        inner.root = self.layer(name, *kinds)
        return inner

    def weight(self, owner: nn.Module, name: str = "weight", optional: bool = False) -> Any:
        """Return a parameter."""
        kept = owner._parameters.get(name)
        self._held.append((owner._parameters, name, kept))
        if kept is None and optional and getattr(owner, name, None) is None:
            return None
        if (
            type(kept) is not nn.Parameter  # quantised or made anew for each call, perhaps
            or kept.dtype not in FORMATS
            or kept.device.type != "cpu"
            or not kept.is_contiguous()
        ):
            raise UnservedError
        self._weights.append((kept, kept.data_ptr(), kept.shape))
        return kept.detach()

    def buffer(self, owner: nn.Module, name: str) -> Tensor | None:
        """Return a buffer of numbers that no gradient changes, None if there is none."""
        held = owner._buffers.get(name)
        self._held.append((owner._buffers, name, held))
        if held is not None:
            if held.dtype not in FORMATS or held.device.type != "cpu" or not held.is_contiguous():
                raise UnservedError
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
            raise UnservedError
        return weight, scale

    def linear(self, program: Program, x: Value, name: str, into: Value | None = None) -> Value:
        """Write a linear layer's instruction."""
        layer = self.layer(name, nn.Linear)
        weight, scale = self.matrix(layer)
        if weight.shape[1] != x.width:
            raise UnservedError
        return program.linear(x, weight, self.weight(layer, "bias", optional=True), into, scale)

    def norm(self, program: Program, x: Value, name: str, **gating: Any) -> Value:
        """Write the instruction of a normalisation by the root mean square."""
        layer = self.layer(name)
        weight = None
        if "Weightless" not in type(layer).__name__:
            weight = self.weight(layer)
        return program.rms_norm(x, weight, self.eps(layer), **gating)

    def _hooks(self) -> bool:
        """Return whether a layer but the root has hooks, in few calls."""
        return any(map(any, map(_HOOKS, itertools.islice(self._attributes, 1, None))))

    def same_code(self, looked: dict[Any, Any] | None) -> bool:
        """Return whether the layers' classes, and what these run, are what they were."""
        return [*map(type, self._layers)] == self._classes and self._code.unchanged(looked)

    def unchanged(self) -> bool:
        """Return whether nothing was replaced, moved, hooked or added since, code aside."""
        for held, kept in self._children:
            if [*held.values()] != kept:
                return False
        for holder, name, kept in self._held:
            if holder.get(name) is not kept:
                return False
        for owner, name, value in self._settings:
            if getattr(owner, name, None) != value:
                return False
        for weight, address, shape in self._weights:
            if weight.data_ptr() != address or weight.shape != shape or not weight.is_contiguous():
                return False
        for make, value in self._derived:
            if make() is not value:
                return False
        return self._hooks() is self._hooked and [*map(len, self._attributes)] == self._sizes


def is_watched(layer: nn.Module) -> bool:
    """Return whether calling a layer does more than its class's forward."""
    held = layer.__dict__
    return bool(
        any(_HOOKS(held))
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
        self, parts: ModuleParts, write: Writer, x: Tensor, states: Sequence[Tensor], y: Tensor
    ) -> None:
        self.parts = parts
        self.format, self.width = x.dtype, x.shape[-1]
        self.states = [(s.dtype, s.shape[1:]) for s in states]
        self.program = Program(torch.float64 if x.dtype is torch.float64 else torch.float32)
        if parts.watched or not self.program.applies(x):  # or the kernel cannot be built
            raise UnservedError
        numbered = [State(i + 2, state) for i, state in enumerate(states)]
        try:
            value = self.program.input(0, x.dtype, self.width)
            value = write(self.program, self.parts, value, numbered)
            self.program.output(value, 1, y.dtype)
        except ValueError as error:  # a dtype that the kernel does not read
            raise UnservedError from error
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
    # whether an input is still its own code's
    refused: Callable[[Tensor, dict[Any, Any] | None], bool] | None = None
    why: str | None = None  # in words; None while a program serves it, or none was tried
    offset: float | None = None  # of a norm's weight, NaN if it is another norm: see ``norms``
    code: ForwardCode | None = None  # which gave it

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
    looked: dict[Any, Any] | None = None,
    by_column: bool = False,
) -> Tensor:
    """Return a module's output for few rows, in one call where it may be.

    Args:
        module: The module.
        writers: What its program may be; the first counts that gives what its own code gives.
        x: ``[..., width]``, a token of each row.
        states: What the call changes, ``[B, ...]`` each.
        own: Its forward.
        looked: See :meth:`ForwardCode.unchanged`.
        by_column: Whether the nearest counts of those that give it, columns judged by themselves.
    """
    known = kept(module)
    if not _may_decode(known, x, states, looked):
        return own()
    step = known.step  # which another thread may replace meanwhile
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
    known = kept(module)
    if not _may_decode(known, x, states, state.shared):
        return own()
    step = known.step
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


def _may_decode(
    known: Decoding, x: Tensor, states: Sequence[Tensor], looked: dict[Any, Any] | None
) -> bool:
    """Tell whether a module's token may go by a program, as things are now."""
    if known.refused is not None and known.refused(x, looked):
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
    rows = x.numel() // x.shape[-1]
    for state in states:
        if not (state.is_cpu and state.is_contiguous() and len(state) == rows):
            return False
    if (step := known.step) is None or step.parts.same_code(looked):
        return True
    known.step, known.why = None, "its code was replaced"
    known.refused = lambda _, looked: not step.parts.same_code(looked)
    return False


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
    asked, differs, fitting = [], False, []
    for writer in writers:
        asked.append(ModuleParts(module, matrices))
        try:
            step = _Step(asked[-1], writer, x, states, y)
        except UnservedError as error:
            known.why = f"no program is written for it: {error}".removesuffix(": ")
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
    if fitting:
        known.step, ours, changed = min(fitting, key=lambda found: apart(found[1], y))
        known.refused = known.why = None
        return ours, changed
    if differs:
        known.why = GAVE_OTHER_NUMBERS
        _log.info("%s decodes by its own code: programs gave other numbers", type(module).__name__)
    kind = x.dtype

    def refused(x: Tensor, looked: dict[Any, Any] | None) -> bool:
        if x.dtype is not kind:
            return False
        for parts in asked:  # noqa: SIM110 (a generator is a call more)
            if not (parts.same_code(looked) and parts.unchanged()):
                return False
        return True

    known.refused = refused
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
