"""The calls of a stock mixer, whose forward runs with our functions among its globals."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ssmzoo.modeling import decoding
from ssmzoo.modeling.forward_code import ForwardCode
from ssmzoo.modeling.layer_state import LayerState
from ssmzoo.modeling.module_parts import is_watched
from ssmzoo.modeling.stock import steps
from ssmzoo.modeling.stock.calls import call
from ssmzoo.modeling.stock.dynamics import dynamics
from ssmzoo.modeling.stock.functions import FUNCTIONS, is_plain_linear
from ssmzoo.modeling.stock.known import functions_of
from ssmzoo.modeling.stock.mixer_states import HeadStates
from ssmzoo_kernels.dispatch import decodes_on_cpu
from ssmzoo_kernels.few_rows_linear import many_rows_linear


class MixerCalls:
    """The calls of an accelerated mixer.

    Attributes:
        forward_with_ops: The stock forward with our functions.
        known_code: The code that was there when the model was accelerated.
        functions: The names of our functions that it calls.
        writers: The functions that write one of its tokens as a program.
        scans_by_head: Whether it scans head by head (Zamba).
    """

    stock_class: Any
    forward_with_ops: Callable[..., Any]
    known_code: ForwardCode
    functions: frozenset[str]
    writers: tuple[decoding.TokenWriter, ...]
    scans_by_head: bool
    dynamics = dynamics

    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        cache_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Map ``[B, L, D]`` to ``[B, L, D]``; the arguments are those of the stock mixer."""
        cache = cache_params if cache is None else cache
        if not torch.compiler.is_compiling():
            if not self.known_code.unchanged(call.checked_code):
                _require_plain(self)
                return self.stock_class.forward(
                    self, hidden_states, cache, attention_mask, **kwargs
                )
            one = hidden_states.shape[1] == 1 and self.writers and cache is not None
            states = cached_states(self, cache) if one and steps_states(attention_mask) else ()
            if states:
                return decoding.token(
                    self,
                    self.writers,
                    hidden_states,
                    states,
                    lambda: self.layered(hidden_states, cache, attention_mask, **kwargs),
                    checked=call.checked_code,
                )
        return self.layered(hidden_states, cache, attention_mask, **kwargs)

    def layered(
        self, hidden_states: Tensor, cache: Any, attention_mask: Tensor | None, **kwargs: Any
    ) -> Any:
        """Run :meth:`forward` without a program."""
        length, packing = hidden_states.shape[1], call.packing
        if attention_mask is not None and attention_mask.shape[-1] > length:
            attention_mask = attention_mask[:, -length:]  # it may cover tokens of the cache
        if packing is None or packing.order is None:
            return self._in_order(hidden_states, cache, attention_mask, **kwargs)
        if attention_mask is not None:
            attention_mask = packing.flat(attention_mask).view_as(attention_mask)
        x = packing.flat(hidden_states).view_as(hidden_states)
        y = self._in_order(x, cache, attention_mask, **kwargs)
        return packing.batch(y.flatten(0, 1)[None], len(y))

    def _in_order(
        self: Any, hidden_states: Tensor, cache: Any, attention_mask: Tensor | None, **kwargs: Any
    ) -> Any:
        """Run the mixer over tokens that lie as ``call.packing`` says."""
        call.mixer = mixer = _multiplying_by_dt_proj(self, hidden_states)
        call.masked, run = attention_mask is not None, self.forward_with_ops
        try:
            if call.passing is None:
                return run(mixer, hidden_states, cache, attention_mask, **kwargs)
            initial, final = call.passing.open_layer(self.layer_idx, hidden_states.device)
            states: Any = LayerState(initial, keep=True, packing=call.packing, final=final)
            call.states = states = HeadStates(states) if self.scans_by_head else states
            y = run(mixer, hidden_states, None, attention_mask, **kwargs)
            if self.scans_by_head:
                states.close()
            return y
        finally:
            call.mixer = call.states = None


def mixer_body(stock: type[nn.Module], code: ForwardCode) -> dict[str, Any]:
    """Return the attributes of the subclass of a mixer's class; see :class:`MixerCalls`."""
    forward = stock.__dict__["forward"]
    body = inspect.unwrap(forward)
    names = functions_of(stock)
    # without its __name__, which would lead torch.compile to the module's own globals
    ours = {name: value for name, value in body.__globals__.items() if name != "__name__"}
    ours |= {name: FUNCTIONS[name] for name in names}
    return {
        "forward_with_ops": staticmethod(_with_globals(forward, body, ours)),
        "known_code": code,
        "functions": frozenset(names),
        "writers": next((steps.MIXERS[name] for name in names if name in steps.MIXERS), ()),
        "scans_by_head": "n_mamba_heads" in body.__code__.co_names
        and "mamba_selective_scan" in names,
    }


def _with_globals(
    function: types.FunctionType, body: types.FunctionType, names: dict[str, Any]
) -> types.FunctionType:
    """Return a decorated function whose innermost body looks names up elsewhere."""
    if function is body:
        copied = types.FunctionType(
            body.__code__, names, body.__name__, body.__defaults__, body.__closure__
        )
    else:
        inner = function.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
        ours = _with_globals(inner, body, names)
        cells = tuple(
            types.CellType(ours) if cell.cell_contents is inner else cell
            for cell in function.__closure__ or ()
        )
        copied = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _require_plain(mixer: Any) -> None:
    """Fail where a mixer whose code was replaced would need our functions."""
    if call.packing is not None or call.passing is not None:
        raise RuntimeError(
            f"{type(mixer).__name__}: its forward, or a function that it calls, was replaced after "
            "accelerate(), and packed or padded sequences, several tokens behind a cache and "
            "states from elsewhere need ssmzoo's kernels; undo that, or restore the model and "
            "accelerate it again"
        )


def steps_states(attention_mask: Tensor | None) -> bool:
    """Return whether a token of this call may change states in place."""
    return (
        not torch.is_grad_enabled()
        and call.packing is None
        and call.passing is None
        and (attention_mask is None or bool(attention_mask[:, -1].all()))
    )


def cached_states(mixer: Any, cache: Any) -> tuple[Tensor, ...]:
    """Return the states of convolution and scan that a program steps; empty: none may run."""
    layer = cache.layers[mixer.layer_idx]
    if len(layer.conv_states) != 1 or getattr(layer, "record_past", False):
        return ()
    conv, scan = layer.conv_states[0], layer.recurrent_states[0]
    known = isinstance(conv, Tensor) and isinstance(scan, Tensor) and layer.has_previous_state[0]
    return (conv, scan) if known else ()


def _multiplying_by_dt_proj(mixer: Any, x: Tensor) -> Any:
    """Return a mixer whose code multiplies by the weight of ``dt_proj``, as that layer would."""
    layer = getattr(mixer, "dt_proj", None)
    if layer is None or "mamba_selective_scan" not in mixer.functions:
        return mixer
    plain = is_plain_linear(layer)
    prompt = x.shape[1] > 1 and decodes_on_cpu(x) and not is_watched(layer)
    return _WithWeight(mixer, layer, plain) if prompt or not plain else mixer


class _WithWeight:
    """A mixer for one call of its forward, which multiplies by ``dt_proj.weight`` itself."""

    def __init__(self, mixer: Any, layer: Any, plain: bool) -> None:
        self._mixer = mixer
        self.dt_proj = _Weight(layer, plain)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mixer, name)


class _Weight:
    """A linear layer in the place of its weight: under an adapter, quantised, or on our kernel."""

    def __init__(self, layer: Any, plain: bool) -> None:
        self.layer, self.plain, self.bias = layer, plain, layer.bias

    @property
    def weight(self) -> _Weight:
        return self

    def __matmul__(self, x: Tensor) -> Tensor:
        """Map ``[B, in, L]`` to ``[B, out, L]``."""
        x = x.transpose(1, 2)
        if self.plain:
            return many_rows_linear(x, self.layer.weight).transpose(1, 2)
        y = self.layer(x)
        return (y if self.bias is None else y - self.bias).transpose(1, 2)

    def __call__(self, x: Tensor) -> Tensor:
        return self.layer(x)
