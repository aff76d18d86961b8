"""What a run measures of its training between two lines of ``metrics.jsonl``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Meter:
    """Losses and gradient norms since the last line, and the time spent on training alone."""

    def __init__(self) -> None:
        self.seconds = 0.0  # of training, until the last line
        self._window: list[tuple[float, float]] = []
        self._tokens = 0
        self._clock = time.perf_counter()

    def start(self, tokens: int) -> None:
        """Start the clock, after so many tokens."""
        self._clock, self._tokens = time.perf_counter(), tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of a block out."""
        pause = time.perf_counter()
        yield
        self._clock += time.perf_counter() - pause

    def add(self, pairs: Sequence[tuple[float, float]]) -> None:
        """Add the losses and gradient norms of some steps."""
        self._window += pairs

    def line(self, tokens: int) -> dict[str, float]:
        """Return the means since the last line, the speed, and the seconds; and begin anew."""
        now = time.perf_counter()
        spent = now - self._clock
        speed = (tokens - self._tokens) / spent
        self.seconds += spent
        self._clock, self._tokens = now, tokens
        losses, norms = zip(*self._window, strict=True)
        self._window = []
        return {
            "loss": sum(losses) / len(losses),
            "grad_norm": sum(norms) / len(norms),
            "tokens_per_second": round(speed, 1),
            "seconds": round(self.seconds, 3),
        }

    def state(self) -> dict[str, Any]:
        """Return, as JSON, what a resumed run needs to write the same lines."""
        spent = self.seconds + time.perf_counter() - self._clock
        return {"seconds": spent, "window": self._window}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state` returned."""
        self.seconds = state["seconds"]
        self._window = [(loss, norm) for loss, norm in state["window"]]
