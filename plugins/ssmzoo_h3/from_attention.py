"""H3 that starts from an attention layer: queries, keys, values and outputs."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ssmzoo.modeling import attention_parts, require_width

from .modeling_h3 import H3Mixer


def fields(attention: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return nothing: a mixer is as wide as the model."""
    return {}


def copy(attention: nn.Module, mixer: H3Mixer) -> None:
    """Copy queries, keys, values and outputs, and the biases of the first three.

    Raises:
        ValueError: The attention is not as wide inside as the model.
    """
    parts = attention_parts(attention)
    require_width("H3", mixer.config.hidden_size, parts)
    layers = mixer.q_proj, mixer.k_proj, mixer.v_proj
    for layer, weight in zip(layers, (parts.q, parts.k, parts.v), strict=True):
        layer.weight.copy_(weight)
    if parts.bias is not None:
        for layer, bias in zip(layers, parts.bias.chunk(3), strict=True):
            layer.bias.copy_(bias)
    mixer.out_proj.weight.copy_(parts.out)
