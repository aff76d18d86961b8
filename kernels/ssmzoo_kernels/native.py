"""Load the C kernels that a wheel brought, or build them with the machine's own compiler, once.

A wheel's kernels (:mod:`.prebuilt`) serve where no setting names a compiler or a target. Else a
kernel is one C file beside its op, compiled the first time it runs for each floating-point type.
The library stays in the user's cache folder (``$XDG_CACHE_HOME/ssmzoo`` or ``~/.cache/ssmzoo``)
under a name made of everything it depends on and of its own digest: a change rebuilds it, a damaged
file is rebuilt, and processes that build at the same time do not see each other's halves. Where
that folder fails (another's, full, mounted noexec), a private temporary one of this process serves.

Settings, from the environment:

=============== ================================================================================
``CC``          the compiler (:mod:`.compiling`)
``SSMZOO_ARCH`` the target, as after the compiler's ``-march=``; without it this CPU
=============== ================================================================================

A kernel's threads are those of the OpenMP runtime that torch has loaded, never of a second one.
GNU's serves gcc's code alone, LLVM's also clang's; code that has none runs on one thread.
"""

import contextlib
import ctypes
import errno
import functools
import hashlib
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from ssmzoo_kernels import compiling, machine, prebuilt

_log = logging.getLogger("ssmzoo")
_PACKAGE = Path(__file__).parent

_REALS = {torch.float32: "float", torch.float64: "double"}
# by the compiler's macro, widest first
_VECTORS = {
    "__AVX512F__": "avx512f",
    "__AVX2__": "avx2",
    "__AVX__": "avx",
    "__SSE2__": "sse2",
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

_failed: dict[Path, str] = {}  # by folder in which a build failed that succeeded elsewhere, why


@functools.cache
def _brought() -> prebuilt.Kind | None:
    """Return the kind of CPU whose kernels came in the wheel and serve; None: they are built."""
    asked = os.environ.get("CC") or os.environ.get("SSMZOO_ARCH")
    kind = None if asked else prebuilt.kind()
    return kind if kind is not None and has_openmp("GOMP_parallel") else None


@functools.cache
def missing() -> str:
    """Return why there is no C kernel here, and the way out, or an empty string.

    Raises:
        ValueError: ``SSMZOO_ARCH`` or ``SSMZOO_BUILD_SECONDS`` is wrong.
    """
    try:
        if _brought() is None:
            _flags()
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


def compiler() -> str:
    """Return what builds kernels, ``"gcc"`` or ``"clang"``; an empty string if there are none."""
    if _brought() is not None:
        return "gcc"
    return "" if missing() else compiling.kind()


def lacks() -> str:
    """Return what kernels are built without here, why, and the way out, or an empty string.

    Raises:
        RuntimeError: None can be built; :func:`missing` says why.
    """
    return "" if _brought() is not None else "; ".join(_settings()[1])


@functools.cache
def vectors() -> str | None:
    """Return the widest vector instructions that kernels are built for, such as ``"avx512f"``.

    None if the compiler names none that are known here.

    Raises:
        RuntimeError: There is no compiler, or it takes none of our flags.
    """
    if (kind := _brought()) is not None:
        return kind.vectors
    command = [*compiling.command(), *_flags(), "-dM", "-E", "-x", "c", os.devnull]
    macros = compiling.run(command, "a list of macros").stdout
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
    macros = tuple(f"-D{name}={value}" for name, value in defines.items())
    if (kind := _brought()) is not None and source.is_relative_to(_PACKAGE):
        return _opened(prebuilt.place(kind, source.stem, _REALS[dtype], macros))
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
        flags = (*compiling.BASE, *target, *_openmp())
        _build("threads", _PROBE, flags)
    except compiling.OutOfTimeError:
        raise
    except RuntimeError as error:
        flags, lacks = (*compiling.BASE, *target), (*lacks, f"C kernels run on one thread: {error}")
    for what in lacks:
        _log.warning("%s", what)
    return flags, lacks


def _target() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the flag for this CPU or the user's target, and a line where the compiler has none."""
    if wanted := os.environ.get("SSMZOO_ARCH"):
        compiling.check_target(wanted)
        targets = [(f"-march={wanted}",)]
    else:
        arm = platform.machine() in ("arm64", "aarch64")  # there older clangs know -mcpu alone
        targets = [("-march=native",), *([("-mcpu=native",)] if arm else []), ()]
    why = RuntimeError()
    for target in targets:
        try:
            _build("probe", _PROBE, (*compiling.BASE, *target))
        except compiling.OutOfTimeError:
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
    kind = compiling.kind()
    gcc = kind == "gcc"
    if not has_openmp("GOMP_parallel" if gcc else "__kmpc_fork_call"):
        whose, other = ("GNU's", "clang") if gcc else ("LLVM's", "gcc")
        way_out = f"install {other}, and set CC={other}"
        if sys.platform == "darwin" and not gcc:
            way_out = "install torch from PyPI"
        raise RuntimeError(f"{kind}'s code needs {whose} OpenMP, which torch has not; {way_out}")
    return ("-fopenmp",) if gcc else ("-Xclang", "-fopenmp")


def has_openmp(entry: str) -> bool:
    """Tell whether the OpenMP that torch has loaded has a function, which libraries then find."""
    if not hasattr(ctypes.CDLL(None), entry):
        for path in _torchs_openmp():  # loaded, on some machines for torch alone
            with contextlib.suppress(OSError):  # one that it has not loaded
                ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
    return hasattr(ctypes.CDLL(None), entry)


def _torchs_openmp() -> list[Path]:
    """Return the files of OpenMP that torch brings, loaded or not; others may have theirs."""
    package = Path(torch.__file__).parent
    folders = package / "lib", package.with_name("torch.libs")
    names = ("libomp.dylib", "libgomp*.so*", "libiomp5.so", "libomp*.so*")
    return [path for folder in folders for name in names for path in sorted(folder.glob(name))]


@functools.cache
def _machine() -> str:
    """Describe compiler and CPU: what a library depends on besides its source and flags."""
    cpu = (platform.machine(), platform.processor(), machine.instructions())
    return "\n".join((*compiling.command(), compiling.version(), *cpu))


def _build(name: str, code: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """Load a library from the user's cache or, where that fails, from the private folder."""
    headers = [path.read_text("utf-8") for path in compiling.HEADERS]
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
        except compiling.OutOfTimeError:
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
        made = compiling.build(Path(scratch), name, code, flags)
        library = _opened(made)
        if name == "probe" and sys.executable and not hasattr(sys, "frozen"):
            done = compiling.run([sys.executable, "-I", "-S", "-c", _TRIAL, str(made)], "a trial")
            if done.returncode < 0:  # by a signal; another program than Python may end otherwise
                raise RuntimeError(
                    f"{compiling.command()[0]} builds what this CPU cannot run: "
                    f"{compiling.reason(done)}"
                )
        try:
            os.replace(made, folder / f"{key}-{_digest(made)}.so")
        except OSError as error:
            _log.info("%s.c is not kept for other processes: %s", name, error)
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


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def cache_folder() -> Path:
    """Return where kernels stay: the package, the user's cache, or a folder of this process alone.

    Raises:
        OSError: There is neither.
    """
    if _brought() is not None:
        return prebuilt.FOLDER
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
