"""C kernels that a wheel brings, built for kinds of CPU: most machines need no compiler then.

A wheel for one machine has a folder for each kind of its CPUs in ``FOLDER``; ``make wheel`` fills
them by :func:`build`. A checkout has none: kernels are built for the CPU itself when they first
run.
"""

from __future__ import annotations

import functools
import os
import platform
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ssmzoo_kernels import compiling, machine

FOLDER = Path(__file__).with_name("prebuilt_kernels")


class Kind(NamedTuple):
    """A kind of CPU: the compiler's name of it, its vectors, and the instructions that it needs."""

    target: str
    vectors: str
    needs: frozenset[str]


_V2 = {"sse4_1", "sse4_2", "ssse3", "popcnt", "cx16"}
_V3 = {*_V2, "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = {*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# by machine, widest first; the C files have nothing for instructions beyond these
KINDS = {
    "x86_64": (
        Kind("x86-64-v4", "avx512f", frozenset(_V4)),
        Kind("x86-64-v3", "avx2", frozenset(_V3)),
        Kind("x86-64-v2", "sse2", frozenset(_V2)),
    ),
    "aarch64": (Kind("armv8-a", "asimd", frozenset()),),  # all have asimd
}


@functools.cache
def kind() -> Kind | None:
    """Return the widest kind of CPU that kernels came for and that this CPU is; None if none."""
    if not FOLDER.is_dir():
        return None
    has = {*machine.instructions().split()}
    kinds = KINDS.get(platform.machine(), ())
    return next((x for x in kinds if x.needs <= has and (FOLDER / x.target).is_dir()), None)


def place(kind: Kind, stem: str, real: str, macros: tuple[str, ...]) -> Path:
    """Return where the library of a C file lies.

    Args:
        kind: The kind of CPU that it is for.
        stem: The C file's.
        real: Its floating-point type, ``"float"`` or ``"double"``.
        macros: As the compiler takes them, such as ``"-DCHUNK=16"``.
    """
    return FOLDER / kind.target / f"{'-'.join((stem, real, *macros))}.so"


def sources() -> Iterator[tuple[Path, str, tuple[str, ...]]]:
    """Yield each C file with each type and each set of macros that the ops build it with."""
    from ssmzoo_kernels.feedback_scan.cpu import CHUNK as FEEDBACK
    from ssmzoo_kernels.scan.cpu import CHUNK

    macros = {
        "feedback_scan": [(f"-DCHUNK={FEEDBACK}",)],
        "linear_scan": [("-DPAIRS=0",), ("-DPAIRS=1",)],
        "longhorn_scan": [(f"-DCHUNK={CHUNK}",)],
        "selective_scan": [(f"-DCHUNK={CHUNK}",), (f"-DCHUNK={CHUNK}", "-DZOH=1")],
    }
    for source in sorted(Path(__file__).parent.rglob("*.c")):
        for real in ("float", "double"):
            for each in macros.get(source.stem, [()]):
                yield source, real, each


def build(which: str, folder: Path) -> None:
    """Build the kernels of a machine into a folder for each kind of its CPUs, with ``CC``.

    Args:
        which: A key of :data:`KINDS`.
        folder: Where the folders are made.

    Raises:
        ValueError: There are none for this machine.
        OSError: The folder cannot be written to.
        RuntimeError: No compiler, or it fails.
    """
    if which not in KINDS:
        raise ValueError(f"SSMZOO_KERNELS must be one of {', '.join(KINDS)}, got {which!r}")

    def one(kind: Kind, source: Path, real: str, macros: tuple[str, ...]) -> None:
        flags = (*compiling.BASE, f"-march={kind.target}", "-fopenmp", f"-DREAL={real}", *macros)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            code = source.read_text("utf-8")
            made = compiling.build(Path(scratch), source.stem, code, flags)
            made.replace(folder / place(kind, source.stem, real, macros).relative_to(FOLDER))

    for kind in KINDS[which]:
        (folder / kind.target).mkdir(parents=True)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        jobs = [threads.submit(one, kind, *file) for kind in KINDS[which] for file in sources()]
        for job in jobs:
            job.result()
