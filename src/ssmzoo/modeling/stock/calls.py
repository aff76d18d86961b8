"""What a call of a model tells the functions that run deep inside its mixers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ssmzoo.modeling.cache import LayerState
from ssmzoo.modeling.packing import PackedRow
from ssmzoo.modeling.sequence_parallel import StatePassing
from ssmzoo.modeling.stock.mixer_states import HeadStates, StartingStates


class Call(threading.local):
    """The call that runs now in this thread.

    Attributes:
        packing: Where packed sequences lie; None: every row is one sequence.
        passing: What passes states on, from process to process or apart from transformers' cache;
            None: nothing does.
        layer: The states of the mixer that runs, where they are passed.
        states: What the next selective scans start from, ``[B, D, N]`` each; none: zeros.
        fused: Whether a function may read the weights of the mixer's projections.
        dt_limit: The least and greatest step size of a Mamba2 mixer.
        seen: The scans that run, with their arguments, while somebody asks; else None.
        looked: What the call has found of its layers' code; None outside a model's forward.
    """

    def __init__(self) -> None:
        # of every thread's own, because a graph's guards look for them there
        self.packing: PackedRow | None = None
        self.passing: StatePassing | StartingStates | None = None
        self.layer: LayerState | HeadStates | None = None
        self.states: tuple[Tensor, ...] = ()
        self.fused: bool = False
        self.dt_limit: tuple[float, float] | None = None
        self.seen: list[tuple[Callable[..., Any], dict[str, Any]]] | None = None
        self.looked: dict[Any, Any] | None = None


call = Call()


@contextlib.contextmanager
def told_of(
    packing: PackedRow | None, passing: StatePassing | StartingStates | None
) -> Iterator[None]:
    """Let mixers inside the block keep these packed sequences apart, and pass their states so."""
    before = call.packing, call.passing
    call.packing, call.passing = packing, passing
    try:
        yield
    finally:
        call.packing, call.passing = before
