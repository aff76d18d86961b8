"""Our wrapper of a model for lm-eval; lm-eval's messages go to our log.

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
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol, TypeAlias

import lm_eval
import lm_eval.api.task
import torch
import torch.distributed as dist
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import resolve_max_length
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ssmzoo.modeling.cache import backbone_of
from ssmzoo.modeling.compat import CACHE

LOG = logging.getLogger("ssmzoo")
# lm-eval's warnings in every run like ours, where nothing is wrong
_EXPECTED = (
    "`pretrained` model kwarg is not of type `str`",
    "Passed an already-initialized model through `pretrained`",
    "Custom kwargs can be passed to `--metadata`",
    "is defined, but aggregation is not",
    "is defined, but higher_is_better is not",
)


def process_count() -> int:
    """Return how many processes score together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def shared_answers(
    requests: Sequence[Any], batches: list[list[int]], answer: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    """Answer requests in all processes together; all must call this, and get all answers.

    Args:
        requests: All of them, in every process.
        batches: Their indices; a batch stays whole, and the processes take turns.
        answer: Answers some of them, in order.

    Raises:
        Exception: In all processes, where ``answer`` raises in one.
    """
    world = process_count()
    if world == 1:
        return answer(list(requests))
    mine = sorted(index for batch in batches[dist.get_rank() :: world] for index in batch)
    outcome: Any
    try:
        answers = answer([requests[index] for index in mine]) if mine else []
        outcome = list(zip(mine, answers, strict=True))
    except Exception as error:
        outcome = error
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, outcome)
    for error in everyone:
        if isinstance(error, Exception):
            raise error
    found = {index: value for part in everyone for index, value in part}
    return [found[index] for index in range(len(requests))]


# a context and a continuation, and the token ids of both
TokenRequest: TypeAlias = tuple[tuple[str, str], list[int], list[int]]


class Backend(Protocol):
    """How log-likelihoods of continuations are computed; a :class:`Scorer` is given one by class.

    Whole texts and generated answers do not go through it. It is no backend of kernels.
    """

    def batches(self, requests: Sequence[TokenRequest]) -> list[list[int]]:
        """Return the indices of requests in batches; processes share whole ones."""
        ...

    def loglikelihoods(
        self, requests: list[TokenRequest], *, silent: bool
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and whether greedy decoding gives it."""
        ...


class PaddedRows:
    """lm-eval's way: sorted by length, a row for each context with its continuation."""

    def __init__(self, lm: Scorer) -> None:
        self._answer = functools.partial(HFLM._loglikelihood_tokens, lm)
        self._size = int(lm.batch_size)

    def batches(self, requests: Sequence[TokenRequest]) -> list[list[int]]:
        """Return batches in lm-eval's order, which it keeps when it sorts a share of them."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index in sorted(
            range(len(requests)),
            key=lambda i: (-len(tokens := requests[i][1] + requests[i][2]), tuple(tokens)),
        ):
            _, context, continuation = requests[index]
            groups.setdefault((*context, *continuation[:-1]), []).append(index)
        found = list(groups.values())
        starts = range(0, len(found), self._size)
        return [list(chain(*found[i : i + self._size])) for i in starts]

    def loglikelihoods(
        self, requests: list[TokenRequest], *, silent: bool
    ) -> list[tuple[float, bool]]:
        """Score as ``HFLM`` does."""
        return self._answer(requests, disable_tqdm=silent)


class Scorer(HFLM):
    """lm-eval's ``HFLM`` around a loaded model, with five differences.

    Log-softmax is float32 whatever the weights are; a tokenizer that opens every text with BOS is
    not charged for predicting it in rolling scores; where a task asks for whole texts, a model
    that reads any length does, its state carried on; progress bars keep to terminals; requests are
    shared among the processes that a launcher started. lm-eval itself does not know of the others:
    every process gets all answers.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        batch_size: Rows of a forward pass; 1 where padding would change a row.
        backend: Makes what computes the log-likelihoods of continuations.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int,
        backend: Callable[[Scorer], Backend] = PaddedRows,
    ) -> None:
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",  # lm-eval's word for the kind of model
            batch_size=batch_size if getattr(model.config, "decodable", True) else 1,
            softmax_dtype="float32",
        )
        self._backend = backend(self)
        self._silent = not sys.stderr.isatty()
        self.whole = False  # whether the texts of the next task are read whole

    def reads_any_length(self) -> bool:
        """Tell whether the model declares no limit and goes on from a state of any text."""
        limit = resolve_max_length(self.config, self.tokenizer, default=0)
        keeps = getattr(self.config, "decodable", True)
        return not limit and keeps and getattr(self.model, "recurrent_backbone", None) is not None

    @property
    def window(self) -> int:
        """Tokens that the model reads at once."""
        return int(self.max_length)

    def make_room(self, tokens: int) -> None:
        """Let prompts be as long as a task needs where the model declares no limit of its own.

        lm-eval's own rule, 2048, stays the least; longer prompts are cut from the left, with a
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
        windows = super().loglikelihood_rolling
        answer = self._of_whole_texts if self.whole else lambda mine: windows(mine, self._silent)
        try:
            return shared_answers(requests, self._batches(requests), answer)
        finally:
            self.add_bos_token = adds_bos

    @torch.no_grad()
    def _of_whole_texts(self, requests: list[Any]) -> list[float]:
        """Score each text from its first token to its last, a piece at a time."""
        found = []
        for request in requests:
            (text,) = request.args
            tokens = torch.tensor([[self.prefix_token_id, *self.tok_encode(text)]])
            cache, total = backbone_of(self.model).cache_class(self.config), 0.0
            for begin in range(0, tokens.shape[1] - 1, self._DEFAULT_MAX_LENGTH):
                piece = tokens[:, begin : begin + self._DEFAULT_MAX_LENGTH + 1].to(self.device)
                logits = self.model(piece[:, :-1], **{CACHE: cache}).logits.float()
                answers = logits.log_softmax(-1).gather(2, piece[:, 1:, None])
                total += answers.double().sum().item()
            found.append(total)
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate; see ``HFLM``.

        Raises:
            ValueError: A task samples, and there are several processes.
        """
        if process_count() > 1 and any(r.args[1].get("do_sample") for r in requests):
            raise ValueError(
                f"task {requests[0].task_name!r} samples, and several processes would draw other "
                "numbers than one; score it without a launcher"
            )
        answer = super().generate_until
        return shared_answers(
            requests, self._batches(requests), lambda mine: answer(mine, self._silent)
        )

    def _batches(self, requests: list[Any]) -> list[list[int]]:
        size = int(self.batch_size)
        return [[*range(len(requests))[i : i + size]] for i in range(0, len(requests), size)]

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        if override_bs is not None:  # rolling scores come once a batch, and would draw a bar each
            answer = super()._loglikelihood_tokens
            return answer(requests, disable_tqdm=True, override_bs=override_bs)
        silent = disable_tqdm or self._silent
        return shared_answers(
            requests,
            self._backend.batches(requests),
            lambda mine: self._backend.loglikelihoods(mine, silent=silent),
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
