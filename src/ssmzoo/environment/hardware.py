"""The device to run on, and the versions that a figure depends on."""

from __future__ import annotations

import contextlib
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def usable_device(name: str | None) -> torch.device:
    """Return the device of a name; without one the GPU if there is one.

    Raises:
        ValueError: Torch cannot use it here.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        found = torch.accelerator.current_accelerator()
        here = "cpu" if found is None else f"cpu, {found.type}"
        raise ValueError(
            f"device must be one that torch can use here ({here}), got {name!r}"
        ) from error
