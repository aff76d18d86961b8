"""Checks of output folders, made before work of minutes or days."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ssmzoo.files import existing_part


def require_place(folder: Path, argument: str) -> None:
    """Check that files can be written into a folder, which may have to be made first.

    Raises:
        RuntimeError: A file is in its way, or the system does not let us write there.
    """
    place = existing_part(folder)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise RuntimeError(
            f"{argument} must be a place that can be written to, {str(place)!r} is no folder to "
            "write into; choose another place"
        )


def require_ours(folder: Path, names: Iterable[str], argument: str, earlier: str) -> None:
    """Check that a folder is not there yet, or holds nothing but files to be replaced.

    Args:
        folder: The folder, which will be written anew.
        names: The files of an earlier call.
        argument: The argument with the folder, for the error.
        earlier: The kind of folder that may be replaced, for the error.

    Raises:
        ValueError: It is a file, or holds something else.
    """
    if folder.exists():
        if not folder.is_dir():
            raise ValueError(f"{argument} must be a folder, {str(folder)!r} is a file")
        others = {path.name for path in folder.iterdir()} - set(names)
        if others:
            raise ValueError(
                f"{argument} must be new, empty or {earlier}: {str(folder)!r} holds "
                f"{min(others)!r}; name a folder inside it"
            )
