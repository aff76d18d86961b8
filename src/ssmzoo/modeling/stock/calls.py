"""The running call, as functions deep inside stock mixers need to know it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ssmzoo.modeling.forward_code import ForwardCode
from ssmzoo.modeling.layer_state import LayerState
from ssmzoo.modeling.packing import Sequences
from ssmzoo.modeling.state_passing import StatePassing
from ssmzoo.modeling.stock.mixer_states import HeadStates, StartingStates


@dataclass
class BlockReading:
    """How blocks read one token.

    Attributes:
        runs: By their first one, blocks that follow one another and read it in one call of C.
        block: The last block that read it by a program.
        output: What that block gave; of a run, the last of its blocks.
        ahead: How many blocks behind ``block`` have read it, too, and return what they get.
    """

    runs: Mapping[Any, Any]
    block: Any = None
    output: Tensor | None = None
    ahead: int = 0


class Call(threading.local):
    """The call that runs now in this thread.

    Attributes:
        packing: Where packed sequences lie; None: every row is one sequence.
        passing: Where mixers get their states and leave them, in place of transformers' cache;
            None: they use the cache.
        mixer: The mixer that runs; None between mixers.
        masked: Whether it got an attention mask.
        states: Its states, where ``passing`` has them.
        scans: The scans that run, with their arguments, while ``dynamics`` asks; else None.
        checked_code: Whether the code of layers is unchanged, as this call has found it; None
            outside a model's forward.
        reading: How the blocks of the model around its layers read one token; None outside it.
    """

    def __init__(self) -> None:
        # in each thread's own instance, where a graph's guards look for them
        self.packing: Sequences | None = None
        self.passing: StatePassing | StartingStates | None = None
        self.mixer: Any = None
        self.masked: bool = False
        self.states: LayerState | HeadStates | None = None
        self.scans: list[tuple[Callable[..., Any], dict[str, Any]]] | None = None
        self.checked_code: dict[ForwardCode, bool] | None = None
        self.reading: BlockReading | None = None


call = Call()


@contextlib.contextmanager
def mixers_with(
    packing: Sequences | None, passing: StatePassing | StartingStates | None
) -> Iterator[None]:
    """Let mixers inside the block keep packed sequences apart and get their states elsewhere."""
    before = call.packing, call.passing
    call.packing, call.passing = packing, passing
    try:
        yield
    finally:
        call.packing, call.passing = before
