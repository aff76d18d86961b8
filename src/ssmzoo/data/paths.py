"""Find the files that paths, folders and globs name, and check that they are unchanged on a resume.

A folder names all files below it, through links too. A file with several names is one file.
"""

from __future__ import annotations

import glob
import logging
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ssmzoo.files import STDLIB, file_digest, reason_of, refuse_blank

logger = logging.getLogger("ssmzoo")

_COMPILED = "__pycache__"


def expand(paths: Sequence[str], field: str) -> list[Path]:
    """Return the files that paths, folders and globs name, in a stable order, none twice.

    Links are followed; of several names of a file the first one counts. A warning tells of links
    that lead nowhere.

    Raises:
        ValueError: A path that does not exist, an empty one, a glob that matches nothing, or a
            folder that cannot be read.
    """
    found: dict[str, Path] = {}
    lost: list[Path] = []
    for pattern in paths:
        refuse_blank(pattern, f"{field} must name files or folders")
        path, folder = Path(pattern).expanduser(), whole_folder(pattern)
        if pattern == STDLIB:
            matches = _standard_library()
        elif path.is_file():
            matches = [path]
        else:
            matches = sorted(_matching(str(path if folder is None else folder / "**"), field))
        files = [file for file in matches if file.is_file()]
        lost += [file for file in matches if not file.exists()]
        if not files:
            why = "holds no file" if folder is not None else "does not exist and matches no file"
            raise ValueError(f"{field}: {pattern!r} {why}")
        for file in files:
            found.setdefault(os.path.realpath(file), file)
    if lost:
        logger.warning("left out links that lead nowhere: %d, the first is %s", len(lost), lost[0])
    return list(found.values())


def whole_folder(pattern: str) -> Path | None:
    """Return the folder that a path names, also by ``folder/**``; None for any other path."""
    folder = Path(pattern.removesuffix("/**/*").removesuffix("/**")).expanduser()
    return folder if folder.is_dir() else None


def _matching(pattern: str, field: str) -> Iterator[Path]:
    """Yield the files that match a glob; below ``**`` no hidden ones, and no folder twice."""
    rooted = pattern if pattern.startswith("/") else f"./{pattern}"
    base, _, rest = (f"{rooted}/*" if rooted.endswith("/**") else rooted).partition("/**/")
    if not rest or "**" in rest or "/." in f"/{rest}":
        yield from map(Path, glob.glob(pattern, recursive=True))
        return
    for folder in [base or "/"] if os.path.isdir(base or "/") else sorted(glob.glob(base)):
        for file in _below(Path(folder), field):
            if file.relative_to(folder).match(rest):
                yield file


def _below(folder: Path, field: str) -> Iterator[Path]:
    """Yield the files below a folder that are not hidden, no folder's content twice."""

    def refuse(error: OSError) -> None:
        raise ValueError(f"{field}: {error.filename} cannot be read: {reason_of(error)}")

    seen: set[str] = set()
    waiting = [folder]  # linked folders come last: a file has the name that needs no link
    while waiting:
        for here, folders, files in os.walk(waiting.pop(0), onerror=refuse):
            if (place := os.path.realpath(here)) in seen:
                folders.clear()
                continue
            seen.add(place)
            folders[:] = sorted(name for name in folders if name[0] != "." and name != _COMPILED)
            waiting += [p for name in folders if (p := Path(here, name)).is_symlink()]
            yield from (Path(here, name) for name in files if name[0] != ".")


def file_manifest(files: Sequence[Path], *, content: bool) -> list[dict[str, Any]]:
    """Return path, size, time and, if the content is to be read, sha256 of every file."""
    manifest = []
    for file in files:
        status = file.stat()
        manifest.append(
            {
                "path": str(file.absolute()),
                "bytes": status.st_size,
                "mtime_ns": status.st_mtime_ns,
                "ctime_ns": status.st_ctime_ns,  # unlike mtime, nobody sets it
                "sha256": file_digest(file) if content else None,
            }
        )
    return manifest


def same_files(
    manifest: Sequence[dict[str, Any]], files: Sequence[Path], root: Path | None
) -> list[dict[str, Any]]:
    """Return the manifest of the same files where they are now, in the same order.

    A file with the same path and times is not read. Others are the same if their name and digest
    are; files of a stream, whose content is not read, if name, size and time are.

    Args:
        manifest: The result of :func:`file_manifest` when the run began.
        files: The files there are now.
        root: A folder in which a file's name is its path, None where it is the path's last part.

    Raises:
        ValueError: A file was changed, removed or added; the message names it.
    """
    hint = "since the run began; put it back as it was, or start a new run"
    now = {str(file.absolute()): file for file in files}
    found: dict[str, dict[str, Any]] = {}  # by the path that an entry had
    for entry in manifest:
        if (file := now.pop(entry["path"], None)) is not None:
            if not _is_same(entry, file):
                raise ValueError(f"the data file {file.absolute()} was changed {hint}")
            found[entry["path"]] = entry
    gone = {entry["path"]: entry for entry in manifest if entry["path"] not in found}
    for path, file in now.items():
        name = file.name if root is None else str(file.relative_to(root))
        named = [entry for entry in gone.values() if entry["path"].endswith(f"/{name}")]
        if not named:
            raise ValueError(f"the data file {path} was added {hint}")
        (moved,) = file_manifest([file], content=named[0]["sha256"] is not None)
        keys = ("bytes", "mtime_ns" if moved["sha256"] is None else "sha256")
        match = next((e for e in named if all(e[key] == moved[key] for key in keys)), None)
        if match is None:
            raise ValueError(f"the data file {path} was changed {hint}")
        found[gone.pop(match["path"])["path"]] = moved
    if gone:
        raise ValueError(f"the data file {next(iter(gone))} was removed {hint}")
    return [found[entry["path"]] for entry in manifest]


def _is_same(entry: dict[str, Any], file: Path) -> bool:
    """Tell whether a file that is still at its place has the content that it had."""
    status = file.stat()
    same = (status.st_size, status.st_mtime_ns) == (entry["bytes"], entry["mtime_ns"])
    if entry["sha256"] is None or (same and status.st_ctime_ns == entry["ctime_ns"]):
        return same
    return file_digest(file) == entry["sha256"]


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "lib2to3", "__pycache__"}
    return [f for f in sorted(root.rglob("*.py")) if not skipped & {*f.relative_to(root).parts}]
