"""B'MOJO that starts from an attention layer: its own attention is the same, in a window.

With rotary positions the state-space model's outputs go to attention alone (``wiring="parallel"``),
so that a new layer gives what the window alone would give, but for its fading memory. Biases, norms
of queries and keys, and scaled rotary positions have no counterpart.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from .modeling_bmojo import BMojoMixer

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def fields(attention: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return heads and positions of an attention's configuration."""
    found = {
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.groups,
        "head_dim": attention.head_width,
    }
    rope = attention.rope_parameters
    if rope is not None:
        found |= {"use_rope": True, "rope_theta": rope["rope_theta"], "wiring": "parallel"}
    return found


def copy(attention: nn.Module, mixer: BMojoMixer) -> None:
    """Copy queries, keys, values and outputs, also for fading memory where it has its own.

    Raises:
        ValueError: The mixer's attention has other sizes.
    """
    ours: Any = mixer.attention
    if ours is None:
        return
    for name in _PROJECTIONS:
        old, new = getattr(attention, name).weight, getattr(ours, name).weight
        if old.shape != new.shape:
            raise ValueError(
                f"B'MOJO must have the heads of the attention that it starts from, {name} of "
                f"{list(old.shape)}, got {list(new.shape)}; set its fields so"
            )
        new.copy_(old)
    for name in ("k_proj", "v_proj"):
        memory = getattr(ours, f"memory_{name}")
        if memory is not None:
            memory.weight.copy_(getattr(attention, name).weight)
