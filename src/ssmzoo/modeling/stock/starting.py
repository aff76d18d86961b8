"""A call of an accelerated model that starts from a state adapter.

Its mixers get their states as in sequence parallelism, apart from transformers' cache, into which
their final ones go after the call. Padding is then packing: a state that is not zero must not decay
over it, as it would in the stock code, which only lets padding add nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from ssmzoo.modeling.cache import refuse_reentrant_checkpointing, require_same_start
from ssmzoo.modeling.packing import find_packing
from ssmzoo.modeling.state_adapter import StateAdapter
from ssmzoo.modeling.stock.cache import CONV_STATE, SCAN_STATE, StockCache, states_of
from ssmzoo.modeling.stock.calls import call, told_of
from ssmzoo.modeling.stock.packed_calls import dtype_of, enter


class StartingStates:
    """What the mixers of one call start from, and what they leave; read as ``StatePassing`` is.

    Args:
        initial: By layer the states by name, a row a sequence.
    """

    def __init__(self, initial: Mapping[int, Mapping[str, Tensor]]) -> None:
        self._initial = initial
        self.final: dict[int, dict[str, Tensor]] = {}

    def open_layer(self, index: int, device: torch.device) -> tuple[Any, Any]:
        """Return where a layer's states come from, and where they go to, by name."""
        return self._initial.get(index, {}), self.final.setdefault(index, {})


def start(
    adapter: StateAdapter,
    model: Any,
    forward: Callable[..., Any],
    given: dict[str, Any],
    name_of_cache: str,
) -> Any:
    """Return what a model makes of a call whose states the adapter begins, or None of others.

    Others go on from a cache, and have no padding.

    Args:
        adapter: The model's.
        model: The model around the layers.
        forward: Its stock forward.
        given: The call's arguments by name.
        name_of_cache: The one of its cache.

    Raises:
        ValueError: The cache began elsewhere, or gradients would be lost.
    """
    cache = given.get(name_of_cache)
    if isinstance(cache, StockCache):
        cache.read_again(model)
    ids = given.get("input_ids")
    inputs = given.get("inputs_embeds") if ids is None else ids
    if inputs is None:
        return None  # the stock code says what is missing
    batch, length = inputs.shape[:2]
    held = [] if cache is None else [states_of(layer) for layer in cache.layers]
    begins = not any(SCAN_STATE in states for states in held)
    if not begins and not isinstance(cache, StockCache):  # which looks itself
        began = getattr(cache, "adapter", None)
        if began is not adapter:
            require_same_start(began, adapter)
    mask = given.get("attention_mask")
    mask = mask[:, -length:] if isinstance(mask, Tensor) and mask.dim() == 2 else None
    padded = mask is not None and not bool(mask.all())
    if not (begins or padded):
        return None
    if model.training and torch.is_grad_enabled():
        refuse_reentrant_checkpointing(model.modules())
    packing, given = enter(model, cache, {}, given)
    packing = packing or call.packing
    if packing is None:
        if padded:
            packing = find_packing(batch, length, 0, mask, None, None, None)
        use = given.get("use_cache")
        if cache is None and (
            use or (use is None and model.config.use_cache and not model.training)
        ):
            cache = DynamicCache(config=model.config.get_text_config(decoder=True))
            given |= {name_of_cache: cache, "use_cache": True}
    if begins:
        initial = adapter(batch if packing is None else packing.sequences, dtype_of(model))
    else:
        initial = {i: of_mixers(states) for i, states in enumerate(held) if SCAN_STATE in states}
    states = StartingStates(initial)
    run = functools.partial(forward, model, **given)
    with told_of(packing, cast(Any, states)):
        output = cache.run(model, run, given) if isinstance(cache, StockCache) else run()
    if cache is not None:
        for index, final in states.final.items():
            conv = F.pad(final[CONV_STATE].detach().transpose(1, 2), (1, 0))
            cache.update_conv_state(conv, index)
            cache.update_recurrent_state(final[SCAN_STATE].detach(), index)
        cast(Any, cache).adapter = adapter
    return output


def of_mixers(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a layer's states in a cache as mixers take them, ``[B, K - 1, D]``."""
    conv = states[CONV_STATE][:, :, 1:].transpose(1, 2)
    return {CONV_STATE: conv, SCAN_STATE: states[SCAN_STATE]}
