"""Send a publication to a repository on the Hub: one commit, or nothing.

A Hub that is busy or out of reach is asked again for a while; after that the same command goes on
where it stopped, because weights that arrived whole are not sent twice.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ssmzoo.checkpoints.loader import is_loader
from ssmzoo.files import read_json
from ssmzoo.publishing.contents import CARD, Publication, is_document, is_of_publications

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi

T = TypeVar("T")

logger = logging.getLogger(__name__)

_BUSY = (408, 429, 500, 502, 503, 504)  # what huggingface_hub asks again after, where it does
_PAUSES = (1, 2, 4, 8)  # seconds between attempts
_LONGEST_PAUSE = 300  # seconds, the window of the Hub's rate limits
_MANY = 8  # names that an error lists


class Sent(NamedTuple):
    """Where a publication went: its address, its commit, and what of an earlier one went away."""

    url: str
    commit: str
    deleted: tuple[str, ...]


def upload(
    repository: str,
    plan: Publication,
    digests: Mapping[str, str],
    *,
    private: bool,
    revision: str | None,
    message: str,
) -> Sent:
    """Commit a publication, which replaces an earlier one as a whole.

    Args:
        repository: Its id; it is created if absent.
        plan: What goes.
        digests: The sha256 of each file of weights, as it was when it was checked.
        private: Create the repository private, or refuse a public one.
        revision: The branch, created if absent; the main branch if None.
        message: The commit's title.

    Raises:
        RuntimeError: The network or the Hub refused, or what is there cannot be replaced.
    """
    from huggingface_hub import HfApi, ModelCard, get_token

    token = get_token()
    if token is None:
        raise RuntimeError(
            f"publishing to {repository} needs a Hugging Face token; run `hf auth login` "
            "or set HF_TOKEN"
        )
    if not (token.isascii() and token.isprintable()):
        raise RuntimeError(
            f"publishing to {repository} failed: the Hugging Face token holds characters that no "
            "token has; run `hf auth login` or set HF_TOKEN"
        )
    api = HfApi(token=token)
    try:
        with _quiet_off_terminal():
            _insist(lambda: api.create_repo(repository, private=private, exist_ok=True))
            if private and not _insist(lambda: api.model_info(repository)).private:
                raise _Refused(
                    f"{repository} is there already and public, so what goes there is not private; "
                    "make it private in its settings on the Hub, or publish without --private "
                    "(private=True)"
                )
            if revision is not None:
                _insist(lambda: api.create_branch(repository, branch=revision, exist_ok=True))
            deleted = _insist(lambda: _stale(api, repository, revision, plan))
            _insist(lambda: ModelCard(plan.text(CARD)).validate())  # before hours of sending
            _insist(
                lambda: api.preupload_lfs_files(
                    repository, _additions(plan, digests), revision=revision, free_memory=False
                )
            )
            commit = _insist(lambda: _commit(api, repository, revision, plan, digests, message))
    except _Refused as error:
        raise RuntimeError(str(error)) from None
    # The HTTP library under huggingface_hub differs by its version, so its errors cannot be named;
    # the original is not chained, because a malformed header is quoted with the token in it.
    except Exception as error:
        raise RuntimeError(_explain(error, repository, api.endpoint, token)) from None
    return Sent(str(commit.commit_url).split("/commit/")[0], commit.oid, tuple(deleted))


class _Refused(Exception):
    """A reason of our own to stop an upload."""


def _additions(plan: Publication, digests: Mapping[str, str]) -> list[CommitOperationAdd]:
    """Return what goes, after reading the weights anew to see that they are what was checked."""
    from huggingface_hub import CommitOperationAdd

    additions = []
    for name, content in plan.sources.items():
        addition = CommitOperationAdd(name, content)
        if isinstance(content, Path) and addition.upload_info.sha256.hex() != digests.get(name):
            raise _Refused(f"{content} changed while it was published; nothing was published")
        additions.append(addition)
    return additions


def _commit(
    api: HfApi,
    repository: str,
    revision: str | None,
    plan: Publication,
    digests: Mapping[str, str],
    message: str,
) -> CommitInfo:
    """Commit what the Hub lacks, without what an earlier publication has left.

    Where there is nothing to do, return its newest commit. All is looked at anew, the weights after
    they were sent, and the repository, since an attempt whose answer was lost may have done it.
    """
    from huggingface_hub import CommitOperationDelete

    stale = _stale(api, repository, revision, plan)
    operations = [
        *_additions(plan, digests),
        *(CommitOperationDelete(name, is_folder=False) for name in stale),
    ]
    return api.create_commit(repository, operations, commit_message=message, revision=revision)


def _stale(api: HfApi, repository: str, revision: str | None, plan: Publication) -> list[str]:
    """Return what an earlier publication brought and this one does not replace.

    Raises:
        _Refused: Other files would remain that a loader may read, or it is of another model.
    """
    from ssmzoo.publishing.export_code import is_exported

    def fetched(name: str) -> Path:
        return Path(api.hf_hub_download(repository, name, revision=revision))

    def was_ours(name: str) -> bool:
        if name.endswith(".py") and "/" not in name:
            path = fetched(name)
            return is_loader(path) or is_exported(path)
        return is_of_publications(name)

    there = {*api.list_repo_files(repository, revision=revision)}
    remain = {
        name
        for name in there - plan.sources.keys()
        if is_of_publications(name) or not is_document(name)
    }
    stale = {name for name in remain if was_ours(name)}
    same = not stale
    if stale and {"config.json"} <= there & plan.sources.keys():
        with suppress(ValueError):  # damaged, there
            kind = read_json(fetched("config.json")).get("model_type")
            same = kind == json.loads(plan.text("config.json")).get("model_type")
    foreign = sorted(remain - stale if same else remain)
    if foreign:
        more = f" and {len(foreign) - _MANY} more" if len(foreign) > _MANY else ""
        raise _Refused(
            f"{repository} already holds {', '.join(foreign[:_MANY])}{more}, which this model does "
            f"not replace; delete them first (hf repos delete-files {repository} ...) or publish "
            "elsewhere"
        )
    return sorted(stale)


def _insist(step: Callable[[], T]) -> T:
    """Do a step that may be repeated, again after a pause where the Hub is busy or out of reach."""
    for pause in _PAUSES:
        try:
            return step()
        except Exception as error:
            trouble = _trouble(error)
            pause = _pause_asked_for(error) or pause
            if trouble is None or pause > _LONGEST_PAUSE:
                raise
            logger.info("%s; asking again in %d s", trouble, pause)
            time.sleep(pause)
    return step()


def _trouble(error: BaseException) -> str | None:
    """Say in words what passes with time; None for an error that would come again."""
    status = _status(error)
    if status is not None:
        return f"the Hub is busy ({status})" if status in _BUSY else None
    if isinstance(error, json.JSONDecodeError):
        return "the Hub's answer was no JSON"
    kinds = {kind.__name__ for kind in type(error).__mro__}  # of httpx, or of its next version
    if "ConnectError" in kinds or "ConnectTimeout" in kinds:
        return "the Hub cannot be reached"
    return "the connection was cut" if "TransportError" in kinds else None


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _pause_asked_for(error: BaseException) -> int | None:
    from huggingface_hub.utils import parse_ratelimit_headers

    headers = getattr(getattr(error, "response", None), "headers", {})
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds + 1
    after = headers.get("retry-after", "")
    return int(after) if after.isdecimal() else None


@contextmanager
def _quiet_off_terminal() -> Iterator[None]:
    """Switch huggingface_hub's progress bars off where nobody watches, as its user could."""
    from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    chosen = HF_HUB_DISABLE_PROGRESS_BARS is not None or are_progress_bars_disabled()
    if chosen or sys.stderr.isatty():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _explain(error: Exception, repository: str, endpoint: str, token: str) -> str:
    where = f"publishing to {repository} at {endpoint} failed"
    cause: BaseException = error  # an upload's errors come wrapped, with the name of its file
    while cause.__cause__ is not None and _status(cause) is None and _trouble(cause) is None:
        cause = cause.__cause__
    status, trouble = _status(cause), _trouble(cause)
    if status == 401:
        return f"{where}: the token is not valid (401); run `hf auth login` or set HF_TOKEN"
    if status == 403:
        return f"{where}: the token may not write there (403); use one with write access"
    during = "" if cause is error else f" ({_one_line(error, token)})"
    if trouble is not None:
        pause = _pause_asked_for(cause)
        when = "later" if pause is None else f"in {pause} s"
        return (
            f"{where}: {trouble}{during}; run the same command again {when}: files that are "
            "already there are not sent again"
        )
    return f"{where}: {type(cause).__name__}: {_one_line(cause, token)}{during}"


def _one_line(error: BaseException, token: str) -> str:
    return " ".join(str(error).replace(token, "***").split())
