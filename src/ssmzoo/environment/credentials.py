"""Find marked credentials in texts and files, and strike them out.

Marked are tokens with the prefix of a service, private keys, and addresses with a password, a token
or a signature. A password that stands alone looks like any other word and is not found, nor is one
that was encrypted or encoded.
"""

from __future__ import annotations

import html
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

import yaml

_STRUCK_OUT = "***"
# of an address: up to the last @ before the path; digits alone up to the path are a port
_PASSWORD = r"(?<=://)[^\s/@:'\"<>]*:(?!\d{1,5}[/?#])[^\s@'\"<>]+(?:@[^\s@/'\"<>]+)*(?=@)"
_TOKEN = r"(?<=://)(?=[\w.~-]*\d)[\w.~-]*[A-Za-z0-9]{20,}[\w.~-]*(?=@)"
_SIGNATURE = (
    r"(?<=[?&])(?i:x-amz-signature|x-amz-security-token|sig|signature|token|access_token|api_key|"
    r"apikey|password)=[^&\s'\"<>*]+"
)
_ASSIGNED = r"['\"\\]*\s*[=:]\s*['\"\\]*"
# kind, a substring of every text that holds one, pattern
_SHAPED = (
    ("a password in an address", "://", _PASSWORD),
    ("a signature in an address", "=", _SIGNATURE),
    ("a Slack webhook", "hooks.slack.com/", r"hooks\.slack\.com/\w+/[\w/-]{20,}"),
    ("a Discord webhook", "/api/webhooks/", r"/api/webhooks/\d{15,}/[\w-]{40,}"),
    ("an AWS secret", "", rf"(?i)secret_?access_?key{_ASSIGNED}[a-z0-9/+=]{{40}}"),
    ("a Weights & Biases key", "", rf"(?i)wandb_api_key{_ASSIGNED}[0-9a-f]{{40}}"),
    ("an Azure key", "Key=", r"(?:Account|SharedAccess)Key=[A-Za-z0-9+/]{40,}={0,2}"),
    (
        "a private key",
        "PRIVATE KEY",
        r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(?:.*?-----END [A-Z ]*-----|.*)",
    ),
    ("a private key", "PuTTY", r"(?s)PuTTY-User-Key-File-\d.*?(?:Private-MAC: *\w+|\Z)"),
)
_LETTERS = r"[A-Za-z0-9]{20,}(?!\w)"
_WORD = r"[\w-]{20,}"
# kind, marks at a token's beginning, pattern of the rest
_MARKED = (
    ("a Hugging Face token", "hf_ api_org_", _LETTERS),
    ("a Hugging Face token", "hf_oauth_ hf_jwt_", r"[\w.-]{20,}"),
    ("a GitHub token", "ghp_ gho_ ghu_ ghs_ ghr_", _LETTERS),
    ("a GitHub token", "github_pat_", _WORD),
    # of its parts one is long and has a digit, unlike a name's
    ("an API key", "sk-", r"(?:[\w-]*[-_])?(?=[A-Za-z]*\d)[A-Za-z0-9]{16,}[\w-]*"),
    ("a GitLab token", "glpat- glrt- gldt- glptt- glcbt- glsoat-", _WORD),
    ("a Slack token", "xoxa- xoxb- xoxe- xoxp- xoxr- xoxs- xapp-", _WORD),
    ("a Google key", "AIza", r"[\w-]{35}(?![\w-])"),
    ("a Google secret", "GOCSPX- ya29.", _WORD),
    ("a token of a package index", "pypi-AgE", r"[\w-]{40,}"),
    ("a token of a package index", "npm_", r"[A-Za-z0-9]{36}(?!\w)"),
    ("an AWS key", "AKIA ASIA", r"[A-Z0-9]{16}(?!\w)(?::[A-Za-z0-9/+=]{40})?"),
    ("a JSON web token", "eyJ", r"[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}"),
    ("a Weights & Biases key", "wandb_v1_", _WORD),
    ("an NVIDIA key", "nvapi-", r"[\w-]{40,}"),
    ("a Groq key", "gsk_", r"[A-Za-z0-9]{40,}"),
    ("an xAI key", "xai-", r"[A-Za-z0-9]{60,}"),
    ("a Perplexity key", "pplx-", r"[A-Za-z0-9]{40,}"),
    ("a Replicate token", "r8_", r"[A-Za-z0-9]{37}(?!\w)"),
    ("a Databricks token", "dapi", r"[0-9a-f]{32}(?:-\d)?(?!\w)"),
    ("a Stripe key", "sk_live_ sk_test_ rk_live_ rk_test_", r"[A-Za-z0-9]{16,}"),
    ("a SendGrid key", "SG.", r"[\w-]{16,}\.[\w-]{32,}"),
    ("a Docker token", "dckr_pat_ dckr_oat_", _WORD),
    ("a DigitalOcean token", "dop_v1_ doo_v1_ dor_v1_", r"[0-9a-f]{40,}"),
    ("an age key", "AGE-SECRET-KEY-1", r"[A-Z0-9]{40,}"),
)


def _at_beginning(mark: str) -> str:
    """Return a pattern of a mark that begins a word, or follows an escape of a string.

    The mark comes first, which a regular expression finds fast, then a look back.
    """
    mark, hexadecimal = re.escape(mark), "[0-9A-Fa-f]"
    escapes = (r"\\[abfnrtv]", rf"\\x{hexadecimal}{{2}}", rf"\\u{hexadecimal}{{4}}")
    before = "|".join(f"(?<={escape}{mark})" for escape in escapes)
    return rf"{mark}(?:(?<![A-Za-z0-9]{mark})|{before})"


_PATTERNS = [(kind, sign, re.compile(pattern)) for kind, sign, pattern in _SHAPED]
_PATTERNS += [
    (kind, mark, re.compile(_at_beginning(mark) + rest))
    for kind, marks, rest in _MARKED
    for mark in marks.split()
]
_PATTERNS.append(("a token in an address", "://", re.compile(_TOKEN)))  # of an unknown service
_QUOTED = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)+"', re.DOTALL)  # with an escape in it
_RUNS = re.compile(rb"[\t\n\r\x20-\x7e]{8,}")  # of characters among bytes
_PNG = b"\x89PNG\r\n\x1a\n"
_LONGEST = 1 << 20  # bytes of a picture's compressed text that are read


def find_credential(text: str) -> tuple[str, int] | None:
    """Return the kind of a credential in a text and its line, from 1; None if there is none."""
    for kind, sign, pattern in _PATTERNS:
        if sign in text and (found := pattern.search(text)):
            return kind, text.count("\n", 0, found.start()) + 1
    return None


def without_credentials(value: Any) -> Any:
    """Return a value with every credential in its strings, at any depth, struck out."""
    if isinstance(value, str):
        for _, sign, pattern in _PATTERNS:
            if sign in value:
                value = pattern.sub(_STRUCK_OUT, value)
        return value
    if isinstance(value, dict):
        return {without_credentials(key): without_credentials(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_credentials(part) for part in value]
    return value


def credential_in_file(name: str, content: bytes) -> tuple[str, str] | None:
    """Return the kind of a credential in a file, and where it stands; None if there is none.

    Read are the file's name, its text in any Unicode encoding, the strings of JSON and YAML as they
    are parsed, the texts of a picture, and all of them with percent signs and HTML's ``&`` decoded.

    Args:
        name: The file's name, by whose ending JSON, safetensors, YAML and cards are known.
        content: Its bytes; of safetensors the header, which is JSON.
    """
    for where, text in _texts(name, content):
        for plain in dict.fromkeys((text, unquote(text), html.unescape(text))):
            if found := find_credential(plain):
                return found[0], where or f"line {found[1]}"
    return None


def _texts(name: str, content: bytes) -> Iterator[tuple[str, str]]:
    """Yield the texts of a file, each with its place; that of the text as it stands is empty."""
    yield "in its name", name
    text = content.decode("utf-8", errors="replace")
    yield "", text
    if b"\0" in content or "\ufffd" in text:  # bytes, or another encoding, which has zeros
        for raw in (content, content.replace(b"\0", b"")):
            yield "among its bytes", b"\n".join(_RUNS.findall(raw)).decode("ascii")
    kind = PurePosixPath(name).suffix.lower()
    if kind in (".json", ".safetensors"):
        yield "with escaped characters", "\n".join(_json_strings(text))
    elif kind in (".yaml", ".yml", ".md"):
        yield "with escaped characters", "\n".join(_yaml_strings(text))
    if content.startswith(_PNG):
        yield "in a text of the picture", "\n".join(_png_texts(content))


def _json_strings(text: str) -> Iterator[str]:
    """Yield keys and values that have escapes; others stand in the text as they are."""
    for quoted in _QUOTED.findall(text):
        try:
            yield json.loads(quoted, strict=False)
        except ValueError:  # of no JSON, which is refused elsewhere
            continue


def _yaml_strings(text: str) -> Iterator[str]:
    """Yield keys and values of a YAML file, or of the block at a card's beginning."""
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.ScalarEvent):
                yield event.value
    except yaml.YAMLError:  # a card's text, or a file that is refused elsewhere
        return


def _png_texts(content: bytes) -> Iterator[str]:
    """Yield the compressed texts of a PNG file; those that are not stand among its bytes."""
    at = len(_PNG)
    while at + 8 <= len(content):
        length, kind = int.from_bytes(content[at : at + 4]), content[at + 4 : at + 8]
        body = content[at + 8 : at + 8 + length]
        at += length + 12
        packed = b""
        if kind == b"zTXt":
            packed = body.partition(b"\0")[2][1:]
        elif kind == b"iTXt" and body.partition(b"\0")[2][:1] == b"\1":
            packed = body.partition(b"\0")[2][2:].split(b"\0", 2)[-1]
        try:
            plain = zlib.decompressobj().decompress(packed, _LONGEST)
        except zlib.error:
            continue
        yield plain.decode("utf-8", errors="replace")
