"""What transformers' mixers call, on our ops: as functions, and as layers for its kernel slots.

A mixer of transformers calls functions of fixed names and arguments. ``FUNCTIONS`` has ours by
these names; ``ssmzoo.accelerate`` puts them into single models. With ``use_kernels=True`` (the
package ``kernels``, GPUs only, all models of the process) transformers fills a slot with a
stateless layer of a kernel repository; this module has one of each slot's name in ``SLOTS``.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ssmzoo_kernels.layers import linear_attention as _linear_attention
from ssmzoo_kernels.layers import selective_scan as _selective_scan

# by the name that mixers call; KDA's have the arguments of the delta rule's
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _selective_scan.causal_conv1d_fn,
    "causal_conv1d_update": _selective_scan.causal_conv1d_update,
    "mamba_inner_fn": _selective_scan.mamba_inner_fn,
    "mamba_selective_scan": _selective_scan.mamba_selective_scan,
    "mamba_selective_state_update": _selective_scan.mamba_selective_state_update,
    "mamba2_split_conv1d_scan_combined": _linear_attention.mamba2_split_conv1d_scan_combined,
    "mamba2_selective_state_update": _linear_attention.mamba2_selective_state_update,
    "mamba2_chunk_scan": _linear_attention.mamba2_chunk_scan,
    "torch_chunk_gated_delta_rule": _linear_attention.torch_chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": _linear_attention.torch_recurrent_gated_delta_rule,
    "chunk_kimi_delta_attention": _linear_attention.torch_chunk_gated_delta_rule,
    "recurrent_kimi_delta_attention": _linear_attention.torch_recurrent_gated_delta_rule,
}
# the op that each function runs; not those in plain torch, those that decline, and mamba_inner_fn,
# which runs several
OPS = {
    "causal_conv1d_fn": "causal_conv1d",
    "mamba_selective_scan": "selective_scan",
    "mamba_selective_state_update": "selective_scan",
    "mamba2_chunk_scan": "gated_linear_attention",
    "torch_chunk_gated_delta_rule": "gated_linear_attention",
    "torch_recurrent_gated_delta_rule": "gated_linear_attention",
    "chunk_kimi_delta_attention": "gated_linear_attention",
    "recurrent_kimi_delta_attention": "gated_linear_attention",
}


def _state_update(state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run one token of Mamba, or of Mamba2, whose state has heads: they share a slot."""
    name = "mamba2" if state.dim() == 4 else "mamba"
    return FUNCTIONS[f"{name}_selective_state_update"](state, *args, **kwargs)


# by slot, the function whose arguments it takes, and what it runs
SLOTS: dict[str, tuple[str, Callable[..., Any]]] = {
    slot: (name, FUNCTIONS[name])
    for slot, name in {
        "causal_conv1d_fn": "causal_conv1d_fn",
        "causal_conv1d_update": "causal_conv1d_update",
        "selective_scan_fn": "mamba_selective_scan",
        "mamba_chunk_scan_combined": "mamba2_chunk_scan",
        "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule": "torch_recurrent_gated_delta_rule",
        "chunk_kda": "chunk_kimi_delta_attention",
        "fused_recurrent_kda": "recurrent_kimi_delta_attention",
    }.items()
} | {"selective_state_update": ("mamba_selective_state_update", _state_update)}


def _layer(slot: str, name: str, function: Callable[..., Any]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = inspect.signature(FUNCTIONS[name])
    # a slot looks at how many arguments a layer takes, and of which kinds
    forward.__signature__ = taken.replace(  # pyright: ignore[reportFunctionMemberAccess]
        parameters=[own, *taken.parameters.values()]
    )
    return type(slot, (nn.Module,), {"forward": forward, "__doc__": function.__doc__})


globals().update({slot: _layer(slot, *told) for slot, told in SLOTS.items()})
