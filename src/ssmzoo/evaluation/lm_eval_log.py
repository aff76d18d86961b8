"""lm-eval with its log in ours, quiet elsewhere, and with each prompt's template compiled once."""

# lm-eval's decorators hide the types of its functions
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import re
import sys
from collections.abc import Iterator

import lm_eval.api.task
import lm_eval.utils
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

LOG = logging.getLogger("ssmzoo")
# lm-eval's warnings in every run like ours, where nothing is wrong
_EXPECTED = (
    "`pretrained` model kwarg is not of type `str`",
    "Passed an already-initialized model through `pretrained`",
    "Custom kwargs can be passed to `--metadata`",
    "is defined, but aggregation is not",
    "is defined, but higher_is_better is not",
)


class _ToOurLog(logging.Handler):
    """Pass on lm-eval's warnings and errors, each kind once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        kind = re.sub(r"\d+", "#", message)
        if kind not in self._seen and not any(known in message for known in _EXPECTED):
            self._seen.add(kind)
            LOG.log(record.levelno, "lm-eval: %s", message)


@contextlib.contextmanager
def tamed() -> Iterator[None]:
    """Run lm-eval with its log in ours, nothing on stdout, bars only on a terminal.

    Bootstrapped standard errors stay in this process: forking one that holds a model is not safe.
    lm-eval compiles a task's template for every prompt, 0.6 ms each; here the first is kept.
    """
    logger, handler = logging.getLogger("lm_eval"), _ToOurLog()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    bar, forking = lm_eval.api.task.tqdm, os.environ.get("DISABLE_MULTIPROC")
    lm_eval.api.task.tqdm = functools.partial(tqdm, disable=None)
    templates = lm_eval.utils.env
    compiling = templates.from_string
    templates.from_string = functools.cache(compiling)
    os.environ["DISABLE_MULTIPROC"] = "1"
    bars_on = transformers_logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        if bars_on:
            transformers_logging.enable_progress_bar()
        if forking is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = forking
        lm_eval.api.task.tqdm = bar
        templates.from_string = compiling
        logger.removeHandler(handler)
        logger.propagate = propagate
