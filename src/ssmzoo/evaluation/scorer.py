"""lm-eval, tamed: our language-model wrapper, and its noise sent to our log.

Importing this module imports lm-eval, torch and transformers; ``evaluate`` does it late.
"""

# lm-eval's decorators hide the types of HFLM and of evaluate
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import lm_eval
import lm_eval.api.task
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import resolve_max_length
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

LOG = logging.getLogger("ssmzoo")
# what lm-eval warns of in every run like ours, where nothing is wrong
_EXPECTED = (
    "`pretrained` model kwarg is not of type `str`",
    "Passed an already-initialized model through `pretrained`",
    "Custom kwargs can be passed to `--metadata`",
    "is defined, but aggregation is not",
    "is defined, but higher_is_better is not",
)


class Scorer(HFLM):
    """lm-eval's ``HFLM`` around a loaded model, with three differences.

    Log-softmax is float32 whatever the weights are; a tokenizer that opens every text with BOS is
    not charged for predicting it in rolling scores; progress bars keep to terminals.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, batch_size: int
    ) -> None:
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_size,
            softmax_dtype="float32",
        )
        self._silent = not sys.stderr.isatty()

    def make_room(self, tokens: int) -> None:
        """Let prompts be as long as a task needs where the model declares no limit of its own.

        lm-eval's own rule, 2048, stays the least; what is longer is cut from the left, with a
        warning in the log.
        """
        self._max_length = resolve_max_length(self.config, self.tokenizer, default=0) or max(
            self._DEFAULT_MAX_LENGTH, tokens
        )

    def run(
        self, tasks: dict[str, Any], *, limit: int | None, bootstrap_draws: int, keep_samples: bool
    ) -> dict[str, Any]:
        """Score loaded tasks with lm-eval's evaluator, and return all that it reports."""
        outcome = lm_eval.evaluate(
            lm=self,
            task_dict=tasks,
            limit=limit,
            bootstrap_iters=bootstrap_draws,
            log_samples=keep_samples,
        )
        assert outcome is not None
        return dict(outcome)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        """Score continuations; see ``HFLM``."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self._silent)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts; see ``HFLM``."""
        adds_bos, self.add_bos_token = self.add_bos_token, False
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm or self._silent)
        finally:
            self.add_bos_token = adds_bos

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate; see ``HFLM``."""
        return super().generate_until(requests, disable_tqdm=disable_tqdm or self._silent)

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        # rolling scores come here once a batch, and would draw a bar for each
        return super()._loglikelihood_tokens(
            requests,
            disable_tqdm=disable_tqdm or self._silent or override_bs is not None,
            override_bs=override_bs,
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
    """
    logger, handler = logging.getLogger("lm_eval"), _ToOurLog()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    bar, forking = lm_eval.api.task.tqdm, os.environ.get("DISABLE_MULTIPROC")
    lm_eval.api.task.tqdm = functools.partial(tqdm, disable=None)
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
        logger.removeHandler(handler)
        logger.propagate = propagate
