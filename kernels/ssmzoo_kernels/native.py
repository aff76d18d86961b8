"""Build the C kernels with the machine's own compiler, once, and load them.

A kernel is one C file beside its op, compiled the first time it runs for each floating-point type.
The library stays in the user's cache folder (``$XDG_CACHE_HOME/ssmzoo`` or ``~/.cache/ssmzoo``)
under a name made of everything it depends on and of its own digest: a change rebuilds it, a damaged
file is rebuilt, and processes that build at the same time do not see each other's halves. A folder
that is unwritable or belongs to someone else is not used; a private temporary one is.
"""

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

_log = logging.getLogger("ssmzoo")

_ROOT = Path(__file__).parent
_HEADERS = (_ROOT / "vector.h", _ROOT / "scan" / "scan.h")
_REALS = {torch.float32: "float", torch.float64: "double"}
# none of these lets the compiler assume finite numbers or reorder sums
_BASE = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
# the best that this compiler takes
_TUNING = (("-march=native", "-fopenmp"), ("-march=native",), ("-fopenmp",), ())
# by the compiler's macro, widest first
_VECTORS = {
    "__AVX512F__": "avx512f",
    "__AVX2__": "avx2",
    "__AVX__": "avx",
    "__SSE2__": "sse2",
    "__ARM_FEATURE_SVE": "sve",
    "__ARM_NEON": "asimd",
}
_PROBE = '#include "vector.h"\nint probe(void) { return LANES; }\n'


@functools.cache
def missing() -> str:
    """Return why C kernels cannot be built here, or an empty string."""
    try:
        _flags()
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


@functools.cache
def vectors() -> str | None:
    """Return the widest vector instructions that kernels are built for, such as ``"avx512f"``.

    None if the compiler names none that are known here.

    Raises:
        RuntimeError: There is no compiler, or it takes none of our flags.
    """
    command = [*_compiler(), *_flags(), "-dM", "-E", "-x", "c", "-"]
    macros = subprocess.run(command, input="", capture_output=True, text=True, check=False).stdout
    return next((name for macro, name in _VECTORS.items() if f"#define {macro} " in macros), None)


@functools.cache
def library(source: Path, dtype: torch.dtype, **defines: int) -> ctypes.CDLL:
    """Return the library of a C file, built for float32 or float64 if it is not in the cache.

    Args:
        source: The C file; it may include the headers of this package.
        dtype: What ``REAL`` is.
        defines: Integer macros.

    Raises:
        RuntimeError: There is no compiler, or it fails on this file.
    """
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    code = source.read_text("utf-8")
    return _build(source.stem, code, (*_flags(), f"-DREAL={_REALS[dtype]}", *macros))


def threads(work: int) -> int:
    """Return how many threads to use for so many updates: torch's number, or 1 for few."""
    return torch.get_num_threads() if work > 65536 else 1


def rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix in a dtype with adjacent columns; its rows may lie apart."""
    if x.dtype is not dtype:
        x = x.to(dtype)
    return x if x.stride(1) == 1 else x.contiguous()


def whole(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a contiguous tensor in a dtype, or None for None."""
    if x is None or (x.dtype is dtype and x.is_contiguous()):
        return x
    return x.to(dtype).contiguous()


def address(x: Tensor | None) -> int | None:
    """Return where a tensor's numbers lie, or None for None: a null pointer."""
    return None if x is None else x.data_ptr()


@functools.cache
def _flags() -> tuple[str, ...]:
    """Return the flags that this compiler takes, found by building a probe."""
    first: RuntimeError | None = None
    for tuning in _TUNING:
        flags = (*_BASE, *tuning)
        try:
            _build("probe", _PROBE, flags)
        except RuntimeError as error:
            first = first or error
        else:
            return flags
    raise first or RuntimeError("no flags to try")


@functools.cache
def _compiler() -> tuple[str, ...]:
    wanted = shlex.split(os.environ.get("CC", ""))
    if wanted:
        if shutil.which(wanted[0]) is None:
            raise RuntimeError(f"no compiler found: CC={wanted[0]} is not on the PATH")
        return tuple(wanted)
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return (name,)
    raise RuntimeError("no compiler found: none of cc, gcc, clang is on the PATH")


@functools.cache
def _machine() -> str:
    """Describe compiler and CPU: what a library depends on besides its source and flags."""
    command = _compiler()
    run = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    features = ""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
        features = next((x for x in lines if x.lower().startswith(("flags", "features"))), "")
    except OSError:
        pass  # not Linux: the processor's name must do
    return "\n".join((*command, run.stdout, platform.machine(), platform.processor(), features))


def _build(name: str, code: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    headers = [path.read_text("utf-8") for path in _HEADERS]
    parts = "\0".join((code, *headers, *flags, _machine()))
    key = f"{name}-{hashlib.sha256(parts.encode()).hexdigest()[:24]}"
    folder = cache_folder()
    for path in sorted(folder.glob(f"{key}-*.so")):
        if path.stem.endswith(_digest(path)):
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                _log.info("building %s again: %s", path.name, error)
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        source, made = Path(scratch, f"{name}.c"), Path(scratch, f"{name}.so")
        source.write_text(code, "utf-8")
        includes = [f"-I{path.parent}" for path in _HEADERS]
        command = [*_compiler(), *flags, *includes, str(source), "-o", str(made)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode or not made.exists():
            raise RuntimeError(f"{_compiler()[0]} failed on {name}.c: {_reason(run.stderr)}")
        path = folder / f"{key}-{_digest(made)}.so"
        os.replace(made, path)
    return ctypes.CDLL(str(path))


def _reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@functools.cache
def cache_folder() -> Path:
    """Return where built kernels stay: the user's cache, or a folder of this process alone."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(base).expanduser() / "ssmzoo"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if hasattr(os, "getuid") and status.st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        if status.st_mode & 0o022:
            raise PermissionError(f"{folder} is writable by others")
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        _log.info("C kernels are built anew for this process: %s", error)
        private = tempfile.mkdtemp(prefix="ssmzoo-")
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        return Path(private)
    return folder
