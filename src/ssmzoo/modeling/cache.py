"""The recurrent state of a model between two calls.

What surprises: the state has a fixed size however many tokens were seen. It can be cropped only
inside calls that were recorded (``rollback``). In the zoo's own models a forward pass that fails
leaves the state unchanged, because new states replace the old ones only at its end. Single steps of
RTF and B'MOJO write into a ring in place, to a row that no token reads before it was written again.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ssmzoo.environment.messages import shortened
from ssmzoo.modeling.cache_files import StateFile, damaged, read_states, write_states
from ssmzoo.modeling.cache_identity import (
    Start,
    difference,
    own_fields,
    require_same_start,
    start_named,
    upgraded,
)
from ssmzoo.modeling.layer_state import LayerState
from ssmzoo.modeling.packing import Sequences
from ssmzoo.modeling.rollback import Recorded, RollbackCache

if TYPE_CHECKING:
    from typing import Self

    from ssmzoo.modeling.configuration import SSMConfig


class CacheLayer:
    """One layer's tensors, in the shape that transformers' Cache expects of a layer."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False
    record_past = False

    def __init__(self) -> None:
        self.states: dict[str, Tensor] = {}

    @property
    def is_initialized(self) -> bool:
        """Return whether there are states."""
        return bool(self.states)

    def get_max_length(self) -> int:
        """Return that there is no greatest length."""
        return -1


class RecurrentCache(RollbackCache):
    """The base of all caches of recurrent states: rollback, rows, copies, files.

    A subclass defines ``get_states`` and ``set_states``: tensors by name, a row a sequence.

    Args:
        config: The configuration of the model it will serve.
    """

    max_cache_len: int | None = None  # None: it has room for any number of tokens
    adapter: Start | None = None  # the state adapter that its states began from

    def __init__(self, config: PreTrainedConfig, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.config = config  # of the model that it serves; never written

    @property
    def is_initialized(self) -> bool:
        """Whether any layer holds a state."""
        return any(self.get_states())

    def get_memory(self) -> list[dict[str, Tensor]]:
        """Return all tensors of each layer, buffers without a state among them."""
        return self.get_states()

    def full_states(self) -> list[dict[str, Tensor]]:
        """Return each layer's states as other kinds of cache read them."""
        return self.get_states()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens each row has seen, padding included."""
        return self.seen_tokens

    @property
    def owner(self) -> dict[str, Any]:
        """The fields that a model must share to go on from this cache."""
        return self.signature(self.config)

    @staticmethod
    def signature(config: Any) -> dict[str, Any]:
        """Return the fields that make the caches of two models interchangeable."""
        names = own_fields(type(config))
        return dict(
            zip(names, itemgetter(*names)(vars(config)), strict=True),
            model_type=type(config).model_type,
        )

    @property
    def batch_size(self) -> int:
        """Return the number of sequences, or -1 before the first token."""
        for states in self.get_memory():
            for state in states.values():
                return state.shape[0]
        return -1

    @property
    def nbytes(self) -> int:
        """Return the size of all states in bytes; only attention's grows with the tokens seen."""
        memory = self.get_memory()
        return sum(s.numel() * s.element_size() for held in memory for s in held.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the states, without the graph that may have made them."""
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        memo[id(self.config)] = self.config
        memo[id(self.adapter)] = self.adapter
        for name, value in self.__dict__.items():
            if name != "layers":
                copied.__dict__[name] = copy.deepcopy(value, memo)
        copied.layers = [copy.copy(layer) for layer in self.layers]
        copied.set_states(self._snapshot())
        return copied

    def reset(self) -> None:
        """Forget everything; the next token starts a new sequence."""
        super().reset()
        self.adapter = None

    def crop(self, max_length: int) -> None:
        """Roll back tokens, as :meth:`RollbackCache.crop` does."""
        super().crop(max_length)
        if not self.is_initialized:  # the next token starts a new sequence
            self.adapter = None

    def selected(self, indices: Tensor) -> Self:
        """Return a copy that holds the rows ``indices [R]``; its calls are not recorded."""
        found = copy.copy(self)
        found.layers = [copy.copy(layer) for layer in self.layers]
        found.recording = False
        found._rows_change(lambda state: state.index_select(0, indices.to(state.device)))
        return found

    @classmethod
    def joined(cls, caches: Sequence[Self]) -> Self:
        """Return a new cache that holds the rows of several of one model, in their order.

        Keys and values of all tokens get zeros in front where other rows have seen more.
        """
        found = copy.copy(caches[0])
        found.layers = [copy.copy(layer) for layer in found.layers]
        found.deactivate_past_recording()
        each = zip(*(cache.get_states() for cache in caches), strict=True)
        found.set_states([{n: _stacked([s[n] for s in held]) for n in held[0]} for held in each])
        found.seen_tokens = max(cache.seen_tokens for cache in caches)
        return found

    def _rows_change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change the rows of every state; drop the snapshots, which are of the rows before."""
        self._require_no_pending()
        self._recorded = []
        self.set_states([{n: change(s) for n, s in held.items()} for held in self.get_states()])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows: row b becomes the former row ``beam_idx[b]``, ``beam_idx [B]``."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices [R]``."""
        self._rows_change(lambda state: state.index_select(0, indices.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self._rows_change(lambda state: state.repeat_interleave(repeats, dim=0))

    def check(self, config: PreTrainedConfig, batch_size: int, tokens: int = 0) -> None:
        """Check that the cache fits a model, and a call of so many sequences and tokens a row.

        Raises:
            ValueError: It belongs to another model, holds another number of sequences, or has too
                little room.
        """
        # most steps are of the model that made the cache
        if self.config is not config and self.owner != (wanted := self.signature(config)):
            raise ValueError(f"cache belongs to another model: {difference(self.owner, wanted)}")
        if self.batch_size not in (-1, batch_size):
            raise ValueError(
                f"cache holds {self.batch_size} sequences, the input has {batch_size}; "
                "use its batch_repeat_interleave or batch_select_indices, or a new cache"
            )

    def require_start(self, adapter: Start | None) -> None:
        """Check that the states began where a model with this state adapter begins.

        Raises:
            ValueError: They began elsewhere.
        """
        if self.adapter is not adapter and self.is_initialized:
            require_same_start(self.adapter, adapter)

    def write(
        self,
        path: str | os.PathLike[str],
        others: Mapping[str, Tensor],
        notes: Mapping[str, str],
    ) -> None:
        """Write the state, other tensors and notes into one file, complete or not at all."""
        self._require_no_pending()
        began = None if self.adapter is None else self.adapter.digest()
        states = dict(enumerate(self.full_states()))
        write_states(path, StateFile(self.owner, states, self.seen_tokens, began, others, notes))

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        config: PreTrainedConfig,
        device: str | torch.device = "cpu",
        *,
        adapter: Start | None = None,
        **options: Any,
    ) -> tuple[Self, StateFile]:
        """Return the cache that :meth:`write` wrote, and all that its file holds.

        Raises:
            ValueError: The file is not a saved state, is damaged, belongs to another model, or
                holds a state that began from another state adapter than the given one.
            OSError: The file cannot be read.
        """
        cache = cls(config, **options)
        file = read_states(path, device)
        owner, wanted = upgraded(file.owner, cache.owner, type(config)), cache.owner
        if owner != wanted:
            raise ValueError(
                f"{path} belongs to another model: {shortened(difference(owner, wanted))}"
            )
        has = None if adapter is None else adapter.digest()
        if file.adapter != has:
            way = "load the adapter" if file.adapter is not None else "remove the adapter"
            raise ValueError(
                f"{path} holds a state that began from {start_named(file.adapter)}, and the model "
                f"has {start_named(has)}; {way} first"
            )
        held = [file.states.get(index, {}) for index in range(len(cache.layers))]
        if missing := sorted(file.states.keys() - {*range(len(held))}):
            raise damaged(path, f"it holds a state of layer {missing[0]}")
        try:
            cache.set_states(held)
        except ValueError as error:
            raise damaged(path, error) from error
        cache.seen_tokens, cache.adapter = file.seen_tokens, adapter
        return cache, file


class StateCache(RecurrentCache):
    """The states of all layers, one row per sequence, and the number of tokens seen.

    Recurrent states are float32 whatever the weights are. Pass it as ``cache``; a forward
    pass that uses it updates it in place and returns it.

    Args:
        config: The configuration of the model it will serve.
    """

    layers: list[CacheLayer]
    layer_class: ClassVar[type[CacheLayer]] = CacheLayer

    def __init__(self, config: SSMConfig) -> None:
        layers: Any = [self.layer_class() for _ in range(config.num_hidden_layers)]
        super().__init__(config, layers=layers)

    def get_states(self) -> list[dict[str, Tensor]]:
        """Return each layer's states by name; not copies."""
        return [layer.states for layer in self.layers]

    def set_states(self, states: list[dict[str, Tensor]]) -> None:
        """Replace each layer's states."""
        for layer, held in zip(self.layers, states, strict=True):
            layer.states = held

    def take(self, states: list[LayerState], hidden_states: Tensor) -> Tensor:
        """Take the states that a call left in its layers; return the call's hidden states.

        Args:
            states: The layers', as the call left them.
            hidden_states: The final norm's output.
        """
        for layer, state in zip(self.layers, states, strict=True):
            layer.states = state.final
        return hidden_states

    def detach(self) -> None:
        """Cut the graph that made the states: no gradient goes back through them."""
        for layer in self.layers:
            layer.states = {name: state.detach() for name, state in layer.states.items()}

    def reset_rows(self, rows: Tensor | Sequence[int]) -> None:
        """Reset some rows, which start new sequences with their next token; keep the others.

        Args:
            rows: Row indices ``[R]``, or a boolean mask ``[B]``.

        Raises:
            ValueError: The states began from a state adapter.
        """
        rows = torch.as_tensor(rows)
        if not rows.numel():  # of an empty list, floating point
            return
        if self.adapter is not None:
            raise ValueError(
                "reset_rows lets rows start from zeros, and these began from a state adapter; take "
                "a new cache for new sequences"
            )
        if rows.dtype is torch.bool:
            rows = rows.nonzero().flatten()
        # all zeros is where every family starts
        self._rows_change(lambda state: state.index_fill(0, rows.to(state.device), 0))

    def before(
        self,
        inputs_embeds: Tensor,
        packing: Sequences | None,
        token_inputs: Mapping[str, Tensor],
    ) -> Recorded | None:
        """Return the snapshot before a call, as :meth:`record` does.

        Args:
            inputs_embeds: The call's inputs ``[B, L, D]``.
            packing: Its sequences; None: every row is one.
            token_inputs: Its further inputs, ``[B, L]``, by argument.
        """
        inputs: dict[str, Tensor] | None = {"inputs_embeds": inputs_embeds.detach(), **token_inputs}
        if packing is not None:
            mask = packing.mask(len(inputs_embeds)) if packing.padded else None
            inputs = None if mask is None else {**inputs, "attention_mask": mask}
        return self.record(inputs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a safetensors file, atomically.

        Raises:
            ValueError: The cache is still empty.
            OSError: The file cannot be written.
        """
        if not self.is_initialized:
            raise ValueError("an empty StateCache cannot be saved; run the model on a prompt first")
        self.write(path, {}, {})

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        config: SSMConfig,
        device: str | torch.device = "cpu",
        *,
        adapter: Start | None = None,
        **options: Any,
    ) -> Self:
        """Load a state that :meth:`save` wrote.

        Args:
            path: The safetensors file.
            config: The configuration of the model that will continue from it.
            device: Where to put the tensors.
            adapter: The state adapter of that model.
            **options: Further arguments of this class of cache.

        Raises:
            ValueError: The file is not a saved state, is damaged, belongs to another model, or
                holds a state that began from another state adapter.
            OSError: The file cannot be read.
        """
        return cls.read(path, config, device, adapter=adapter, **options)[0]


def _stacked(states: list[Tensor]) -> Tensor:
    """Return the rows of states ``[B, ...]``, with zeros in front of shorter ones ``[B, P, D]``."""
    if len({state.shape[1:] for state in states}) > 1:
        longest = max(state.shape[1] for state in states)
        states = [F.pad(state, (0, 0, longest - state.shape[1], 0)) for state in states]
    return torch.cat(states)


def check_kind(cache: object, kind: type[RecurrentCache] = StateCache) -> None:
    """Fail unless this is None or a cache of a kind.

    Raises:
        TypeError: It is another cache, as transformers makes them for attention.
    """
    if cache is not None and not isinstance(cache, kind):
        raise TypeError(
            f"cache must be a {kind.__name__}, got {type(cache).__name__}; "
            "leave it out, or pass prefill(...).cache (where prefix tuning "
            "makes it, train a state adapter)"
        )


def backbone_of(model: Any) -> Any:
    """Return the backbone of a language model, which makes its caches.

    Raises:
        ValueError: It has none that we know.
    """
    backbone = getattr(model, "recurrent_backbone", None)
    if backbone is None:
        raise ValueError(
            "model must be a language model of the zoo, or one of transformers' recurrent models "
            f"after ssmzoo.accelerate(model), got {type(model).__name__}"
        )
    return backbone


def refuse_reentrant_checkpointing(layers: Iterable[nn.Module]) -> None:
    """Fail where checkpointing would silently cut the gradients through a given state.

    Raises:
        ValueError: A layer is checkpointed so.
    """
    for layer in layers:
        checkpoint = getattr(layer, "_gradient_checkpointing_func", None)
        options = getattr(checkpoint, "keywords", {})
        if getattr(layer, "gradient_checkpointing", False) and options.get("use_reentrant"):
            raise ValueError(
                "a cache in training needs gradient_checkpointing_kwargs="
                "{'use_reentrant': False}: reentrant checkpointing passes no gradient through "
                "a state"
            )


def refuse_pieces() -> NoReturn:
    """Fail where a model with a state adapter reads a row in pieces on several processes.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        "sequence parallelism lets every row start from zeros, and this model starts from a state "
        "adapter; remove one of the two"
    )
