"""The calls of an accelerated model.

Padding is packing here: a sequence of its own, over which a row's state neither moves nor decays,
as it would in the stock code, which only lets padding add nothing. Where a call is padded, starts
from a state adapter, or goes on with several tokens that a stock scan cannot continue, its mixers
get their states apart from transformers' cache, and their final states are written into it after
the call; transformers' attention uses it as ever.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from ssmzoo.modeling.cache import refuse_pieces, refuse_reentrant_checkpointing
from ssmzoo.modeling.cache_identity import STATE_ADAPTER, require_same_start
from ssmzoo.modeling.compat import CACHE, cache_name, is_checkpointing, renamed_cache
from ssmzoo.modeling.packing import Sequences
from ssmzoo.modeling.sequence_parallel import require_shifted
from ssmzoo.modeling.state_passing import CutRows
from ssmzoo.modeling.stock.blocks import read_together
from ssmzoo.modeling.stock.cache import (
    CONV_STATE,
    SCAN_STATE,
    StockCache,
    StockSequenceParallelCache,
    dynamic_cache,
    new_cache,
    states_of,
)
from ssmzoo.modeling.stock.calls import call, mixers_with
from ssmzoo.modeling.stock.functions import STARTED
from ssmzoo.modeling.stock.known import functions_of, unknown
from ssmzoo.modeling.stock.mixer_states import StartingStates, mixer_states
from ssmzoo.modeling.stock.mixers import MixerCalls
from ssmzoo.modeling.stock.packed_calls import (
    dtype_of,
    inputs_of,
    packed_call,
    padding_of,
    positions,
)


class ModelCalls:
    """The calls of an accelerated model, and its methods for caches and adapters.

    Attributes:
        argument_names: Those of the stock forward, in order.
        cache_argument: The one of the cache.
        counts_positions: Whether a token's position is an input.
        restarts_positions: Whether the stock forward counts positions from 0 in every call,
            whatever its cache has seen.
    """

    stock_class: Any
    argument_names: tuple[str, ...]
    cache_argument: str
    counts_positions: bool
    restarts_positions: bool
    cache_class = StockCache

    @property
    def recurrent_backbone(self: Any) -> Any:
        """The model around the layers, without head, that this one is or holds."""
        for module in self.children():
            if isinstance(module, ModelCalls):
                return module.recurrent_backbone
        return self

    def read_any(self: Any, given: dict[str, Any]) -> Any:
        """Run a forward pass with these arguments, whatever the cache is called among them."""
        asked = renamed_cache(given, self.cache_argument)
        cache = given.get(self.cache_argument)
        if isinstance(cache, StockSequenceParallelCache):
            output = self._read_piece(given)
        else:
            packing, given = packed_call(self, cache, given)
            if packing is None:
                output = self._read(given)
            else:
                with mixers_with(packing, call.passing):
                    output = self._read(given)
        # an output's class may have both names
        if asked and isinstance(output, ModelOutput) and not hasattr(type(output), asked):
            output[asked] = output.get(self.cache_argument)
        return output

    def _read_piece(self: Any, given: dict[str, Any]) -> Any:
        """Read a piece of a row that lies on several processes."""
        cache: StockSequenceParallelCache = given[self.cache_argument]
        tokens = _check_piece(self, cache, given)
        with mixers_with(None, cache.passing):
            output = self.read_any(given | {self.cache_argument: None, "use_cache": False})
        cache.take(tokens)
        if isinstance(output, ModelOutput):
            output[self.cache_argument] = cache
        return output

    def _read(self: Any, given: dict[str, Any]) -> Any:
        """Read rows, in which mixers keep packed sequences apart."""
        if self.recurrent_backbone is not self:
            return self.stock_class.forward(self, **given)
        cache = given.get(self.cache_argument)
        if isinstance(cache, StockCache):
            cache.read_again(self)
        elif self._modules.get(STATE_ADAPTER) is None:
            require_same_start(getattr(cache, "adapter", None), None)
        if call.packing is None and call.passing is None:
            given = self._placed(cache, given)
        inputs = inputs_of(given)
        if inputs is None:
            return self._layers(given)  # the stock code names the missing input
        packing = call.packing
        padded = packing is None and (packing := padding_of(given, inputs)) is not None
        if self._starts_apart(given, padded):
            return self._read_apart(given, packing)
        return self._through_cache(given)

    def _layers(self: Any, given: dict[str, Any]) -> Any:
        """Run the stock forward; send on states that belong to another process."""
        if torch.compiler.is_compiling():
            output = self.stock_class.forward(self, **given)  # which somebody may replace
        else:
            output = read_together(self, given)
        if call.passing is None:
            return output
        hidden_states = call.passing.close(output[0])
        if isinstance(output, tuple):
            return hidden_states, *output[1:]
        output.last_hidden_state = hidden_states
        return output

    def _through_cache(self: Any, given: dict[str, Any]) -> Any:
        cache = given.get(self.cache_argument)
        if isinstance(cache, StockCache):
            return cache.run(self, functools.partial(self._layers, given), given)
        return self._layers(given)

    def _placed(self: Any, cache: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Return a call's arguments, with positions and a cache where these would not count."""
        inputs = inputs_of(given)
        names = self.argument_names
        if "position_ids" in names and given.get("position_ids") is None and inputs is not None:
            seen = 0 if cache is None else cache.get_seq_length()
            places = positions(given, seen)
            if places is None and self.restarts_positions and cache is not None:
                places = torch.arange(seen, seen + inputs.shape[1], device=inputs.device)[None]
            given["position_ids"] = places
        if cache is None and not torch.compiler.is_compiling() and returns_cache(self, given):
            counts = new_cache(self.config)
            if isinstance(counts, StockCache):
                given[self.cache_argument] = counts
        return given

    def _starts_apart(self: Any, given: dict[str, Any], padded: bool) -> bool:
        """Return whether a call's mixers must get their states apart from transformers' cache.

        Raises:
            ValueError: The cache began from another state adapter.
        """
        cache = given.get(self.cache_argument)
        adapter = self._modules.get(STATE_ADAPTER) if call.passing is None else None
        several = cache is not None and inputs_of(given).shape[1] > 1
        if adapter is None:
            return padded or (several and self._scans_on(cache))
        if not _holds_states(cache):
            return True
        if not isinstance(cache, StockCache) and getattr(cache, "adapter", None) is not adapter:
            require_same_start(getattr(cache, "adapter", None), adapter)
        return padded or (several and self._scans_on(cache))

    def _scans_on(self: Any, cache: Any) -> bool:
        """Return whether tokens behind a cache meet a scan that stock code would start anew."""
        if call.passing is not None or not _holds_states(cache):
            return False
        mixers = (m for m in self.modules() if isinstance(m, MixerCalls))
        return any("mamba_selective_scan" in mixer.functions for mixer in mixers)

    def _read_apart(self: Any, given: dict[str, Any], packing: Sequences | None) -> Any:
        """Read with mixers whose states come from an adapter, or out of the cache.

        Raises:
            ValueError: Gradients would be lost.
        """
        name, cache = self.cache_argument, given.get(self.cache_argument)
        adapter = self._modules.get(STATE_ADAPTER) if call.passing is None else None
        begins = adapter is not None and not _holds_states(cache)
        trains = self.training and torch.is_grad_enabled()
        if begins and trains:
            refuse_reentrant_checkpointing(self.modules())
        if cache is None and call.passing is None and returns_cache(self, given):
            cache = new_cache(self.config)
            given |= {name: cache, "use_cache": True}
        if begins:
            rows = len(inputs_of(given)) if packing is None else packing.sequences
            initial = cast(Any, adapter)(rows, dtype_of(self))
        elif cache is None or (
            # whose layers drop transformers' caches, and ours refuses
            trains and is_checkpointing(self) and not isinstance(cache, StockCache)
        ):
            with mixers_with(packing, call.passing):
                return self._layers(given)
        else:
            held = enumerate(map(states_of, cache.layers))
            initial = {i: mixer_states(states) for i, states in held if SCAN_STATE in states}
        states = StartingStates(initial)
        with mixers_with(packing, states):
            output = self._through_cache(given)
        if cache is not None:
            states.leave(cache, adapter)
            if adapter is not None:
                cast(Any, cache).adapter = adapter
        return output

    def sequence_cache(
        self: Any, group: dist.ProcessGroup | None, rows: CutRows | None
    ) -> StockSequenceParallelCache:
        """See :func:`ssmzoo.modeling.sequence_cache`."""
        name, mixers = type(self).__name__, 0
        for path, module in self.named_modules():
            if isinstance(module, MixerCalls):
                mixers += 1
            elif functions_of(type(module)):
                raise ValueError(
                    "sequence parallelism passes states of layers on ssmzoo's kernels, and "
                    f"{path} of {name} stays stock: {unknown(type(module))}"
                )
        layers = dynamic_cache(self.config).layers
        kinds = [type(layer).__name__ for layer in layers if type(layer).__name__ != "DummyLayer"]
        if kinds != ["LinearAttentionLayer"] * mixers:
            strange = sorted({*kinds} - {"LinearAttentionLayer"}) or ["LinearAttentionLayer"]
            raise ValueError(
                f"sequence parallelism passes states of a fixed size, and {name} has layers "
                f"besides the {mixers} on ssmzoo's kernels that attend to tokens (their caches are "
                f"{', '.join(strange)}); take a model without such layers"
            )
        return StockSequenceParallelCache(self.config, group, rows)

    def startable_states(self: Any, index: int, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return those of a layer's states that a state adapter holds, as its mixer takes them.

        Raises:
            ValueError: The layer's states do not go through one convolution and one scan of ours.
        """
        states = {name: state for name, state in states.items() if name not in ("keys", "values")}
        if not states:
            return {}
        mixers = [m for m in self.modules() if getattr(m, "layer_idx", None) == index]
        served = [mixer for mixer in mixers if isinstance(mixer, MixerCalls)]
        starts = any(mixer.functions & STARTED for mixer in served)
        by_head = any(mixer.scans_by_head for mixer in served)
        if states.keys() != {CONV_STATE, SCAN_STATE} or not starts or by_head:
            raise ValueError(
                "a state adapter starts layers that have one convolution and one scan on ssmzoo's "
                f"kernels, and layer {index} of {type(self).__name__} has others; take LoRA for "
                "this model"
            )
        return mixer_states(states)


def model_body(stock: type[PreTrainedModel]) -> dict[str, Any]:
    """Return the attributes of the subclass of a model's class; see :class:`ModelCalls`."""
    names = tuple(inspect.signature(stock.forward).parameters)[1:]
    used = inspect.unwrap(cast(Any, stock.forward)).__code__.co_names

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        if len(given) < len(args) or given.keys() & kwargs.keys():
            return stock.forward(self, *args, **kwargs)  # which names the wrong argument
        given |= kwargs
        if torch.compiler.is_compiling() or call.checked_code is not None:
            return self.read_any(given)
        call.checked_code = {}  # each layer's code is checked once a call
        try:
            return self.read_any(given)
        finally:
            call.checked_code = None

    return {
        "forward": forward,
        "argument_names": names,
        "cache_argument": cache_name(names) or CACHE,
        "counts_positions": "position_ids" in names,
        "restarts_positions": "arange" in used and "get_seq_length" not in used,
    }


def returns_cache(model: Any, given: Mapping[str, Any]) -> bool:
    """Return whether a call without a cache makes one, as transformers decides it."""
    if model.training and is_checkpointing(model):
        return False
    use = given.get("use_cache")
    return bool(model.config.use_cache and not model.training if use is None else use)


def _holds_states(cache: Any) -> bool:
    """Return whether a cache holds the state of a scan."""
    return cache is not None and any(SCAN_STATE in states_of(layer) for layer in cache.layers)


def _check_piece(model: Any, cache: StockSequenceParallelCache, given: dict[str, Any]) -> int:
    """Return how many tokens a row a call reads as its piece; fail if it cannot be a piece."""
    backbone = model.recurrent_backbone
    if STATE_ADAPTER in backbone._modules:
        refuse_pieces()
    routes = given.get("output_router_logits")
    if getattr(backbone.config, "output_router_logits", False) if routes is None else routes:
        raise ValueError(
            "output_router_logits must be False where a row lies on several processes: the loss "
            "that balances experts is of all tokens"
        )
    require_shifted(given.get("labels"), given.get("shift_labels"))
    if model.training and torch.is_grad_enabled():
        refuse_reentrant_checkpointing(model.modules())
    batch, tokens = inputs_of(given).shape[:2]
    cache.check(backbone.config, batch)
    return tokens
