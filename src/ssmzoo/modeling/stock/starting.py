"""Calls of an accelerated model whose mixers get their states apart from transformers' cache.

They are those that start from a state adapter and those that are padded. Padding is packing here:
a sequence of its own, over which a row's state neither moves nor decays, as it would in the stock
code, which only lets padding add nothing. The mixers start from the states in the cache, and what
they leave goes into it after the call; transformers' attention uses it as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ssmzoo.modeling.cache import (
    STATE_ADAPTER,
    refuse_reentrant_checkpointing,
    require_same_start,
)
from ssmzoo.modeling.compat import is_checkpointing
from ssmzoo.modeling.packing import PackedRow, find_packing
from ssmzoo.modeling.stock.cache import CONV_STATE, SCAN_STATE, StockCache, new_cache, states_of
from ssmzoo.modeling.stock.calls import call, told_of
from ssmzoo.modeling.stock.mixer_states import StartingStates
from ssmzoo.modeling.stock.packed_calls import dtype_of, inputs_of


def read_apart(
    model: Any,
    read: Callable[..., Any],
    given: dict[str, Any],
    name_of_cache: str,
    packing: PackedRow | None,
) -> Any:
    """Return what a model makes of a call that is padded or starts from an adapter; else None.

    Args:
        model: The model around the layers.
        read: Its forward.
        given: The call's arguments by name.
        name_of_cache: The one of its cache.
        packing: Packed sequences that were found in the call.

    Raises:
        ValueError: The cache began elsewhere, or gradients would be lost.
    """
    inputs, cache = inputs_of(given), given.get(name_of_cache)
    if inputs is None:
        return None  # the stock code says what is missing
    packing = packing or call.packing
    padded = packing is None and (packing := padding_of(given, inputs)) is not None
    adapter = model._modules.get(STATE_ADAPTER) if call.passing is None else None
    if adapter is None and not padded:
        return None
    if isinstance(cache, StockCache):
        cache.read_again(model)
    held = [] if cache is None else [states_of(layer) for layer in cache.layers]
    begins = adapter is not None and not any(SCAN_STATE in states for states in held)
    if adapter is not None and not begins and not isinstance(cache, StockCache):  # it looks itself
        began = getattr(cache, "adapter", None)
        if began is not adapter:
            require_same_start(began, adapter)
    if not begins and not padded:
        return None
    trains = model.training and torch.is_grad_enabled()
    if begins and trains:
        refuse_reentrant_checkpointing(model.modules())
    if cache is None and call.passing is None and returns_cache(model, given):
        cache = new_cache(model.config)
        given |= {name_of_cache: cache, "use_cache": True}
    if adapter is not None and begins:
        rows = len(inputs) if packing is None else packing.sequences
        initial = adapter(rows, dtype_of(model))
    elif cache is None or (
        # whose layers drop transformers' caches, and ours refuses
        trains and is_checkpointing(model) and not isinstance(cache, StockCache)
    ):
        with told_of(packing, call.passing):
            return read(model, **given)
    else:
        initial = {i: of_mixers(states) for i, states in enumerate(held) if SCAN_STATE in states}
    states = StartingStates(initial)
    run = functools.partial(read, model, **given)
    with told_of(packing, states):
        output = cache.run(model, run, given) if isinstance(cache, StockCache) else run()
    if cache is not None:
        states.leave(cache, adapter)
        if adapter is not None:
            cast(Any, cache).adapter = adapter
    return output


def returns_cache(model: Any, given: Mapping[str, Any]) -> bool:
    """Return whether a call without a cache makes one, as transformers decides it."""
    if model.training and is_checkpointing(model):
        return False
    use = given.get("use_cache")
    return bool(model.config.use_cache and not model.training if use is None else use)


def padding_of(given: Mapping[str, Any], inputs: Tensor) -> PackedRow | None:
    """Return a call's padding as sequences of their own; None: it has none.

    In a graph, where nobody looks, several tokens with a mask always have.
    """
    mask, (batch, length) = given.get("attention_mask"), inputs.shape[:2]
    if isinstance(mask, dict):  # as generate makes them for caches of one size
        mask = mask.get("linear_attention")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    mask = mask[:, -length:]
    if length == 1 if torch.compiler.is_compiling() else bool(mask.all()):
        return None  # in a graph a step's token counts, as transformers has it
    return find_packing(batch, length, 0, mask, None, None, None)


def of_mixers(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a layer's states in a cache as mixers take them, ``[B, K - 1, D]``."""
    conv = states[CONV_STATE][:, :, 1:].transpose(1, 2)
    return {CONV_STATE: conv, SCAN_STATE: states[SCAN_STATE]}
