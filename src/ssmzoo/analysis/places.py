"""Where results go, checked before what takes minutes or days."""

from __future__ import annotations

import os
from pathlib import Path


def require_place(folder: Path, argument: str) -> None:
    """Check that files can be written into a folder, which may have to be made first.

    Raises:
        RuntimeError: A file is in its way, or the system does not let us write there.
    """
    place = folder
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise RuntimeError(
            f"{argument} must be a place that can be written to, {str(place)!r} is no folder to "
            "write into; choose another place"
        )
