"""A mixer's view of the cache: the states of its layer before and after one forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ssmzoo.modeling.packing import Sequences

if TYPE_CHECKING:
    from ssmzoo.modeling.forward_code import ForwardCode


@dataclass
class LayerState:
    """One layer's view of the cache during one forward pass.

    A mixer reads its initial state with :meth:`get` and stores its final state with :meth:`put`.
    :meth:`get` never returns what :meth:`put` stored in the same pass, so a layer may run twice
    (gradient checkpointing).
    """

    initial: Mapping[str, Tensor] = field(default_factory=dict)
    keep: bool = False
    packing: Sequences | None = None
    room: int | None = None  # for how many tokens the cache is; None: no bound
    final: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[Any, Any] = field(default_factory=dict)  # computed once for all layers
    reversed_shared: dict[Any, Any] = field(default_factory=dict)  # by mixers on reversed sequences
    # whether the code of layers is unchanged, as this call has found it; shared by all layers
    checked_code: dict[ForwardCode, bool] = field(default_factory=dict)

    def get(self, name: str) -> Tensor | None:
        """Return the state to start from, one row per sequence, or None for a fresh start."""
        state, packing = self.initial.get(name), self.packing
        if state is None or packing is None or packing.rows is None:
            return state
        return state.new_zeros(packing.count, *state.shape[1:]).index_copy(0, packing.rows, state)

    def get_row(self, name: str) -> Tensor | None:
        """Return the state to start from, one for every row of :meth:`Sequences.aligned`."""
        return self.initial.get(name)

    def put_row(self, name: str, state: Tensor) -> None:
        """Store the states of those rows; without a cache they are dropped."""
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
            got = f"a {state.dtype}" if isinstance(state, Tensor) else f"a {type(state).__name__}"
            raise TypeError(
                f"state {name!r} must be a tensor of real numbers with a row a sequence, got "
                f"{got}; of complex ones take torch.view_as_real"
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
