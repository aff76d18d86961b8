"""Run the C kernels' tests with the compilers that are named, for this machine's CPU.

    python -m tests.kernels.compilers gcc-11 clang-16 /roots/gcc-15 ...

prints a row of ``compilers.csv`` for each. The tests are those of ``test_targets.py``. A compiler
of another Debian runs in a folder that has it, and sees this machine's files where they are:

    debootstrap --variant=minbase --include=gcc-15,libc6-dev forky /roots/forky
    mkdir -p /roots/forky/PROJECT
    mount --bind PROJECT /roots/forky/PROJECT; mount --bind /tmp /roots/forky/tmp

and ``/roots/gcc-15`` is a script of one line, ``exec chroot /roots/forky gcc-15 "$@"``.
"""

import csv
import os
import sys
import tempfile
from pathlib import Path

from tests.kernels.emulated import first_line, outcome
from tests.kernels.sanitizers import run_pytest

HERE = Path(__file__).parent
TABLE = HERE / "compilers.csv"
# Debian 11 to 14 have these; no clang 20
COMPILERS = (*(f"gcc-{n}" for n in range(9, 16)), *(f"clang-{n}" for n in (*range(14, 20), 21)))


def main() -> None:
    """Print a row for each compiler."""
    commit = first_line("git", "rev-parse", "--short", "HEAD")
    for compiler in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {"CC": compiler, "XDG_CACHE_HOME": cache}
            chosen = (
                "-m",
                "not slow and not gpu",
                str(HERE / "test_targets.py"),
                "-k not TestElsewhere",
            )
            found = outcome(run_pytest(sys.executable, chosen, environment, 7200))
        if found.failures:
            sys.stderr.write(found.output)
        name, version = Path(compiler).name, first_line(compiler, "--version")
        csv.writer(sys.stdout).writerow((commit, name, version, found.tests, found.failures))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
