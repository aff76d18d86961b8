"""A state in buffers that are written in place, so that a CUDA graph can run a step.

What surprises: a token changes no Python number, as the tokens seen are counted in a tensor. So one
graph of ``torch.compile`` serves all steps, and its memory never moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ssmzoo.modeling.cache import CacheLayer, StateCache
from ssmzoo.modeling.layer_state import LayerState

if TYPE_CHECKING:
    from typing import Self

    from ssmzoo.modeling.configuration import SSMConfig


class StaticLayer(CacheLayer):
    """One layer's buffers; states that are assigned are copied into them."""

    is_compileable = True

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.fresh = True  # nothing was read yet, whatever the buffers hold
        self.settled = False  # the buffers have the sizes that this model leaves

    def __copy__(self) -> StaticLayer:
        """Return a layer without buffers, for the states of this one."""
        copied = type(self)()
        copied.settled = self.settled and not self.fresh
        return copied

    @property
    def states(self) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the buffers, nothing where nothing was read."""
        return {} if self.fresh else self.buffers

    @states.setter
    def states(self, states: Mapping[str, Tensor]) -> None:
        for name, state in states.items():
            buffer = self.buffers.get(name)
            if buffer is None or _kind(buffer) != _kind(state):
                self.buffers[name] = _buffer(state)
            elif buffer is not state:
                buffer.copy_(state)
        self.fresh = not states


class StaticStateCache(StateCache):
    """A :class:`StateCache` whose memory stays where it is: every call writes into it in place.

    The first call makes the buffers; run it uncompiled where CUDA graphs shall run the steps
    (``generate`` does). :meth:`reset` keeps them for the next prompt of as many rows; only methods
    that change the number of rows make new ones. A call that fails leaves the state unchanged.

    Args:
        config: The configuration of the model it will serve.
        max_cache_len: How many tokens it has room for, padding included, where the state grows
            (``config.state_grows``: B'MOJO's layers that attend to all tokens); None elsewhere.

    Raises:
        ValueError: ``max_cache_len`` is missing, of no use, or not positive.
        TypeError: It is no integer.
    """

    layer_class = StaticLayer
    layers: list[StaticLayer]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: SSMConfig, max_cache_len: int | None = None) -> None:
        if config.state_grows and max_cache_len is None:
            raise ValueError(
                f"max_cache_len must be given: the state of a {type(config).__name__} with layers "
                "that attend to all tokens grows; pass the most tokens that a row will have"
            )
        if max_cache_len is not None:
            if type(max_cache_len) is not int:
                kind = type(max_cache_len).__name__
                raise TypeError(f"max_cache_len must be an integer, got a {kind}")
            if not config.state_grows:
                raise ValueError(
                    f"max_cache_len must be left out, got {max_cache_len}: the state of this "
                    f"{type(config).__name__} has one size after any number of tokens"
                )
            if max_cache_len < 1:
                raise ValueError(f"max_cache_len must be at least 1, got {max_cache_len}")
        self._seen: Tensor | None = None
        super().__init__(config)
        self.max_cache_len = max_cache_len

    def get_memory(self) -> list[dict[str, Tensor]]:
        """Return the buffers of each layer."""
        return [layer.buffers for layer in self.layers]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy buffers and count, into memory that every mode of autograd may write into."""
        copied = super().__deepcopy__(memo)
        if self._seen is not None:
            copied._seen = _buffer(self._seen)
        return copied

    @property
    def seen_tokens(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return how many tokens each row has seen, padding included; on a GPU this waits."""
        return 0 if self._seen is None else int(self._seen)

    @seen_tokens.setter
    def seen_tokens(self, tokens: int) -> None:
        if self._seen is None:
            device = next((s.device for la in self.layers for s in la.buffers.values()), None)
            if device is None:
                assert tokens == 0
                return
            self._seen = _buffer(torch.zeros((), dtype=torch.int64, device=device))
        self._seen.fill_(tokens)

    def _count(self, tokens: int) -> None:
        if self._seen is None:
            self.seen_tokens = tokens
        else:
            self._seen.add_(tokens)

    @property
    def is_compileable(self) -> bool:
        """Tell transformers' ``generate``, which then compiles decoding on GPUs."""
        return not self.recording  # a list of snapshots grows

    def check(self, config: PreTrainedConfig, batch_size: int, tokens: int = 0) -> None:
        """Check that the cache fits; in a graph it fails as that runs, on a GPU after it."""
        super().check(config, batch_size, tokens)
        room = self.max_cache_len
        if room is None:
            return
        if self._seen is None or not torch.compiler.is_compiling():
            if self.seen_tokens + tokens > room:
                raise ValueError(
                    f"cache has room for max_cache_len = {room} tokens, got "
                    f"{self.seen_tokens} and {tokens} more; make it with a longer max_cache_len"
                )
        else:
            torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
                self._seen + tokens <= room,
                "cache got more tokens than its max_cache_len; make it with a longer one",
            )

    def take(self, states: list[LayerState], hidden_states: Tensor) -> Tensor:
        """Copy the states that a call left into the buffers.

        Raises:
            ValueError: A state has another size than before, or a gradient's graph.
        """
        for index, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
            if layer.settled and layer.buffers.keys() != state.final.keys():
                raise ValueError(
                    f"layer {index} must leave the states {sorted(layer.buffers)} in a "
                    f"StaticStateCache, got {sorted(state.final)}; take a StateCache"
                )
            for name, final in state.final.items():
                what, buffer = f"state {name!r} of layer {index}", layer.buffers.get(name)
                if final.requires_grad:
                    raise ValueError(
                        f"a StaticStateCache must be used under torch.no_grad(), got {what} with a "
                        "graph, which writing in place would break; take a StateCache to train"
                    )
                if layer.settled and buffer is not None and _kind(buffer) != _kind(final):
                    raise ValueError(
                        f"{what} must stay {_kind(buffer)} in a StaticStateCache, got "
                        f"{_kind(final)}; take a StateCache, or a new one for another dtype"
                    )
        output = super().take(states, hidden_states)
        for layer in self.layers:
            layer.settled = True
        return output


def _kind(state: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return state.shape, state.dtype, state.device


def _buffer(state: Tensor) -> Tensor:
    """Return a copy in memory of its own, which every mode of autograd may write into."""
    if torch.compiler.is_compiling():
        return state.clone()
    with torch.inference_mode(False), torch.no_grad():
        buffer = state.clone()
    if buffer.device.type != "cpu":  # CPUs have no such graphs
        torch._dynamo.mark_static_address(buffer, guard=False)
    return buffer
