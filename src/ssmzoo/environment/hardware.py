"""What a figure depends on: the device, the versions, the commit."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import torch

# what runs write into a checkout and what nobody runs: neither changes a figure
_NO_CODE = ("eval/results", "kernels/benchmarks/results", "model_cards", "*.md")
# vector instructions, widest first: as /proc/cpuinfo lists them
_VECTORS = ("avx512f", "avx2", "avx", "sse2", "sve", "asimd")


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def hardware(device: torch.device) -> str:
    """Return what a device is, in words: the GPU's name, or the processor's and its threads."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    return f"{name}, {torch.get_num_threads()} threads"


class Environment(TypedDict):
    """What the last bits of a figure depend on, beside device and versions.

    Attributes:
        commit: Of the git checkout that ssmzoo runs from; None if it runs from none.
        dirty: Whether the checkout's code differed from that commit; None as above.
        cpu_vectors: The CPU's widest vector instructions, such as ``"avx512f"``; None if unknown.
        torch_vectors: Those that torch uses, such as ``"AVX512"``.
        kernel_vectors: Those that the C kernels are built for; None where none can be built.
        threads: Torch's.
        omp_num_threads: The variable ``OMP_NUM_THREADS``; None if it is not set.
    """

    commit: str | None
    dirty: bool | None
    cpu_vectors: str | None
    torch_vectors: str
    kernel_vectors: str | None
    threads: int
    omp_num_threads: str | None


def environment() -> Environment:
    """Return what the last bits of a figure that is measured now depend on."""
    import torch

    from ssmzoo_kernels import native

    commit, dirty = checkout(Path(__file__))
    return {
        "commit": commit,
        "dirty": dirty,
        "cpu_vectors": _cpu_vectors(),
        "torch_vectors": torch.backends.cpu.get_cpu_capability(),
        "kernel_vectors": None if native.missing() else native.vectors(),
        "threads": torch.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


@functools.cache
def checkout(file: Path) -> tuple[str | None, bool | None]:
    """Return the commit of the git checkout that tracks a file, and whether its code differs.

    Both are None where no checkout tracks it, git is missing, or git does not trust the folder.
    """

    def git(*words: str) -> str:
        # without a lock, which would disturb a commit that is made at the same time
        command = ["git", "--no-optional-locks", "-C", str(file.parent), *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git("ls-files", "--error-unmatch", file.name)
        commit = git("rev-parse", "--short=12", "HEAD")
        outside = [f":(top,exclude){pattern}" for pattern in _NO_CODE]
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", *outside)
        return commit, bool(changed)
    return None, None


def _cpu_vectors() -> str | None:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        lines = (line.lower().split() for line in text.splitlines())
        flags = next((line for line in lines if line[:1] in (["flags"], ["features"])), [])
        return next((name for name in _VECTORS if name in flags), None)
    return None


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
        raise ValueError(
            f"device must be one that torch can use here, such as 'cpu' or 'cuda', got {name!r}"
        ) from error
