"""Embedding, residual blocks and final norm around a family's mixer.

What surprises: a batch with padding, or with several sequences in a row, is laid out as one flat
row ``[1, B * L]`` with ``cu_seqlens`` for the mixers, and folded back at the end.

Dimensions: B batch, L length, D hidden, E inner, N state, K conv width, S sequences, V vocabulary.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ssmzoo.environment.messages import suggestion
from ssmzoo.modeling.cache import (
    StateCache,
    check_kind,
    refuse_pieces,
    refuse_reentrant_checkpointing,
)
from ssmzoo.modeling.cache_identity import STATE_ADAPTER
from ssmzoo.modeling.compat import CACHE, BaseModelOutputWithPast, one_cache
from ssmzoo.modeling.configuration import SSMConfig
from ssmzoo.modeling.decoding import is_token, token_of_layer
from ssmzoo.modeling.dynamics import Dynamics, Trajectories
from ssmzoo.modeling.forward_code import ForwardCode
from ssmzoo.modeling.images import ImageEmbedding
from ssmzoo.modeling.inputs import check_indices, given_inputs
from ssmzoo.modeling.layer_state import LayerState
from ssmzoo.modeling.layers import MLP, Dropout, DropPath, Linear, keeping_precision
from ssmzoo.modeling.module_parts import ModuleParts, State, UnservedError, is_watched
from ssmzoo.modeling.norms import (
    BatchNorm,
    LayerNorm,
    NoNorm,
    RMSNorm,
    add_and_norm,
    make_norm,
    takes_op,
)
from ssmzoo.modeling.packing import PackedRow, find_packing, flip, flip_steps
from ssmzoo.modeling.pretrained import SSMPreTrainedModel, empty_is_nan
from ssmzoo.modeling.sequence_parallel import PassingCache, SequenceParallelCache
from ssmzoo.modeling.state_passing import CutRows
from ssmzoo.modeling.static_cache import StaticStateCache
from ssmzoo_kernels.token_step import Program, Value

# what transformers' collators and trainer hand to every model, and a recurrent one has no use for
_IGNORED = frozenset(
    {"cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch", "token_type_ids"}
)


_NOTHING = None, None
_Norm: TypeAlias = RMSNorm | LayerNorm | BatchNorm | NoNorm


class _NaNUntilDrawn(type):
    """Fill what a mixer makes by ``torch.empty`` with NaN: one that no model draws must be seen."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        with empty_is_nan():
            return super().__call__(*args, **kwargs)


class SSMMixer(nn.Module, metaclass=_NaNUntilDrawn):
    """Base class of a family's mixer: ``[B, L, D] -> [B, L, D]`` with a state.

    Parameters that belong to the mixer itself, not to a submodule of it, are SSM parameters: they
    are float32 at least, and no cast to a lower precision (``.to(bfloat16)``, ``.half()``, loading
    in bfloat16) touches them. What a mixer makes by ``torch.empty`` is NaN until a model draws it.

    Attributes:
        param_group_names: Maps a parameter's name to its optimizer group. Parameters in these
            groups have no weight decay unless their group is given one, and may have a learning
            rate of their own.
        param_branch: The group that all other parameters of it and its submodules belong to; if it
            is given no weight decay, their matrices decay as usual.
        reads_residual: Whether :meth:`forward` and :meth:`write_token` also get the block's input
            before the norm, as ``residual``.
        reads_both_ways: Whether :meth:`forward` itself reads in all of ``config.directions``; if
            not, the block also runs the mixer, or a second one, on the reversed sequence.
        written_in_place: The states that a step may write over, where no earlier token's are read.
        startable_states: The states that a :class:`StateAdapter` gives a mixer to start from: it
            trains those of real numbers, and counters are zero; None: all.
        writes_tokens: Whether :meth:`write_token` is of the class that :meth:`forward` is of.
    """

    param_group_names: ClassVar[Mapping[str, str]] = {}
    param_branch: ClassVar[str | None] = None
    reads_residual: ClassVar[bool] = False
    reads_both_ways: ClassVar[bool] = False
    written_in_place: ClassVar[frozenset[str]] = frozenset()
    startable_states: ClassVar[frozenset[str] | None] = None
    writes_tokens: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        forward, written = (
            next(kind for kind in cls.__mro__ if name in kind.__dict__)
            for name in ("forward", "write_token")
        )
        cls.writes_tokens = forward is written

    def __init__(self, config: SSMConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx

    def __call__(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        """Call :meth:`forward`; boundaries ``[S + 1]`` are a packing, too."""
        if isinstance(named.get("packing"), Tensor):
            named["packing"] = self._packed(named["packing"], hidden_states)
        elif len(given) > 1 and isinstance(given[1], Tensor):
            given = (given[0], self._packed(given[1], hidden_states), *given[2:])
        return super().__call__(hidden_states, *given, **named)

    def _packed(self, cu_seqlens: Tensor, hidden_states: Tensor) -> PackedRow:
        return PackedRow.of(cu_seqlens, hidden_states.shape[1], type(self).__name__)

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: PackedRow | None = None
    ) -> Tensor:
        """Mix along the sequence; read ``state.get``, leave ``state.put``.

        Args:
            hidden_states: ``[B, L, D]``.
            state: The state of this layer.
            packing: Where the sequences in the flat row ``[1, T, D]`` begin and end; None: every
                row is one. Ops take it for ``cu_seqlens``; a call may also give ``cu_seqlens``.

        Returns:
            ``[B, L, D]``.
        """
        raise NotImplementedError

    def write_token(
        self, program: Program, parts: ModuleParts, x: Value, states: Mapping[str, State]
    ) -> Value:
        """Write :meth:`forward` of one token as instructions, which C runs where it decodes.

        A mixer without this decodes by its forward. So does one whose class has another forward
        than the class that wrote this.

        Args:
            program: What the instructions are written to.
            parts: Finds this mixer's layers and weights, and refuses those that something wraps.
            x: The token, ``[B, D]``.
            states: The states that :meth:`forward` would read, by name; instructions write the
                next ones over them.

        Returns:
            What :meth:`forward` returns, ``[B, D]``.
        """
        raise UnservedError

    def next_is_written(self, state: LayerState) -> bool:
        """Tell whether the next token is one that :meth:`write_token` is written for."""
        return True

    def dynamics(self, hidden_states: Tensor) -> Dynamics | None:
        """Return what is known of the filters at an input ``[B, L, D]``, or None to measure them.

        ``ssmzoo inspect`` calls this without gradients, in evaluation mode.
        """
        return None

    def project_parameters(self) -> None:
        """Project parameters into their allowed range after an optimizer step, if they have one.

        Runs in place and without gradients, so that the optimizer keeps the same tensors.
        """

    def gauges(self, hidden_states: Tensor) -> dict[str, Tensor]:
        """Return numbers to log while this layer trains, one tensor of one element per name.

        Our trainer calls this when it logs, without gradients, in evaluation mode, at what the
        mixer gets ``[B, L, D]`` of a few tokens of the batch.
        """
        return {}

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register an SSM parameter; one that was made in a low default dtype, in float32.

        transformers loads under a default dtype, bfloat16 say, and gives parameters and buffers the
        dtype that was registered, whether the checkpoint has them or not.
        """
        if param is not None and _in_low_default(param):
            param = nn.Parameter(param.detach().float(), param.requires_grad)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register a buffer, as :meth:`register_parameter` does."""
        if tensor is not None and _in_low_default(tensor):
            tensor = tensor.float()
        super().register_buffer(name, tensor, persistent)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SSMMixer:
        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(keeping_precision(fn), recurse=False)


def _in_low_default(tensor: Tensor) -> bool:
    return tensor.dtype == torch.get_default_dtype() and tensor.dtype.itemsize < 4


class SSMBlock(GradientCheckpointingLayer):
    """A mixer, and an MLP if the configuration has one, each in a residual branch.

    ``x + mixer(norm(x))``, or ``norm(x + mixer(x))`` without ``prenorm``; the sum is in float32 if
    the configuration says so. In both ``directions`` ``mixer(y) + flip(other(flip(y)))`` takes the
    place of ``mixer(y)``; the other one is the same mixer or a second one, ``reverse``.

    What surprises: a sum and the norm after it are one call where that is faster, also where it is
    the next block's norm. The block leaves what it returns and its norm in ``state.shared``, and
    the next one takes the norm if it is of what it gets.
    """

    def __init__(self, config: SSMConfig, mixer: SSMMixer, reverse: SSMMixer | None = None) -> None:
        super().__init__()
        self.both_ways = config.directions != "forward" and not mixer.reads_both_ways
        self.residual_in_fp32 = config.residual_in_fp32
        self.prenorm = config.prenorm
        self.reads_residual = mixer.reads_residual
        self.startable_states = mixer.startable_states
        self.residual = config.residual
        self.counts_tokens = config.norm_type == "batch"
        self.norm = make_norm(config)
        self.mixer = mixer
        # so that its parameters' names end as the other mixer's
        self.reverse = None if reverse is None else nn.ModuleDict({"mixer": reverse})
        self.dropout = Dropout(config.dropout, config.tie_dropout)
        depth = mixer.layer_idx / max(1, config.num_hidden_layers - 1)
        self.drop_path = DropPath(depth * config.drop_path_rate)
        self.mlp = None
        if config.intermediate_size is not None:
            self.mlp_norm = make_norm(config)
            self.mlp = MLP(config)

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: PackedRow | None = None
    ) -> Tensor:
        """Map ``[B, L, D]`` to ``[B, L, D]``."""
        mixer = self.mixer
        if (
            getattr(mixer, "writes_tokens", False)  # not so if something wraps it, as PEFT does
            and state.initial
            and "parametrizations" not in mixer._modules
            and is_token(self, hidden_states, packing)
            # programs are for CPUs; elsewhere nobody waits for a number
            and (not hidden_states.is_cpu or mixer.next_is_written(state))
        ):
            return token_of_layer(
                self,
                _write_block,
                hidden_states,
                state,
                lambda: self._layered(hidden_states, state, None),
                self.norm.weight.dtype,
                in_place=mixer.written_in_place,
            )
        return self._layered(hidden_states, state, packing)

    def _layered(self, x: Tensor, state: LayerState, packing: PackedRow | None) -> Tensor:
        # what the norms must leave out of their statistics
        real = (packing.real(),) if self.counts_tokens and packing is not None else ()
        given, y = state.shared.pop("normed", _NOTHING)
        if given is not x or y is None:
            y = self.norm(x, *real) if self.prenorm else x.to(self.norm.weight.dtype)
        more = {"residual": x} if self.reads_residual else {}
        mixed = self.mixer(y, state, packing, **more)
        if not torch.compiler.is_compiling() and getattr(mixed, "shape", None) != x.shape:
            got = list(mixed.shape) if isinstance(mixed, Tensor) else f"a {type(mixed).__name__}"
            raise ValueError(
                f"{type(self.mixer).__name__} must return a tensor of the shape that it gets, "
                f"{list(x.shape)}, got {got}"
            )
        if self.both_ways:
            other = self.mixer if self.reverse is None else self.reverse["mixer"]
            more = {name: flip(given, packing) for name, given in more.items()}
            fresh = LayerState(packing=packing, shared=state.reversed_shared)
            mixed = mixed + flip(other(flip(y, packing), fresh, packing, **more), packing)
        after = state.next_norm if self.mlp is None else self.mlp_norm
        x, y = self._added(x, mixed, self.norm, after, real, packing)
        if self.mlp is not None:
            if y is None:
                y = self.mlp_norm(x, *real) if self.prenorm else x.to(self.mlp_norm.weight.dtype)
            x, y = self._added(x, self.mlp(y), self.mlp_norm, state.next_norm, real, packing)
        if y is not None:
            state.shared["normed"] = (x, y)
        return x

    def _added(
        self,
        x: Tensor,
        y: Tensor,
        norm: _Norm,
        after: nn.Module | None,
        real: tuple[Tensor | None, ...],
        packing: PackedRow | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Add what a branch made of ``x`` to it; also return the norm after it if it was had."""
        if self.dropout.training or self.drop_path.training:
            y = self.drop_path(self.dropout(y, packing), packing)
        normed = None
        if self.residual:
            if self.residual_in_fp32:
                x = x.to(torch.promote_types(torch.float32, x.dtype))
            if not self.prenorm:
                after = norm
            if type(after) is RMSNorm:
                y, normed = add_and_norm(x, y, after)
            else:
                y = x + y
        if self.prenorm:
            return y, normed
        return (norm(y, *real) if normed is None else normed), None


_BLOCK = SSMBlock.forward


def _write_block(
    program: Program, parts: ModuleParts, x: Value, states: Mapping[str, State]
) -> Value:
    """Write a block's token."""
    block: Any = parts.root
    if any(parts.setting(drop, "training") for drop in (block.dropout, block.drop_path)):
        raise UnservedError
    prenorm, adds = parts.setting(block, "prenorm"), parts.setting(block, "residual")
    for norm, name in (("norm", "mixer"), ("mlp_norm", "mlp")):
        if getattr(block, name) is None:
            continue
        y = _write_norm(program, parts, x, norm) if prenorm else x
        branch = parts.within(name)
        if isinstance(branch.root, SSMMixer):
            more = {"residual": x} if branch.root.reads_residual else {}
            y = branch.root.write_token(program, branch, y, states, **more)
        elif type(branch.root) is MLP:
            y = branch.root.write_token(program, branch, y)
        else:
            raise UnservedError
        if adds:
            y = program.add(x, y)
        x = y if prenorm else _write_norm(program, parts, y, norm)
    return x


def _write_norm(program: Program, parts: ModuleParts, x: Value, name: str) -> Value:
    layer = parts.layer(name)
    if type(layer) is NoNorm:
        return x
    if type(layer) is not RMSNorm:
        raise UnservedError
    return parts.norm(program, x, name)


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
        kind = self.mixer_class
        second = config.directions == "both-separate" and not kind.reads_both_ways
        self.layers = nn.ModuleList(
            SSMBlock(config, kind(config, index), kind(config, index) if second else None)
            for index in range(config.num_hidden_layers)
        )
        self.layers_built = len(self.layers)
        self.norm = make_norm(config) if config.prenorm else None
        self.gradient_checkpointing = False
        self.post_init()
        self._tp_plan = self._split_parts()

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
        packing: PackedRow | Literal[False] | None = None,
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
            packing: What mask, positions and boundaries say, from :meth:`find_packing`; the heads
                pass it instead of them.
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
        token_inputs: dict[str, Tensor] = {}
        for name in self.token_inputs:
            token_inputs[name] = kwargs.pop(name, None)
        if kwargs:
            refuse_unknown(kwargs, SSMModel.forward, token_inputs)
        config = self.config
        if output_hidden_states is None:
            output_hidden_states = bool(config.output_hidden_states)
        if return_dict is None:
            return_dict = config.return_dict
        hidden_states = self._embed(input_ids, inputs_embeds, input_values, pixel_values)
        batch, length = hidden_states.shape[:2]
        for name, given in token_inputs.items():
            _check_token_input(name, given, batch, length)
        if packing is None:
            packing = self.find_packing(
                (None, hidden_states),
                cache,
                attention_mask,
                position_ids,
                seq_idx,
                cu_seq_lens_q if cu_seqlens is None else cu_seqlens,
            )
        packing = packing or None
        for name, given in token_inputs.items():
            token_inputs[name] = _real_steps(name, given, packing)
        # rows of the cache are the sequences: of a padded batch its rows, as without padding
        packed = None if packing is None or packing.padded else packing
        causal = self.causal
        if use_cache is None:
            use_cache = cache is not None or (
                bool(config.use_cache) and not self.training and packed is None and causal
            )
        if use_cache and not causal:
            raise ValueError(
                f"{type(self).__name__} is bidirectional and cannot have a cache: later tokens "
                "change earlier outputs; pass whole sequences with use_cache=False"
            )
        if cache is not None and self.training and torch.is_grad_enabled():
            refuse_reentrant_checkpointing(self.layers)
        sequences = packed.sequences if packed else batch
        cache = self._cache(cache, use_cache, sequences, length)
        recorded, starts = None, None
        if cache is not None and cache.recording:
            recorded = cache.before(hidden_states, packing, token_inputs)
        adapter: Any = self._modules.get(STATE_ADAPTER)
        if adapter is not None and (cache is None or not cache.is_initialized):
            refuse_no_start(self, cache)
            starts = adapter(sequences, hidden_states.dtype)
            if packing is None and length == 1:  # a prompt, not a step
                ends = torch.arange(batch + 1, device=hidden_states.device)
                packing = PackedRow(ends, batch, None, 1)

        if packing is not None:
            hidden_states = packing.flat(hidden_states)
        if self.dropout.training:
            hidden_states = self.dropout(hidden_states, packing)
        all_hidden_states: list[Tensor] = []
        states: list[LayerState] = []
        shared: dict[Any, Any] = {}
        checked_code: dict[ForwardCode, bool] = {}
        for name, given in token_inputs.items():
            shared[name] = given if packing is None else packing.flat(given)
        reversed_shared = {} if causal else {n: flip_steps(x, packing) for n, x in shared.items()}
        room = None if cache is None else cache.max_cache_len
        passing = cache if isinstance(cache, SequenceParallelCache) else None
        next_norms: Iterable[nn.Module | None] = itertools.repeat(None)
        # a checkpointed layer runs again alone: with gradients, blocks have to be independent
        if not torch.is_grad_enabled() and not output_hidden_states and takes_op(hidden_states):
            next_norms = self._next_norms()
        # generate lowers the number for a while to propose by the first layers alone
        layers = self.layers
        wanted, present = config.num_hidden_layers, len(layers._modules)
        if wanted != present and (wanted > present or present != self.layers_built):
            raise ValueError(
                f"config.num_hidden_layers must be the number of layers, {present}, got {wanted}; "
                "set it where layers are added or taken away"
            )
        numbered = zip(range(wanted), layers, next_norms, strict=False)
        for index, layer, next_norm in numbered:
            if output_hidden_states:
                # the layer goes on from what is returned, so that a gradient can be retained there
                shown = hidden_states if packing is None else packing.batch(hidden_states, batch)
                all_hidden_states.append(shown)
                hidden_states = shown.view_as(shown) if packing is None else packing.flat(shown)
            initial, keep = {}, cache is not None
            if starts is not None:  # some mixers look at no state unless they leave one
                initial, keep = starts.get(index, {}), True
            elif cache is not None:
                initial = cache.layers[index].states
            state = LayerState(
                initial,
                keep,
                packing,
                room,
                shared=shared,
                reversed_shared=reversed_shared,
                next_norm=next_norm,
                checked_code=checked_code,
            )
            if passing is not None:
                passing.open_layer(index, state, hidden_states)
            hidden_states = layer(hidden_states, state, packing)
            states.append(state)
        if self.norm is not None:
            given, normed = shared.get("normed", _NOTHING)
            if given is hidden_states and normed is not None:
                hidden_states = normed
            elif isinstance(self.norm, BatchNorm) and packing is not None:
                hidden_states = self.norm(hidden_states, packing.real())
            else:
                hidden_states = self.norm(hidden_states)
        if packing is not None:
            hidden_states = packing.batch(hidden_states, batch)
        if output_hidden_states:
            all_hidden_states.append(hidden_states)

        if cache is not None:
            hidden_states = cache.take(states, hidden_states)
            if starts is not None:
                cache.adapter = adapter
            cache.advance(length if packed is None else packed.longest(), recorded)
        kept: dict[str, Any] = {CACHE: cache}
        output = BaseModelOutputWithPast(
            **kept,
            last_hidden_state=hidden_states,
            hidden_states=tuple(all_hidden_states) if output_hidden_states else None,
        )
        return output if return_dict else output.to_tuple()

    def find_packing(
        self,
        inputs: tuple[Tensor | None, ...],
        cache: StateCache | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        seq_idx: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> PackedRow | Literal[False]:
        """Find the sequences in a batch and check them, once for a call of the model.

        Args:
            inputs: ``input_ids``, ``inputs_embeds`` and ``input_values``, of which one is given.
            cache: As for :meth:`forward`, like the rest.
            attention_mask: See there.
            position_ids: See there.
            seq_idx: See there.
            cu_seqlens: See there.

        Returns:
            Where the sequences lie in the flat row; False: every row is one whole sequence.

        Raises:
            ValueError: Something does not fit the batch; the message names it.
            TypeError: A mask or boundaries of another kind.
        """
        plain = attention_mask is None and position_ids is None
        if plain and seq_idx is None and cu_seqlens is None:
            return False
        check_kind(cache)
        batch, length = given_inputs(*inputs).shape[:2]
        if attention_mask is None or cache is None:
            past_length = 0
        elif torch.compiler.is_compiling() and isinstance(cache, StaticStateCache):
            past_length = attention_mask.shape[1] - length  # the count has no value in a graph
        else:
            past_length = cache.seen_tokens
        told = (attention_mask, position_ids, seq_idx, cu_seqlens)
        return find_packing(batch, length, past_length, *told) or False

    def _embed(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        input_values: Tensor | None,
        pixel_values: Tensor | None,
    ) -> Tensor:
        channels = self.config.input_channels
        if pixel_values is not None:
            if self.config.image_size is None:
                raise ValueError(
                    "this model takes no images, got pixel_values; set image_size in its "
                    "configuration"
                )
            others = {
                "input_ids": input_ids,
                "inputs_embeds": inputs_embeds,
                "input_values": input_values,
            }
            if more := [name for name, given in others.items() if given is not None]:
                raise ValueError(f"give exactly one of pixel_values and {more[0]}, got both")
            inputs_embeds = self.embed_images(pixel_values)
        elif self.config.image_size is not None and inputs_embeds is None:
            raise ValueError("this model takes images: give pixel_values [B, C, H, W]")
        given = (input_ids is not None) + (inputs_embeds is not None) + (input_values is not None)
        if given != 1:
            wanted = "input_ids" if channels is None else "input_values"
            raise ValueError(f"give exactly one of {wanted} and inputs_embeds")
        if inputs_embeds is not None:
            if inputs_embeds.dim() != 3 or inputs_embeds.shape[2] != self.config.hidden_size:
                raise ValueError(
                    f"inputs_embeds must have shape [B, L, {self.config.hidden_size}], "
                    f"got {list(inputs_embeds.shape)}"
                )
            embeddings = inputs_embeds
        elif input_values is not None:
            if channels is None:
                raise ValueError(
                    "this model takes input_ids, got input_values; "
                    "for values set input_channels in its configuration"
                )
            if input_values.dim() == 2 and channels == 1:
                input_values = input_values.unsqueeze(2)
            if input_values.dim() != 3 or input_values.shape[2] != channels:
                raise ValueError(
                    f"input_values must have shape [B, L, {channels}], "
                    f"got {list(input_values.shape)}"
                )
            if not input_values.is_floating_point():
                raise TypeError(f"input_values must be floating point, got {input_values.dtype}")
            embeddings = self.embed_values(input_values.to(self.embed_values.weight.dtype))
        else:
            assert input_ids is not None
            if channels is not None:
                raise ValueError(
                    f"this model takes input_values [B, L, {channels}], got input_ids; "
                    "for tokens leave input_channels out of its configuration"
                )
            if input_ids.dim() != 2:
                raise ValueError(f"input_ids must have shape [B, L], got {list(input_ids.shape)}")
            if input_ids.dtype not in (torch.int64, torch.int32):
                raise TypeError(f"input_ids must be int64 or int32, got {input_ids.dtype}")
            try:
                embeddings = self.embed_tokens(input_ids)
            except IndexError:  # of torch's, which names neither argument nor token
                check_indices("input_ids", input_ids, self.config.vocab_size)
                raise
        if embeddings.shape[1] == 0:
            raise ValueError(
                "the input must have at least one token, got L = 0; with a cache, pass the new "
                "tokens to forward and the whole sequence (old and new) to generate"
            )
        return embeddings

    def startable_states(self, index: int, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of a layer's states that a state adapter holds, or counts from zero."""
        names = cast(Any, self.layers[index]).startable_states
        return {name: s for name, s in states.items() if names is None or name in names}

    def trajectories(self, input_ids: Tensor) -> Trajectories | None:
        """Return the model's path through a plane as it reads ``[B, L]``, or None without a plane.

        ``ssmzoo inspect`` calls this without gradients, in evaluation mode, and draws the path.
        """
        return None

    def _next_norms(self) -> Iterable[nn.Module | None]:
        """Return for each layer the norm that its output goes to, nothing coming between."""
        layers: list[Any] = [*self.layers[: self.config.num_hidden_layers]]
        # another forward might write into its input
        if any(type(layer).forward is not _BLOCK or is_watched(layer) for layer in layers):
            return itertools.repeat(None)
        return [*(layer.norm for layer in layers[1:]), self.norm]

    def get_input_embeddings(self) -> nn.Module | None:
        """Return the token embedding, None for a model of continuous values or images."""
        return getattr(self, "embed_tokens", None)

    def _cache(
        self, given: StateCache | None, use_cache: bool, sequences: int, tokens: int
    ) -> StateCache | None:
        if given is not None:
            check_kind(given)
            given.check(self.config, sequences, tokens)
            adapter: Any = self._modules.get(STATE_ADAPTER)
            if given.adapter is not adapter:
                given.require_start(adapter)
            if given.pending is not None:
                given.read_again(self)
            return given
        return StateCache(self.config) if use_cache else None


def refuse_no_start(model: Any, cache: object) -> None:
    """Fail where a call cannot begin from a state adapter.

    Raises:
        ValueError: Its row lies on several processes, or its gradients would be lost.
    """
    if isinstance(cache, PassingCache):
        refuse_pieces()
    if model.training and torch.is_grad_enabled():
        refuse_reentrant_checkpointing(model.modules())


def _check_token_input(name: str, given: object, batch: int, length: int) -> None:
    if given is None:
        raise ValueError(
            f"{name} must be given, [B, L] = [{batch}, {length}]: this model needs it; "
            "transformers' Trainer passes it on with remove_unused_columns=False"
        )
    if not isinstance(given, Tensor) or not given.is_floating_point():
        kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(f"{name} must be a floating-point tensor [B, L], got {kind}")
    if given.shape != (batch, length):
        raise ValueError(
            f"{name} must have shape [B, L] = [{batch}, {length}], got {list(given.shape)}"
        )


def _real_steps(name: str, steps: Tensor, packing: PackedRow | None) -> Tensor:
    """Return steps ``[B, L]`` with 1 for padding's; check on a CPU that all can be steps."""
    real = None if packing is None else packing.mask(len(steps))
    if real is not None:
        steps = torch.where(real, steps, 1)
    if steps.is_cpu and not torch.compiler.is_compiling():
        wrong = ~((steps > 0) & steps.isfinite())
        if wrong.any():
            raise ValueError(
                f"{name} must be positive and finite, got {float(steps[wrong][0])}; each is the "
                "time since the token before, of a sequence's first token 1 if there is none"
            )
    return steps


def refuse_cache(kwargs: dict[str, Any]) -> None:
    """Take caches out of what the backbone gets, for a head that reads whole sequences."""
    why = "this head reads whole sequences and returns no cache"
    if kwargs.pop("use_cache", None):
        raise ValueError(f"use_cache must be None or False, got True: {why}")
    for name in ("cache", "past_key_values"):
        if (given := kwargs.pop(name, None)) is not None:
            raise ValueError(f"{name} must be left out, got a {type(given).__name__}: {why}")


def refuse_unknown(
    kwargs: dict[str, Any], forward: Callable[..., Any], others: Iterable[str] = ()
) -> None:
    """Fail for an argument that a model's ``forward`` lacks and transformers does not add."""
    for name, value in kwargs.items():
        if name in _IGNORED or (name == "output_attentions" and not value):
            continue
        if name == "output_attentions":
            raise ValueError("output_attentions must be False: no attention weights are kept")
        hint = suggestion(name, [*inspect.signature(forward).parameters, *others])
        raise TypeError(f"this model takes no argument {name!r}{hint}")
