"""Markdown that shows texts from files of others as they are: no HTML, link or heading."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


class Markdown(str):
    """A text that is written as Markdown already; any other shows its characters as they are."""


def as_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the first line is its header."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return (text if isinstance(text, Markdown) else plain(text)).replace("|", "\\|")


def plain(text: str) -> str:
    """Return Markdown, in one line, that shows a text's characters: neither HTML, code nor link."""
    return re.sub(r"([\\`\[\]])", r"\\\1", " ".join(text.split())).replace("<", "&lt;")


def code(value: object) -> Markdown:
    """Return a value in a code span, in one line."""
    text = " ".join(str(value).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return Markdown(f"{fence}{space}{text}{space}{fence}")


def fenced(language: str, text: str) -> str:
    """Return a text in a code block that nothing in it can end."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
