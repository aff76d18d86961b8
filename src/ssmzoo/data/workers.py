"""Work on texts with a tokenizer, in this process or in worker processes.

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
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from ssmzoo.data.tokenizer import Encoder, encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
P = ParamSpec("P")

# on the path of this process: a tokenizer's class may lie beside the script that made it
_START = """
import sys
sys.path[:] = sys.argv[1:]
from ssmzoo.data.workers import serve_calls
serve_calls()
"""


class Workers:
    """What calls functions of an encoder and texts, ahead of their use if there are workers.

    Args:
        tokenizer: The tokenizer.
        count: Worker processes, started when they are first needed; 0 calls in this process.

    Attributes:
        count: How many there are.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, count: int = 0) -> None:
        self.count, self._tokenizer = count, tokenizer
        self._encode = encoder(tokenizer)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._mine = threading.local()
        self._threads = ThreadPoolExecutor(count) if count else None

    def submit(
        self, function: Callable[Concatenate[Encoder, P], T], *given: P.args, **named: P.kwargs
    ) -> Callable[[], T]:
        """Return what waits for ``function(encode, ...)``; without workers it is called only then.

        Raises:
            RuntimeError: On waiting: a worker was killed. What the function raises is raised.
        """
        if self._threads is None:
            return partial(function, self._encode, *given, **named)
        return self._threads.submit(self._ask, (function, given, named)).result

    def close(self) -> None:
        """End the workers; what was submitted and not begun is dropped."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            _stop(process)
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


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError):  # it was killed with something left to read
        process.stdin.close()
    process.stdout.close()
    process.wait()


def serve_calls() -> None:
    """Be a worker: call what comes on standard input, and write the results to standard output."""
    calls, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no result
    try:
        encode = encoder(pickle.load(calls))
        while True:
            function, given, named = pickle.load(calls)
            try:
                answer = function(encode, *given, **named), None
            except Exception as error:
                answer = None, error
            pickle.dump(answer, results, protocol=pickle.HIGHEST_PROTOCOL)
            results.flush()
    except (EOFError, OSError):  # the run has ended
        os._exit(0)


def encoded(encode: Encoder, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the tokens of texts, by document."""
    return encode(texts)
