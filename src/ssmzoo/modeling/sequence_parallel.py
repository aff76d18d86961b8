"""Sequence parallelism: one long row over several processes, each of which reads a piece of it.

A layer's state is all that its next tokens need of those before. So the process of a piece reads
its layers' initial states from the process before, and sends its final states to the one behind;
gradients go the other way. Nothing else crosses, and no size depends on the length.

What surprises: no process waits for another's whole model. A mixer receives its state where its
scan begins and sends one where it ends; processes compute projections, MLPs and the head at the
same time. Of R processes the last one starts late by R - 1 scans of one layer, once a pass, not
once a layer. Families need no code for this, and recurrences need not be linear (COFFEE).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ssmzoo.modeling.cache import RecurrentCache, StateCache, backbone_of
from ssmzoo.modeling.compat import CACHE
from ssmzoo.modeling.layer_state import LayerState
from ssmzoo.modeling.packing import Sequences
from ssmzoo.modeling.state_passing import CutRows, StatePassing

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ssmzoo.modeling.configuration import SSMConfig


class PassingCache(RecurrentCache):
    """Base of the caches that pass a call's states from process to process.

    Attributes:
        kind: The class of cache for the state after the whole row.
        passing: Receives and sends the states.
    """

    kind: ClassVar[type[RecurrentCache]]
    passing: StatePassing

    def check(self, config: PreTrainedConfig, batch_size: int, tokens: int = 0) -> None:
        """Check that the cache fits a model, and that it is new.

        Raises:
            ValueError: It belongs to another model, or read a piece already.
        """
        super().check(config, batch_size, tokens)
        self.passing.require_new()

    def whole(self) -> RecurrentCache:
        """Return, in every process, the state after the row; all must call this."""
        cache = self.kind(self.config)
        states, cache.seen_tokens = self.passing.broadcast_last(self)
        cache.set_states(states)
        return cache


class SequenceParallelCache(PassingCache, StateCache):
    """The states of a row that lies on several processes, in pieces of consecutive tokens.

    Every process calls its copy of the model on its piece, with a new cache of this class, and in
    training runs a backward pass through the output; all make the same calls in the same order.
    Outputs and gradients are those of the whole row: each process gets the outputs of its tokens,
    and its share of every parameter's gradient; the gradient is the sum of the shares. After the
    call the last process's cache holds the state after the row.

    Args:
        config: The configuration of the model it will serve.
        group: The processes, in the order of the pieces; None: all of them.
        rows: Where sequences are packed, which of them cross the cuts; None: each row is one.

    Raises:
        ValueError: A model whose state cannot be passed on: it grows, tokens see those behind them,
            or norms look at all tokens of a batch.
    """

    kind = StateCache

    def __init__(
        self,
        config: SSMConfig,
        group: dist.ProcessGroup | None = None,
        *,
        rows: CutRows | None = None,
    ) -> None:
        require_passing(config)
        super().__init__(config)
        self.passing = StatePassing(group, rows)

    def open_layer(self, index: int, state: LayerState, hidden_states: Tensor) -> None:
        """Let a layer's states come from the process before and go to the one behind."""
        state.initial, state.final = self.passing.open_layer(index, hidden_states.device)

    def take(self, states: list[LayerState], hidden_states: Tensor) -> Tensor:
        """Take the states that a call left; gradients of what this returns flow through them.

        A process whose tokens have no loss must run a backward pass, too, for those before it.
        """
        hidden_states = self.passing.close(hidden_states)
        for index, layer in enumerate(self.layers):
            layer.states = self.passing.final(index)
        return hidden_states


def require_shifted(labels: object, shift_labels: object) -> None:
    """Raise unless a piece's loss is of targets that were shifted before the row was cut.

    Raises:
        ValueError: There are labels alone.
    """
    if labels is not None and shift_labels is None:
        raise ValueError(
            "labels of a piece of a row lack the token behind the piece; shift them before the row "
            "is cut and pass shift_labels"
        )


def require_passing(config: SSMConfig) -> None:
    """Raise unless a model's states can go from process to process, and are all that has to.

    Raises:
        ValueError: It is bidirectional, its state grows, or its norms look at all tokens.
    """
    name = type(config).__name__.removesuffix("Config")
    if not config.causal:
        raise ValueError(
            f"sequence parallelism passes states forwards, and {name} with directions = "
            f"{config.directions!r} reads backwards, too; take directions = 'forward'"
        )
    if config.state_grows:
        raise ValueError(
            f"sequence parallelism passes states of a fixed size, and {name}'s layers that attend "
            "to all tokens have one that grows; take a configuration without such layers"
        )
    if config.norm_type == "batch":
        raise ValueError(
            f"sequence parallelism lets each process norm its own tokens, and {name} with "
            "norm_type = 'batch' norms by all of them; take another norm_type"
        )


def packed_piece(starts: Tensor, begin: int, end: int) -> tuple[Tensor, CutRows]:
    """Return boundaries of a piece of rows of packed sequences, and which sequences it cuts.

    Args:
        starts: Where sequences begin ``[B, L]``.
        begin: The piece's first column.
        end: The column behind its last one.

    Returns:
        ``cu_seqlens [S + 1]`` of the piece's ``B`` rows, laid end to end, and its :class:`CutRows`.
    """
    fresh = starts[:, begin:end]
    begins = fresh.clone()
    begins[:, 0] = True
    batch, width = begins.shape
    first = begins.flatten().nonzero().flatten()
    ends = torch.arange(1, batch + 1, device=first.device) * width
    leaving = torch.searchsorted(first, ends) - 1
    cu_seqlens = torch.cat([first, ends[-1:]]).int()
    return cu_seqlens, CutRows(first // width, fresh.flatten()[first], leaving)


def sequence_cache(
    model: Any, group: dist.ProcessGroup | None = None, *, rows: CutRows | None = None
) -> RecurrentCache:
    """Return the cache with which a model reads its piece of a row.

    Args:
        model: A language model of the zoo, or one of transformers after ``ssmzoo.accelerate``, as
            it was before DDP or a compiler wrapped it.
        group: The processes, in the order of the pieces; None: all of them.
        rows: Where sequences are packed, which of them cross the cuts; None: each row is one.

    Raises:
        ValueError: Another model, or one whose state cannot be passed on.
    """
    return backbone_of(model).sequence_cache(group, rows)


def sequence_piece(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the arguments with which this process's model reads its piece of a batch.

    ``model(**sequence_piece(model, input_ids))`` returns logits of this process's tokens, those
    from ``rank * L // R`` on.

    Args:
        model: As for :func:`sequence_cache`.
        input_ids: The whole batch ``[B, L]``, the same in every process.
        attention_mask: ``[B, L]``, 0 for padding.
        cu_seqlens: Boundaries of sequences packed into one row (B = 1), ``[S + 1]``.
        group: The processes that share the batch; None: all of them.

    Raises:
        ValueError: Fewer tokens a row than processes, a mask of another shape, boundaries of more
            than one row, or what :func:`sequence_cache` raises.
    """
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    batch, length = input_ids.shape
    if length < count:
        raise ValueError(
            f"input_ids must have a token for each of the {count} processes, got L = {length}"
        )
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {list(input_ids.shape)}, got "
            f"{list(attention_mask.shape)}; give the whole batch's mask in every process"
        )
    begin, end = rank * length // count, (rank + 1) * length // count
    piece: dict[str, Any] = {"input_ids": input_ids[:, begin:end]}
    rows = None
    if attention_mask is not None:
        piece["attention_mask"] = attention_mask[:, begin:end]
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(f"cu_seqlens needs one packed row, got a batch of {batch}")
        starts = torch.zeros_like(input_ids, dtype=torch.bool)
        offsets = Sequences.of(cu_seqlens, length, "model").offsets
        starts[0, offsets[offsets < length]] = True  # an empty last sequence begins nowhere
        piece["cu_seqlens"], rows = packed_piece(starts, begin, end)
    cache = sequence_cache(model, group, rows=rows)
    return {**piece, CACHE: cache, "use_cache": True}
