"""The cache of an accelerated model that can be saved, cropped and copied."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from ssmzoo.modeling.cache import RecurrentCache
from ssmzoo.modeling.cache_identity import STATE_ADAPTER, own_fields
from ssmzoo.modeling.compat import is_checkpointing
from ssmzoo.modeling.sequence_parallel import PassingCache
from ssmzoo.modeling.state_passing import CutRows, StatePassing

_ATTENTION = ("keys", "values")
# of a linear-attention layer, where it may have several: "conv_states.0", "conv_states.1"
_RECURRENT = ("conv_states", "recurrent_states")
# of a layer that has one of each
CONV_STATE, SCAN_STATE = (f"{kind}.0" for kind in _RECURRENT)
_PLACES = ("attention_mask", "position_ids")
# of attention, of a mixer, of both, of neither; not of attention in a window, which drops tokens
_KNOWN = ("DynamicLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer")
_KNOWN += ("DummyLayer",)


class StockCache(RecurrentCache):
    """The layers of transformers' own cache, which stock mixers and attention write into.

    It counts tokens where they hold recurrent states alone, and rolls back by snapshot and replay,
    attention's keys and values too. Stock layers write into it as they run, so a call that fails
    may leave some of them ahead of others: go on from a copy made before, or reset it.

    Args:
        config: The configuration of the model it will serve.

    Raises:
        ValueError: A layer's cache is of a kind that we do not know, a window's for example.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        layers = dynamic_cache(config).layers
        super().__init__(config, layers=layers)
        if strange := {type(layer).__name__ for layer in layers} - set(_KNOWN):
            raise ValueError(
                f"{type(config).__name__}: a layer's cache must be one of {', '.join(_KNOWN)} to "
                f"be saved or rolled back, got {', '.join(sorted(strange))}"
            )

    @property
    def is_compileable(self) -> bool:
        """Return False: ``generate`` then compiles no more than it does without this cache."""
        return False

    @property
    def batch_size(self) -> int:
        """Return the number of sequences, or -1 before the first token."""
        for layer in self.layers:  # every token asks
            for state in states_of(layer).values():
                return state.shape[0]
        return -1

    @property
    def is_linear(self) -> list[bool]:
        """Return which layers keep no tokens, but none of a model of such layers alone.

        There ``generate`` would not cut the tokens seen off a prompt.
        """
        linear = super().is_linear
        return [False] * len(linear) if all(linear) else linear

    @staticmethod
    def signature(config: Any) -> dict[str, Any]:
        """Return the fields that make the caches of two models interchangeable."""
        fields = {name: getattr(config, name, None) for name in own_fields(type(config))}
        fields["model_type"] = config.model_type
        return json.loads(json.dumps(fields, default=str))  # as it reads in a file

    def get_states(self) -> list[dict[str, Tensor]]:
        """Return each layer's states by name; not copies."""
        return [states_of(layer) for layer in self.layers]

    def set_states(self, states: list[dict[str, Tensor]]) -> None:
        """Replace each layer's states.

        Raises:
            ValueError: A layer has no state of such a name.
        """
        fresh = dynamic_cache(self.config)
        for index, (layer, tensors) in enumerate(zip(fresh.layers, states, strict=True)):
            attends = isinstance(layer, CacheLayerMixin) and set(_ATTENTION) <= tensors.keys()
            for name, state in tensors.items():
                kind, _, place = name.partition(".")
                number = int(place) if place.isdecimal() else -1
                if kind in _RECURRENT and number in getattr(layer, kind, ()):
                    update = (fresh.update_conv_state, fresh.update_recurrent_state)
                    update[_RECURRENT.index(kind)](state, index, state_idx=number)
                elif not (attends and name in _ATTENTION):
                    raise ValueError(f"layer {index} has no state {name!r}")
            if attends:
                fresh.update(tensors["keys"], tensors["values"], index)
        self.layers = fresh.layers

    def run(self, model: Any, forward: Callable[[], Any], given: Mapping[str, Any]) -> Any:
        """Run a forward pass that writes into this cache.

        Args:
            model: The module that it is one of.
            forward: The pass.
            given: Its arguments by name.

        Raises:
            ValueError: The cache belongs to another model, began from another state adapter, holds
                another number of sequences, or meets gradient checkpointing, for which
                transformers' layers drop their caches.
        """
        name = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
        if given.get(name) is None:
            return forward()  # which names the missing input
        if model.training and is_checkpointing(model):
            raise ValueError(
                f"cache must be left out where {type(model).__name__} trains with "
                "gradient checkpointing, whose layers write into no cache; call model.eval() or "
                "model.gradient_checkpointing_disable()"
            )
        self.check(model.config, len(given[name]))
        self.require_start(model._modules.get(STATE_ADAPTER))
        places = {n: given[n] for n in _PLACES if given.get(n) is not None}
        whole = all(isinstance(place, Tensor) and place.dim() == 2 for place in places.values())
        recorded = self.record({name: given[name].detach(), **places} if whole else None)
        output = forward()
        self.advance(given[name].shape[1], recorded)
        return output


def dynamic_cache(config: PreTrainedConfig) -> DynamicCache:
    """Return transformers' empty cache for a model."""
    return DynamicCache(config=config.get_text_config(decoder=True))


def new_cache(config: PreTrainedConfig) -> DynamicCache | StockCache:
    """Return the cache that a call makes: transformers', or ours for recurrent layers alone.

    transformers' cache counts tokens by the keys of attention.
    """
    cache = dynamic_cache(config)
    return StockCache(config) if all(cache.is_linear) else cache


class StockSequenceParallelCache(PassingCache, StockCache):
    """The :class:`SequenceParallelCache` of an accelerated model.

    Its mixers' functions take their states from it, and leave them here, as in a call without a
    cache; transformers' code does not see it.

    Args:
        config: The configuration of the model it will serve.
        group: The processes, in the order of the pieces; None: all of them.
        rows: Where sequences are packed, which of them cross the cuts; None: each row is one.
    """

    kind = StockCache

    def __init__(
        self, config: PreTrainedConfig, group: dist.ProcessGroup | None, rows: CutRows | None
    ) -> None:
        super().__init__(config)
        self.passing = StatePassing(group, rows)

    def take(self, tokens: int) -> None:
        """Take the states after a call of so many tokens a row."""
        states = [self.passing.final(index) for index in range(len(self.layers))]
        for held in states:
            if CONV_STATE in held:
                held[CONV_STATE] = cached_convolution(held[CONV_STATE])
        self.set_states(states)
        self.advance(tokens, None)


def cached_convolution(state: Tensor) -> Tensor:
    """Return a convolution's last inputs ``[B, K - 1, D]`` as transformers has them: ``[B, D, K]``.

    Its oldest entry, which no token reads again, is zero.
    """
    return F.pad(state.transpose(1, 2), (1, 0))


def states_of(layer: Any) -> dict[str, Tensor]:
    """Return the tensors of a layer that has seen tokens."""
    found = {
        f"{kind}.{number}": state
        for kind in _RECURRENT
        for number, state in getattr(layer, kind, {}).items()
        if state is not None and layer.has_previous_state[number]
    }
    if getattr(layer, "keys", None) is not None and layer.keys.numel():
        found |= {name: getattr(layer, name) for name in _ATTENTION}
    return found
