"""A state in 12 bits a number between two calls: 8 bits, and 4 of what these leave.

A layer's state is in full only while the layer reads. Rounded to 8 bits at every token it loses
what it holds, since a token adds less than is rounded away; with 4 more bits for the error
(vllm#55196) that stays. Numbers are whole multiples, up to 2,047, of a step that 64 neighbours
share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo.modeling.cache import CacheLayer, StateCache
from ssmzoo.modeling.layer_state import LayerState

GROUP = 64  # numbers that share a step
MOST = 2047  # of 12 bits with a sign


def pack(state: Tensor) -> Tensor:
    """Return a state ``[B, ...]`` as bytes ``[B, P]``: higher 8 bits, lower 4, steps in float32.

    A number is off by at most half a step, 1 / 4094 of the largest of its 64. Packed again after
    :func:`unpack`, it gives the same bytes. Of NaN and infinities the 64 become NaN.
    """
    rows = state.flatten(1).float()
    groups = F.pad(rows, (0, -rows.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    step = groups.abs().amax(2, keepdim=True) / MOST
    whole = (groups / step.clamp(min=torch.finfo(step.dtype).tiny)).round().to(torch.int16)
    whole = whole.flatten(1)
    low = (whole & 15).to(torch.uint8)
    low = low[:, ::2] | (low[:, 1::2] << 4)
    high = (whole >> 4).to(torch.int8).view(torch.uint8)
    return torch.cat([high, low, step.flatten(1).view(torch.uint8)], dim=1)


def unpack(packed: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the state ``[B, *shape]`` of what :func:`pack` returned."""
    size = math.prod(shape)
    padded = size + -size % GROUP
    high, low, step = packed.split([padded, padded // 2, padded // GROUP * 4], dim=1)
    whole = torch.stack([low & 15, low >> 4], dim=2).flatten(1).to(torch.int16)
    whole |= high.view(torch.int8).to(torch.int16) << 4
    state = whole.unflatten(1, (-1, GROUP)) * step.contiguous().view(torch.float32).unsqueeze(2)
    return state.flatten(1)[:, :size].reshape(-1, *shape).to(dtype).contiguous()


class QuantizedLayer(CacheLayer):
    """One layer's states, those that decay as bytes, and what these are in full."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}

    def unpacked(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return states in full; those that were not packed stay."""
        return {
            name: unpack(state, *self.kinds[name]) if state.dtype is torch.uint8 else state
            for name, state in states.items()
        }


class QuantizedStateCache(StateCache):
    """A :class:`StateCache` that takes 2.5 times less memory for states that decay.

    They are those of ``SSMMixer.decaying_states``; keys, values and inputs that a layer keeps stay
    as they are. Every call rounds them once, so a prompt read at once and token by token no longer
    give the same numbers. Files have full states: :class:`StateCache` reads them, too.

    Args:
        config: The configuration of the model it will serve.
    """

    layer_class: ClassVar[type[CacheLayer]] = QuantizedLayer
    layers: list[QuantizedLayer]  # pyright: ignore[reportIncompatibleVariableOverride]

    def open_layer(self, index: int, state: LayerState, hidden_states: Tensor) -> None:
        """Give a layer its states in full."""
        state.initial = self.layers[index].unpacked(state.initial)

    def close_layer(self, index: int, state: LayerState, decaying: AbstractSet[str]) -> None:
        """Pack those of a layer's states that decay, and drop what it had in full.

        Raises:
            ValueError: A gradient's graph hangs on them.
        """
        state.initial, layer = {}, self.layers[index]
        for name in decaying & state.final.keys():
            final = state.final[name]
            if final.requires_grad:
                raise ValueError(
                    "a QuantizedStateCache must be used under torch.no_grad(), got state "
                    f"{name!r} of layer {index} with a graph; take a StateCache to train"
                )
            if layer.kinds.get(name) != (kind := (final.shape[1:], final.dtype)):
                layer.kinds = {**layer.kinds, name: kind}  # copies of the layer have their own
            state.final[name] = pack(final)

    def take(self, states: list[LayerState], hidden_states: Tensor) -> Tensor:
        """Take the states that a call left.

        Raises:
            ValueError: None of them is packed.
        """
        if not any(layer.kinds for layer in self.layers):
            kind = type(self.config).__name__.removesuffix("Config")
            raise ValueError(
                f"a QuantizedStateCache needs states that decay, and this {kind} keeps none; take "
                "a StateCache, and leave cache_implementation out"
            )
        return super().take(states, hidden_states)

    def full_states(self) -> list[dict[str, Tensor]]:
        """Return each layer's states, not packed."""
        return [layer.unpacked(layer.states) for layer in self.layers]
