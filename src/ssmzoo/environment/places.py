"""Checks of output folders, made before work of minutes or days."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def require_writable(folder: Path, argument: str) -> None:
    """Check that files can be written into a folder, which may have to be made first.

    A temporary file is written and removed: permissions alone do not show a read-only disk.

    Raises:
        RuntimeError: The system refuses; the message names the argument and the reason.
    """
    place = folder
    while not os.path.lexists(place):
        place = place.parent
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".ssmzoo."):
            pass
    except OSError as error:
        raise RuntimeError(
            f"{argument} {str(folder)!r} cannot be written: {error.strerror}; choose another place"
        ) from error


def require_ours(folder: Path, names: Iterable[str], argument: str, earlier: str) -> None:
    """Check that a folder is absent, empty, or holds only files of an earlier call.

    Args:
        folder: The folder, which will be written anew.
        names: The files of an earlier call.
        argument: The argument with the folder, for the error.
        earlier: The kind of folder that may be replaced, for the error.

    Raises:
        ValueError: It is a file, or holds something else.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{argument} must be a folder, {str(folder)!r} is a file")
    if others := {path.name for path in folder.iterdir()} - set(names):
        raise ValueError(
            f"{argument} must be new, empty or {earlier}: {str(folder)!r} holds "
            f"{min(others)!r}; name a folder inside it"
        )
