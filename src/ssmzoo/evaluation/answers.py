"""Answers to requests that outlive a killed process: a line each, in files beside the results."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

LOG = logging.getLogger("ssmzoo")


class Answers:
    """The answers to finished requests, by a digest of all that decides them.

    Args:
        path: The file that keeps them. Each process writes one of its own, with ``suffix``; all
            read those of all. None: nothing is kept.
        facts: What else must be the same for an answer to hold, such as the model's weights.
        suffix: Of this process's file.
    """

    def __init__(self, path: Path | None = None, facts: object = None, suffix: str = "") -> None:
        self._facts = json.dumps(facts, sort_keys=True, default=str)
        self._path, self._suffix, self._keeps = path, suffix, True
        self._known: dict[str, Any] = {}
        for file in self._files():
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                self._take(line)

    def key(self, kind: str, asked: object) -> str:
        """Return the digest of a request; of none where nothing is kept."""
        if self._path is None:
            return ""
        return hashlib.sha256(f"{self._facts}\0{kind}\0{asked!r}".encode()).hexdigest()[:32]

    def get(self, key: str) -> Any:
        """Return an answer, or None."""
        return self._known.get(key)

    def add(self, key: str, answer: Any) -> None:
        """Keep an answer; where that fails, scoring goes on."""
        if self._path is None or not self._keeps:
            return
        own = self._path.with_name(self._path.name + self._suffix)
        try:
            own.parent.mkdir(parents=True, exist_ok=True)
            with own.open("a", encoding="utf-8") as file:
                file.write(f"\n{json.dumps([key, answer])}\n")  # there may be half a line
        except OSError as error:
            self._keeps = False
            LOG.warning(
                "%s cannot be written (%s): were this call killed, the next would ask all again",
                *(own, error.strerror),
            )

    def remove(self) -> None:
        """Remove the files: all is answered."""
        for file in self._files():
            file.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        if self._path is None or not self._path.parent.is_dir():
            return []
        return sorted(
            file for file in self._path.parent.iterdir() if file.name.startswith(self._path.name)
        )

    def _take(self, line: str) -> None:
        try:
            key, answer = json.loads(line)
        except (TypeError, ValueError):  # an empty one, or half of one
            return
        self._known[key] = tuple(answer) if isinstance(answer, list) else answer
