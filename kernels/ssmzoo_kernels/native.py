"""Build the C kernels with the machine's own compiler, once, and load them.

A kernel is one C file beside its op, compiled the first time it runs for each floating-point type.
The library stays in the user's cache folder (``$XDG_CACHE_HOME/ssmzoo`` or ``~/.cache/ssmzoo``)
under a name made of everything it depends on and of its own digest: a change rebuilds it, a damaged
file is rebuilt, and processes that build at the same time do not see each other's halves. Where
that folder fails (another's, full, mounted noexec), a private temporary one of this process serves.

Settings, from the environment:

======================== =======================================================================
``CC``                   the compiler; without it the first of cc, gcc, clang
``SSMZOO_ARCH``          the target, as after the compiler's ``-march=``; without it this CPU
``SSMZOO_BUILD_SECONDS`` how long the compiler may take for one file; without it 300
======================== =======================================================================

A kernel's threads are those of the OpenMP runtime that torch has loaded, never of a second one.
GNU's serves gcc's code alone, LLVM's also clang's; code that has none runs on one thread.
"""

import ctypes
import errno
import functools
import hashlib
import logging
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from ssmzoo_kernels import machine

_log = logging.getLogger("ssmzoo")

_ROOT = Path(__file__).parent
_HEADERS = (
    *(_ROOT / f"{name}.h" for name in ("vector", "linear", "matrices", "diagonal", "companion")),
    _ROOT / "scan" / "scan.h",
)
_REALS = {torch.float32: "float", torch.float64: "double"}
# none of these lets the compiler assume finite numbers or reorder sums; arrays as long as a caller
# says fit no thread's stack
_BASE = (
    *("-O3", "-std=gnu11", "-shared", "-fPIC", "-Werror=vla"),
    *("-fno-math-errno", "-fno-trapping-math"),
)
# by the compiler's macro, widest first
_VECTORS = {
    "__AVX512F__": "avx512f",
    "__AVX2__": "avx2",
    "__AVX__": "avx",
    "__SSE2__": "sse2",
    "__ARM_FEATURE_SVE": "sve",
    "__ARM_NEON": "asimd",
}
_PROBE = """#include "vector.h"
void probe(REAL *x) {
#pragma omp parallel for
  for (int i = 0; i < 64; i += LANES) store(x + i, load(x + i) * load(x + i) + splat(1));
}
"""
# for a process that instructions which the CPU lacks may end
_TRIAL = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).probe((ctypes.c_double * 64)())"
_FULL = (errno.ENOSPC, errno.EDQUOT)

_failed: dict[Path, str] = {}  # by folder in which a build failed that succeeded elsewhere, why


class _OutOfTimeError(RuntimeError):
    """The compiler took too long; no other flags or folder are tried."""


@functools.cache
def missing() -> str:
    """Return why no C kernel can be built here, and the way out, or an empty string.

    Raises:
        ValueError: ``SSMZOO_ARCH`` or ``SSMZOO_BUILD_SECONDS`` is wrong.
    """
    try:
        _flags()
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


def compiler() -> str:
    """Return what builds kernels here, ``"gcc"`` or ``"clang"``; an empty string if none does."""
    return "" if missing() else _kind()


def lacks() -> str:
    """Return what kernels are built without here, why, and the way out, or an empty string.

    Raises:
        RuntimeError: None can be built; :func:`missing` says why.
    """
    return "; ".join(_settings()[1])


@functools.cache
def vectors() -> str | None:
    """Return the widest vector instructions that kernels are built for, such as ``"avx512f"``.

    None if the compiler names none that are known here.

    Raises:
        RuntimeError: There is no compiler, or it takes none of our flags.
    """
    command = [*_compiler(), *_flags(), "-dM", "-E", "-x", "c", os.devnull]
    macros = _run(command, "a list of macros").stdout
    return next((name for macro, name in _VECTORS.items() if f"#define {macro} " in macros), None)


@functools.cache
def library(source: Path, dtype: torch.dtype, **defines: int) -> ctypes.CDLL:
    """Return the library of a C file, built for float32 or float64 if it is not in the cache.

    Args:
        source: The C file; it may include the headers of this package.
        dtype: The type of ``REAL``.
        defines: Integer macros.

    Raises:
        RuntimeError: No library, and why: no compiler, it fails on this file or takes too long, or
            no folder takes the library or lets it be loaded.
        ValueError: ``SSMZOO_ARCH`` or ``SSMZOO_BUILD_SECONDS`` is wrong.
    """
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    code = source.read_text("utf-8")
    return _build(source.stem, code, (*_flags(), f"-DREAL={_REALS[dtype]}", *macros))


ONE_THREADS_WORK = 65536  # updates that one thread does as soon as many


def threads(work: int) -> int:
    """Return how many threads to use for so many updates: torch's number, or 1 for few."""
    return torch.get_num_threads() if work > ONE_THREADS_WORK else 1


def rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix in a dtype with adjacent columns; its rows may lie apart."""
    if x.dtype is not dtype:
        x = x.to(dtype)
    return x if x.stride(1) == 1 else x.contiguous()


def blocks(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a dtype whose rows, each in one piece, may lie apart."""
    x = x.to(dtype)
    return x if x.shape[0] and x[0].is_contiguous() else x.contiguous()


def whole(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a contiguous tensor in a dtype, or None for None."""
    if x is None or (x.dtype is dtype and x.is_contiguous()):
        return x
    return x.to(dtype).contiguous()


def address(x: Tensor | None) -> int | None:
    """Return where a tensor's numbers lie, or None for None: a null pointer.

    Raises:
        TypeError: A tensor whose numbers lie nowhere, as a wrapper's; kernels take it for None.
    """
    place = None if x is None else x.data_ptr()
    if not place and x is not None and x.numel():
        raise _without_memory(x)
    return place


def addresses(tensors: Iterable[Tensor | None]) -> list[int | None]:
    """Return where the numbers of each tensor lie, as :func:`address` does."""
    found: list[int | None] = []
    for x in tensors:  # written out: a call for each takes as long as a small kernel
        place = None if x is None else x.data_ptr()
        if not place and x is not None and x.numel():
            raise _without_memory(x)
        found.append(place)
    return found


def _without_memory(x: Tensor) -> TypeError:
    return TypeError(f"kernels read tensors that have memory, got a {type(x).__name__}")


def _flags() -> tuple[str, ...]:
    """Return the flags that this compiler takes."""
    return _settings()[0]


@functools.cache
def _settings() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return this compiler's flags, found by building probes, and what kernels then lack."""
    target, lacks = _target()
    try:
        flags = (*_BASE, *target, *_openmp())
        _build("threads", _PROBE, flags)
    except _OutOfTimeError:
        raise
    except RuntimeError as error:
        flags, lacks = (*_BASE, *target), (*lacks, f"C kernels run on one thread: {error}")
    for what in lacks:
        _log.warning("%s", what)
    return flags, lacks


def _target() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the flag for this CPU or the user's target, and a line where the compiler has none."""
    if wanted := os.environ.get("SSMZOO_ARCH"):
        _check_target(wanted)
        targets = [(f"-march={wanted}",)]
    else:
        arm = platform.machine() in ("arm64", "aarch64")  # there older clangs know -mcpu alone
        targets = [("-march=native",), *([("-mcpu=native",)] if arm else []), ()]
    why = RuntimeError()
    for target in targets:
        try:
            _build("probe", _PROBE, (*_BASE, *target))
        except _OutOfTimeError:
            raise
        except RuntimeError as error:
            why = error
            continue
        if target:
            return target, ()
        return target, (f"C kernels are built without -march=native: {why}",)
    raise why


def _openmp() -> tuple[str, ...]:
    """Return the flags for threads of the runtime that torch has loaded.

    Raises:
        RuntimeError: It does not serve this compiler's code, and the way out.
    """
    mac = sys.platform == "darwin"
    if _kind() == "gcc":
        if mac:
            raise RuntimeError("gcc would bring an OpenMP beside torch's; set CC=clang")
        return ("-fopenmp",)
    runtime = Path(torch.__file__).with_name("lib") / "libomp.dylib"
    if mac and runtime.exists():  # torch has it loaded, but not for libraries that name none
        ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
    if not hasattr(ctypes.CDLL(None), "__kmpc_fork_call"):
        way_out = "install torch from PyPI" if mac else "install gcc, and set CC=gcc"
        raise RuntimeError(f"clang's code needs LLVM's OpenMP, which torch has not; {way_out}")
    # clang's own -fopenmp would link a second one
    return ("-Xclang", "-fopenmp", *(["-Wl,-undefined,dynamic_lookup"] if mac else []))


def _check_target(target: str) -> None:
    """Fail unless the compiler knows a target and this CPU has all of its instructions."""
    features: list[set[str]] = []
    for name in ("native", target):
        command = [*_compiler(), f"-march={name}", "-dM", "-E", "-x", "c", os.devnull]
        run = _run(command, "a list of macros")
        if run.returncode and name == target:
            raise ValueError(
                f"SSMZOO_ARCH must be a target that {command[0]} knows, got {target!r}: "
                f"{_reason(run)}; name another, or unset it to build for this CPU"
            )
        features.append(set(re.findall(r"^#define (__[A-Z][A-Z0-9_]*__) 1$", run.stdout, re.M)))
    present, needed = features
    lacking = sorted(x.strip("_") for x in needed - present)
    if present and lacking:
        raise ValueError(
            f"SSMZOO_ARCH must be a target that this CPU can run, got {target!r}, which needs "
            f"{', '.join(lacking[:4])}; name another, or unset it to build for this CPU"
        )


@functools.cache
def _compiler() -> tuple[str, ...]:
    if sys.platform == "win32":
        raise RuntimeError("C kernels are not built on Windows; use WSL")
    named = os.environ.get("CC", "")
    try:
        wanted = shlex.split(named)
    except ValueError as error:
        raise RuntimeError(
            f"no compiler found: CC must be a command, got {named!r}: {error}; correct or unset it"
        ) from error
    if wanted:
        if shutil.which(wanted[0]) is None:
            raise RuntimeError(
                f"no compiler found: CC={wanted[0]} is not on the PATH; install gcc or clang"
            )
        return tuple(wanted)
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return (name,)
    raise RuntimeError(
        "no compiler found: none of cc, gcc, clang is on the PATH; install gcc or clang"
    )


@functools.cache
def _version() -> str:
    return _run([*_compiler(), "--version"], "its version").stdout


def _kind() -> str:
    return "clang" if "clang" in _version() else "gcc"  # on a Mac gcc is clang's other name


@functools.cache
def _machine() -> str:
    """Describe compiler and CPU: what a library depends on besides its source and flags."""
    cpu = (platform.machine(), platform.processor(), machine.instructions())
    return "\n".join((*_compiler(), _version(), *cpu))


def _build(name: str, code: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """Load a library from the user's cache or, where that fails, from the private folder."""
    headers = [path.read_text("utf-8") for path in _HEADERS]
    parts = "\0".join((code, *headers, *flags, _machine()))
    key = f"{name}-{hashlib.sha256(parts.encode()).hexdigest()[:24]}"
    causes: dict[str, None] = {}  # in order, each once
    way_out = "name another compiler with CC"
    users = None
    for find in (_users_folder, machine.private_folder):
        try:
            folder = find()
            if not causes:
                users = folder
            library = _cached(folder, key) or _made(folder, key, name, code, flags)
        except _OutOfTimeError:
            raise
        except (OSError, RuntimeError) as error:
            causes[_words(error)] = None
            if isinstance(error, OSError):
                way_out = "set XDG_CACHE_HOME to a folder that has room and may hold programs"
            continue
        for cause in causes:
            _tell_of_the_private_folder(cause)
            if users is not None:
                _failed[users] = cause
        return library
    raise RuntimeError(f"{'; '.join(causes)}; {way_out}")


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    return getattr(error, "strerror", None) or str(error)


def _cached(folder: Path, key: str) -> ctypes.CDLL | None:
    for path in sorted(folder.glob(f"{key}-*.so")):
        if machine.is_of_another(path.stat(follow_symlinks=False)):
            _log.info("building %s again: it belongs to another user", path.name)
        elif path.stem.endswith(_digest(path)):
            try:
                return _opened(path)
            except RuntimeError as error:
                _log.info("building %s again: %s", path.name, error)
        path.unlink(missing_ok=True)
    return None


def _made(folder: Path, key: str, name: str, code: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """Build a library, load it, and leave it in the folder; what cannot be loaded is not kept."""
    # a library on NFS that is loaded leaves a name behind
    with tempfile.TemporaryDirectory(
        dir=folder, prefix="build-", ignore_cleanup_errors=True
    ) as scratch:
        source, made = Path(scratch, f"{name}.c"), Path(scratch, f"{name}.so")
        source.write_text(code, "utf-8")
        includes = [f"-I{path.parent}" for path in _HEADERS]
        command = [*_compiler(), *flags, *includes, str(source), "-o", str(made)]
        run = _run(command, source.name, TMPDIR=scratch)
        if run.returncode or not made.exists():
            for number in _FULL:
                if os.strerror(number) in run.stderr:
                    raise OSError(number, os.strerror(number), str(folder))
            raise RuntimeError(f"{command[0]} failed on {source.name}: {_reason(run)}")
        library = _opened(made)
        if name == "probe" and sys.executable and not hasattr(sys, "frozen"):
            run = _run([sys.executable, "-I", "-S", "-c", _TRIAL, str(made)], "a trial")
            if run.returncode < 0:  # by a signal; another program than Python may end otherwise
                raise RuntimeError(f"{command[0]} builds what this CPU cannot run: {_reason(run)}")
        try:
            os.replace(made, folder / f"{key}-{_digest(made)}.so")
        except OSError as error:
            _log.info("%s is not kept for other processes: %s", source.name, error)
    return library


def _opened(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if os.statvfs(path.parent).f_flag & getattr(os, "ST_NOEXEC", 0):
            raise OSError(errno.EACCES, "mounted noexec", str(path.parent)) from error
        reason = str(error).removeprefix(f"{path}: ")
        name = path.name.partition("-")[0].removesuffix(".so")
        raise RuntimeError(
            f"the compiled library of {name}.c cannot be loaded: {reason}"
        ) from error


def _run(command: list[str], what: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the compiler within the time limit; past it, end it and all that it started."""
    seconds = _seconds()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env=os.environ | {"LC_ALL": "C"} | variables,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise _OutOfTimeError(
                    f"{command[0]} took more than {seconds:g} seconds for {what}; "
                    "SSMZOO_BUILD_SECONDS sets another limit"
                ) from None
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _seconds() -> float:
    given = os.environ.get("SSMZOO_BUILD_SECONDS") or "300"
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"SSMZOO_BUILD_SECONDS must be a number of seconds above 0, got {given!r}; unset it "
            "for 300"
        )
    return min(seconds, 1e6)  # the longest that poll waits is 24 days


def _reason(run: subprocess.CompletedProcess[str]) -> str:
    """Return the line of a compiler's output that names the error."""
    lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("collect2:")] or lines  # a consequence
    if lines:
        return next((line for line in lines if "error" in line), lines[-1])
    if run.returncode < 0:
        return f"ended by {signal.Signals(-run.returncode).name}"
    return f"exit status {run.returncode}, no message"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def cache_folder() -> Path:
    """Return where built kernels stay: the user's cache, or a folder of this process alone.

    Raises:
        OSError: There is neither.
    """
    try:
        return _users_folder()
    except (OSError, RuntimeError) as error:
        _tell_of_the_private_folder(_words(error))
        return machine.private_folder()


def _users_folder() -> Path:
    folder = machine.users_folder()
    if folder in _failed:
        raise RuntimeError(_failed[folder])
    return folder


@functools.cache
def _tell_of_the_private_folder(why: str) -> None:
    _log.info("C kernels are built anew for this process: %s", why)
