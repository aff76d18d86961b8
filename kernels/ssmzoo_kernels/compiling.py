"""The machine's compiler: which one it is, and what it makes of a C file.

Settings, from the environment:

======================== =======================================================================
``CC``                   the compiler; without it the first of cc, gcc, clang
``SSMZOO_BUILD_SECONDS`` how long it may take for one file; without it 300
======================== =======================================================================
"""

import errno
import functools
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parent
_SHARED = ("vector", "numbers", "few_bits", "linear", "matrices", "diagonal", "companion")
HEADERS = (
    *(_ROOT / f"{name}.h" for name in _SHARED),
    _ROOT / "scan" / "scan.h",
    *(_ROOT / "token_step" / f"{name}.h" for name in ("instructions", "recurrences", "attention")),
)
# none of these lets the compiler assume finite numbers or reorder sums; arrays as long as a caller
# says fit no thread's stack
BASE = (
    *("-O3", "-std=gnu11", "-fPIC", "-Werror=vla"),
    *("-fno-math-errno", "-fno-trapping-math"),
)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class OutOfTimeError(RuntimeError):
    """The compiler took too long; no other flags or folder are tried."""


@functools.cache
def command() -> tuple[str, ...]:
    """Return the compiler's command.

    Raises:
        RuntimeError: There is no compiler.
    """
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
def version() -> str:
    """Return what the compiler says of its version."""
    return run([*command(), "--version"], "its version").stdout


def kind() -> str:
    """Return ``"gcc"`` or ``"clang"``."""
    return "clang" if "clang" in version() else "gcc"  # on a Mac gcc is clang's other name


def check_target(target: str) -> None:
    """Check that the compiler knows a target, and that this CPU has all of its instructions.

    Raises:
        ValueError: One of them does not hold.
    """
    features: list[set[str]] = []
    for name in ("native", target):
        words = [*command(), f"-march={name}", "-dM", "-E", "-x", "c", os.devnull]
        done = run(words, "a list of macros")
        if done.returncode and name == target:
            raise ValueError(
                f"SSMZOO_ARCH must be a target that {words[0]} knows, got {target!r}: "
                f"{reason(done)}; name another, or unset it to build for this CPU"
            )
        features.append(set(re.findall(r"^#define (__[A-Z][A-Z0-9_]*__) 1$", done.stdout, re.M)))
    present, needed = features
    lacking = sorted(x.strip("_") for x in needed - present)
    if present and lacking:
        raise ValueError(
            f"SSMZOO_ARCH must be a target that this CPU can run, got {target!r}, which needs "
            f"{', '.join(lacking[:4])}; name another, or unset it to build for this CPU"
        )


def build(folder: Path, name: str, code: str, flags: tuple[str, ...]) -> Path:
    """Compile a C file into a library of a folder, which names no OpenMP: torch's will serve.

    Raises:
        OSError: The disk is full.
        RuntimeError: The compiler fails, or takes too long.
    """
    source, unlinked, made = (folder / f"{name}.{suffix}" for suffix in ("c", "o", "so"))
    source.write_text(code, "utf-8")
    includes = [f"-I{path.parent}" for path in HEADERS]
    lookup = ["-Wl,-undefined,dynamic_lookup"] if sys.platform == "darwin" else []
    for words in (
        [*command(), *flags, *includes, "-c", str(source), "-o", str(unlinked)],
        [*command(), "-shared", *lookup, str(unlinked), "-o", str(made)],
    ):
        done = run(words, source.name, TMPDIR=str(folder))
        if done.returncode or not Path(words[-1]).exists():
            for number in _FULL:
                if os.strerror(number) in done.stderr:
                    raise OSError(number, os.strerror(number), str(folder.parent))
            raise RuntimeError(f"{words[0]} failed on {source.name}: {reason(done)}")
    return made


def run(words: list[str], what: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the compiler within the time limit; past it, end it and all that it started.

    Raises:
        OutOfTimeError: It took too long.
        ValueError: ``SSMZOO_BUILD_SECONDS`` is no number of seconds.
    """
    seconds = _seconds()
    with subprocess.Popen(
        words,
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
                raise OutOfTimeError(
                    f"{words[0]} took more than {seconds:g} seconds for {what}; "
                    "SSMZOO_BUILD_SECONDS sets another limit"
                ) from None
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


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


def reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return the line of a compiler's output that names the error."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("collect2:")] or lines  # a consequence
    if lines:
        return next((line for line in lines if "error" in line), lines[-1])
    if done.returncode < 0:
        return f"ended by {signal.Signals(-done.returncode).name}"
    return f"exit status {done.returncode}, no message"
