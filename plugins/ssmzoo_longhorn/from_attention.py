"""Longhorn that starts from an attention layer: its values, its outputs, and a gate of the values.

Its keys and queries are few and follow from the values, so they are drawn.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ssmzoo.modeling import attention_parts, expansion_of, require_width, start_gated_block

from .modeling_longhorn import LonghornMixer


def fields(attention: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the expansion that makes a mixer as wide inside as an attention's heads."""
    return {"expand": expansion_of(attention)}


def copy(attention: nn.Module, mixer: LonghornMixer) -> None:
    """Copy values and outputs.

    Raises:
        ValueError: The mixer has another inner width than the attention.
    """
    parts = attention_parts(attention)
    require_width("Longhorn", mixer.config.d_inner, parts)
    start_gated_block(mixer, parts)


def gate(mixer: LonghornMixer) -> Tensor:
    """Return the rows that gate the values."""
    return mixer.in_proj.weight[mixer.config.d_inner :]
