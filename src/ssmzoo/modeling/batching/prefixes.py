"""States behind the beginnings of prompts, for later requests that begin alike."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence

from ssmzoo.modeling.cache import RecurrentCache


class Prefixes:
    """States by the tokens that they have read; those not used for longest go first.

    Args:
        room: Bytes of states that are kept at most.
    """

    def __init__(self, room: float) -> None:
        self.room, self.nbytes = room, 0
        self._held: OrderedDict[tuple[int, ...], RecurrentCache] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def put(self, tokens: Sequence[int], cache: RecurrentCache) -> None:
        """Keep a copy of the state of one row behind these tokens, if there is room for it."""
        key = tuple(tokens)
        if key in self._held:
            self._held.move_to_end(key)
            return
        if cache.nbytes > self.room:
            return
        self._held[key] = kept = copy.deepcopy(cache)
        self.nbytes += kept.nbytes
        while self.nbytes > self.room:
            _, dropped = self._held.popitem(last=False)
            self.nbytes -= dropped.nbytes

    def longest(self, tokens: Sequence[int]) -> tuple[int, RecurrentCache | None]:
        """Return how many first tokens of a prompt some state has read, and a copy of that state.

        The last token is always left to read: its logits are what a prompt is read for.
        """
        for length in sorted({len(key) for key in self._held}, reverse=True):
            key = tuple(tokens[:length])
            if length < len(tokens) and key in self._held:
                self._held.move_to_end(key)
                return length, copy.deepcopy(self._held[key])
        return 0, None

    def clear(self) -> None:
        """Forget all states, as after a change of the weights."""
        self._held.clear()
        self.nbytes = 0
