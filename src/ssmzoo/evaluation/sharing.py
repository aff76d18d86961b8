"""Requests that several processes answer together, and that a killed call has answered before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ssmzoo.evaluation.answers import Answers
from ssmzoo.evaluation.reading import Finish

T = TypeVar("T")
A = TypeVar("A")


def process_count() -> int:
    """Return how many processes score together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def together(parts: list[list[int]], answer: Callable[[list[int]], dict[int, A]]) -> dict[int, A]:
    """Answer requests in all processes together; all must call this, and get all answers.

    Args:
        parts: Each process's requests, by index.
        answer: Answers some of them.

    Raises:
        Exception: In all processes, where ``answer`` raises in one.
    """
    if len(parts) == 1:
        return answer(parts[0])
    outcome: Any
    try:
        outcome = answer(parts[dist.get_rank()])
    except Exception as error:
        outcome = error
    everyone: list[Any] = [None] * len(parts)
    dist.all_gather_object(everyone, outcome)
    for error in everyone:
        if isinstance(error, Exception):
            raise error
    return {index: value for part in everyone for index, value in part.items()}


class Sharing:
    """Answers requests in all processes, but those that a killed call has answered.

    Args:
        answers: What such a call has kept, and this one keeps.
        processes: How many share the requests.
        shrink: Makes calls of a model smaller where memory ends; returns False where it cannot.
    """

    def __init__(self, answers: Answers, processes: int, shrink: Callable[[], bool]) -> None:
        self.processes = processes
        self._answers, self._shrink = answers, shrink
        if processes > 1:
            dist.barrier()  # all have read the answers before one adds to them

    def answer(
        self,
        kind: str,
        asked: Sequence[T],
        divide: Callable[[Sequence[T], int], list[list[int]]],
        work: Callable[[Sequence[T], Finish[A]], None],
    ) -> list[A]:
        """Return the answer to each request; all processes must call this, and all get all.

        Args:
            kind: What is asked.
            asked: The requests.
            divide: Returns each process's requests.
            work: Answers requests, and hands over each answer.
        """
        keys = [self._answers.key(kind, each) for each in asked]

        def kept(indices: list[int]) -> dict[int, A]:
            known = ((i, self._answers.get(keys[i])) for i in indices)
            return {i: value for i, value in known if value is not None}

        # a process may have files that another one, on another machine, has not
        found = together([[*range(len(asked))]] * self.processes, kept)
        left = [i for i in range(len(asked)) if i not in found]
        parts = divide([asked[i] for i in left], self.processes)
        mine = [[left[i] for i in part] for part in parts]
        found |= together(mine, lambda part: self._work(part, asked, keys, work))
        return [found[i] for i in range(len(asked))]

    def _work(
        self,
        part: list[int],
        asked: Sequence[T],
        keys: list[str],
        work: Callable[[Sequence[T], Finish[A]], None],
    ) -> dict[int, A]:
        """Return this process's answers; where memory ends, smaller calls give those left."""
        answered: dict[int, A] = {}
        todo = part
        while todo:

            def finish(index: int, answer: A, todo: list[int] = todo) -> None:
                answered[todo[index]] = answer
                self._answers.add(keys[todo[index]], answer)

            try:
                work([asked[i] for i in todo], finish)
            except torch.OutOfMemoryError:
                if not self._shrink():
                    raise
            todo = [i for i in part if i not in answered]
        return answered
