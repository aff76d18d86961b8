"""Rolling tokens back: calls leave snapshots, and a call's tokens that stay are read again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from ssmzoo.modeling.compat import CACHE


@dataclass
class Recorded:
    """A forward pass that may be rolled back: the states before it, and its inputs."""

    states: list[dict[str, Tensor]]
    inputs: dict[str, Tensor] | None  # by argument, [B, L, ...]; None: none to read again
    length: int = 0  # by how many tokens it advanced the cache


class RollbackCache(Cache):
    """A cache that counts tokens and rolls them back; a subclass holds the states."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen_tokens = 0
        self.pending: dict[str, Tensor] | None = None  # inputs that the next call must read first
        self.input_holds_seen = False  # in generate: whether the first input repeats tokens seen
        self.recording = False
        self._recorded: list[Recorded] = []

    def get_states(self) -> list[dict[str, Tensor]]:
        """Return each layer's states by name; not copies."""
        raise NotImplementedError

    def set_states(self, states: list[dict[str, Tensor]]) -> None:
        """Replace each layer's states.

        Raises:
            ValueError: A layer has no state of such a name.
        """
        raise NotImplementedError

    def _snapshot(self) -> list[dict[str, Tensor]]:
        # some steps write into a state's own memory
        return [{n: s.detach().clone() for n, s in held.items()} for held in self.get_states()]

    def reset(self) -> None:
        """Forget everything; the next token starts a new sequence."""
        self.set_states([{} for _ in self.layers])
        self.seen_tokens = 0
        self.pending, self._recorded = None, []

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
            inputs: The call's inputs, as :class:`Recorded` keeps them.
        """
        return Recorded(self._snapshot(), inputs) if self.recording else None

    def advance(self, tokens: int, recorded: Recorded | None) -> None:
        """Count the tokens of a call, and keep the snapshot of :meth:`record` before it."""
        self._count(tokens)
        if recorded is not None:
            recorded.length = tokens
            self._recorded.append(recorded)

    def _count(self, tokens: int) -> None:
        self.seen_tokens += tokens

    @torch.no_grad()
    def read_again(self, model: nn.Module) -> None:
        """Let ``model`` read the tokens of a call that a crop kept, to bring states up to date."""
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
        """Return whether calls from now on can be rolled back."""
        return self.recording

    def crop(self, max_length: int) -> None:
        """Roll back tokens that were read while calls were recorded.

        Whole calls are rolled back from their snapshots. Of a call that stays in part, the tokens
        that stay are read again at the start of the next call.

        Args:
            max_length: If positive, the number of tokens to keep; if 0 or negative, as transformers
                passes it, minus the number to roll back. The snapshots taken so far are dropped.

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
        self._recorded = []

    def _require_no_pending(self) -> None:
        if self.pending is not None:
            raise RuntimeError(
                "the cache was cropped into the middle of a call, so its states are recomputed in "
                "the next call; run the model on the next tokens first"
            )
