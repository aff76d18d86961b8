"""What leaves this machine, in cards and results, holds no folder of it and no credential.

Found are tokens of services that mark theirs, private keys, and addresses that carry a password or
a signature. A password that stands alone looks like any other word and is not found.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

_STRUCK_OUT = "***"
_KINDS = {
    # up to the last @ before the path; what is digits up to the path is a port
    "a password in an address": r"(?<=://)[^\s/@:'\"<>]*:(?!\d{1,5}[/?#])"
    r"[^\s@'\"<>]+(?:@[^\s@/'\"<>]+)*(?=@)",
    "a signature in an address": r"(?i)(?<=[?&])(?:x-amz-signature|x-amz-security-token|sig|"
    r"signature|token|access_token|api_key|apikey|password)=[^&\s'\"<>*]+",
    "a Hugging Face token": r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}\b",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})\b",
    # of its parts one is long and has a digit, unlike a name's
    "an API key": r"(?<![\w-])sk-(?:[\w-]*[-_])?(?=[A-Za-z]*\d)[A-Za-z0-9]{16,}[\w-]*",
    "a GitLab token": r"\bgl(?:pat|rt|dt|ptt|cbt)-[\w-]{20,}",
    "a Slack token": r"\b(?:xox[abeprs]|xapp)-[\w-]{20,}",
    "a Google key": r"\bAIza[\w-]{35}(?![\w-])",
    "a token of a package index": r"\b(?:pypi-AgE[\w-]{40,}|npm_[A-Za-z0-9]{36}\b)",
    "an AWS key": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b(?::[A-Za-z0-9/+=]{40})?",
    "an AWS secret": r"(?i)(?<=secret_access_key)['\"]?\s*[=:]\s*['\"]?[a-z0-9/+=]{40}",
    "a JSON web token": r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}",
    "a private key": r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*-----)?",
}
_PATTERNS = {kind: re.compile(pattern) for kind, pattern in _KINDS.items()}
# at the beginning of a word, of KEY=VALUE's value, or of an entry of a list or of a mapping
_ABSOLUTE = re.compile(
    r"(^|[=\[({,]\s*|file://|:(?!//)\s*)(['\"]?)((?:/|~[\w.-]*/)[^\s,\])}=][^,\])}=]*)"
)


def find_credential(text: str) -> tuple[str, int] | None:
    """Return the kind of a credential in a text and its line, from 1; None if there is none."""
    for kind, pattern in _PATTERNS.items():
        if found := pattern.search(text):
            return kind, text.count("\n", 0, found.start()) + 1
    return None


def without_credentials(value: Any) -> Any:
    """Return a value with every credential in its strings, at any depth, struck out."""
    if isinstance(value, str):
        for pattern in _PATTERNS.values():
            value = pattern.sub(_STRUCK_OUT, value)
        return value
    if isinstance(value, dict):
        return {without_credentials(key): without_credentials(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_credentials(part) for part in value]
    return value


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
