"""Tokenise texts, in this process or in worker processes.

A worker is a fresh interpreter on two pipes. It ends when its pipe is closed, so none outlives the
run, however that ends; it hears no signal, so a run that is told to stop can finish its step.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ssmzoo.data.tokenizer import Encoder, encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

# with the path of this process: a tokenizer's class may be defined beside the script
_START = """
import sys
sys.path[:] = sys.argv[1:]
from ssmzoo.data.workers import serve_calls
serve_calls()
"""


class Workers:
    """Call functions of an encoder and texts, ahead of time if there are worker processes.

    Args:
        tokenizer: The tokenizer.
        count: Worker processes, started when they are first needed; 0 calls in this process.

    Attributes:
        count: How many there are.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, count: int) -> None:
        self.count, self._tokenizer = count, tokenizer
        self._encode = encoder(tokenizer)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._mine = threading.local()
        self._threads = ThreadPoolExecutor(count) if count else None

    def submit(self, function: Callable[..., T], *given: Any) -> Callable[[], T]:
        """Return a function that waits for ``function(encode, *given)`` and returns its result.

        Without workers the call is made only then.

        Raises:
            RuntimeError: On waiting: a worker was killed. Errors of the function are raised, too.
        """
        if self._threads is None:
            return partial(function, self._encode, *given)
        return self._threads.submit(self._ask, (function, given)).result

    def close(self) -> None:
        """End the workers; calls that have not begun are dropped."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            with suppress(OSError):  # it was killed with something left to read
                process.stdin.close()  # type: ignore[union-attr]
            process.stdout.close()  # type: ignore[union-attr]
            process.wait()
        self._processes.clear()

    def _ask(self, call: tuple[Any, ...]) -> Any:
        new = not hasattr(self._mine, "process")
        if new:
            self._mine.process = self._start()
        process: subprocess.Popen[bytes] = self._mine.process
        try:
            if new:
                pickle.dump(self._tokenizer, process.stdin)  # type: ignore[arg-type]
            pickle.dump(call, process.stdin)  # type: ignore[arg-type]
            process.stdin.flush()  # type: ignore[union-attr]
            result, error = pickle.load(process.stdout)  # type: ignore[arg-type]
        except (OSError, EOFError, pickle.UnpicklingError) as broken:
            raise RuntimeError(
                f"data.workers: worker process {process.pid} was killed or ended (status "
                f"{process.wait()}), perhaps for memory; resume the run, with fewer than "
                f"{self.count} workers if there is too little"
            ) from broken
        if error is not None:
            raise error
        return result

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        # blocked signals stay so in the new process, from its beginning on
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, *sys.path],  # noqa: TID251  # it is read
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._processes.append(process)
        return process


def serve_calls() -> None:
    """Run a worker: make the calls that standard input gives; results go to standard output."""
    calls, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print to standard output
    try:
        encode = encoder(pickle.load(calls))
        while True:
            function, given = pickle.load(calls)
            try:
                answer = function(encode, *given), None
            except Exception as error:
                answer = None, error
            pickle.dump(answer, results, protocol=pickle.HIGHEST_PROTOCOL)
            results.flush()
    except (EOFError, OSError):  # the run has ended
        os._exit(0)


def encoded(encode: Encoder, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the tokens of texts, by document."""
    return encode(texts)
