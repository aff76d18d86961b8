"""RTF's Hyena block that starts from an attention layer.

Its two gates are the queries and the keys of the attention: ``x0 * filter(x1 * v)``.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ssmzoo.modeling import attention_parts, require_width, start_as_identity

from .modeling_rtf import RTFMixer


def fields(attention: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the block that has counterparts of an attention's parts."""
    return {"block": "hyena", "mixer_rank": None}


def copy(attention: nn.Module, mixer: RTFMixer) -> None:
    """Copy queries, keys and values into gates and input, and outputs; other blocks have none.

    Raises:
        ValueError: The attention is not as wide inside as the model.
    """
    parts = attention_parts(attention)
    require_width("RTF", mixer.config.hidden_size, parts)
    if mixer.block != "hyena" or mixer.filter_norm is not None:
        return
    mixer.in_proj.weight.copy_(torch.cat([parts.q, parts.k, parts.v]))
    if parts.bias is not None:
        mixer.in_proj.bias.copy_(parts.bias)
    mixer.out_proj.weight.copy_(parts.out)
    start_as_identity(mixer.short_conv)
