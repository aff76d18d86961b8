"""The recurrent state of a model between two calls.

What surprises: the state has a fixed size however many tokens were seen. It can be cropped only
inside calls that were recorded: the snapshot from before the call is restored, and the tokens that
stay are read again. In the zoo's own models a forward pass that fails leaves the state unchanged,
because new states replace the old ones only at its end. Single steps of RTF and B'MOJO write into a
ring in place, to a row that no token reads before it was written again.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig

from ssmzoo.environment.messages import shortened
from ssmzoo.modeling.compat import CACHE
from ssmzoo.modeling.packing import PackedRow

if TYPE_CHECKING:
    from typing import Self

    from ssmzoo.modeling.configuration import SSMConfig

_FORMAT = "ssmzoo-state-1"
_OTHER = "other."  # before the names of tensors in the file that are no states


STATE_ADAPTER = "state_adapter"  # the name of a state adapter in the model around the layers


class Start(Protocol):
    """What a state may have begun from in place of zeros: a state adapter."""

    def digest(self) -> str:
        """Return the SHA-256 of its states."""
        ...


@dataclass
class Recorded:
    """A forward pass that may be rolled back: the states before it, and what it read."""

    states: list[dict[str, Tensor]]
    inputs: dict[str, Tensor] | None  # by argument, [B, L, ...]; None: none to read again
    length: int = 0  # by how many tokens it advanced the cache


@dataclass
class LayerState:
    """One layer's view of the cache during one forward pass.

    A mixer reads its initial state with :meth:`get` and stores its final state with :meth:`put`.
    :meth:`get` never returns what :meth:`put` stored in the same pass, so a layer may run twice
    (gradient checkpointing).
    """

    initial: Mapping[str, Tensor] = field(default_factory=dict)
    keep: bool = False
    packing: PackedRow | None = None
    room: int | None = None  # for how many tokens the cache is; None: no bound
    final: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[Any, Any] = field(default_factory=dict)  # worked out once for all layers
    reversed_shared: dict[Any, Any] = field(default_factory=dict)  # by mixers on reversed sequences
    next_norm: nn.Module | None = None  # what the block's output goes to, where one may run both

    def get(self, name: str) -> Tensor | None:
        """Return the state to start from, one row per sequence, or None for a fresh start."""
        state, packing = self.initial.get(name), self.packing
        if state is None or packing is None or packing.rows is None:
            return state
        return state.new_zeros(packing.count, *state.shape[1:]).index_copy(0, packing.rows, state)

    def get_row(self, name: str) -> Tensor | None:
        """Return the state to start from, one for every row of :meth:`PackedRow.aligned`."""
        return self.initial.get(name)

    def put_row(self, name: str, state: Tensor) -> None:
        """Leave the states of those rows; without a cache they are dropped."""
        if self.keep:
            self.final[name] = state

    def put(self, name: str, state: Tensor) -> None:
        """Store the state after the last token, one row per sequence; dropped without a cache.

        A state of zeros must mean the same as None in :meth:`get`: a new sequence.

        Raises:
            TypeError: It is no tensor of real numbers.
            ValueError: It has another number of rows than there are sequences.
        """
        if not isinstance(state, Tensor) or state.dim() == 0 or state.is_complex():
            what = f"a {state.dtype}" if isinstance(state, Tensor) else f"a {type(state).__name__}"
            raise TypeError(
                f"state {name!r} must be a tensor of real numbers with a row a sequence, got "
                f"{what}; of complex ones take torch.view_as_real"
            )
        packing = self.packing
        if packing is not None:
            if state.shape[0] != packing.count:
                raise ValueError(
                    f"state {name!r} must have a row for each of the {packing.count} packed "
                    f"sequences, padding included, got shape {list(state.shape)}"
                )
            if packing.rows is not None and self.keep:
                state = state.index_select(0, packing.rows)
        if self.keep:
            self.final[name] = state


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


class RecurrentCache(Cache):
    """What every cache of states has, whoever writes into it: rollback, rows, copies, files.

    A subclass tells what its layers hold, tensors with a row a sequence by name, and takes it back.

    Args:
        config: The configuration of the model it will serve.
    """

    max_cache_len: int | None = None  # None: it has room for any number of tokens
    adapter: Start | None = None  # what its states began from

    def __init__(self, config: PreTrainedConfig, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.config = config  # of the model that it serves; never written
        self.seen_tokens = 0
        self.pending: dict[str, Tensor] | None = None  # what the next call must read again first
        self.input_holds_seen = False  # in generate: whether its first input repeats what was seen
        self.recording = False
        self._recorded: list[Recorded] = []

    @property
    def is_initialized(self) -> bool:
        """Whether any layer holds a state."""
        return any(self.get_states())

    def get_states(self) -> list[dict[str, Tensor]]:
        """Return what each layer holds, by name; not copies."""
        raise NotImplementedError

    def set_states(self, states: list[dict[str, Tensor]]) -> None:
        """Let each layer hold these.

        Raises:
            ValueError: A layer has no state of such a name.
        """
        raise NotImplementedError

    def get_memory(self) -> list[dict[str, Tensor]]:
        """Return what each layer keeps, states or not."""
        return self.get_states()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens each row has seen, padding included."""
        return self.seen_tokens

    @property
    def owner(self) -> dict[str, Any]:
        """What a model must share with the one that it serves."""
        return self.signature(self.config)

    @staticmethod
    def signature(config: Any) -> dict[str, Any]:
        """Return what two models must share for a state of one to be the other's, too."""
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
        kept = self.get_memory()
        return sum(s.numel() * s.element_size() for states in kept for s in states.values())

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

    def _snapshot(self) -> list[dict[str, Tensor]]:
        # some steps write into a state's own memory
        return [{n: s.detach().clone() for n, s in held.items()} for held in self.get_states()]

    def reset(self) -> None:
        """Forget everything; the next token starts a new sequence."""
        self.set_states([{} for _ in self.layers])
        self.seen_tokens = 0
        self.pending, self._recorded, self.adapter = None, [], None

    def activate_past_recording(self) -> None:
        """Take a snapshot before every call from now on, so that :meth:`crop` can roll it back.

        transformers calls it for assisted decoding, which rolls back rejected tokens.
        """
        self.recording = True

    def deactivate_past_recording(self) -> None:
        """Take no more snapshots, and drop those taken so far."""
        self.recording, self._recorded = False, []

    def record(self, inputs: dict[str, Tensor] | None) -> Recorded | None:
        """Return the snapshot that :meth:`advance` takes, so that a call can be rolled back.

        Args:
            inputs: What the call is about to read, as :class:`Recorded` keeps it.
        """
        return Recorded(self._snapshot(), inputs) if self.recording else None

    def advance(self, tokens: int, recorded: Recorded | None) -> None:
        """Count the tokens of a call, and keep what :meth:`record` returned before it."""
        self._count(tokens)
        if recorded is not None:
            recorded.length = tokens
            self._recorded.append(recorded)

    def _count(self, tokens: int) -> None:
        self.seen_tokens += tokens

    @torch.no_grad()
    def read_again(self, model: nn.Module) -> None:
        """Bring the states to where a crop put the number of tokens; ``model`` reads what stays."""
        pending, seen = self.pending, self.seen_tokens
        if pending is None:
            return
        ids = pending.get("input_ids", pending.get("inputs_embeds"))
        assert ids is not None
        self.pending, self.seen_tokens = None, seen - ids.shape[1]
        recording, self.recording = self.recording, False
        try:
            model(**pending, **{CACHE: self})
        except BaseException:
            self.pending, self.seen_tokens = pending, seen
            raise
        finally:
            self.recording = recording

    @property
    def is_croppable(self) -> bool:
        """Return whether what is read from now on can be rolled back."""
        return self.recording

    def crop(self, max_length: int) -> None:
        """Roll back tokens that were read while calls were recorded.

        Whole calls are rolled back from their snapshots. Of a call that stays in part, the tokens
        that stay are read again at the start of the next call.

        Args:
            max_length: Number of tokens to keep; if 0 or negative, minus the number to roll back.
                Either way the snapshots taken so far are dropped.

        Raises:
            RuntimeError: They were read before :meth:`activate_past_recording`, are part of a call
                with packed sequences, or were read before rows were reordered, selected or reset.
        """
        max_length = int(max_length)  # some versions of transformers pass a tensor
        remove = -max_length if max_length <= 0 else max(self.seen_tokens - max_length, 0)
        recorded = list(self._recorded)
        if remove > sum(call.length for call in recorded):
            raise RuntimeError(
                "crop needs recorded calls: a recurrent state holds no earlier states; call "
                "activate_past_recording before the tokens to roll back, or keep a copy.deepcopy "
                "of the cache"
            )
        pending, back, left = self.pending, None, remove
        while left > 0:
            back = recorded.pop()
            left -= back.length
        if left and back is not None:
            gone = back.length + left
            if back.inputs is None:
                raise RuntimeError(
                    "crop must roll back a call with packed sequences, or with a mask or positions "
                    "that are not [B, L], as a whole, got "
                    f"{gone} of its {back.length} tokens to roll back"
                )
            # a mask may be longer, of all that the cache has seen
            pending = {n: given[:, : given.shape[1] - gone] for n, given in back.inputs.items()}
        if back is not None:
            self.set_states(back.states)
            self.pending = pending if left else None
            self.seen_tokens -= remove
            if not any(back.states):  # the next token starts a new sequence
                self.adapter = None
        self._recorded = []

    def _settled(self) -> None:
        if self.pending is not None:
            raise RuntimeError(
                "the cache was cropped into the middle of a call, so its states are recomputed in "
                "the next call; run the model on the next tokens first"
            )

    def _rows_change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change the rows of every state; drop the snapshots, which are of the rows before."""
        self._settled()
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
        self._settled()
        tensors = {
            f"{index}.{name}": state.detach().contiguous()
            for index, states in enumerate(self.get_states())
            for name, state in states.items()
        }
        metadata = {
            "format": _FORMAT,
            "owner": json.dumps(self.owner),
            "states": json.dumps(sorted(tensors)),
            "seen_tokens": str(self.seen_tokens),
            **({} if self.adapter is None else {"adapter": self.adapter.digest()}),
            **notes,
        }
        tensors |= {f"{_OTHER}{name}": tensor.contiguous() for name, tensor in others.items()}
        partial = Path(f"{os.fspath(path)}.{os.getpid()}.partial")
        try:
            partial.touch()
            mode = partial.stat().st_mode
            save_file(tensors, partial, metadata=metadata)
            partial.chmod(mode)  # safetensors makes files that nobody else may read
            with partial.open("rb") as written:  # on the disk before it has the name
                os.fsync(written.fileno())
            os.replace(partial, path)
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        config: PreTrainedConfig,
        device: str | torch.device = "cpu",
        *,
        adapter: Start | None = None,
        **options: Any,
    ) -> tuple[Self, dict[str, Tensor], dict[str, str]]:
        """Return state, other tensors and notes that :meth:`write` wrote.

        Raises:
            ValueError: The file is not a saved state, is damaged, belongs to another model, or
                holds a state that began from another state adapter than the given one.
            OSError: The file cannot be read.
        """
        cache = cls(config, **options)
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                # where a file's tensors begin, matrix libraries round otherwise: a copy is aligned
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except OSError:
            raise
        except Exception as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
        if metadata.get("format") != _FORMAT:
            raise ValueError(
                f"{path} is not a saved StateCache: its format must be {_FORMAT!r}, "
                f"got {metadata.get('format')!r}"
            )
        try:
            owner, names = json.loads(metadata["owner"]), json.loads(metadata["states"])
            seen = int(metadata["seen_tokens"])
        except (KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is a damaged StateCache: bad metadata {error}") from error
        if owner != cache.owner:
            raise ValueError(
                f"{path} belongs to another model: {shortened(difference(owner, cache.owner))}"
            )
        began, has = metadata.get("adapter"), None if adapter is None else adapter.digest()
        if began != has:
            way = "load the adapter" if began is not None else "remove the adapter"
            raise ValueError(
                f"{path} holds a state that began from {_start(began)}, and the model has "
                f"{_start(has)}; {way} first"
            )
        others = {n.removeprefix(_OTHER): t for n, t in tensors.items() if n.startswith(_OTHER)}
        states = {name: tensor for name, tensor in tensors.items() if not name.startswith(_OTHER)}
        if sorted(states) != names:
            raise ValueError(
                f"{path} is a damaged StateCache: it holds {sorted(states)} of {names}"
            )
        held: list[dict[str, Tensor]] = [{} for _ in cache.layers]
        for name, state in states.items():
            index, _, state_name = name.partition(".")
            if not (index.isdecimal() and int(index) < len(held) and state_name):
                raise ValueError(f"{path} is a damaged StateCache: it holds a state {name!r}")
            held[int(index)][state_name] = state
        rows = {tuple(state.shape[:1]) for state in states.values()}
        if len(rows) > 1 or () in rows or seen < 0:
            raise ValueError(
                f"{path} is a damaged StateCache: each state must have a row a sequence, "
                f"got {sorted(rows)} rows after {seen} tokens"
            )
        try:
            cache.set_states(held)
        except ValueError as error:
            raise ValueError(f"{path} is a damaged StateCache: {error}") from error
        cache.seen_tokens, cache.adapter = seen, adapter
        return cache, others, metadata


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
        """Return what each layer holds, by name; not copies."""
        return [layer.states for layer in self.layers]

    def set_states(self, states: list[dict[str, Tensor]]) -> None:
        """Let each layer hold these."""
        for layer, held in zip(self.layers, states, strict=True):
            layer.states = held

    def take(self, states: list[LayerState], hidden_states: Tensor) -> Tensor:
        """Take the states that a call left in its layers; return what the call returns.

        Args:
            states: The layers', as the call left them.
            hidden_states: What the last layer returned, normed.
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
        packing: PackedRow | None,
        token_inputs: Mapping[str, Tensor],
    ) -> Recorded | None:
        """Return what :meth:`record` returns for a call.

        Args:
            inputs_embeds: What it is about to read ``[B, L, D]``.
            packing: Where its sequences are, if its rows are not whole ones.
            token_inputs: What else it reads, ``[B, L]``, by argument.
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
            **options: What else this class of cache is made with.

        Raises:
            ValueError: The file is not a saved state, is damaged, belongs to another model, or
                holds a state that began from another state adapter.
            OSError: The file cannot be read.
        """
        return cls.read(path, config, device, adapter=adapter, **options)[0]


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


def reader_of(model: Any) -> Any:
    """Return what a language model's tokens are read by, which makes its caches: its backbone.

    Raises:
        ValueError: It has none that we know.
    """
    reader = getattr(model, "prompt_reader", None)
    if reader is None:
        raise ValueError(
            "model must be a language model of the zoo, or one of transformers' recurrent models "
            f"after ssmzoo.accelerate(model), got {type(model).__name__}"
        )
    return reader


def require_same_start(began: Start | None, adapter: Start | None) -> None:
    """Check that a cache's states began where a model with this state adapter begins.

    Raises:
        ValueError: They began elsewhere.
    """
    made, has = (None if given is None else given.digest() for given in (began, adapter))
    if made != has:
        raise ValueError(
            f"cache began from {_start(made)}, and this model has {_start(has)}; "
            "read the prompt again"
        )


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


def _start(digest: str | None) -> str:
    return "no state adapter" if digest is None else f"the state adapter {digest[:12]}"


# fields that change neither what a state means nor its shape
_STATELESS = frozenset(
    {"vocab_size", "initializer_range", "tie_word_embeddings", "use_cache", "pooling"}
    | {"bos_token_id", "eos_token_id", "pad_token_id"}
    | {"dropout", "embedding_dropout", "tie_dropout", "attention_dropout", "hidden_dropout"}
    | {"drop_path_rate", "classifier_bias", "residual_in_fp32"}
)


def difference(before: Any, now: Mapping[str, Any]) -> str:
    """Return in words what two signatures do not share; of two families, their names."""
    if not isinstance(before, dict):  # of a file
        return f"made for {before!r}, got {now}"
    shared = before.keys() & now.keys()
    names = [x for x in {**before, **now} if x not in shared or before[x] != now[x]]
    if "model_type" in names:
        names = ["model_type"]
    made, got = (
        ", ".join(f"{name} = {fields.get(name)!r}" for name in names) for fields in (before, now)
    )
    return f"made for {made}, got {got}"


@functools.cache
def own_fields(kind: type[PreTrainedConfig]) -> tuple[str, ...]:
    """Return the fields of a configuration that a state's meaning or shape may depend on."""
    general = {field.name for field in dataclasses.fields(PreTrainedConfig)} | _STATELESS
    return tuple(field.name for field in dataclasses.fields(kind) if field.name not in general)
