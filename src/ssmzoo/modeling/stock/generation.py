"""Generation by accelerated models: going on from a state, rolling back rejected tokens.

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

from ssmzoo.modeling.causal_lm import decode_assisted, given_state
from ssmzoo.modeling.compat import CACHE, given_cache
from ssmzoo.modeling.stock.cache import StockCache, new_cache, states_of
from ssmzoo.modeling.stock.model_calls import ModelCalls


class GeneratingCalls(ModelCalls):
    """The calls of an accelerated model that generates; methods are those of GenerationMixin."""

    _is_stateful = False  # transformers' word for a cache that cannot be cropped

    def prepare_with_cache(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        """Run ``prepare_inputs_for_generation``, also behind one of our caches."""
        cache = kwargs.get(CACHE)
        if isinstance(cache, StockCache) and cache.input_holds_seen:
            cache.input_holds_seen = False
            kwargs["next_sequence_length"] = input_ids.shape[1] - cache.seen_tokens
        prepare = self.stock_class.prepare_inputs_for_generation
        inputs, mask = prepare(self, input_ids, **kwargs), kwargs.get("attention_mask")
        read = inputs.get("input_ids")
        several = read is not None and read.shape[1] > 1
        if isinstance(cache, StockCache) and several and inputs.get("attention_mask") is None:
            inputs["attention_mask"] = mask  # dropped behind a prompt's first chunk
        return inputs

    def _prepare_cache_for_generation(
        self: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Give ``generate`` a cache that counts tokens, and that assisted decoding can crop."""
        name = given_cache(model_kwargs)
        if name is not None:
            _require_count(self, name, model_kwargs[name])
        if name is not None and (name == "cache" or isinstance(model_kwargs[name], StockCache)):
            model_kwargs[CACHE] = model_kwargs.pop(name)
        given = model_kwargs.get(CACHE)
        if isinstance(given, StockCache):
            model_kwargs[CACHE] = given_state(given, generation_config, model_kwargs, batch_size)
            return
        if given is not None and CACHE not in inspect.signature(self.forward).parameters:
            raise TypeError(
                f"{CACHE} of {type(self).__name__} must be the state of a prompt that "
                f"ssmzoo.modeling.prefill read, got {type(given).__name__}; call it cache_params"
            )
        super()._prepare_cache_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        if generation_config.is_assistant:  # its proposals may be taken back
            _record(self, model_kwargs)
            return
        made = given_cache(model_kwargs) if name is None else None
        if made is not None and type(model_kwargs[made]) is DynamicCache:
            counts = new_cache(self.recurrent_backbone.config)
            if isinstance(counts, StockCache):
                del model_kwargs[made]
                model_kwargs[CACHE] = counts

    def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what ``generate_batch`` and servers answer by: ``ssmzoo.modeling.batching``.

        Raises:
            ValueError: The model has attention, whose keys do not say where a row begins.
        """
        from ssmzoo.modeling.batching.manager import StateManager

        if not isinstance(new_cache(self.recurrent_backbone.config), StockCache):
            raise ValueError(
                f"{type(self).__name__} has attention, whose cache cannot join rows of different "
                "lengths; use generate, with left-padded prompts"
            )
        return StateManager.of(self, *args, **kwargs)

    def _prepare_position_ids_for_generation(
        self: Any, inputs_tensor: Tensor, model_kwargs: dict[str, Any]
    ) -> Tensor:
        """Return positions by which new tokens go on behind the last column.

        transformers calls it 0 in a padded row.
        """
        prepare = super()._prepare_position_ids_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        made, mask = prepare(inputs_tensor, model_kwargs), model_kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == made.shape:
            made = (mask.long().cumsum(-1) - 1).clamp_min(0)
        return made

    def _assisted_decoding(
        self: Any, input_ids: Tensor, *args: Any, generation_config: Any, **kwargs: Any
    ) -> Any:
        """Decode with an assistant, and a cache that can be cropped."""
        if getattr(generation_config, "assistant_early_exit", None) is not None:
            raise ValueError(
                f"assistant_early_exit must be left out for {type(self).__name__}: transformers' "
                "recurrent models do not all run on fewer layers; use prompt_lookup_num_tokens"
            )
        _record(self, kwargs)
        decode = functools.partial(
            super()._assisted_decoding,  # pyright: ignore[reportAttributeAccessIssue]
            *(input_ids, *args),
            generation_config=generation_config,
            **kwargs,
        )
        return decode_assisted(
            decode, self.recurrent_backbone, input_ids, generation_config, kwargs
        )


def generating_body(stock: type[nn.Module]) -> dict[str, Any]:
    """Return the method of the subclass whose signature depends on the class."""
    theirs: Any = stock
    stock_inputs = theirs.prepare_inputs_for_generation

    @functools.wraps(stock_inputs)
    def prepare_inputs_for_generation(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        return self.prepare_with_cache(input_ids, **kwargs)

    # generate accepts the arguments that it finds named here
    signature = inspect.signature(stock_inputs)
    named = list(signature.parameters.values())
    for name in sorted({CACHE, "cache"} - signature.parameters.keys()):
        ours = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        named.insert(len(named) - (named[-1].kind is inspect.Parameter.VAR_KEYWORD), ours)
    prepare: Any = prepare_inputs_for_generation
    prepare.__signature__ = signature.replace(parameters=named)
    return {"prepare_inputs_for_generation": prepare}


def _require_count(model: Any, name: str, cache: Any) -> None:
    """Check that a given cache of recurrent layers alone, whose tokens nobody counts, is empty.

    Raises:
        ValueError: It holds states.
    """
    if isinstance(cache, Cache) and all(cache.is_linear) and any(map(states_of, cache.layers)):
        raise ValueError(
            f"{name} must count its tokens, so that generate of {type(model).__name__} reads the "
            f"new ones alone, got a {type(cache).__name__}, which does not; give the one that the "
            "accelerated model returns, or that of ssmzoo.modeling.prefill(model, input_ids)"
        )


def _record(model: Any, model_kwargs: dict[str, Any]) -> None:
    """Replace the cache, if there is one, by one that can be cropped, and let it record.

    Raises:
        ValueError: It holds tokens, or is of a kind whose tensors we do not know.
    """
    name = given_cache(model_kwargs)
    if name is None:
        return
    cache = model_kwargs.pop(name)
    if not isinstance(cache, StockCache):
        fresh = StockCache(model.recurrent_backbone.config)
        if type(cache) is not DynamicCache or cache.offloading or any(map(states_of, cache.layers)):
            raise ValueError(
                f"assisted decoding with {type(model).__name__} needs {name} of a prompt that "
                f"ssmzoo.modeling.prefill read, or none, got a {type(cache).__name__}; leave "
                f"{name} and cache_implementation out"
            )
        cache = fresh
    cache.activate_past_recording()
    model_kwargs[CACHE] = cache
