"""Strip this machine's folders, and all credentials, from texts for cards and results."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath

from ssmzoo.environment.credentials import without_credentials

# at the beginning of a word, of KEY=VALUE's value, or of an entry of a list or of a mapping
_ABSOLUTE = re.compile(
    r"(^|[=\[({,]\s*|file://|:(?!//)\s*)(['\"]?)((?:/|~[\w.-]*/)[^\s,\])}=][^,\])}=]*)"
)


def portable(value: object) -> object:
    """Return a value with every absolute path in it, at any depth, cut to its last part.

    Credentials are struck out.
    """
    if isinstance(value, str):
        if value.startswith(("/", "~", "file:///")):
            value = PurePath(value).name or value
        return without_credentials(value)
    if isinstance(value, dict):
        return {portable(key): portable(part) for key, part in value.items()}
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
