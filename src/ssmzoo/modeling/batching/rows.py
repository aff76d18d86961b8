"""The requests that are being answered: a row of one cache each."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.requests import RequestState

from ssmzoo.modeling.cache import RecurrentCache, backbone_of
from ssmzoo.modeling.compat import CACHE


class DecodingRows:
    """Requests behind their prompts, and their states.

    Args:
        model: A causal language model that keeps a state.
        new_cache: Makes what keeps it.
    """

    def __init__(self, model: Any, new_cache: Callable[[], RecurrentCache]) -> None:
        self._model, self._new_cache = model, new_cache
        self._growing: set[tuple[int, str]] = set()  # layers and names of states with all tokens
        self.requests: list[RequestState] = []
        self.cache: RecurrentCache | None = None

    def __len__(self) -> int:
        return len(self.requests)

    def read(self, tokens: Sequence[int], cache: RecurrentCache | None) -> RecurrentCache:
        """Read some tokens of one row behind its state, if it has one; return its new state."""
        state = self._new_cache() if cache is None else cache
        backbone_of(self._model)(self._ids([tokens]), **{CACHE: state})
        return state

    def finish(
        self, tokens: Sequence[int], cache: RecurrentCache | None
    ) -> tuple[Tensor, RecurrentCache]:
        """Read the last tokens of a prompt; return the logits ``[1, V]`` and the state."""
        state = self._new_cache() if cache is None else cache
        return self._logits(self._ids([tokens]), state), state

    def add(self, requests: Sequence[RequestState], cache: RecurrentCache) -> None:
        """Let requests join, a row of the cache each."""
        self.cache = cache if self.cache is None else type(cache).joined([self.cache, cache])
        self.requests = [*self.requests, *requests]

    def keep(self, wanted: Container[str]) -> None:
        """Drop the rows of all requests but these."""
        rows = [i for i, request in enumerate(self.requests) if request.request_id in wanted]
        if self.cache is None or len(rows) == len(self.requests):
            return
        self.requests = [self.requests[i] for i in rows]
        if not rows:
            self.cache = None
            return
        longest = max(map(tokens_read, self.requests))
        self.cache = self._cut(self.cache.selected(torch.tensor(rows)), longest)

    def state(self, row: int) -> RecurrentCache:
        """Return the state of a row alone, before its request has its next token."""
        assert self.cache is not None
        return self._cut(self.cache.selected(torch.tensor([row])), tokens_read(self.requests[row]))

    def _cut(self, cache: RecurrentCache, longest: int) -> RecurrentCache:
        """Drop what other rows put in front of states that grow."""
        if self._growing:
            states = cache.get_states()
            for layer, name in self._growing:
                states[layer][name] = states[layer][name][:, -longest:].contiguous()
            cache.set_states(states)
        return cache

    def step(self) -> Tensor:
        """Read the newest token of every row; return the logits behind them, ``[R, V]``."""
        assert self.cache is not None
        before = self.cache.get_states()
        shapes = [{name: state.shape for name, state in held.items()} for held in before]
        newest = [[request.generated_tokens[-1]] for request in self.requests]
        logits = self._logits(self._ids(newest), self.cache)
        for layer, held in enumerate(self.cache.get_states()):
            for name, state in held.items():
                if state.shape != shapes[layer][name]:
                    self._growing.add((layer, name))
        return logits

    def _ids(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([list(row) for row in rows], device=self._model.device)

    def _logits(self, ids: Tensor, cache: RecurrentCache) -> Tensor:
        output = self._model(ids, logits_to_keep=1, use_cache=True, **{CACHE: cache})
        return output.logits[:, -1]


def tokens_read(request: RequestState) -> int:
    """Return how many tokens the state of a request that is being answered has read."""
    return len(request.initial_tokens) + len(request.generated_tokens) - 1
