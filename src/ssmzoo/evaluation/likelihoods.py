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

from ssmzoo.evaluation.planner import Request, cut_into_batches, tokens_alone
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


class Likelihoods(Protocol):
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

        def length(row: list[int]) -> int:
            return len(requests[row[0]].tokens) - 1

        rows = self._rows_of(requests)
        reading.start(tokens_alone(requests), sum(map(length, rows)))
        for batch in cut_into_batches(rows, length, self._rows, self._tokens):
            indices = [index for row in batch for index in row]
            pairs = [
                (None, list(each.tokens[: -each.scored]), list(each.tokens[-each.scored :]))
                for each in (requests[index] for index in indices)
            ]
            answers = self._answer(pairs, disable_tqdm=True, override_bs=len(pairs))
            reading.add(sum(map(length, batch)))
            for index, answer in zip(indices, answers, strict=True):
                finish(index, answer)

    @staticmethod
    def _rows_of(requests: Sequence[Request]) -> list[list[int]]:
        """Return the requests of each row that is read, the longest first."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(request.tokens[:-1], []).append(index)
        return [groups[row] for row in sorted(groups, key=lambda row: (-len(row), row))]
