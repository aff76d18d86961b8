"""The kernels' functions for transformers' mixers, told of the call that they run in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.activations import ACT2FN

from ssmzoo.modeling.stock.cache import CONV_STATE, SCAN_STATE
from ssmzoo.modeling.stock.calls import call
from ssmzoo.modeling.stock.dynamics import noted
from ssmzoo_kernels import layers

# by function that keeps a state: the state's name in a cache, the argument that it begins with, and
# the one that asks for the final one
_STATES = {
    "causal_conv1d_fn": (CONV_STATE, "initial_state", "return_final_state"),
    "mamba_selective_scan": (SCAN_STATE, "initial_state", "return_last_state"),
    "mamba2_chunk_scan": (SCAN_STATE, "initial_states", "return_final_states"),
    "torch_chunk_gated_delta_rule": (SCAN_STATE, "initial_state", "output_final_state"),
}
# the scans among them
STARTED = {name for name, (state, *_) in _STATES.items() if state == SCAN_STATE}


def _told(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that knows the call: its packed sequences, and the states it passes on."""
    state, initial, wanted = _STATES.get(function.__name__, ("", "", ""))

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        kwargs["cu_seqlens"], kwargs["seq_idx"] = call.packing, None
        kwargs["cu_seq_lens_q"] = None
        if call.seen is not None:
            noted(function, args, kwargs)
        if call.layer is None or not state:
            return function(*args, **kwargs)
        kwargs |= {initial: call.layer.get(state), wanted: True}
        out, final = function(*args, **kwargs)
        call.layer.put(state, final)
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


@functools.wraps(layers.FUNCTIONS["mamba_inner_fn"])
def _mamba_inner_fn(*args: Any, **kwargs: Any) -> Tensor | None:
    """Decline where something wraps a projection: the mixer then calls its layers."""
    return _told(layers.FUNCTIONS["mamba_inner_fn"])(*args, **kwargs) if call.fused else None


@functools.wraps(layers.FUNCTIONS["mamba_selective_scan"])
def _mamba_selective_scan(*args: Any, **kwargs: Any) -> Any:
    start, call.states = (call.states[0], call.states[1:]) if call.states else (None, ())
    run = _told(layers.FUNCTIONS["mamba_selective_scan"])
    return run(*args, initial_state=start, **kwargs)


@functools.wraps(layers.FUNCTIONS["mamba2_selective_state_update"])
def _mamba2_selective_state_update(*args: Any, **kwargs: Any) -> Tensor:
    run = layers.FUNCTIONS["mamba2_selective_state_update"]
    return run(*args, dt_limit=call.dt_limit, **kwargs)


# by the name that mixers call
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _told(function) for name, function in layers.FUNCTIONS.items()},
    "causal_conv1d_fn": _activated(_told(layers.FUNCTIONS["causal_conv1d_fn"])),
    "causal_conv1d_update": _activated(layers.FUNCTIONS["causal_conv1d_update"]),
    "mamba_inner_fn": _mamba_inner_fn,
    "mamba_selective_scan": _mamba_selective_scan,
    "mamba2_selective_state_update": _mamba2_selective_state_update,
}
