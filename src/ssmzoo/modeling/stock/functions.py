"""The kernels' functions for transformers' mixers, which know the call that they run in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from ssmzoo.modeling.module_parts import is_watched, stock_class
from ssmzoo.modeling.stock.cache import CONV_STATE, SCAN_STATE
from ssmzoo.modeling.stock.calls import call
from ssmzoo.modeling.stock.dynamics import noted
from ssmzoo_kernels import layers

# by the Python name of a function of ours that keeps a state (KDA's is the delta rule's): the
# state's name in a cache, the argument that takes it, and the one that asks for the final one
_STATES = {
    "causal_conv1d_fn": (CONV_STATE, "initial_state", "return_final_state"),
    "mamba_selective_scan": (SCAN_STATE, "initial_state", "return_last_state"),
    "mamba2_chunk_scan": (SCAN_STATE, "initial_states", "return_final_states"),
    "torch_chunk_gated_delta_rule": (SCAN_STATE, "initial_state", "output_final_state"),
}
# the names by which mixers call the scans among them
STARTED = {
    name
    for name, function in layers.FUNCTIONS.items()
    if _STATES.get(function.__name__, ("",))[0] == SCAN_STATE
}


def _in_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that knows the call's packed sequences, and states that lie apart."""
    state, initial, wanted = _STATES.get(function.__name__, ("", "", ""))

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        kwargs["cu_seqlens"], kwargs["seq_idx"] = call.packing, None
        kwargs["cu_seq_lens_q"] = None
        if call.scans is not None:
            noted(function, args, kwargs)
        if call.states is None or not state:
            return function(*args, **kwargs)
        kwargs |= {initial: call.states.get(state), wanted: True}
        out, final = function(*args, **kwargs)
        call.states.put(state, final)
        # the delta rule returns a state, wanted or not
        return (out, final) if wanted == "output_final_state" else out

    return run


def _activated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a convolution that takes every activation of transformers, not silu alone."""
    place = [*inspect.signature(function).parameters].index("activation")

    @functools.wraps(function)
    def run(*args: Any, activation: str | None = None, **kwargs: Any) -> Tensor:
        if len(args) > place:
            args, activation = args[:place], args[place]
        ours = activation in ("silu", "swish", None)
        y = function(*args, activation=activation if ours else None, **kwargs)
        return y if ours else ACT2FN[activation](y)

    return run


def is_plain_linear(layer: Any) -> bool:
    """Return whether a layer only multiplies with its weight, or there is none."""
    if layer is None:
        return True
    return stock_class(layer) is nn.Linear and type(layer.weight) is nn.Parameter


def _may_fuse(mixer: Any) -> bool:
    """Return whether a function may read the weights of a mixer's projections."""
    if not isinstance(mixer, nn.Module):  # one that reads its step sizes otherwise
        return False
    projections: list[Any] = [mixer.x_proj, mixer.dt_proj, mixer.out_proj]
    return (
        mixer.activation in ("silu", "swish")
        and type(mixer.conv1d) is nn.Conv1d
        and not is_watched(mixer.conv1d)
        and all(is_plain_linear(layer) and not is_watched(layer) for layer in projections)
    )


@functools.wraps(layers.FUNCTIONS["mamba_inner_fn"])
def _mamba_inner_fn(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return None where it would differ from the mixer's layers: the mixer then calls these."""
    # it takes no states and no mask
    if call.passing is not None or call.masked or not _may_fuse(call.mixer):
        return None
    return _in_call(layers.FUNCTIONS["mamba_inner_fn"])(*args, **kwargs)


@functools.wraps(layers.FUNCTIONS["mamba2_selective_state_update"])
def _mamba2_selective_state_update(*args: Any, **kwargs: Any) -> Tensor:
    run = layers.FUNCTIONS["mamba2_selective_state_update"]
    return run(*args, dt_limit=getattr(call.mixer, "time_step_limit", None), **kwargs)


# by the name that mixers call
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _in_call(function) for name, function in layers.FUNCTIONS.items()},
    "causal_conv1d_fn": _activated(_in_call(layers.FUNCTIONS["causal_conv1d_fn"])),
    "causal_conv1d_update": _activated(layers.FUNCTIONS["causal_conv1d_update"]),
    "mamba_inner_fn": _mamba_inner_fn,
    "mamba2_selective_state_update": _mamba2_selective_state_update,
}
