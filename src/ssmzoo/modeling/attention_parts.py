"""An attention layer's weights, for a mixer of another family that starts from them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssmzoo.modeling.layers import CausalConv1d


class AttentionParts(NamedTuple):
    """An attention's weights with a key and value head for each of its H query heads of size d.

    Attributes:
        q: ``[H d, D]``, and so are ``k`` and ``v``.
        out: ``[D, H d]``.
        bias: Those of q, k and v, ``[3 H d]``; None without.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    bias: Tensor | None

    @property
    def gate(self) -> Tensor:
        """Return ``[H d, D]``, a start for a gate of the values: the mean of v and out transposed.

        As hybrid-model-factory has it.
        """
        return (self.out.T + self.v) / 2


def attention_parts(attention: Any) -> AttentionParts:
    """Return the weights of an :class:`Attention`."""
    config = attention.config
    heads, groups = config.heads, config.groups

    def repeated(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (groups, -1)).repeat_interleave(heads // groups, 0).flatten(0, 1)

    layers = attention.q_proj, attention.k_proj, attention.v_proj
    q, k, v = (layer.weight.detach() for layer in layers)
    k, v, out = repeated(k), repeated(v), attention.o_proj.weight.detach()
    bias = None
    if attention.q_proj.bias is not None:
        first, *rest = (layer.bias.detach() for layer in layers)
        bias = torch.cat([first, *(repeated(x) for x in rest)])
    return AttentionParts(q, k, v, out, bias)


def require_width(name: str, got: int, parts: AttentionParts) -> None:
    """Fail unless a mixer is as wide inside as the attention that it starts from.

    Raises:
        ValueError: Names both widths.
    """
    if got != len(parts.v):
        raise ValueError(
            f"{name} must be as wide inside as the attention that it starts from, {len(parts.v)} "
            f"features, got {got}; set its fields so if it has such, or take --start drawn"
        )


def expansion_of(attention: Any) -> int:
    """Return ``expand`` of a mixer that is as wide inside as an attention's heads.

    Args:
        attention: Its configuration.
    """
    return max(1, attention.heads * attention.head_width // attention.hidden_size)


def start_gated_block(mixer: Any, parts: AttentionParts) -> None:
    """Start Mamba's block, ``[x | z] = in_proj(h)``, ``conv1d`` of x, ``out_proj``, as attention.

    x starts as the values, outputs as the outputs, the convolution as the identity.
    """
    mixer.in_proj.weight[: len(parts.v)] = parts.v
    mixer.out_proj.weight.copy_(parts.out)
    start_as_identity(mixer.conv1d)


def start_as_identity(conv: CausalConv1d, bias: Tensor | None = None) -> None:
    """Let a short convolution give its last input, plus ``bias``, before its activation."""
    conv.weight.zero_()
    conv.weight[..., -1] = 1
    if conv.bias is not None:
        conv.bias.zero_() if bias is None else conv.bias.copy_(bias)
