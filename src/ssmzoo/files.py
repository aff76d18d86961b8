"""Files and folders that appear under their names when they are complete, or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def appears_whole(target: Path) -> Iterator[Path]:
    """Give a path to write to, whose file becomes ``target`` if the block succeeds.

    It is flushed to the disk before; if the block fails, the earlier file stays as it was.
    """
    # by process, so that two which write the same file do not write into one another
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        _flush(unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(target: Path, text: str) -> None:
    """Write a text file that appears complete or not at all."""
    with appears_whole(target) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_json(target: Path, value: object, *, indent: int = 1) -> None:
    """Write a JSON file that appears complete or not at all.

    Raises:
        ValueError: A number is not finite; nothing is written.
    """
    text = json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False)
    write_text(target, text + "\n")


def write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a folder that appears complete or not at all; an older one is replaced.

    What an earlier call left unfinished is removed: only one process may write ``target``.
    """
    unfinished = target.with_name(f".{target.name}.unfinished")
    replaced = target.with_name(f".{target.name}.replaced")
    if replaced.exists() and not target.exists():  # an earlier call was killed in between
        os.replace(replaced, target)
    for leftover in (unfinished, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        write(unfinished)
        for path in [*unfinished.rglob("*"), unfinished]:
            _flush(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if target.exists():
        os.replace(target, replaced)
    os.replace(unfinished, target)
    _flush(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_folder(target: Path) -> None:
    """Remove a folder that is under its name whole or not at all; its remains are hidden."""
    replaced = target.with_name(f".{target.name}.replaced")
    os.replace(target, replaced)
    shutil.rmtree(replaced)


def file_digest(file: Path) -> str:
    """Return the sha256 of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
