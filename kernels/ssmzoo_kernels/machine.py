"""What a figure depends on: the device, the vectors, the threads, the commit; what a call takes."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypedDict

import torch

from ssmzoo_kernels import native

# outputs of runs, and files that no run reads: neither changes a figure
_NO_CODE = ("eval/results", "kernels/benchmarks/results", "model_cards", "*.md")
# vector instructions, widest first: as /proc/cpuinfo lists them
_VECTORS = ("avx512f", "avx2", "avx", "sse2", "sve", "asimd")


def hardware(device: torch.device) -> str:
    """Return a device in words: the GPU's name, or the processor's and its threads."""
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
    return (_cpu_line("vendor_id") or [""])[-1]


def _cpu_flags() -> list[str]:
    return [word.lower() for word in _cpu_line("flags", "features")]


def _cpu_line(*names: str) -> list[str]:
    """Return the words of the first line that Linux tells of a CPU under one of these names."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        lines = (line.split() for line in text.splitlines())
        return next((line for line in lines if line and line[0].lower() in names), [])
    return []


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
