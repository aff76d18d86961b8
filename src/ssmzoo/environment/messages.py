"""Parts of error messages, and contexts that keep transformers' bars and reports quiet.

It imports nothing of ssmzoo: it travels with a checkpoint's own code.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its kind if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def shortened(text: str, most: int = 1000) -> str:
    """Return a message without its middle if it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    tail = most // 4
    return f"{text[: most - tail]} [{len(text) - most:,} characters left out] {text[-tail:]}"


def missing(need: str, extra: str, error: ImportError) -> RuntimeError:
    """Return the error to raise where a package of an extra cannot be imported.

    ``need`` is a clause, as "recipes need pydantic".
    """
    return RuntimeError(f"{need} ({first_line(error)}): pip install 'ssmzoo[{extra}]'")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest of the known names, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Keep transformers' bars for single weight files off the terminal."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def without_reports() -> Iterator[None]:
    """Keep transformers' reports that are no errors, such as of missing weights, off the log."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
