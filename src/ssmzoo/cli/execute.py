"""Run another program, such as ``lm_eval``, with the families registered."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import NoReturn

from ssmzoo.environment.messages import suggestion

# programs that load models by transformers' Auto classes
_USUAL = ("accelerate", "lm_eval", "torchrun", "transformers", "trl")


def execute(program: str, arguments: Sequence[str]) -> NoReturn:
    """Become another Python program: its output, its signals and its exit status.

    The families are registered as soon as the program imports transformers, also in the processes
    that it starts with the same environment, unless Python starts there with ``-I`` or ``-S``.

    Args:
        program: The name of a console script, a module as for ``python -m``, or a Python file.
        arguments: The program's arguments, unchanged.

    Raises:
        LookupError: There is no such program; the message suggests and lists.
    """
    command = [sys.executable, *_command(program), *arguments]
    startup = str(Path(__file__).with_name("startup"))
    others = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    paths = [startup, *(place for place in others if place != startup)]
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})


def _command(program: str) -> list[str]:
    """Return the arguments of Python that run a program."""
    if program.endswith(".py") and Path(program).is_file():
        return [program]
    scripts: dict[str, EntryPoint] = {}
    for point in entry_points(group="console_scripts"):
        scripts.setdefault(point.name, point)
    if program in scripts:
        point = scripts[program]
        # as pip's script does, which may lie in another folder than Python
        call = f"sys.exit({point.module}.{point.attr}())"
        return ["-P", "-c", f"import sys, {point.module}; sys.argv[0] = {program!r}; {call}"]
    if all(part.isidentifier() for part in program.split(".")) and _importable(program):
        return ["-m", program]
    known = [name for name in _USUAL if name in scripts]
    raise LookupError(
        f"no program, module or Python file {program!r} here{suggestion(program, scripts)}; "
        f"installed, among others: {', '.join(known) or 'none that loads models'}"
    )


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of the package that it lies in
        return False
