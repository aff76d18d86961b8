"""How log-likelihoods are computed: the protocol, and lm-eval's way for models without a state.

:mod:`.shared_states` is the way of models with one.
"""

# lm-eval's decorators hide the types of HFLM
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from lm_eval.models.huggingface import HFLM

from ssmzoo.evaluation.planner import Request, tokens_alone
from ssmzoo.evaluation.reading import Finish, Reading

LOG = logging.getLogger("ssmzoo")


def keeps_state(model: Any) -> bool:
    """Return whether a model goes on from a state that we can copy.

    A model on stock layers, of attention alone, or with PEFT's virtual tokens does not.
    """
    backbone = getattr(model, "recurrent_backbone", None)
    if backbone is None or not getattr(model.config, "decodable", True):
        return False
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return False
    try:
        backbone.cache_class(backbone.config)
    except ValueError as error:
        LOG.warning("requests are read one by one: %s", error)
        return False
    return True


class Backend(Protocol):
    """How log-likelihoods are computed."""

    def divide(self, requests: Sequence[Request], parts: int) -> list[list[int]]:
        """Return the indices of each process's requests."""
        ...

    def loglikelihoods(
        self, requests: Sequence[Request], finish: Finish[tuple[float, bool]], reading: Reading
    ) -> None:
        """Hand over each request's log-likelihood, and whether greedy decoding gives its tokens."""
        ...


class PaddedRows:
    """lm-eval's way: sorted by length, a row for each context with its continuation.

    Args:
        lm: Reads the rows.
        rows: Rows of a call.
        tokens: Tokens of a call, padding included; None: any number.
    """

    def __init__(self, lm: HFLM, *, rows: int, tokens: int | None) -> None:
        self._answer = functools.partial(HFLM._loglikelihood_tokens, lm)
        self._rows, self._tokens = rows, tokens

    def divide(self, requests: Sequence[Request], parts: int) -> list[list[int]]:
        """Return the indices of each process's requests, whatever its limits are by now."""
        rows = self._rows_of(requests)
        return [[i for row in rows[part::parts] for i in row] for part in range(parts)]

    def loglikelihoods(
        self, requests: Sequence[Request], finish: Finish[tuple[float, bool]], reading: Reading
    ) -> None:
        """Score as ``HFLM`` does."""
        batches = self._batches(requests)
        rows = [{requests[i].tokens[:-1] for i in batch} for batch in batches]
        reading.start(tokens_alone(requests), sum(len(row) for batch in rows for row in batch))
        for batch, read in zip(batches, rows, strict=True):
            asked = [requests[i] for i in batch]
            pairs = [
                (None, list(each.tokens[: -each.scored]), list(each.tokens[-each.scored :]))
                for each in asked
            ]
            answers = self._answer(pairs, disable_tqdm=True, override_bs=len(pairs))
            reading.add(sum(map(len, read)))
            for index, answer in zip(batch, answers, strict=True):
                finish(index, answer)

    @staticmethod
    def _rows_of(requests: Sequence[Request]) -> list[list[int]]:
        """Return the requests of each row that is read, the longest first."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(request.tokens[:-1], []).append(index)
        return [groups[row] for row in sorted(groups, key=lambda row: (-len(row), row))]

    def _batches(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return requests in batches; those whose rows are the same count once."""
        batches: list[list[int]] = []
        count = width = 0
        for row in self._rows_of(requests):
            count += 1
            full = self._tokens is not None and count * width > self._tokens
            if not batches or count > self._rows or full:
                batches.append([])
                count, width = 1, len(requests[row[0]].tokens) - 1
            batches[-1] += row
        return batches
