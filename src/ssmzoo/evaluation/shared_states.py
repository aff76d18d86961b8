"""Score and generate from states that requests share, read as :mod:`.planner` plans it.

The log-likelihoods are those of requests read alone: a recurrent model's state holds all that it
knows of what it read, and padding on the left of a row behind a state changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssmzoo.evaluation.planner import Limits, ReadBatch, Request, plan, shares, tokens_alone
from ssmzoo.modeling.cache import RecurrentCache, backbone_of
from ssmzoo.modeling.compat import CACHE
from ssmzoo.modeling.state_memory import free_bytes, state_size

if TYPE_CHECKING:
    from ssmzoo.evaluation.reading import Finish, Reading


@dataclass(frozen=True)
class Held:
    """The rows of a batch after their reads.

    Attributes:
        cache: Their states; None where nothing goes on from them, or nothing was read.
        input_ids: ``[B, L]``, all that was read, padding among it.
        attention_mask: ``[B, L]``, 0 for padding.
    """

    cache: RecurrentCache | None
    input_ids: Tensor
    attention_mask: Tensor

    def rows(self, rows: Sequence[int]) -> Held:
        """Return copies of some rows, in this order, for another batch to go on from."""
        indices = torch.tensor(rows, device=self.input_ids.device)
        cache = None if self.cache is None else self.cache.selected(indices)
        return Held(cache, self.input_ids[indices], self.attention_mask[indices])


@dataclass(frozen=True)
class Found:
    """What a batch tells about a request: log-probabilities, and whether each is the greatest."""

    request: int
    values: Tensor
    greedy: bool


class SharedStates:
    """Reads once what requests share; see the module.

    Args:
        model: A causal language model that keeps a state.
        rows: Rows of a call.
        tokens: Tokens of a call, padding included; None: any number.
        memory: Bytes of states that are kept at once; None: half of what is free.
        autocast: Makes the context in which the model is called.

    Raises:
        ValueError: ``memory`` holds no state, or the model's cache is of a kind that cannot be
            copied.
    """

    def __init__(
        self,
        model: Any,
        *,
        rows: int,
        tokens: int | None,
        memory: int | None,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._model, self._backbone, self._autocast = model, backbone_of(model), autocast
        self._rows, self._tokens, self._memory = rows, tokens, memory
        self._bytes = state_size(model)
        if memory is not None and memory < (least := self._bytes(1)):
            raise ValueError(
                f"state_memory must hold a state of this model, {least / 2**20:.3g} MiB, got "
                f"{memory / 2**20:.3g}"
            )

    def divide(self, requests: Sequence[Request], parts: int) -> list[list[int]]:
        """Divide requests among processes; see :func:`.planner.shares`."""
        return shares(requests, parts)

    @torch.no_grad()
    def loglikelihoods(
        self, requests: Sequence[Request], finish: Finish[tuple[float, bool]], reading: Reading
    ) -> None:
        """Score the last tokens of requests, and hand over each answer as soon as it is known."""
        values: list[list[Tensor]] = [[] for _ in requests]
        greedy = [True] * len(requests)
        for batch, _, found in self.read(requests, reading):
            for each in found:
                values[each.request].append(each.values)
                greedy[each.request] &= each.greedy
            for index in (index for read in batch.reads for index in read.last):
                finish(index, (float(torch.cat(values[index]).sum()), greedy[index]))
                values[index].clear()

    @torch.no_grad()
    def read(
        self, requests: Sequence[Request], reading: Reading
    ) -> Iterator[tuple[ReadBatch, Held, list[Found]]]:
        """Read requests batch by batch, and yield each batch, its rows, and what it tells."""
        memory = free_bytes(self._model.device) / 2 if self._memory is None else self._memory
        planned = plan(requests, Limits(self._rows, self._tokens, memory, self._bytes))
        reading.start(tokens_alone(requests), planned.read)
        kept: list[Held] = []
        for batch in planned.batches:
            del kept[batch.depth :]
            before = kept[-1].rows([read.parent for read in batch.reads]) if kept else None
            held, logits = self._call(batch, requests, before)
            if batch.keeps:
                kept.append(held)
            reading.add(sum(read.end - read.begin for read in batch.reads))
            yield batch, held, [] if logits is None else _found(batch, requests, logits)

    def _call(
        self, batch: ReadBatch, requests: Sequence[Request], before: Held | None
    ) -> tuple[Held, Tensor | None]:
        """Read a batch; return its rows, and the logits of its last tokens if any are asked."""
        width = max(read.end - read.begin for read in batch.reads)
        ids = torch.zeros(len(batch.reads), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, read in enumerate(batch.reads):
            if length := read.end - read.begin:
                ids[row, -length:] = torch.tensor(
                    requests[read.request].tokens[read.begin : read.end]
                )
                mask[row, -length:] = 1
        ids, mask = ids.to(self._model.device), mask.to(self._model.device)
        cache = None
        if before is not None:
            cache = before.cache
        elif width and (batch.keeps or self._goes_on(batch, requests)):
            cache = self._backbone.cache_class(self._backbone.config)
        whole = mask if before is None else torch.cat([before.attention_mask, mask], 1)
        logits = self._logits(ids, whole, cache, _asked(batch)) if width else None
        seen = ids if before is None else torch.cat([before.input_ids, ids], 1)
        return Held(cache, seen, whole), logits

    @staticmethod
    def _goes_on(batch: ReadBatch, requests: Sequence[Request]) -> bool:
        """Return whether text is generated behind a batch."""
        return any(not requests[index].scored for read in batch.reads for index in read.last)

    def _logits(
        self, ids: Tensor, mask: Tensor, cache: RecurrentCache | None, asked: int
    ) -> Tensor | None:
        """Return the logits of so many last tokens; None of none."""
        given: dict[str, Any] = {"attention_mask": mask, CACHE: cache}
        if cache is None:
            given["use_cache"] = False
        if self._backbone.counts_positions:
            places = (mask.cumsum(1) - 1).clamp_min(0)
            given["position_ids"] = places[:, -ids.shape[1] :]
        with self._autocast():
            if not asked:
                self._backbone(ids, **given)
                return None
            return self._model(ids, logits_to_keep=asked, **given).logits


def _asked(batch: ReadBatch) -> int:
    """Return of how many last columns logits are asked."""
    places = [read.end - answer.begin for read in batch.reads for answer in read.answers]
    return max(places, default=0)


def _found(batch: ReadBatch, requests: Sequence[Request], logits: Tensor) -> list[Found]:
    """Return what the logits ``[B, K, V]`` of a batch's last tokens tell."""
    columns = logits.shape[1]
    places: list[int] = []  # of logits in all rows' columns, row after row
    tokens: list[int] = []  # the token behind each place
    asked: list[int] = []  # the request of each answer
    lengths: list[int] = []
    for row, read in enumerate(batch.reads):
        first = (row + 1) * columns - read.end  # the place of a request's first token
        for answer in read.answers:
            places += range(first + answer.begin, first + answer.end)
            tokens += requests[answer.request].tokens[answer.begin + 1 : answer.end + 1]
            asked.append(answer.request)
            lengths.append(answer.end - answer.begin)
    # several answers may ask for the same place
    once, numbers = torch.tensor(places, device=logits.device).unique(return_inverse=True)
    scores = logits.flatten(0, 1)[once].log_softmax(-1, dtype=torch.float32)
    wanted = torch.tensor(tokens, device=logits.device)
    values = scores[numbers, wanted].cpu().split(lengths)
    greedy = (scores.argmax(-1)[numbers] == wanted).cpu().split(lengths)
    return [
        Found(request, value, bool(hits.all()))
        for request, value, hits in zip(asked, values, greedy, strict=True)
    ]
