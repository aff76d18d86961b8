"""Publish a model folder: into another folder, or to a repository on the Hub.

The files to publish are a closed list (:mod:`ssmzoo.publishing.contents`); the report names the
others. A file that holds a credential is refused. A dry run makes the same plan and
changes nothing; for a Hub repository it needs neither network nor token. Both kinds of publication
appear at once or not at all, a folder by a rename, a repository by a single commit, and replace an
earlier one as a whole.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ssmzoo.checkpoints.weights import (
    OPTIMIZER,
    STATE,
    is_state_adapter,
    listed,
    read_adapter_config,
    read_weights,
)
from ssmzoo.environment.credentials import find_credential
from ssmzoo.family import family_of, packages_of
from ssmzoo.files import file_digest, read_json, write_folder
from ssmzoo.publishing.contents import (
    CARD,
    Content,
    Publication,
    publication_of,
    refuse_credentials,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublishedFile:
    """One file of a publication: its path inside the target, with ``/``, and its size in bytes."""

    path: str
    size: int


@dataclass(frozen=True)
class PublishReport:
    """The files of a publication and where it went; a dry run returns the same plan.

    Attributes:
        kind: ``"folder"`` or ``"hub"``.
        target: The folder's absolute path, or the repository id.
        files: The published files, sorted by path.
        left_out: Names in the model folder that are not published; folders end in ``/``.
        load: How a reader loads it, in one line.
        dry_run: True if nothing was written.
        url: The repository's address, or the folder's path; None for a dry run.
        commit: The commit on the Hub; None for a folder and for a dry run.
        deleted: Files of an earlier publication that this one deleted from the Hub's repository;
            empty for a folder, which is replaced, and for a dry run, which does not ask the Hub.
    """

    kind: Literal["folder", "hub"]
    target: str
    files: tuple[PublishedFile, ...]
    left_out: tuple[str, ...]
    load: str
    dry_run: bool
    url: str | None = None
    commit: str | None = None
    deleted: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes in all files together."""
        return sum(file.size for file in self.files)


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
            is loaded to check that it continues from it. A reader downloads the repository and
            calls :func:`ssmzoo.modeling.load_state`.
        dry_run: Check everything that can be checked here and report; write and send nothing.
        private: Create the repository private. An existing one that is public is refused.
        revision: The branch to commit to, created if absent; the main branch if None.
        commit_message: The commit's title on the Hub.

    Raises:
        ValueError: The model folder or the target is not fit, or a file holds a credential; the
            message says why.
        FileNotFoundError: The folder holds a part of a state adapter.
        RuntimeError: The disk, the network or the Hub refused.
    """
    kind, place = _parse_target(target)
    folder = Path(model_dir)
    if not folder.is_dir():
        raise ValueError(f"model_dir must be a folder with a saved model, got {str(model_dir)!r}")
    folder = folder.resolve()
    asked = {"private": private, "revision": revision, "commit_message": commit_message}
    of_the_hub = [name for name, value in asked.items() if value]
    if kind == "folder" and of_the_hub:
        raise ValueError(
            f"{' and '.join(of_the_hub)} must be left out for a folder, got the folder {place!r}; "
            "publish without, or to the Hub (user/name)"
        )
    if commit_message and find_credential(commit_message):
        raise ValueError("commit_message must hold no credential, and holds one; write another")
    digests = {} if dry_run else _digests(folder)
    sends_code = code and _has_code(folder)
    plan = publication_of(folder, code=sends_code, state=include_state)
    if include_state:
        _check_state(folder)
    if sends_code:
        plan = _with_code(folder, plan)
    refuse_credentials(folder, plan)
    files = tuple(PublishedFile(name, size) for name, size in plan.sizes().items())
    load = _how_to_load(folder, place, sends_code)
    report = PublishReport(kind, place, files, plan.left_out, load, dry_run=True)
    if kind == "folder":
        report = _publish_folder(folder, plan, digests, report, dry_run)
    elif not dry_run:
        from ssmzoo.publishing.upload import upload

        sent = upload(
            place,
            plan,
            digests,
            private=private,
            revision=revision,
            message=commit_message or f"Publish {place.split('/')[1]}",
        )
        report = replace(report, dry_run=False, **sent._asdict())
    _warn_without_license(folder, plan)
    return report


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
    """Tell whether a model is of an installed family; transformers has the code of others.

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
    name = str(config.get("model_type")).removeprefix("ssmzoo_")
    with suppress(RuntimeError, ValueError):  # a family that is broken, or not installed
        family = family_of(config)
        if family is None:
            return f"to load it: from_pretrained({place!r}), with the code that transformers has"
        name = family.name
    others = packages_of(name)[1:]
    also = f" and {listed(others)} from its authors, not by its name alone" if others else ""
    return (
        "to load it: install ssmzoo from a clone of its repository (pip install . there; no "
        f"package index has it){also}, import ssmzoo.auto, then from_pretrained({place!r})"
    )


def _digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file of weights, taken before anything is checked."""
    files = (path for path in folder.glob("*.safetensors") if path.name != OPTIMIZER)
    return {path.name: file_digest(path) for path in files if path.is_file()}


def _with_code(folder: Path, plan: Publication) -> Publication:
    """Return a plan with the model's code, written anew."""
    from ssmzoo.publishing.export_code import standalone_files

    config = read_json(folder / "config.json")
    try:
        texts = standalone_files(config, plan.text(CARD), "tokenizer_config.json" in plan.sources)
    except ValueError as error:
        raise ValueError(f"{error}; --no-code publishes the model without its code") from error
    return plan.with_code(texts)


def _check_state(folder: Path) -> None:
    """Check that the model, as a reader loads it, continues from the prompt beside it."""
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


def _warn_without_license(folder: Path, plan: Publication) -> None:
    from huggingface_hub import ModelCard

    if ModelCard(plan.text(CARD)).data.to_dict().get("license") is None:
        logger.warning(
            "%s names no licence, and without one nobody may use the model; write it again with "
            "the option --license of ssmzoo card, or with card.license in the recipe",
            folder / CARD,
        )


def _publish_folder(
    folder: Path,
    plan: Publication,
    digests: Mapping[str, str],
    report: PublishReport,
    dry_run: bool,
) -> PublishReport:
    target = Path(report.target)
    _check_folder(folder, target)
    if dry_run:
        return report

    def write(staged: Path) -> None:
        for name, content in plan.sources.items():
            _put(content, staged / name, digests.get(name))

    write_folder(target, write)
    return replace(report, dry_run=False, url=str(target))


def _check_folder(folder: Path, target: Path) -> None:
    """Check that a folder is outside the model's, and absent, empty or an earlier publication."""
    if target == folder or target.is_relative_to(folder):
        raise ValueError(f"target {target} must lie outside the model folder {folder}")
    if target.exists() and not target.is_dir():
        raise ValueError(f"target {target} is a file; name a folder")
    if target.is_dir() and any(target.iterdir()) and (reason := _why_foreign(folder, target)):
        raise ValueError(
            f"target {target} is not empty and no earlier publication of this model ({reason}); "
            "choose another folder or empty it first"
        )


def _why_foreign(folder: Path, target: Path) -> str | None:
    """Say why a filled target is not an earlier publication of this model; None if it is one."""
    if (target.resolve().parent / "run.json").is_file():
        return "it is what a run has trained"
    try:
        earlier = publication_of(target, code=True, state=(target / STATE).exists())
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    present = {
        path.relative_to(target).as_posix() for path in target.rglob("*") if not path.is_dir()
    }
    if foreign := present - set(earlier.sources):
        return f"it holds {listed(foreign)}"
    (old, *tensors), (new, *needed) = _kind(target), _kind(folder)
    if old != new:
        return f"it holds {old}, not {new}"
    return None if tensors == needed else "its tensors have other names, types or shapes"


def _kind(folder: Path) -> tuple[str, object]:
    """Return a folder's kind of content, in words, and its tensors' types and shapes."""
    if is_state_adapter(folder):
        config = read_adapter_config(folder)
        return f"a state adapter of a {config['model_type']}", (config["base"], config["states"])
    kind = read_json(folder / "config.json").get("model_type")
    return f"a model of type {kind!r}", read_weights(folder)


def _put(content: Content, place: Path, digest: str | None) -> None:
    """Write a file; weights are copied, and the copy must have the digest."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        place.write_bytes(content)
        return
    shutil.copyfile(content, place)
    if file_digest(place) != digest:
        raise RuntimeError(f"{content} changed while it was published; nothing was published")
