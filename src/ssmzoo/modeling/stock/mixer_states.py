"""The states of a call's mixers where they are kept apart from transformers' cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ssmzoo.modeling.layer_state import LayerState
from ssmzoo.modeling.stock.cache import CONV_STATE, SCAN_STATE, cached_convolution


class StartingStates:
    """The states of one call's mixers, kept apart from transformers' cache.

    Its methods are those of ``StatePassing``.

    Args:
        initial: By layer the states by name, a row a sequence.
    """

    def __init__(self, initial: Mapping[int, Mapping[str, Tensor]]) -> None:
        self._initial = initial
        self.final: dict[int, dict[str, Tensor]] = {}

    def open_layer(self, index: int, device: torch.device) -> tuple[Any, Any]:
        """Return where a layer's states come from, and where they go to, by name."""
        return self._initial.get(index, {}), self.final.setdefault(index, {})

    def close(self, hidden_states: Tensor) -> Tensor:
        """Return ``hidden_states``: there is nothing to receive or send."""
        return hidden_states

    def leave(self, cache: Cache, adapter: Any) -> None:
        """Write the mixers' final states into a cache, cut from the graph if an adapter began."""
        for index, final in self.final.items():
            conv, scan = (
                final[name] if adapter is None else final[name].detach()
                for name in (CONV_STATE, SCAN_STATE)
            )
            cache.update_conv_state(cached_convolution(conv), index)
            cache.update_recurrent_state(scan, index)


class HeadStates:
    """A mixer's states where its scans run head by head, each with its own ``[B, D, N]``.

    Args:
        states: Those of all heads, ``[B, H, D, N]``.
    """

    def __init__(self, states: LayerState) -> None:
        self._states = states
        self._starts: Iterator[Tensor] | None = None
        self._final: list[Tensor] = []

    def get(self, name: str) -> Tensor | None:
        """Return the state to start from, of a scan the next head's."""
        if name != SCAN_STATE:
            return self._states.get(name)
        if self._starts is None:
            whole = self._states.get(name)
            self._starts = iter(() if whole is None else whole.unbind(1))
        return next(self._starts, None)

    def put(self, name: str, state: Tensor) -> None:
        """Leave a final state."""
        if name == SCAN_STATE:
            self._final.append(state)
        else:
            self._states.put(name, state)

    def close(self) -> None:
        """Leave those of the scans, which have all run."""
        self._states.put(SCAN_STATE, torch.stack(self._final, dim=1))


def mixer_states(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a layer's states in a cache as mixers take them, ``[B, K - 1, D]`` and the scan's."""
    conv = states[CONV_STATE][:, :, 1:].transpose(1, 2)
    return {CONV_STATE: conv, SCAN_STATE: states[SCAN_STATE]}
