"""The layers, weights and settings of a module that a program for one of its tokens uses.

They can be compared with those that the program was written for.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from ssmzoo.modeling.forward_code import ForwardCode, current_code
from ssmzoo_kernels.few_rows_linear import PARTS_OF_FEW_BITS, few_bits
from ssmzoo_kernels.token_step import Program, Value

FORMATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HOOKS = operator.itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
_chain = itertools.chain.from_iterable

T = TypeVar("T")


class State(NamedTuple):
    """A state as a program knows it."""

    number: int
    like: Tensor  # [B, ...]


class UnservedError(Exception):
    """No program is written for a part of the module; it is asked again when the module changes.

    Its text names the part.
    """


class ModuleParts:
    """The layers and weights that a program is made of, and whether they are still the same.

    Args:
        module: The module whose layers are looked up.
        dtype: Of its matrices.

    Attributes:
        watched: Whether a layer has hooks or methods of its own.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.root: Any = module
        self.dtype = dtype
        self._layers = [*module.modules()]
        self._children = [layer._modules for layer in self._layers if layer._modules]
        self._kept_children = [*_chain(map(dict.values, self._children))]
        self._attributes = [layer.__dict__ for layer in self._layers]
        self._sizes = [*map(len, self._attributes)]
        self._classes = [*map(type, self._layers)]
        self._code = [current_code(self._classes)]
        self._inner = self._attributes[1:]  # hooks of the root see its output
        self._hooked = self._hooks()
        # hooks of Accelerate are an object's own forward
        methods = self._code[0].methods
        own = any(not methods.isdisjoint(held) for held in self._inner)
        inner = methods - {"forward"}
        self.watched = self._hooked or own or not inner.isdisjoint(module.__dict__)
        # columns of tables, so that each kind is compared in few calls
        self._held: tuple[list[dict[str, Any]], list[str], list[Any]] = [], [], []
        self._weights: tuple[list[Tensor], list[int], list[int]] = [], [], []
        self._settings: tuple[list[Any], list[str], list[Any]] = [], [], []
        self._derived: tuple[list[Callable[[], Any]], list[Any]] = [], []

    @classmethod
    def joined(cls, several: Sequence[ModuleParts]) -> ModuleParts:
        """Return the parts of modules that are looked at together; none may have hooks."""
        one = copy.copy(several[0])
        for name in ("_layers", "_children", "_kept_children", "_attributes", "_sizes", "_classes"):
            setattr(one, name, [x for parts in several for x in getattr(parts, name)])
        for name in ("_held", "_weights", "_settings", "_derived"):
            tables = zip(*(getattr(parts, name) for parts in several), strict=True)
            setattr(
                one, name, tuple([x for column in columns for x in column] for columns in tables)
            )
        one._code = [*dict.fromkeys(code for parts in several for code in parts._code)]
        one._inner = one._attributes
        return one

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
        _add(self._held, owner._parameters, name, kept)
        if kept is None and optional and getattr(owner, name, None) is None:
            return None
        if (
            type(kept) is not nn.Parameter  # quantised or made anew for each call, perhaps
            or kept.dtype not in FORMATS
            or kept.device.type != "cpu"
            or not kept.is_contiguous()
        ):
            raise UnservedError
        _add(self._weights, kept, kept.data_ptr(), kept.numel())
        return kept.detach()

    def buffer(self, owner: nn.Module, name: str) -> Tensor | None:
        """Return a buffer of numbers that no gradient changes, None if there is none."""
        held = owner._buffers.get(name)
        _add(self._held, owner._buffers, name, held)
        if held is not None:
            if held.dtype not in FORMATS or held.device.type != "cpu" or not held.is_contiguous():
                raise UnservedError
            _add(self._weights, held, held.data_ptr(), held.numel())
        return held

    def derived(self, make: Callable[[], T]) -> T:
        """Return the value of a function that returns the same object until its inputs change."""
        value = make()
        _add(self._derived, make, value)
        return value

    def setting(self, owner: object, name: str) -> Any:
        """Return a plain attribute, None if there is none."""
        value = getattr(owner, name, None)
        _add(self._settings, owner, name, value)
        return value

    def eps(self, layer: nn.Module) -> float:
        """Return the number that a norm adds to the mean square."""
        if not (name := name_of_eps(layer)):
            raise UnservedError
        return self.setting(layer, name)

    def matrix(self, layer: nn.Module) -> tuple[Any, Any]:
        """Return a linear layer's weight and its scales: those of :func:`few_bits`, or None."""
        kept: Any = layer._parameters.get("weight")
        scale = None
        if (bits := few_bits(kept)) is None:
            weight = self.weight(layer)
        else:
            weight, scale = bits
            _add(self._held, layer._parameters, "weight", kept)
            for part in bits:
                _add(self._weights, part, part.data_ptr(), part.numel())
            for name in PARTS_OF_FEW_BITS:
                _add(self._held, kept.__dict__, name, kept.__dict__.get(name))
            if weight is not kept.qdata:  # but a packed copy of it
                for source in (kept, kept.qdata, kept.scale, kept.zero_point):
                    self.setting(source, "_version")
        if kept.dtype is not self.dtype:  # the dtype of its own code's inputs
            raise UnservedError
        return weight, scale

    def linear(self, program: Program, x: Value, name: str, into: Value | None = None) -> Value:
        """Write a linear layer's instruction."""
        layer = self.layer(name, nn.Linear)
        weight, scale = self.matrix(layer)
        if layer._parameters["weight"].shape[1] != x.width:
            raise UnservedError
        return program.linear(x, weight, self.weight(layer, "bias", optional=True), into, scale)

    def norm(self, program: Program, x: Value, name: str, **gating: Any) -> Value:
        """Write the instruction of a normalisation by the root mean square."""
        layer = self.layer(name)
        weight = None
        if "Weightless" not in type(layer).__name__:
            weight = self.weight(layer)
        return program.rms_norm(x, weight, self.eps(layer), **gating)

    def layer_norm(self, program: Program, x: Value, name: str) -> Value:
        """Write the instruction of a normalisation by mean and variance."""
        layer = self.layer(name)
        weight, bias = self.weight(layer), self.weight(layer, "bias", optional=True)
        return program.layer_norm(x, weight, bias, self.eps(layer))

    def _hooks(self) -> bool:
        """Return whether a layer but the root has hooks, in few calls."""
        return any(map(any, map(_HOOKS, self._inner)))

    def same_code(self, checked: dict[ForwardCode, bool] | None) -> bool:
        """Return whether the layers have the same classes, and these the same code, as before."""
        if [*map(type, self._layers)] != self._classes:
            return False
        for code in self._code:  # noqa: SIM110 (a generator is a call more)
            if not code.unchanged(checked):
                return False
        return True

    def unchanged(self) -> bool:
        """Return whether nothing was replaced, moved, hooked or added since, code aside."""
        weights, addresses, sizes = self._weights
        owners, names, values = self._settings
        holders, entries, kept = self._held
        makers, made = self._derived
        with torch._C.DisableTorchFunctionSubclass():  # torchao's weights would be asked one by one
            settings = [*map(getattr, owners, names, itertools.repeat(None))]
        return settings == values and (
            [*_chain(map(dict.values, self._children))] == self._kept_children
            and all(map(operator.is_, map(dict.get, holders, entries), kept))
            and [*map(Tensor.data_ptr, weights)] == addresses
            and [*map(Tensor.numel, weights)] == sizes
            and all(map(Tensor.is_contiguous, weights))
            and all(map(operator.is_, map(operator.call, makers), made))
            and self._hooks() is self._hooked
            and [*map(len, self._attributes)] == self._sizes
        )


def _add(table: tuple[list[Any], ...], *row: Any) -> None:
    for column, value in zip(table, row, strict=True):
        column.append(value)


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
    """Return the name of a norm's epsilon, or an empty string."""
    names = ("variance_epsilon", "eps")
    return next((name for name in names if isinstance(getattr(layer, name, None), float)), "")


def recurrent(program: Program, state: State) -> int:
    """Return the number of a recurrent state, which must be of the program's dtype."""
    if state.like.dtype is not program.dtype:
        raise UnservedError  # a state of fewer bits
    return state.number
