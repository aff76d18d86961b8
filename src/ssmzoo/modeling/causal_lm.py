"""The language-model head, with generation."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from ssmzoo.modeling.backbone import SSMModel
from ssmzoo.modeling.cache import RecurrentCache, StateCache, check_kind
from ssmzoo.modeling.compat import CACHE, CausalLMOutputWithPast, renamed_cache
from ssmzoo.modeling.configuration import SSMConfig
from ssmzoo.modeling.head import SSMHead, names_inputs
from ssmzoo.modeling.layers import Linear
from ssmzoo.modeling.losses import next_token_loss
from ssmzoo.modeling.packing import without_holes
from ssmzoo.modeling.prompt import PromptState, prefill
from ssmzoo.modeling.quantized_cache import QuantizedStateCache
from ssmzoo.modeling.sequence_parallel import SequenceParallelCache, require_shifted
from ssmzoo.modeling.static_cache import StaticStateCache

_LOGGER = logging.get_logger("ssmzoo")

# arguments of `generate` in a plain decoding step
_STEP_ARGUMENTS = frozenset(
    {"next_sequence_length", "use_cache", "logits_to_keep", "position_ids", "attention_mask"}
)


class SSMForCausalLM(SSMHead, GenerationMixin):
    """A backbone and a language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    accepts_loss_kwargs = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Tell Trainer, which shifts smoothed labels only for the classes that it knows by name."""
        super().__init_subclass__(**kwargs)
        if cls.config_class is not None:
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(cls.config_class.model_type, cls.__name__)

    def __init__(self, config: SSMConfig) -> None:
        takes = "continuous values" if config.image_size is None else "images"
        if config.input_channels is not None or config.image_size is not None or not config.causal:
            why = "is bidirectional" if not config.causal else f"takes {takes}"
            raise ValueError(
                f"{type(self).__name__} predicts the next token, but its configuration "
                f"{why}; use a classification head, or change the configuration"
            )
        super().__init__(config)
        self.vocab_size = config.vocab_size
        self.lm_head = self.make_head(config)
        self.post_init()

    @property
    def recurrent_backbone(self) -> SSMModel:
        """The module that reads tokens and makes caches."""
        return self.model

    def make_head(self, config: Any) -> nn.Module:
        """Return the map from ``[B, L, D]`` to logits ``[B, L, V]``; a family may have another.

        Its ``weight [V, D]`` is the embedding's where the configuration ties the two.
        """
        return Linear(config.hidden_size, config.vocab_size, bias=False)

    @names_inputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool | None = None,
        **inputs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Predict the next token at every position.

        Args:
            input_ids: Token ids ``[B, L]``; or give ``inputs_embeds``.
            attention_mask: 1 for tokens, 0 for padding.
            labels: ``[B, L]``, the tokens themselves; the shift happens inside, -100 does not
                count (padding does, unless it has that label), and no token is predicted across the
                boundary of packed sequences.
            return_dict: Return an output object (default) or a tuple.
            logits_to_keep: Only the last so many positions get logits (0: all), or these indices.
            skip_logits: In training, return a loss and no logits, of which only few exist at a
                time; None: as ``config.skip_logits`` says.
            **inputs: Other arguments of :meth:`SSMModel.forward`. For the loss
                ``shift_labels [B, L]``, the token after each position, or -100, taken as they are
                in place of ``labels``; and ``num_items_in_batch``, the tokens that Trainer counts
                in a step. This call's share of sequences' first tokens, which nothing predicts, is
                subtracted from it: exact if all calls of the step have the same share.

        Returns:
            ``loss`` (mean cross-entropy in nats), ``logits [B, L, V]`` or None, ``cache``.
        """
        inputs["input_ids"] = input_ids
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask
        items = inputs.pop("num_items_in_batch", None)
        # not in the signature: Trainer takes the loss of an evaluated batch only if it holds every
        # argument with "label" in its name
        shift_labels: Tensor | None = inputs.pop("shift_labels", None)
        if labels is not None and shift_labels is None:
            renamed_cache(inputs)
            if isinstance(inputs.get(CACHE), SequenceParallelCache):
                require_shifted(labels, shift_labels)
        outputs, packing = self.read(inputs)
        hidden_states = outputs.last_hidden_state
        if not isinstance(logits_to_keep, int):
            hidden_states = hidden_states[:, logits_to_keep]
        elif logits_to_keep:
            hidden_states = hidden_states[:, -logits_to_keep:]
        asked = labels is not None or shift_labels is not None
        skips = self.config.skip_logits if skip_logits is None else skip_logits
        skips = skips and asked and self.training
        logits = None if skips else self.lm_head(hidden_states)
        loss = None
        if asked:
            values = hidden_states if logits is None else logits
            every = isinstance(logits_to_keep, int) and not logits_to_keep
            for name, targets in (("labels", labels), ("shift_labels", shift_labels)):
                if targets is not None:
                    _check_targets(name, targets, values, every)
            head = self.lm_head if logits is None else None
            loss = next_token_loss(self, values, labels, shift_labels, packing, items, head=head)
        kept: dict[str, Any] = {CACHE: getattr(outputs, CACHE)}
        return self.answer(
            CausalLMOutputWithPast, outputs, return_dict, loss=loss, logits=logits, **kept
        )

    def prefill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: StateCache | None = None,
        *,
        past_key_values: StateCache | None = None,
        chunk_size: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> PromptState:
        """See :func:`ssmzoo.modeling.prefill`."""
        return prefill(
            self,
            input_ids,
            attention_mask,
            cache,
            past_key_values=past_key_values,
            chunk_size=chunk_size,
            group=group,
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool = False,
        cache: StateCache | None = None,
        past_key_values: StateCache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Drop the inputs that are already in the state.

        ``generate`` accepts embeddings, and a cache for a family whose ``forward`` does not name
        it, only from a model whose signature here names them.
        """
        kwargs.pop("tokenizer", None)  # of stop strings, which generate hands on
        given = past_key_values if cache is None else cache
        one = kwargs.get("next_sequence_length") == 1 and given is not None
        if one and not is_first_iteration and kwargs.keys() <= _STEP_ARGUMENTS:
            # a plain decoding step, by far the most frequent call
            token = input_ids[:, -1:]
            if isinstance(given, StaticStateCache):  # a graph is for strides that do not change
                token = token.clone(memory_format=torch.contiguous_format)
            return {
                "input_ids": token,
                CACHE: given,
                "use_cache": kwargs.get("use_cache"),
                "logits_to_keep": kwargs.get("logits_to_keep") or 0,
            }
        if given is not None:
            kwargs[CACHE] = given
        if is_first_iteration and given is not None and given.input_holds_seen:
            given.input_holds_seen = False
            kwargs["next_sequence_length"] = input_ids.shape[1] - given.seen_tokens
        kwargs |= {"inputs_embeds": inputs_embeds, "is_first_iteration": is_first_iteration}
        prepare = super().prepare_inputs_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        inputs = prepare(input_ids, **kwargs)
        inputs.pop("position_ids", None)
        tokens = inputs.get("input_ids")
        if tokens is not None and tokens.shape[1] == 1 and not is_first_iteration:
            inputs.pop("attention_mask", None)
        return inputs

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``generate_batch`` and servers answer by: ``ssmzoo.modeling.batching``.

        Raises:
            ValueError: The model cannot generate.
        """
        from ssmzoo.modeling.batching.manager import StateManager

        return StateManager.of(self, *args, **kwargs)

    def create_masks_for_generate(self, attention_mask: Tensor | None, **_: Any) -> Tensor | None:
        """Return the mask as it is, where transformers would make one for attention."""
        return attention_mask

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Check the arguments of ``generate`` before it begins, and set the cache it must use."""
        if self.config.token_inputs:
            names = " and ".join(self.config.token_inputs)
            raise ValueError(
                f"{type(self).__name__} cannot generate: it needs {names} of every token, and a "
                "new token has none; call it on whole sequences"
            )
        renamed_cache(kwargs)
        check_kind(kwargs.get(CACHE))
        # as transformers does: an argument first, then the given configuration, then the model's
        places = kwargs, vars(generation_config or self.generation_config)
        places = *places, vars(self.generation_config)
        kind, early = (
            next((place[name] for place in places if place.get(name) is not None), None)
            for name in ("cache_implementation", "assistant_early_exit")
        )
        if kind == "paged":
            raise ValueError(
                "cache_implementation must be left out, got 'paged', which is for attention's "
                f"keys and values; the state of {type(self).__name__} has a fixed size"
            )
        layers = self.config.num_hidden_layers
        if early is not None and not (type(early) is int and 1 <= early <= layers):
            raise ValueError(
                f"assistant_early_exit must be a number of layers from 1 to {layers}, got {early!r}"
            )
        prepare = super()._prepare_generation_config  # pyright: ignore[reportAttributeAccessIssue]
        prepared, model_kwargs = prepare(generation_config, **kwargs)
        if kind == "quantized" and prepared.cache_config is not None:
            raise ValueError(
                "cache_config must be left out beside cache_implementation='quantized', which "
                f"always has 12 bits, got {prepared.cache_config!r}"
            )
        if kind not in (None, "static", "quantized"):
            _LOGGER.warning_once(
                f"cache_implementation={kind!r} changes nothing: the state of "
                f"{type(self).__name__} has no kind but 'static' and 'quantized' beside its own"
            )
            prepared.cache_implementation = None
        if prepared.is_assistant:  # or the model's own setting would call for an assistant again
            prepared.assistant_early_exit = None
        return prepared, model_kwargs

    def _prepare_attention_mask_for_generation(
        self, inputs_tensor: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> Tensor:
        """Find padding around a prompt, but not in an assistant's input.

        For an assistant transformers leaves the mask out if nothing is padded, and a pad token in
        its input is one that the model chose.
        """
        if generation_config.is_assistant:
            return inputs_tensor.new_ones(inputs_tensor.shape[:2], dtype=torch.long)
        prepare = super()._prepare_attention_mask_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        return without_holes(prepare(inputs_tensor, generation_config, model_kwargs))

    def _assisted_decoding(
        self, input_ids: Tensor, *args: Any, generation_config: Any, **kwargs: Any
    ) -> Any:
        """Decode with an assistant, also from a given state, and tidy up however it ends.

        The configuration gets its number of layers back, and the state records no more calls.
        """
        generation_config.cache_implementation = None  # transformers refuses its own static caches
        layers = self.config.num_hidden_layers
        if len(self.model.layers) == layers:  # fewer may propose tokens
            self.model.layers_built = layers
        decode = functools.partial(
            super()._assisted_decoding,  # pyright: ignore[reportAttributeAccessIssue]
            *(input_ids, *args),
            generation_config=generation_config,
            **kwargs,
        )
        try:
            return decode_assisted(decode, self.model, input_ids, generation_config, kwargs)
        finally:
            self.config.num_hidden_layers = layers

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Give ``generate`` our cache; transformers' own would not count the tokens."""
        given = model_kwargs.get(CACHE)
        asked = generation_config.cache_implementation
        kind = {"static": StaticStateCache, "quantized": QuantizedStateCache}.get(asked, StateCache)
        # a prompt's lookup proposes past the end, at most after all tokens but the last two
        most = max_cache_length + max((generation_config.prompt_lookup_num_tokens or 0) - 1, 0)
        if given is not None:
            if not isinstance(given, kind):
                raise ValueError(
                    f"cache_implementation={asked!r} needs a {kind.__name__} as cache, "
                    f"or none, got a {type(given).__name__}; leave one of the two out, or load a "
                    f"saved state by {kind.__name__}.load"
                )
            room = given.max_cache_len
            if room is not None and room < most:
                raise ValueError(
                    f"cache has room for max_cache_len = {room} tokens, and generate may "
                    f"read {most}; make it with a longer max_cache_len"
                )
            model_kwargs[CACHE] = given_state(given, generation_config, model_kwargs, batch_size)
        elif generation_config.use_cache is not False:
            static = kind is StaticStateCache
            model_kwargs[CACHE] = (
                self._static_cache(generation_config, most) if static else kind(self.config)
            )
            if generation_config.is_assistant:  # its proposals may be taken back
                model_kwargs[CACHE].activate_past_recording()

    def _static_cache(self, generation_config: Any, most: int) -> StaticStateCache:
        asked = getattr(generation_config, "max_cache_len", None)
        if self.config.state_grows:
            return StaticStateCache(self.config, max(most, asked or 0))
        if asked is not None:
            _LOGGER.warning_once(
                f"max_cache_len={asked} changes nothing: the state of {type(self).__name__} has "
                "one size after any number of tokens"
            )
        return StaticStateCache(self.config)


def prompt_length(generation_config: Any, model_kwargs: Mapping[str, Any]) -> int | None:
    """Return how many tokens a prompt has, also where only those behind a given state came.

    ``generate`` drops a mask that is all ones and keeps its length.
    """
    mask = model_kwargs.get("attention_mask")
    return getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]


def decode_assisted(
    decode: Callable[[], Any],
    backbone: nn.Module,
    input_ids: Tensor,
    generation_config: Any,
    model_kwargs: Mapping[str, Any],
) -> Any:
    """Run transformers' assisted decoding, which takes proposed tokens back from the cache.

    Args:
        decode: Runs it.
        backbone: The module that reads the accepted tokens of the last proposals again.
        input_ids: The tokens so far.
        generation_config: The settings of ``generate``.
        model_kwargs: The arguments of the model's calls, with the cache as :data:`CACHE`.
    """
    cache: Any = model_kwargs.get(CACHE)
    if cache is None:
        return decode()  # transformers refuses it
    length = prompt_length(generation_config, model_kwargs)
    # transformers ignores tokens that a given state has seen as it adds candidates to a first call
    cache.input_holds_seen = bool(cache.seen_tokens) and length == input_ids.shape[1]
    try:
        output = decode()
    finally:
        cache.input_holds_seen = False
        cache.deactivate_past_recording()
    if generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False):
        cache.read_again(backbone)  # it outlives the call, and may be saved or get other rows
    return output


def given_state(
    given: RecurrentCache, generation_config: Any, model_kwargs: dict[str, Any], batch_size: int
) -> RecurrentCache:
    """Return the state that ``generate`` goes on from: the given one, or a copy with a row a beam.

    Raises:
        ValueError: It has seen all tokens of the prompt already, or the new ones would be read in
            chunks by a transformers that reads those before them again.
    """
    length = prompt_length(generation_config, model_kwargs)
    if length is not None and length <= given.get_seq_length():
        raise ValueError(
            f"cache has seen {given.get_seq_length()} tokens, and input_ids (or "
            "attention_mask, where they are the new ones alone) must have more, got "
            f"{length}; ssmzoo.modeling.prefill keeps a prompt that generate can go on from"
        )
    chunk = generation_config.prefill_chunk_size
    if chunk is not None and CACHE != "cache" and given.get_seq_length():
        raise ValueError(
            f"prefill_chunk_size must be left out beside a cache before transformers 5.24, got "
            f"{chunk}; call generate(**ssmzoo.modeling.prefill(model, input_ids, cache=cache, "
            f"chunk_size={chunk}).inputs())"
        )
    expanded = max(generation_config.num_beams, generation_config.num_return_sequences)
    if expanded > 1 and given.batch_size == batch_size:  # as the prompt's rows were
        given = copy.deepcopy(given)
        given.batch_repeat_interleave(expanded)
    given._is_user_defined = True  # pyright: ignore[reportAttributeAccessIssue]
    return given


def _check_targets(name: str, targets: Tensor, values: Tensor, every: bool) -> None:
    """Fail unless there is a target for each position, of which all have logits."""
    if targets.dim() != 2:
        raise ValueError(f"{name} must have shape [B, L], got {list(targets.shape)}")
    if values.shape[1] != targets.shape[1]:
        if not every:
            raise ValueError(f"{name} need all logits; leave logits_to_keep at 0")
        wanted, got = list(values.shape[:2]), list(targets.shape)
        raise ValueError(f"{name} must have shape [B, L] = {wanted}, got {got}")
