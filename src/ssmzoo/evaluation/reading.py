"""How many tokens a scoring reads, of how many, and what sharing saves."""

from __future__ import annotations

import sys
from typing import Protocol, TypeVar

from tqdm import tqdm

Answer = TypeVar("Answer", contravariant=True)


class Finish(Protocol[Answer]):
    """Takes the index of a request and its answer."""

    def __call__(self, index: int, answer: Answer) -> None: ...  # noqa: D102


class Reading:
    """Counts tokens, and shows them on a terminal as tokens read of tokens planned.

    Attributes:
        alone: Tokens that reading each request alone takes.
        read: Tokens that were read.
    """

    def __init__(self, *, silent: bool) -> None:
        self.alone = self.read = 0
        self._silent = silent or not sys.stderr.isatty()
        self._bar: tqdm | None = None

    def reset(self) -> None:
        """Count from 0 again."""
        self.alone = self.read = 0

    def start(self, alone: int, planned: int) -> None:
        """Begin to read: so many tokens for requests that would take others alone."""
        self.close()
        self.alone += alone
        self._bar = tqdm(
            total=planned,
            unit=" tokens",
            unit_scale=True,
            desc=f"reading {planned:,} tokens in place of {alone:,}",
            disable=self._silent,
        )

    def add(self, tokens: int) -> None:
        """Count tokens that were read."""
        self.read += tokens
        if self._bar is not None:
            self._bar.update(tokens)
            if self._bar.n >= self._bar.total:
                self.close()

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
