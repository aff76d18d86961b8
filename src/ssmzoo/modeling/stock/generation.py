"""What ``generate`` asks of an accelerated model: to go on from a state, to take tokens back.

transformers refuses assisted decoding for recurrent models, since its caches of their states cannot
be cropped; :class:`StockCache` can. It is called :data:`CACHE` here, also where the model
calls it ``cache_params``, before 5.24: transformers looks for lengths and crops under that name
alone.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor, nn
from transformers import Cache, DynamicCache

from ssmzoo.modeling.causal_lm import given_state, prompt_length
from ssmzoo.modeling.compat import CACHE, given_cache
from ssmzoo.modeling.stock.cache import StockCache, new_cache, states_of

_REPLACED = (
    *("prepare_inputs_for_generation", "_prepare_cache_for_generation"),
    *("_assisted_decoding", "_is_stateful", "_prepare_position_ids_for_generation"),
)


def overrides(stock: type[nn.Module]) -> dict[str, Any]:
    """Return the methods of ``GenerationMixin`` that an accelerated model's class replaces.

    Nothing where one is missing: their names are transformers' own affair.
    """
    theirs: Any = stock
    if not all(hasattr(theirs, name) for name in _REPLACED):
        return {}  # another transformers: it refuses assisted decoding as before
    stock_inputs = theirs.prepare_inputs_for_generation

    def prepare_inputs_for_generation(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        if isinstance(cache, StockCache) and cache.input_holds_seen:
            cache.input_holds_seen = False
            kwargs["next_sequence_length"] = input_ids.shape[1] - cache.seen_tokens
        inputs, mask = stock_inputs(self, input_ids, **kwargs), kwargs.get("attention_mask")
        read = inputs.get("input_ids")
        several = read is not None and read.shape[1] > 1
        if isinstance(cache, StockCache) and several and inputs.get("attention_mask") is None:
            inputs["attention_mask"] = mask  # dropped behind a prompt's first chunk
        return inputs

    functools.update_wrapper(prepare_inputs_for_generation, stock_inputs)
    # generate accepts the arguments that it finds named here
    signature = inspect.signature(stock_inputs)
    named = list(signature.parameters.values())
    for name in sorted({CACHE, "cache"} - signature.parameters.keys()):
        ours = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        named.insert(len(named) - (named[-1].kind is inspect.Parameter.VAR_KEYWORD), ours)
    prepare_inputs_for_generation.__signature__ = signature.replace(parameters=named)

    @functools.wraps(theirs._prepare_cache_for_generation)
    def _prepare_cache_for_generation(
        self: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        name = given_cache(model_kwargs)
        if name is not None:
            _require_count(self, name, model_kwargs[name])
        if name is not None and (name == "cache" or isinstance(model_kwargs[name], StockCache)):
            model_kwargs[CACHE] = model_kwargs.pop(name)
        given = model_kwargs.get(CACHE)
        if isinstance(given, StockCache):
            model_kwargs[CACHE] = given_state(given, generation_config, model_kwargs, batch_size)
            return
        arguments = generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        if given is not None and CACHE not in inspect.signature(self.forward).parameters:
            raise TypeError(
                f"{CACHE} of {type(self).__name__} must be the state of a prompt that "
                f"ssmzoo.modeling.prefill read, got {type(given).__name__}; call it cache_params"
            )
        theirs._prepare_cache_for_generation(self, *arguments)
        if generation_config.is_assistant:  # its proposals may be taken back
            _record(self, model_kwargs)
            return
        made = given_cache(model_kwargs) if name is None else None
        if made is not None and type(model_kwargs[made]) is DynamicCache:
            counts = new_cache(self.prompt_reader.config)
            if isinstance(counts, StockCache):
                del model_kwargs[made]
                model_kwargs[CACHE] = counts

    @functools.wraps(theirs._prepare_position_ids_for_generation)
    def _prepare_position_ids_for_generation(
        self: Any, inputs_tensor: Tensor, model_kwargs: dict[str, Any]
    ) -> Tensor:
        made = theirs._prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs)
        mask = model_kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == made.shape:
            # new tokens go on behind the last column, which transformers calls 0 in a padded row
            made = (mask.long().cumsum(-1) - 1).clamp_min(0)
        return made

    @functools.wraps(theirs._assisted_decoding)
    def _assisted_decoding(
        self: Any, input_ids: Tensor, *args: Any, generation_config: Any, **kwargs: Any
    ) -> Any:
        if getattr(generation_config, "assistant_early_exit", None) is not None:
            raise ValueError(
                f"assistant_early_exit must be left out for {type(self).__name__}: transformers' "
                "recurrent models do not all run on fewer layers; use prompt_lookup_num_tokens"
            )
        cache = _record(self, kwargs)
        if cache is None:  # which transformers refuses
            return theirs._assisted_decoding(
                self, input_ids, *args, generation_config=generation_config, **kwargs
            )
        length = prompt_length(generation_config, kwargs)
        # transformers forgets what a given state has seen when it adds candidates to the first call
        cache.input_holds_seen = bool(cache.seen_tokens) and length == input_ids.shape[1]
        try:
            output = theirs._assisted_decoding(
                self, input_ids, *args, generation_config=generation_config, **kwargs
            )
        finally:
            cache.input_holds_seen = False
            cache.deactivate_past_recording()
        if generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False):
            cache.read_again(self.prompt_reader)  # it outlives the call, and may meet stock code
        return output

    return {
        "_is_stateful": False,  # to transformers: what cannot take tokens back
        "prepare_inputs_for_generation": prepare_inputs_for_generation,
        "_prepare_cache_for_generation": _prepare_cache_for_generation,
        "_prepare_position_ids_for_generation": _prepare_position_ids_for_generation,
        "_assisted_decoding": _assisted_decoding,
    }


def _require_count(model: Any, name: str, cache: Any) -> None:
    """Check that a given cache of recurrent layers alone, which stock code counts not, is empty.

    Raises:
        ValueError: It holds states.
    """
    if isinstance(cache, Cache) and all(cache.is_linear) and any(map(states_of, cache.layers)):
        raise ValueError(
            f"{name} must count its tokens, so that generate of {type(model).__name__} reads the "
            f"new ones alone, got a {type(cache).__name__}, which does not; give the one that the "
            "accelerated model returns, or that of ssmzoo.modeling.prefill(model, input_ids)"
        )


def _record(model: Any, model_kwargs: dict[str, Any]) -> StockCache | None:
    """Let the cache be one that can be cropped; None: there shall be none.

    Raises:
        ValueError: It holds tokens, or is of a kind whose tensors we do not know.
    """
    name = given_cache(model_kwargs)
    if name is None:
        return None
    cache = model_kwargs.pop(name)
    if not isinstance(cache, StockCache):
        fresh = StockCache(model.prompt_reader.config)
        if type(cache) is not DynamicCache or cache.offloading or any(map(states_of, cache.layers)):
            raise ValueError(
                f"assisted decoding with {type(model).__name__} needs {name} of a prompt that "
                f"ssmzoo.modeling.prefill read, or none, got a {type(cache).__name__}; leave "
                f"{name} and cache_implementation out"
            )
        cache = fresh
    cache.activate_past_recording()
    model_kwargs[CACHE] = cache
    return cache
