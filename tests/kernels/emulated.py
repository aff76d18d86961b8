"""Run the C kernels' tests on an emulated ARM CPU, with kernels that compilers here build for it.

    python -m tests.kernels.emulated ROOT [--all] [--compiler NAME] [--target TARGET] [pytest's]

takes what ARM runs, Python and torch, from the folder ROOT, runs the tests of the C kernels, and
prints a row of ``emulated.csv`` for each compiler and target, or for those that are named. The
tests are those of ``test_targets.py``; with ``--all``, those that ``sanitizers.py`` runs. The
emulator runs Python; compilers run as they are. ``PYTEST_ADDOPTS="-n 2"`` uses two cores.

On a Debian with qemu-user, debootstrap, gcc-aarch64-linux-gnu and clang, root makes ROOT so, with
any pip (torch 2.10 is the last that has a wheel for ARM without CUDA):

    debootstrap --arch=arm64 --foreign --variant=minbase \\
        --include=python3.11,libgomp1,libstdc++6 bookworm ROOT
    for package in ROOT/var/cache/apt/archives/*.deb; do dpkg -x "$package" ROOT; done
    install="pip install --target ROOT/site --python-version 311 --only-binary=:all:
        --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64
        --platform manylinux2014_aarch64"
    $install --no-deps torch==2.10.0
    $install filelock fsspec jinja2 networkx sympy typing_extensions numpy transformers \\
        pytest pytest-timeout pytest-xdist hypothesis
"""

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.kernels.sanitizers import c_kernels_tests, run_pytest

HERE = Path(__file__).parent
TABLE = HERE / "emulated.csv"
PROJECT = HERE.parents[1]
EMULATOR = "qemu-aarch64"

COMPILERS = {"gcc": "aarch64-linux-gnu-gcc", "clang": "clang --target=aarch64-linux-gnu"}
TARGETS = ("armv8-a", "armv8.2-a+dotprod+bf16", "armv8.2-a+sve")


class Outcome(NamedTuple):
    """What a run of the tests on the emulated CPU gave."""

    tests: int
    failures: int
    output: str


def run(
    root: Path, compiler: str, target: str, arguments: Sequence[str], seconds: int = 14400
) -> Outcome:
    """Run tests in an emulated process whose kernels are built for it.

    Args:
        root: The folder with what ARM runs.
        compiler: A key of ``COMPILERS``.
        target: As after the compiler's ``-march=``.
        arguments: pytest's.
        seconds: After which the tests are given up.
    """
    paths = [root / "site", *(PROJECT / x for x in ("kernels", "src", "plugins", "."))]
    with tempfile.TemporaryDirectory() as scratch:
        environment = os.environ | {"CC": COMPILERS[compiler], "SSMZOO_ARCH": target}
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
        environment |= {"XDG_CACHE_HOME": scratch, "PYTHONDONTWRITEBYTECODE": "1"}
        chosen = ("-m", "not slow and not gpu", *arguments)
        return outcome(run_pytest(_python(root, Path(scratch)), chosen, environment, seconds))


def outcome(done: subprocess.CompletedProcess[str]) -> Outcome:
    """Return what pytest told of its tests.

    Raises:
        RuntimeError: They did not come to their end.
    """
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|errors?)", done.stdout)}
    if done.returncode not in (0, 1) or not counts:
        raise RuntimeError(f"the tests did not end:\n{done.stdout[-10_000:]}")
    passed = counts.pop("passed", 0)
    failures = sum(counts.values())
    return Outcome(passed + failures, failures, done.stdout)


def _python(root: Path, folder: Path) -> Path:
    """Return a program of this machine that is ARM's Python, and that Python starts as itself."""
    program = folder / "python"
    command = f"exec {EMULATOR} -L '{root}' -0 '{program}' '{root}/usr/bin/python3.11' \"$@\""
    program.write_text(f"#!/bin/sh\n{command}\n", "utf-8")
    program.chmod(0o700)
    return program


def first_line(*command: str) -> str:
    """Return the first line that a command prints."""
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


def main() -> None:
    """Print the rows of the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--all", action="store_true", help="every test of the C kernels")
    parser.add_argument("--compiler", choices=COMPILERS, action="append")
    parser.add_argument("--target", action="append")
    options, arguments = parser.parse_known_args()
    briefly = [str(HERE / "test_targets.py"), "-k", "not TestElsewhere"]
    tests = c_kernels_tests() if options.all else briefly
    commit = first_line("git", "rev-parse", "--short", "HEAD")
    emulator = first_line(EMULATOR, "--version")
    write = csv.writer(sys.stdout).writerow
    for compiler in options.compiler or [x for x in COMPILERS if installed(x)]:
        version = first_line(*COMPILERS[compiler].split(), "--version")
        for target in options.target or TARGETS:
            found = run(options.root.resolve(), compiler, target, arguments or tests)
            if found.failures:
                sys.stderr.write(found.output)
            write((commit, emulator, version, target, found.tests, found.failures))
            sys.stdout.flush()


def installed(compiler: str) -> bool:
    """Tell whether a compiler is on this machine."""
    return shutil.which(COMPILERS[compiler].split()[0]) is not None


if __name__ == "__main__":
    main()
