"""Embedding, residual blocks and final norm: a model without head.

What surprises: a batch with padding, or with several sequences in a row, is laid out as one flat
row ``[1, B * L]`` with ``cu_seqlens`` for the mixers, and folded back at the end.

Dimensions: B batch, L length, D hidden, E inner, N state, K conv width, S sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from ssmzoo.modeling.block import SSMBlock
from ssmzoo.modeling.cache import (
    StateCache,
    check_kind,
    refuse_pieces,
    refuse_reentrant_checkpointing,
)
from ssmzoo.modeling.cache_identity import STATE_ADAPTER
from ssmzoo.modeling.compat import CACHE, BaseModelOutputWithPast, one_cache
from ssmzoo.modeling.configuration import SSMConfig
from ssmzoo.modeling.decoding import decoding_of, is_token
from ssmzoo.modeling.dynamics import Trajectories
from ssmzoo.modeling.forward_code import ForwardCode
from ssmzoo.modeling.images import ImageEmbedding
from ssmzoo.modeling.inputs import (
    check_indices,
    one_input,
    refuse_unknown,
    take_sequences,
    take_steps,
)
from ssmzoo.modeling.joined import JoinedBlocks, joined_blocks
from ssmzoo.modeling.layer_state import LayerState
from ssmzoo.modeling.layers import Dropout, Linear
from ssmzoo.modeling.mixer import SSMMixer
from ssmzoo.modeling.norms import BatchNorm, make_norm
from ssmzoo.modeling.packing import Sequences, flip_steps
from ssmzoo.modeling.pretrained import SSMPreTrainedModel
from ssmzoo.modeling.quantized_cache import QuantizedStateCache
from ssmzoo.modeling.sequence_parallel import PassingCache, SequenceParallelCache
from ssmzoo.modeling.state_passing import CutRows


class SSMModel(SSMPreTrainedModel):
    """Embedding, blocks, final norm. A family's subclass names its ``mixer_class``.

    With ``config.input_channels`` continuous values come in through ``embed_values``, with
    ``config.image_size`` images through ``embed_images``, and there is no ``embed_tokens``.
    """

    mixer_class: type[SSMMixer]
    # for ``prefill``: what its states are kept in, and whether a token's position is an input
    cache_class = StateCache
    counts_positions = False

    def __init__(self, config: SSMConfig) -> None:
        super().__init__(config)
        self.causal = config.causal
        self.token_inputs = config.token_inputs
        if config.image_size is not None:
            self.embed_images = ImageEmbedding(config)
        elif config.input_channels is None:
            self.embed_tokens = self.make_embedding(config)
        else:
            self.embed_values = Linear(config.input_channels, config.hidden_size)
        self.dropout = Dropout(config.embedding_dropout, config.tie_dropout)
        kinds = [self.kind_of_layer(config, index) for index in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(
            SSMBlock(config, kind.mixer_class(own, index))
            for index, (kind, own) in enumerate(kinds)
        )
        self.layers_built = len(self.layers)
        self.norm = make_norm(config) if config.prenorm else None
        self.gradient_checkpointing = False
        self.post_init()
        self._tp_plan = self._split_parts()

    @classmethod
    def kind_of_layer(cls, config: Any, index: int) -> tuple[type[SSMModel], Any]:
        """Return the backbone whose mixer a layer has, and its configuration.

        A family whose layers are of other families overrides this.
        """
        return cls, config

    @classmethod
    def without_layers(cls, config: Any) -> Any:
        """Return a model without modules, whose ``_init_weights`` draws mixers alone."""
        model = cls.__new__(cls)
        PreTrainedModel.__init__(model, config)  # its own would make embedding and blocks
        return model

    def _split_parts(self) -> dict[str, str]:
        """Tell transformers what tensor parallelism splits: embedding and MLPs, but no mixer."""
        config, plan = self.config, {}
        if hasattr(self, "embed_tokens"):
            plan["embed_tokens"] = "embedding_rowwise"
        if config.intermediate_size is not None:
            columns = ("gate_proj", "up_proj") if config.mlp_type == "swiglu" else ("up_proj",)
            plan |= {f"layers.*.mlp.{name}": "colwise" for name in columns}
            plan["layers.*.mlp.down_proj"] = "rowwise"
        return plan

    def sequence_cache(
        self, group: dist.ProcessGroup | None, rows: CutRows | None
    ) -> SequenceParallelCache:
        """See :func:`ssmzoo.modeling.sequence_cache`."""
        return SequenceParallelCache(self.config, group, rows=rows)

    def make_embedding(self, config: Any) -> nn.Embedding:
        """Return the token embedding; a family with another one overrides this."""
        return nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        input_values: Tensor | None = None,
        packing: Sequences | None = None,
        pixel_values: Tensor | None = None,
        past_key_values: StateCache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Run the backbone over tokens or values.

        Args:
            input_ids: Token ids ``[B, L]``; or give ``inputs_embeds``.
            attention_mask: 1 for tokens, 0 for padding, ``[B, L]`` or, with a cache,
                ``[B, past + L]``. Padding before, after or between a row's tokens does not change
                what comes out at them.
            position_ids: ``[B, L]``; only used to find packed sequences: one begins where positions
                do not go up by one, as in batches of transformers' flattening collator. A cache's
                sequence goes on with the first token, whatever its position.
            cache: The cache to go on from; updated in place.
            inputs_embeds: ``[B, L, D]`` instead of ``input_ids``.
            use_cache: Return a cache. Default: the configuration's, but never while training or for
                packed batches.
            output_hidden_states: Also return the input of every block and the final output.
            return_dict: Return an output object (default) or a tuple.
            cu_seqlens: Boundaries of sequences packed into one row (B = 1), ``[S + 1]``; a cache
                then has a row per sequence.
            cu_seq_lens_q: The collator's name for ``cu_seqlens``.
            seq_idx: ``[B, L]`` number of the sequence each token belongs to.
            input_values: Continuous inputs ``[B, L, C]``, or ``[B, L]`` for one channel, of a model
                with ``input_channels``.
            packing: Where sequences lie, instead of mask, positions and boundaries; heads need it,
                too, and find it before the call.
            pixel_values: Images ``[B, C, H, W]`` of a model with ``image_size``; L is one more than
                an image has patches.
            past_key_values: The name of ``cache`` before transformers 5.24.
            **kwargs: What ``config.token_inputs`` names, and what transformers' own collators and
                trainer add.

        Raises:
            ValueError: Inputs that contradict each other or do not fit the cache.
            TypeError: An argument this model does not have.
        """
        if past_key_values is not None:
            cache = one_cache(cache, past_key_values)
        config = self.config
        if output_hidden_states is None:
            output_hidden_states = bool(config.output_hidden_states)
        if return_dict is None:
            return_dict = config.return_dict
        hidden_states = self._embed(input_ids, inputs_embeds, input_values, pixel_values)
        batch, length = hidden_states.shape[:2]
        plain = attention_mask is None and position_ids is None and seq_idx is None
        if packing is None and not (plain and cu_seqlens is None and cu_seq_lens_q is None):
            told = {"inputs_embeds": hidden_states, CACHE: cache, "attention_mask": attention_mask}
            told |= {"position_ids": position_ids, "seq_idx": seq_idx}
            packing = take_sequences(
                {**told, "cu_seqlens": cu_seqlens, "cu_seq_lens_q": cu_seq_lens_q}
            )
        steps: dict[str, Tensor] = {}
        if self.token_inputs:
            steps = take_steps(self.token_inputs, kwargs, packing, batch, length)
        if kwargs:
            refuse_unknown(kwargs, SSMModel.forward, self.token_inputs)
        # rows of the cache are the sequences: of a padded batch its rows, as without padding
        packed = None if packing is None or packing.padded else packing
        sequences = batch if packed is None else packed.sequences
        if use_cache is None:
            use_cache = cache is not None or (
                bool(config.use_cache) and not self.training and packed is None and self.causal
            )
        if use_cache or cache is not None:
            cache = self._cache(cache, use_cache, sequences, length)
        recorded = None
        if cache is not None and cache.recording:
            recorded = cache.before(hidden_states, packing, steps)
        starts = None
        if STATE_ADAPTER in self._modules:
            packing, starts = self._starts(cache, packing, sequences, hidden_states)
        states = self._states(cache, starts, steps, packing)
        hidden_states, shown = self._read(
            hidden_states, states, packing, output_hidden_states, cache
        )
        if cache is not None:
            hidden_states = cache.take(states, hidden_states)
            if starts is not None:
                cache.adapter = cast(Any, self._modules[STATE_ADAPTER])
            cache.advance(length if packed is None else packed.longest(), recorded)
        kept: dict[str, Any] = {CACHE: cache}
        output = BaseModelOutputWithPast(
            **kept, last_hidden_state=hidden_states, hidden_states=shown
        )
        return output if return_dict else output.to_tuple()

    def _embed(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        input_values: Tensor | None,
        pixel_values: Tensor | None,
    ) -> Tensor:
        """Return the embeddings ``[B, L, D]`` of the one input that was given.

        A rollback reads them again as ``inputs_embeds``: what is done to embeddings stands in
        :meth:`_read`.
        """
        if input_values is not None and input_values.dim() == 2 and self.config.input_channels == 1:
            input_values = input_values.unsqueeze(2)
        kind = one_input(
            self.config,
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            input_values=input_values,
            pixel_values=pixel_values,
        )
        if kind == "input_ids":
            assert input_ids is not None
            try:
                embeddings = self.embed_tokens(input_ids)
            except IndexError:  # of torch's, which names neither argument nor token
                check_indices("input_ids", input_ids, self.config.vocab_size)
                raise
        elif kind == "pixel_values":
            embeddings = self.embed_images(cast(Tensor, pixel_values))
        elif kind == "input_values":
            assert input_values is not None
            embeddings = self.embed_values(input_values.to(self.embed_values.weight.dtype))
        else:
            embeddings = cast(Tensor, inputs_embeds)
        if embeddings.shape[1] == 0:
            raise ValueError(
                "the input must have at least one token, got L = 0; with a cache, pass the new "
                "tokens to forward and the whole sequence (old and new) to generate"
            )
        return embeddings

    def _cache(
        self, given: StateCache | None, use_cache: bool, sequences: int, tokens: int
    ) -> StateCache:
        """Return the cache of a call: the given one, checked, or a new one."""
        if use_cache and not self.causal:
            raise ValueError(
                f"{type(self).__name__} is bidirectional and cannot have a cache: later tokens "
                "change earlier outputs; pass whole sequences with use_cache=False"
            )
        if given is None:
            return StateCache(self.config)
        if self.training and torch.is_grad_enabled():
            refuse_reentrant_checkpointing(self.layers)
        check_kind(given)
        given.check(self.config, sequences, tokens)
        adapter: Any = self._modules.get(STATE_ADAPTER)
        if given.adapter is not adapter:
            given.require_start(adapter)
        if given.pending is not None:
            given.read_again(self)
        return given

    def _starts(
        self,
        cache: StateCache | None,
        packing: Sequences | None,
        sequences: int,
        hidden_states: Tensor,
    ) -> tuple[Sequences | None, Mapping[int, Mapping[str, Tensor]] | None]:
        """Return the state adapter's states by layer, where a call begins from them.

        Mixers then read a single token as a prompt, not as a step: it is packed.
        """
        if cache is not None and cache.is_initialized:
            return packing, None
        refuse_no_start(self, cache)
        batch, length = hidden_states.shape[:2]
        if packing is None and length == 1:
            ends = torch.arange(batch + 1, device=hidden_states.device)
            packing = Sequences(ends, batch, None, 1)
        adapter: Any = self._modules[STATE_ADAPTER]
        return packing, adapter(sequences, hidden_states.dtype)

    def _states(
        self,
        cache: StateCache | None,
        starts: Mapping[int, Mapping[str, Tensor]] | None,
        steps: Mapping[str, Tensor],
        packing: Sequences | None,
    ) -> list[LayerState]:
        """Return what each layer starts from, and what all layers share."""
        # generate lowers the number for a while to propose by the first layers alone
        wanted, present = self.config.num_hidden_layers, len(self.layers._modules)
        if wanted != present and (wanted > present or present != self.layers_built):
            raise ValueError(
                f"config.num_hidden_layers must be the number of layers, {present}, got {wanted}; "
                "set it where layers are added or taken away"
            )
        shared: dict[Any, Any] = dict(steps)
        checked_code: dict[ForwardCode, bool] = {}
        if packing is not None:
            for name, given in steps.items():
                shared[name] = packing.flat(given)
        backwards = {} if self.causal else {n: flip_steps(x, packing) for n, x in shared.items()}
        room = None if cache is None else cache.max_cache_len
        states = []
        for index in range(wanted):
            initial: Mapping[str, Tensor] = {}
            if starts is not None:
                initial = starts.get(index, {})
            elif cache is not None:
                initial = cache.layers[index].states
            # some mixers look at no state unless they leave one
            keep = cache is not None or starts is not None
            states.append(
                LayerState(
                    initial,
                    keep,
                    packing,
                    room,
                    shared=shared,
                    reversed_shared=backwards,
                    checked_code=checked_code,
                )
            )
        return states

    def _read(
        self,
        hidden_states: Tensor,
        states: Sequence[LayerState],
        packing: Sequences | None,
        output_hidden_states: bool,
        cache: StateCache | None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Run blocks and final norm; also return what enters each and leaves, if asked for.

        What a model does to embeddings before its blocks comes first here.
        """
        batch, shown = hidden_states.shape[0], []
        by_layer = (SequenceParallelCache, QuantizedStateCache)
        opened = cache if isinstance(cache, by_layer) else None
        if packing is not None:
            hidden_states = packing.flat(hidden_states)
        if self.dropout.training:
            hidden_states = self.dropout(hidden_states, packing)
        joined: Mapping[int, JoinedBlocks] = {}
        one = hidden_states.shape[1] == 1 and opened is None and not output_hidden_states
        if one and is_token(self, hidden_states, packing):
            joined = joined_blocks(self, states)
        done = 0  # layers that were read together
        for index, (layer, state) in enumerate(zip(self.layers, states, strict=False)):
            if index < done:
                continue
            if (run := joined.get(index)) is not None:
                done = index + len(run.layers)
                if (y := run(hidden_states, states[index:done])) is not None:
                    hidden_states = y
                    continue
                # called one by one, and joined anew before the next token
                done, joined, decoding_of(self).joined = 0, {}, None
            if output_hidden_states:
                # the layer goes on from what is returned, so that a gradient can be retained there
                given = hidden_states if packing is None else packing.batch(hidden_states, batch)
                shown.append(given)
                hidden_states = given.view_as(given) if packing is None else packing.flat(given)
            if opened is not None:
                opened.open_layer(index, state, hidden_states)
            hidden_states = layer(hidden_states, state, packing)
            if isinstance(opened, QuantizedStateCache):
                opened.close_layer(index, state, cast(Any, layer).decaying_states)
        if isinstance(self.norm, BatchNorm) and packing is not None:
            hidden_states = self.norm(hidden_states, packing.real())
        elif self.norm is not None:
            hidden_states = self.norm(hidden_states)
        if packing is not None:
            hidden_states = packing.batch(hidden_states, batch)
        return hidden_states, (*shown, hidden_states) if output_hidden_states else None

    def startable_states(self, index: int, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of a layer's states that a state adapter holds, or counts from zero."""
        names: Any = cast(Any, self.layers[index]).startable_states
        begins = ("",) if names is None else tuple(names)
        return {name: s for name, s in states.items() if name.startswith(begins)}

    def trajectories(self, input_ids: Tensor) -> Trajectories | None:
        """Return the model's path through a plane as it reads ``[B, L]``, or None without a plane.

        ``ssmzoo inspect`` calls this without gradients, in evaluation mode, and draws the path.
        """
        return None

    def get_input_embeddings(self) -> nn.Module | None:
        """Return the token embedding, None for a model of continuous values or images."""
        return getattr(self, "embed_tokens", None)


def refuse_no_start(model: Any, cache: object) -> None:
    """Fail where a call cannot begin from a state adapter.

    Raises:
        ValueError: Its row lies on several processes, or its gradients would be lost.
    """
    if isinstance(cache, PassingCache):
        refuse_pieces()
    if model.training and torch.is_grad_enabled():
        refuse_reentrant_checkpointing(model.modules())
