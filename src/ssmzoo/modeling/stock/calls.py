"""What a call of a model tells the functions that run deep inside its mixers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ssmzoo.modeling.packing import PackedRow


class Call(threading.local):
    """The call that runs now in this thread.

    Attributes:
        packing: Where packed sequences lie; None: every row is one sequence.
        states: What the next selective scans start from, ``[B, D, N]`` each; none: zeros.
        fused: Whether a function may read the weights of the mixer's projections.
        dt_limit: The least and greatest step size of a Mamba2 mixer.
        seen: The scans that run, with their arguments, while somebody asks; else None.
    """

    packing: PackedRow | None = None
    states: tuple[Tensor, ...] = ()
    fused: bool = False
    dt_limit: tuple[float, float] | None = None
    seen: list[tuple[Callable[..., Any], dict[str, Any]]] | None = None


call = Call()


@contextlib.contextmanager
def packed(packing: PackedRow | None) -> Iterator[None]:
    """Let mixers inside the block keep these packed sequences apart."""
    before, call.packing = call.packing, packing
    try:
        yield
    finally:
        call.packing = before
