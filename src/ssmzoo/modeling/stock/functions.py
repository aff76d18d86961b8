"""The kernels' functions for transformers' mixers, told of the call that they run in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.activations import ACT2FN

from ssmzoo.modeling.stock.calls import call
from ssmzoo_kernels import layers


def _told(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that knows the call's packed sequences, as this library found them."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        kwargs["cu_seqlens"], kwargs["seq_idx"] = call.packing, None
        kwargs["cu_seq_lens_q"] = None
        return function(*args, **kwargs)

    return run


@functools.wraps(layers.FUNCTIONS["causal_conv1d_fn"])
def _causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    ours = activation in ("silu", "swish", None)
    y = _told(layers.FUNCTIONS["causal_conv1d_fn"])(
        hidden_states, weight, bias, activation if ours else None
    )
    return y if ours else ACT2FN[activation](y)


@functools.wraps(layers.FUNCTIONS["causal_conv1d_update"])
def _causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    ours = activation in ("silu", "swish", None)
    y = layers.FUNCTIONS["causal_conv1d_update"](
        hidden_states, conv_state, weight, bias, activation if ours else None
    )
    return y if ours else ACT2FN[activation](y)


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
    "causal_conv1d_fn": _causal_conv1d_fn,
    "causal_conv1d_update": _causal_conv1d_update,
    "mamba_inner_fn": _mamba_inner_fn,
    "mamba_selective_scan": _mamba_selective_scan,
    "mamba2_selective_state_update": _mamba2_selective_state_update,
}
