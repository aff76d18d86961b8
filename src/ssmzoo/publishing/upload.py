"""Send a publication to a repository on the Hub: one commit, or nothing.

huggingface_hub repeats requests that a busy Hub or a cut connection refused. What fails in spite of
that is one line; the same command sends no weights again that arrived whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ssmzoo.checkpoints.loader import is_loader
from ssmzoo.files import file_digest, read_json
from ssmzoo.publishing.contents import CARD, Publication, is_document, is_of_publications

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_PASSING = (408, 429)  # refusals that pass with time, as those of 500 and more do
_MANY = 8  # names that an error lists


class Sent(NamedTuple):
    """The repository's address, the commit, and the files of an earlier publication it deleted."""

    url: str
    commit: str
    deleted: tuple[str, ...]


class _Refused(Exception):
    """A reason of our own to stop an upload."""


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
        plan: The files to send.
        digests: The sha256 of each file of weights, as it was when it was checked.
        private: Create the repository private, or refuse a public one.
        revision: The branch, created if absent; the main branch if None.
        message: The commit's title.

    Raises:
        RuntimeError: The network or the Hub refused, or the repository holds files that this
            publication does not replace.
    """
    from huggingface_hub import HfApi, get_token

    token = get_token()
    if token is None or not (token.isascii() and token.isprintable()):
        raise RuntimeError(
            f"publishing to {repository} needs a valid Hugging Face token; run `hf auth login` "
            "or set HF_TOKEN"
        )
    api = HfApi(token=token)
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        if private and not api.model_info(repository).private:
            raise _Refused(
                f"{repository} is there already and public, so what goes there is not private; "
                "make it private in its settings on the Hub, or publish without --private "
                "(private=True)"
            )
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        return _commit(api, repository, revision, plan, digests, message)
    except _Refused as error:
        raise RuntimeError(str(error)) from None
    # not chained: the original may quote a header with the token in it
    except Exception as error:
        told = _explain(error).replace(token, "***")
        where = f"publishing to {repository} at {api.endpoint} failed"
        raise RuntimeError(f"{where}: {told}") from None


def _commit(
    api: HfApi,
    repository: str,
    revision: str | None,
    plan: Publication,
    digests: Mapping[str, str],
    message: str,
) -> Sent:
    """Commit the files that the Hub lacks, and delete those that only an earlier one had."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, ModelCard

    stale = _stale(api, repository, revision, plan)
    ModelCard(plan.text(CARD)).validate()  # before hours of sending
    additions = [CommitOperationAdd(name, content) for name, content in plan.sources.items()]
    api.preupload_lfs_files(repository, additions, revision=revision, free_memory=False)
    for addition in additions:
        weights = plan.sources[addition.path_in_repo]
        if isinstance(weights, Path):  # digests when checked, when announced, and when sent
            announced = addition.upload_info.sha256.hex()
            if not digests.get(addition.path_in_repo) == announced == file_digest(weights):
                raise _Refused(f"{weights} changed while it was published; nothing was published")
    deletions = [CommitOperationDelete(name, is_folder=False) for name in stale]
    done = api.create_commit(
        repository, [*additions, *deletions], commit_message=message, revision=revision
    )
    return Sent(str(done.commit_url).split("/commit/")[0], done.oid, tuple(stale))


def _stale(api: HfApi, repository: str, revision: str | None, plan: Publication) -> list[str]:
    """Return the files that an earlier publication brought and this one does not replace.

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


def _explain(error: BaseException) -> str:
    """Return in one line why the Hub or the network refused, and the way out."""
    causes = [error]  # an upload's error names its file, the one below it the reason
    while _status(causes[-1]) is None and causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    status = _status(causes[-1])
    if status == 401:
        return "the token is not valid (401); run `hf auth login` or set HF_TOKEN"
    if status == 403:
        return "the token may not write there (403); use one with write access"
    lines = [" ".join(str(cause).split()) or type(cause).__name__ for cause in causes]
    reason = ": ".join(dict.fromkeys(lines))
    refused = isinstance(error, ValueError)  # a card, say
    if not refused and (status is None or status >= 500 or status in _PASSING):
        reason += "; run the same command again: files that are already there are not sent again"
    return reason


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)
