"""Stop a run at a signal without losing its work."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# from clusters that take a machine or whose time is up, from users, from a closed terminal, and
# Ctrl-C; Ctrl-\\ (SIGQUIT) is left to end at once a run that hangs
SIGNALS = (
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
    signal.SIGHUP,
    signal.SIGINT,
)
_SAME_REQUEST = 1.0  # seconds within which a second signal repeats the first: `timeout` sends two


class Stopped(KeyboardInterrupt):
    """A run was told to stop by a signal and has stopped, with its work saved.

    Attributes:
        signal: The signal's number.
    """

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(number, message)  # so that it can be sent to other processes
        self.signal, self.message = number, message

    @property
    def status(self) -> int:
        """The exit status of a program that a signal ends: 128 and the signal's number."""
        return 128 + self.signal

    def __str__(self) -> str:
        return self.message or f"stopped by {signal.Signals(self.signal).name}"


class StopRequest:
    """Whether this process was told to stop.

    Attributes:
        signal: The first of :data:`SIGNALS` that came, None if none did.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._came = 0.0
        self._at_once = False
        self._before: dict[int, Any] = {}

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals inside; afterwards the handlers from before are back.

        Only the main thread can handle them. A signal that the process ignores stays ignored. One
        that came too late to be obeyed is sent again at the end.
        """
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before not in (None, signal.SIG_IGN):
                    self._before[number] = before
                    signal.signal(number, self._handle)
        try:
            yield
        finally:
            self._put_back()
        if self.signal is not None:
            signal.raise_signal(self.signal)

    @contextmanager
    def obeyed_at_once(self) -> Iterator[None]:
        """Stop anywhere inside, where nothing can be lost.

        Raises:
            Stopped: A signal came, also before.
        """
        outer, self._at_once = self._at_once, True
        try:
            if self.signal is not None:
                raise Stopped(self.signal)
            yield
        finally:
            self._at_once = outer

    def flags(self) -> list[int]:
        """Return 1 for the signal that came, 0 for the others of :data:`SIGNALS`."""
        return [int(number == self.signal) for number in SIGNALS]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._came = number, time.monotonic()
            if self._at_once:
                raise Stopped(number)
        # the system repeats SIGXCPU every second; a launcher passes on signals that its
        # processes already have, and kills slow ones
        elif (
            number != signal.SIGXCPU
            and "WORLD_SIZE" not in os.environ
            and time.monotonic() - self._came > _SAME_REQUEST
        ):
            self._put_back()
            signal.raise_signal(number)

    def _put_back(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()


def signal_of(flags: list[int]) -> int | None:
    """Return the first signal in :meth:`StopRequest.flags` that are summed over processes."""
    return next((number for number, count in zip(SIGNALS, flags, strict=True) if count), None)
