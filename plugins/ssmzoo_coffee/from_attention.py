"""COFFEE that starts from an attention layer: its values, its outputs, and a gate of the values."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ssmzoo.modeling import attention_parts, expansion_of, require_width, start_gated_block

from .modeling_coffee import CoffeeMixer


def fields(attention: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the expansion that makes a gated mixer as wide inside as an attention's heads."""
    return {"block": "gated", "expand": expansion_of(attention)}


def copy(attention: nn.Module, mixer: CoffeeMixer) -> None:
    """Copy values and outputs; a bare mixer has no such parts.

    Raises:
        ValueError: The mixer has another inner width than the attention.
    """
    parts = attention_parts(attention)
    require_width("COFFEE", mixer.config.d_inner, parts)
    if mixer.gated:
        start_gated_block(mixer, parts)


def gate(mixer: CoffeeMixer) -> Tensor | None:
    """Return the rows that gate the values; a bare mixer has none."""
    return mixer.in_proj.weight[mixer.config.d_inner :] if mixer.gated else None
