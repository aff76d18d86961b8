"""This machine: CPU, threads and commit, to record with figures; memory; the kernels' folder.

What systems tell in different ways is read here alone: Linux by ``/proc``, macOS by ``sysctl``.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import functools
import multiprocessing.util
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypedDict

import torch

# outputs of runs, and files that no run reads: neither changes a figure
_NO_CODE = ("eval/results", "kernels/benchmarks/results", "model_cards", "*.md")
# vector instructions, widest first: as /proc/cpuinfo lists them
_VECTORS = ("avx512f", "avx2", "avx", "sse2", "sve", "asimd")
_OF_MACOS = {"avx2_0": "avx2", "avx1_0": "avx", "advsimd": "asimd"}  # its names for the same


def hardware(device: torch.device) -> str:
    """Return a device in words: the GPU's name, or the processor's and its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    facts = _cpu_facts()
    name = facts.get("model name") or facts.get("machdep.cpu.brand_string")
    name = name or platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


class Environment(TypedDict):
    """What the last bits of a figure depend on, beside device and versions.

    Attributes:
        commit: Of the git checkout that the ops run from; None if it runs from none.
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
    """Return the facts on which the last bits of a figure measured now depend."""
    from ssmzoo_kernels import native  # which imports this module

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
    flags = _cpu_flags()
    return next((name for name in _VECTORS if name in flags), None)


def vendor() -> str:
    """Return the CPU's maker as Linux names it, such as ``"AuthenticAMD"``; empty if unknown."""
    return _cpu_facts().get("vendor_id", "")


def instructions() -> str:
    """Return the names of all instructions that the CPU has; empty if unknown."""
    return " ".join(sorted(_cpu_flags()))


def _cpu_flags() -> set[str]:
    facts = _cpu_facts()
    words = (facts.get("flags") or facts.get("features") or "").lower().split()
    for name, value in facts.items():
        if name.startswith("hw.optional.") and value == "1":
            word = name.rpartition(".")[2]
            words.append(_OF_MACOS.get(word, word))
    return set(words)


@functools.cache
def _cpu_facts() -> dict[str, str]:
    """Return what the system tells of its first CPU, by name in lower case; nothing if unknown."""
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        if sys.platform == "darwin":
            command = ["/usr/sbin/sysctl", "machdep.cpu.brand_string", "hw.optional"]
            text = subprocess.run(command, capture_output=True, text=True).stdout
        else:
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip().lower(), value.strip())
    return facts


def users_folder() -> Path:
    """Return the user's folder for built kernels, made if it is not there.

    Raises:
        OSError: It cannot be made, may hold no programs, or others may change what is in it.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # the XDG specification: a relative path is to be ignored
    folder = (base if base.is_absolute() else Path("~/.cache").expanduser()) / "ssmzoo"
    for part in (*reversed(folder.parents), folder):  # parents=True would ignore the mode
        part.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if is_of_another(status):
        raise PermissionError(f"{folder} belongs to another user")
    if status.st_mode & 0o022:
        raise PermissionError(f"{folder} is writable by others")
    for part in folder.resolve().parents:
        _require_safe(part)
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise PermissionError(errno.EACCES, "mounted noexec", str(folder))
    return folder


def _require_safe(folder: Path) -> None:
    """Fail if others may put another folder in the place of one that lies in this one."""
    status = folder.stat()
    if is_of_another(status) and status.st_uid != 0:
        raise PermissionError(f"{folder} belongs to another user")
    shared = status.st_mode & 0o022
    if shared == 0o020 and _is_own_group(status.st_gid):
        return
    if shared and not status.st_mode & stat.S_ISVTX:  # as in /tmp, where each moves only his own
        raise PermissionError(f"{folder} is writable by others")


def is_of_another(status: os.stat_result) -> bool:
    """Tell whether a file belongs to another user."""
    return hasattr(os, "getuid") and status.st_uid != os.getuid()


def _is_own_group(group: int) -> bool:
    """Tell whether a group is the user's alone: that of his name, as many systems make it."""
    import grp
    import pwd

    try:
        return grp.getgrgid(group).gr_name == pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False


def private_folder() -> Path:
    """Return this process's own folder: one that it forks may outlive it, and has another."""
    return _folder_of(os.getpid())


@functools.cache
def _folder_of(owner: int) -> Path:
    private = tempfile.mkdtemp(prefix="ssmzoo-")

    # at the end of this process and no other; multiprocessing's skip what atexit calls
    remove = functools.partial(shutil.rmtree, private, ignore_errors=True)
    multiprocessing.util.Finalize(None, remove, exitpriority=0)
    return Path(private)


def circumstances(device: torch.device) -> dict[str, Any]:
    """Return the columns that all rows of a benchmark share; ``slug`` names the device's file."""
    name = hardware(device)
    slug = name.lower().replace("nvidia", "").strip().replace(" ", "-")
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "device": name,
        "slug": "cpu" if device.type == "cpu" else slug,
        **versions,
        **environment(),
        "date": datetime.date.today().isoformat(),
    }


def keep_freed_memory() -> None:
    """Let this process keep what it frees: no call then pays for pages that another gave back.

    Without it the GNU C library returns large tensors to the kernel or not, depending on what else
    lies above them, and a transform takes half as long or twice.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mmap_max, trim_threshold = -4, -1  # of malloc.h
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)


def read_bandwidth() -> float:
    """Return how many bytes a second torch's threads read from memory, the best of four times."""
    x, best = torch.ones(2**26), 0.0
    for _ in range(4):
        start = time.perf_counter()
        x.sum()
        best = max(best, x.nbytes / (time.perf_counter() - start))
    return best


def multiplies_bfloat16() -> bool:
    """Tell whether the CPU has instructions that multiply bfloat16; where unknown, it has not."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(_cpu_flags())


def memory_growth(call: Callable[[], object], device: torch.device) -> int:
    """Return the bytes by which a call raises this process's memory at its highest.

    On a CPU that is all its memory, so call this once in a process that has done nothing else.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    # memory that was freed would hide growth: take it again
    ballast = torch.empty(max(0, _highest_memory() - _present_memory()), dtype=torch.uint8)
    ballast.fill_(1)
    before = _highest_memory()
    call()
    return _highest_memory() - before


def _highest_memory() -> int:
    """Return the most bytes of memory that this process has had."""
    import resource  # which Windows does not have

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _present_memory() -> int:
    """Return the bytes of memory that this process has now; more than any has, off Linux."""
    import resource

    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 2**63
    return pages * resource.getpagesize()


def measured_apart(program: str) -> float:
    """Return what a program for ``python -c`` prints, MiB say, from a process of its own.

    There, memory of activations is mapped, and unmapped when it is freed.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=kept | {"MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)
