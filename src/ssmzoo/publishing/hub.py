"""Publish a model folder: into another folder, or to a repository on the Hub.

What goes is a closed list: configuration, safetensors weights, tokenizer or image processor,
generation configuration, card, the pictures that the card links, scores of benchmarks on the Hub,
golden logits, the code that the model needs where this package is not installed, unless told not
to, and, if asked for, a prompt that the model has read. Everything else stays behind and is named
in the report. A text that holds a credential is refused.
A dry run makes the same plan and changes nothing; for a Hub repository it needs neither network nor
token. Both kinds of publication appear at once or not at all: a folder by a rename, a repository by
a single commit. A Hub that is busy or out of reach is asked again for a while; after that the same
command goes on where it stopped, because weights that arrived whole are not sent twice.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, TypeVar
from urllib.parse import unquote

import yaml

from ssmzoo.checkpoints.trust import refuse_paths
from ssmzoo.checkpoints.weights import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    GOLDEN,
    NO_WEIGHTS,
    OPTIMIZER,
    STATE,
    WEIGHTS_INDEX,
    is_state_adapter,
    listed,
    read_adapter_config,
    read_weights,
)
from ssmzoo.environment.portable import find_credential
from ssmzoo.family import claims, family_of, packages_of
from ssmzoo.files import read_json, write_folder, writing

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, HfApi

T = TypeVar("T")

logger = logging.getLogger(__name__)

CARD = "README.md"
EVAL_RESULTS = ".eval_results"  # what the Hub's leaderboards read
ENTRIES = f"{EVAL_RESULTS}/ssmzoo.yaml"  # ours there

_CONFIGURATION = ("config.json", "generation_config.json", "preprocessor_config.json")
_OF_WEIGHTS = {*_CONFIGURATION, GOLDEN, ENTRIES}  # untrue beside others
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib"}
_CODE = {".py", ".pyc", ".so", ".sh", ".ipynb"}
_TEXTS = {".json", ".yaml", ".md", ".py", ".jinja", ".txt", ".svg"}
_PICTURES = {".png", ".jpg", ".jpeg", ".svg", ".gif", ".webp"}
_LINKED_PICTURE = re.compile(r"""!\[[^\]]*\]\(\s*<?([^)\s>]+)|<img\b[^>]*?\bsrc=["']([^"']+)["']""")
_ELSEWHERE = re.compile(r"^(https?:|data:)", re.IGNORECASE)
_BUSY = (408, 429, 500, 502, 503, 504)  # what huggingface_hub asks again after, where it does
_PAUSES = (1, 2, 4, 8)  # seconds between attempts
_LONGEST_PAUSE = 300  # seconds, the window of the Hub's rate limits


@dataclass(frozen=True)
class PublishedFile:
    """One file of a publication: its path inside the target, with ``/``, and its size in bytes."""

    path: str
    size: int


@dataclass(frozen=True)
class PublishReport:
    """What a publication holds and where it went; a dry run returns the same, undone.

    Attributes:
        kind: ``"folder"`` or ``"hub"``.
        target: The folder's absolute path, or the repository id.
        files: Every file that goes, sorted by path.
        left_out: Names in the model folder that do not go; folders end in ``/``.
        load: In one line, what a reader does to load it.
        dry_run: True if nothing was written.
        url: Where to look at it, for a folder its path; None for a dry run.
        commit: The commit on the Hub; None for a folder and for a dry run.
    """

    kind: Literal["folder", "hub"]
    target: str
    files: tuple[PublishedFile, ...]
    left_out: tuple[str, ...]
    load: str
    dry_run: bool
    url: str | None = None
    commit: str | None = None

    @property
    def size(self) -> int:
        """Bytes in all files together."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class _Plan:
    sources: dict[str, Path]  # path inside the target -> the file to copy
    sizes: dict[str, int]
    left_out: tuple[str, ...]


def publish(
    model_dir: str | Path,
    target: str | Path,
    *,
    code: bool = True,
    include_state: bool = False,
    dry_run: bool = False,
    private: bool = False,
    revision: str | None = None,
    commit_message: str | None = None,
) -> PublishReport:
    """Publish a model folder into a folder or to a Hub repository.

    Args:
        model_dir: A folder as ``save_pretrained`` writes it, with the card of ``ssmzoo card``.
        target: A folder (a ``Path``, or ``./x``, ``/x``, ``folder:x``) or a repository
            (``user/name``, ``hub:user/name``). A folder must be absent, empty, or an earlier
            publication of the same model, which is then replaced as a whole.
        code: Send the model's code along, so that it loads with ``trust_remote_code=True`` where
            ssmzoo is not installed; see :func:`ssmzoo.publishing.export_code.export_code`.
            Models of transformers' own have none to send.
        include_state: Send ``state.safetensors`` along, a prompt that
            ``PromptState.save_pretrained`` wrote into the model folder, tokens included. The model
            is loaded to see that it goes on from it. A reader downloads the repository and calls
            :func:`ssmzoo.modeling.load_state`.
        dry_run: Check everything that can be checked here and report; write and send nothing.
        private: Create the repository private. An existing one that is public is refused.
        revision: The branch to commit to, created if absent; the main branch if None.
        commit_message: The commit's title on the Hub.

    Raises:
        ValueError: The model folder or the target is not fit; the message says why.
        FileNotFoundError: The folder holds a part of a state adapter.
        RuntimeError: The disk, the network or the Hub refused.
    """
    kind, place = _parse_target(target)
    folder = Path(model_dir)
    if not folder.is_dir():
        raise ValueError(f"model_dir must be a folder with a saved model, got {str(model_dir)!r}")
    folder = folder.resolve()
    if kind == "folder" and (private or revision or commit_message):
        raise ValueError(
            "private, revision and commit_message are for Hub repositories, "
            f"got them with the folder {place!r}"
        )
    if commit_message and find_credential(commit_message):
        raise ValueError("commit_message must hold no credential, and holds one; write another")
    sends_code = code and _has_code(folder)
    plan = _plan(folder, code=sends_code, state=include_state)
    if include_state:
        _check_state(folder)
    with _with_code(folder, plan) if sends_code else nullcontext(plan) as plan:
        _refuse_credentials(folder, plan)
        report = _report(kind, place, plan, _how_to_load(folder, place, sends_code))
        if kind == "folder":
            return _publish_folder(folder, plan, report, dry_run)
        if dry_run:
            return report
        return _publish_hub(
            plan, report, private, revision, commit_message or f"Publish {place.split('/')[1]}"
        )


def _parse_target(target: str | Path) -> tuple[Literal["folder", "hub"], str]:
    if isinstance(target, Path):
        return "folder", str(target.expanduser().resolve())
    prefix, _, rest = target.partition(":")
    if prefix == "folder" and rest:
        return "folder", str(Path(rest).expanduser().resolve())
    if target.startswith(("/", "./", "../", "~")) or target in (".", ".."):
        return "folder", str(Path(target).expanduser().resolve())
    repository = rest if prefix == "hub" else target
    if repository.count("/") != 1:
        raise ValueError(
            "target must be a folder (./x, /x, folder:x) or a Hub repository (user/name), "
            f"got {target!r}"
        )
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ValueError(f"target {target!r} is no Hub repository id: {error}") from error
    parent = Path(target).parent
    if prefix != "hub" and (Path(target).exists() or parent.is_dir()):
        raise ValueError(
            f"target {target!r} must say whether it is a folder, since {str(parent)!r} is one "
            f"here, or a Hub repository; write ./{target} or hub:{target}"
        )
    return "hub", repository


def _has_code(folder: Path) -> bool:
    """Tell whether a model is of a family whose code may go; transformers has that of others.

    Raises:
        ValueError: It is of a family that is not installed.
    """
    config = folder / "config.json"
    return config.is_file() and family_of(read_json(config)) is not None


def _how_to_load(folder: Path, place: str, code: bool) -> str:
    if code:
        return f"to load it: from_pretrained({place!r}, trust_remote_code=True)"
    if is_state_adapter(folder):
        return (
            "to load it: download it, and load_state_adapter(folder, model) of ssmzoo.modeling, or "
            "ssmzoo generate MODEL PROMPT --adapter FOLDER"
        )
    config = read_json(folder / "config.json")
    kind = str(config.get("model_type"))
    name = kind.removeprefix("ssmzoo_")
    if name == kind or name not in claims():  # another package's family may have any model_type
        # a broken plugin, or one that is not installed: this command needs none
        with suppress(RuntimeError, ValueError):
            family = family_of(config)
            if family is None:
                return (
                    f"to load it: from_pretrained({place!r}), with the code that transformers has"
                )
            name = family.name
    others = packages_of(name)[1:]
    also = "".join(f" and {name}" for name in others)
    return (
        "to load it: install ssmzoo from a clone of its repository (pip install . there; no "
        f"package index has it){also}, import ssmzoo.auto, then from_pretrained({place!r})"
    )


def _refuse_credentials(folder: Path, plan: _Plan) -> None:
    """Fail if a text that is to go holds what looks like a credential; the error does not show it.

    Raises:
        ValueError: It does; the message says where.
    """
    for name, path in plan.sources.items():
        suffix = PurePosixPath(name).suffix  # a link's target may have another
        if suffix not in _TEXTS:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found = find_credential(text)
        where = f"line {found[1]}" if found else ""
        if found is None and suffix == ".json":  # where characters may be escaped
            plain = json.dumps(json.loads(text), ensure_ascii=False)
            found, where = find_credential(plain), "with escaped characters"
        if found is not None:
            raise ValueError(
                f"{folder / name} must hold no credential, got {found[0]} ({where}); take it out, "
                "and revoke it if others have seen it"
            )


def _plan(folder: Path, code: bool, state: bool) -> _Plan:
    """List what goes, after checking every file of it.

    ``code`` says whether an export's modules may go, ``state`` whether a saved prompt does.
    """
    from ssmzoo.publishing.export_code import is_exported

    sources: dict[str, Path] = {}
    left_out: list[str] = []
    for path in sorted(folder.iterdir()):
        name = path.name
        if path.is_dir() and name == EVAL_RESULTS:
            for file in sorted(path.iterdir()):
                if file.suffix == ".yaml":
                    sources[f"{name}/{file.name}"] = _eval_results(folder, file)
                else:
                    left_out.append(f"{name}/{file.name}")
        elif path.is_dir():
            left_out.append(name + "/")
        elif path.suffix in _PICKLES:
            raise ValueError(
                f"{path} is a pickle, which can run code on the reader's machine; move it away "
                "(weights are published as safetensors only)"
            )
        elif path.suffix == ".py" and path.is_file() and is_exported(path):
            if not code:
                raise ValueError(
                    f"{path} is the model's own code; publish without --no-code, or move it away"
                )
            sources[name] = _inside(folder, path)
        elif path.suffix in _CODE:
            raise ValueError(f"{path} is code, which is not published with a model; move it away")
        elif name == OPTIMIZER or (name == STATE and not state):
            left_out.append(name)
        elif (
            name in (*_CONFIGURATION, *_TOKENIZER, CARD, WEIGHTS_INDEX, ADAPTER_CONFIG)
            or path.suffix == ".safetensors"
        ):
            sources[name] = _inside(folder, path)
        else:
            left_out.append(name)

    if not sources.keys().isdisjoint((ADAPTER_CONFIG, ADAPTER_FILE)):
        read_adapter_config(folder)
    if is_state_adapter(folder):
        if state:
            raise ValueError(
                f"include_state must be absent with {folder}, a state adapter: the state of a "
                "prompt is published with the model that read it"
            )
        return _finished_plan(folder, sources, left_out)
    if "config.json" not in sources:
        inside = folder / "model"
        hint = f", here {inside}" if (inside / "config.json").exists() else ""
        raise ValueError(
            f"{folder} has no config.json; give the folder that save_pretrained wrote{hint}"
        )
    for name in sources:
        if name.endswith(".json"):
            read_json(folder / name)
    if "auto_map" in read_json(folder / "config.json") and not code:
        raise ValueError(
            f"{folder / 'config.json'} has an auto_map to code, which would stay behind; take it "
            "out, or, with a model of ssmzoo's families, publish without --no-code"
        )
    read_weights(folder)
    refuse_paths(folder)
    if state and STATE not in sources:
        raise ValueError(
            f"{folder} holds no {STATE}; save a prompt with "
            "model.prefill(input_ids).save_pretrained(folder), or publish without --include-state"
        )
    return _finished_plan(folder, sources, left_out)


def _finished_plan(folder: Path, sources: dict[str, Path], left_out: list[str]) -> _Plan:
    """Return the plan of what goes, with the pictures of the card, which must be there."""
    if CARD not in sources:
        raise ValueError(f"{folder} has no card {CARD}; write one with: ssmzoo card {folder}")
    for name in _pictures(folder):
        sources[name] = _inside(folder, folder / name)
    left_out = [name for name in left_out if name not in sources]
    sizes = {name: path.stat().st_size for name, path in sources.items()}
    return _Plan(dict(sorted(sources.items())), sizes, tuple(left_out))


def _eval_results(folder: Path, path: Path) -> Path:
    """Return a file of scores for the Hub's leaderboards, and check that the Hub can read it."""
    from huggingface_hub import parse_eval_result_entries

    real = _inside(folder, path)
    try:
        parse_eval_result_entries(yaml.safe_load(real.read_text(encoding="utf-8")))
    except Exception as error:  # yaml.YAMLError, KeyError, TypeError: all mean one thing
        raise ValueError(
            f"{path} must be a list of entries as the Hub reads them, each with dataset.id, "
            f"dataset.task_id and value, got {type(error).__name__}: {' '.join(str(error).split())}"
            "; move it away, or write it again with: ssmzoo card"
        ) from error
    return real


def _check_state(folder: Path) -> None:
    """Check that the model, as a reader loads it, goes on from the prompt beside it."""
    from transformers import AutoModelForCausalLM

    import ssmzoo.auto  # noqa: F401
    from ssmzoo.modeling import SSMForCausalLM, load_state

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    if not isinstance(model, SSMForCausalLM):
        raise ValueError(
            f"{folder / STATE} goes with a model of ssmzoo's families, got "
            f"{type(model).__name__}; publish without --include-state"
        )
    load_state(folder, model)


@contextmanager
def _with_code(folder: Path, plan: _Plan) -> Iterator[_Plan]:
    """Give a plan with the model's code, written anew, in a folder that lives as long."""
    from ssmzoo.publishing.export_code import standalone_files

    config = read_json(folder / "config.json")
    card = plan.sources[CARD].read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as written:
        sources = {n: path for n, path in plan.sources.items() if not n.endswith(".py")}
        try:
            texts = standalone_files(config, card, "tokenizer_config.json" in plan.sources)
        except ValueError as error:
            raise ValueError(f"{error}; --no-code publishes the model without its code") from error
        for name, text in texts.items():
            sources[name] = Path(written, name)
            with writing(sources[name]):
                sources[name].write_text(text, encoding="utf-8")
        sizes = {name: path.stat().st_size for name, path in sources.items()}
        left_out = (*plan.left_out, *(plan.sources.keys() - sources.keys()))
        yield _Plan(dict(sorted(sources.items())), sizes, tuple(sorted(left_out)))


def _pictures(folder: Path) -> list[str]:
    """Return the pictures beside the card that it links, and check the card's metadata."""
    from huggingface_hub import ModelCard

    path = folder / CARD
    try:
        card = ModelCard.load(path)
    except Exception as error:  # yaml.YAMLError, ValueError, UnicodeDecodeError: all mean one thing
        raise ValueError(f"{path} has no readable metadata block: {error}") from error
    names = set()
    for match in _LINKED_PICTURE.finditer(card.text):
        link = match[1] or match[2]
        if _ELSEWHERE.match(link):
            continue
        name = PurePosixPath(unquote(re.split(r"[?#]", link)[0]))
        if name.is_absolute() or ".." in name.parts or "\\" in str(name):
            raise ValueError(f"{path} links {link!r}, which lies outside the model folder")
        if name.suffix.lower() not in _PICTURES:
            raise ValueError(f"{path} shows {link!r}, which is no picture ({listed(_PICTURES)})")
        if not (folder / name).is_file():
            raise ValueError(f"{path} links the picture {link!r}, which is missing")
        names.add(str(name))
    return sorted(names)


def _inside(folder: Path, path: Path) -> Path:
    real = path.resolve()
    if not real.is_relative_to(folder):
        raise ValueError(
            f"{path} is a link out of the model folder; copy the folder with its links followed "
            "(cp -rL) and publish the copy"
        )
    if not real.is_file():
        raise ValueError(f"{path} must be a regular file")
    return real


def _report(kind: Literal["folder", "hub"], place: str, plan: _Plan, load: str) -> PublishReport:
    files = tuple(PublishedFile(name, plan.sizes[name]) for name in plan.sources)
    return PublishReport(kind, place, files, plan.left_out, load, dry_run=True)


def _done(report: PublishReport, url: str, commit: str | None = None) -> PublishReport:
    return replace(report, dry_run=False, url=url, commit=commit)


def _publish_folder(
    folder: Path, plan: _Plan, report: PublishReport, dry_run: bool
) -> PublishReport:
    target = Path(report.target)
    _check_folder(folder, target)
    if dry_run:
        return report

    def write(staged: Path) -> None:
        for name, source in plan.sources.items():
            _copy(source, staged / name, plan.sizes[name])

    write_folder(target, write)
    return _done(report, str(target))


def _check_folder(folder: Path, target: Path) -> None:
    if target == folder or target.is_relative_to(folder):
        raise ValueError(f"target {target} must lie outside the model folder {folder}")
    if target.exists() and not target.is_dir():
        raise ValueError(f"target {target} is a file; name a folder")
    parent = next(path for path in target.parents if path.exists())
    if not parent.is_dir():
        raise ValueError(f"target {target} lies under {parent}, which is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RuntimeError(f"cannot write into {parent}; choose another target or its permissions")
    if target.is_dir() and any(target.iterdir()):
        reason = _why_foreign(folder, target)
        if reason:
            raise ValueError(
                f"target {target} is not empty and no earlier publication of this model "
                f"({reason}); choose another folder or empty it first"
            )


def _why_foreign(folder: Path, target: Path) -> str | None:
    """Say why a filled target is not an earlier publication of this model; None if it is one."""
    if (target.resolve().parent / "run.json").is_file():
        return "it is what a run has trained"
    try:
        earlier = _plan(target, code=True, state=(target / STATE).exists())
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    present = {
        path.relative_to(target).as_posix() for path in target.rglob("*") if not path.is_dir()
    }
    if foreign := present - set(earlier.sources):
        return f"it holds {listed(foreign)}"
    alone = is_state_adapter(folder)
    if alone != is_state_adapter(target):
        return "it holds a model" if alone else "it holds a state adapter without a model"
    if alone:
        one, other = read_adapter_config(target), read_adapter_config(folder)
        same = all(one[name] == other[name] for name in ("model_type", "base", "states"))
        return None if same else "it holds a state adapter of another model"
    old, new = (read_json(place / "config.json").get("model_type") for place in (target, folder))
    if old != new:
        return f"its model_type is {old!r}, this model's {new!r}"
    if read_weights(target) != read_weights(folder):
        return "its tensors have other names, types or shapes"
    return None


def _copy(source: Path, destination: Path, size: int) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, destination)
    if destination.stat().st_size != size:
        raise RuntimeError(f"{source} changed while it was published; nothing was published")


def _publish_hub(
    plan: _Plan, report: PublishReport, private: bool, revision: str | None, message: str
) -> PublishReport:
    from huggingface_hub import HfApi, get_token

    repository, token = report.target, get_token()
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
            remote = _insist(lambda: api.list_repo_files(repository, revision=revision))
            _refuse_other_weights(remote, plan, repository)
            commit = _insist(lambda: _commit(api, plan, repository, revision, message))
    except _Refused as error:
        raise RuntimeError(str(error)) from None
    # The HTTP library under huggingface_hub differs by its version, so its errors cannot be named;
    # the original is not chained, because a malformed header is quoted with the token in it.
    except Exception as error:
        raise RuntimeError(_explain(error, repository, api.endpoint, token)) from None
    return _done(report, str(commit.commit_url).split("/commit/")[0], commit.oid)


def _commit(
    api: HfApi, plan: _Plan, repository: str, revision: str | None, message: str
) -> CommitInfo:
    """Send what the Hub lacks, as one commit; where it lacks nothing, return its newest commit."""
    from huggingface_hub import CommitOperationAdd

    operations = [CommitOperationAdd(name, str(path)) for name, path in plan.sources.items()]
    for operation in operations:
        if operation.upload_info.size != plan.sizes[operation.path_in_repo]:
            raise _Refused(
                f"{operation.path_or_fileobj} changed while it was published; nothing was published"
            )
    return api.create_commit(repository, operations, commit_message=message, revision=revision)


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


class _Refused(Exception):
    """A reason of our own to stop an upload."""


def _refuse_other_weights(remote: Iterable[str], plan: _Plan, repository: str) -> None:
    # A loader takes model.safetensors before an index: stale weights would win over new shards.
    remote = {*remote}
    weights = {
        name
        for name in remote - NO_WEIGHTS
        if (name.endswith(".safetensors") or name == WEIGHTS_INDEX) and "/" not in name
    }
    stale = (weights | remote & _OF_WEIGHTS) - plan.sources.keys()
    if stale:
        raise _Refused(
            f"{repository} already holds {listed(stale)}, which this model does not replace; "
            f"delete them first (hf repos delete-files {repository} ...) or publish elsewhere"
        )


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
