"""What leaves this machine, in cards and results, holds no folder of it and no credential."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath

from ssmzoo.credentials import without_credentials

# at the beginning of a word, of KEY=VALUE's value, or of a list's entry
_ABSOLUTE = re.compile(r"(^|[=\[,] ?)(['\"]?)([/~][^,\]=]*)")


def portable(value: object) -> object:
    """Return a value with every absolute path in it, at any depth, cut to its last part.

    Credentials are struck out.
    """
    if isinstance(value, str):
        value = PurePath(value).name or value if value.startswith(("/", "~")) else value
        return without_credentials(value)
    if isinstance(value, dict):
        return {key: portable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [portable(part) for part in value]
    return value


def portable_command(words: Sequence[str]) -> str:
    """Return a command line for a shell, its absolute paths cut to their last parts.

    Credentials are struck out.
    """
    return shlex.join(
        _ABSOLUTE.sub(
            lambda m: m[1] + m[2] + (PurePath(m[3]).name or m[3]), without_credentials(word)
        )
        for word in words
    )
