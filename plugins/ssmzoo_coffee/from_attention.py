"""COFFEE that starts from an attention layer: values, outputs and a gate between them."""

from typing import Any

from torch import nn

from ssmzoo.modeling import attention_parts, require_width, start_as_identity

from .modeling_coffee import CoffeeMixer


def fields(attention: Any) -> dict[str, Any]:
    """Return the expansion that makes a gated mixer as wide inside as an attention's heads."""
    width = attention.heads * attention.head_width
    return {"block": "gated", "expand": max(1, width // attention.hidden_size)}


def copy(attention: nn.Module, mixer: CoffeeMixer) -> None:
    """Copy values and outputs, and start the gate between them; a bare mixer has no such parts.

    Raises:
        ValueError: The mixer has another inner width than the attention.
    """
    parts, inner = attention_parts(attention), mixer.config.d_inner
    require_width("COFFEE", inner, parts)
    if not mixer.gated:
        return
    mixer.in_proj.weight[:inner] = parts.v
    mixer.in_proj.weight[inner:] = parts.gate
    mixer.out_proj.weight.copy_(parts.out)
    start_as_identity(mixer.conv1d)
