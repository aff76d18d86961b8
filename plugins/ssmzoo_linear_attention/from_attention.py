"""Linear attention that starts from an attention layer: softmax left out, a decay and a gate added.

Queries, keys and values keep their heads, and short convolutions start as the identity, so that
they do. Rotary positions and norms of keys and queries have no counterpart; biases have one where
there is a convolution.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ssmzoo.modeling import attention_parts, require_width, start_as_identity

from .configuration_linear_attention import LinearAttentionConfig
from .modeling_linear_attention import LinearAttentionMixer


def fields(attention: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of an attention's configuration: a key head for each of its query heads."""
    heads, size = attention.heads, attention.head_width
    found = {"num_heads": heads, "num_key_heads": heads, "head_k_dim": size, "head_v_dim": size}
    convolves = given.get("d_conv", LinearAttentionConfig.d_conv) is not None
    return found | ({"conv_bias": True} if attention.attention_bias and convolves else {})


def copy(attention: nn.Module, mixer: LinearAttentionMixer) -> None:
    """Copy queries, keys, values and outputs.

    Raises:
        ValueError: The mixer has other sizes than the attention.
    """
    parts = attention_parts(attention)
    for width in mixer.widths:
        require_width("linear attention", width, parts)
    mixer.in_proj.weight[: sum(mixer.widths)] = torch.cat([parts.q, parts.k, parts.v])
    mixer.out_proj.weight.copy_(parts.out)
    if mixer.conv1d is not None:
        start_as_identity(mixer.conv1d, parts.bias)


def gate(mixer: LinearAttentionMixer) -> Tensor | None:
    """Return the rows that gate the values; None without, and of a gate of low rank."""
    alone = mixer.config.out_gate != "none" and mixer.gate_proj is None
    return mixer.in_proj.weight[-mixer.splits[-1] :] if alone else None
