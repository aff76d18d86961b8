"""Run the C kernels' tests with kernels that watch their memory and arithmetic.

    python -m tests.kernels.sanitizers [pytest's arguments]

builds every kernel with AddressSanitizer and UndefinedBehaviorSanitizer, runs the contracts' checks
of the backend "cpu" and the tests of the ops that have no contract, and prints a row of
``sanitizers.csv``. A finding ends the process of the tests, and the row counts it.
"""

import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

FINDING = re.compile(r"ERROR: AddressSanitizer|: runtime error: ")
HERE = Path(__file__).parent
TABLE = HERE / "sanitizers.csv"

# ops without a contract, whose tests are not named after a backend
WHOLE = ("test_few_rows_linear.py", "test_token_recurrences.py", "test_token_step.py")
_KERNELS = "cpu or few_rows or token_step or token_recurrences"
FLAGS = (
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    *("-fno-omit-frame-pointer", "-g1"),
)
# torch and Python leave memory to the system at their end
SETTINGS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


class Outcome(NamedTuple):
    """What a run of the tests under sanitizers gave."""

    compiler: str
    tests: int
    findings: int
    output: str


def compiler() -> str | None:
    """Return a compiler that has the sanitizers' libraries, or None."""
    found = shutil.which("gcc") is not None and all(map(os.path.isabs, _libraries("gcc")))
    return "gcc" if found else None


def _libraries(name: str) -> list[str]:
    """Return what must be loaded before torch: the sanitizer, and what it must find then."""
    commands = [[name, f"-print-file-name={x}"] for x in ("libasan.so", "libstdc++.so.6")]
    return [subprocess.check_output(command, text=True).strip() for command in commands]


def run(*arguments: str, seconds: int = 7200) -> Outcome:
    """Run tests in a process whose kernels are built with the sanitizers.

    Args:
        arguments: pytest's; without them all tests of the C kernels.
        seconds: After which the tests are given up.
    """
    name = compiler()
    assert name is not None
    version = subprocess.check_output([name, "--version"], text=True).splitlines()[0]
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | SETTINGS | {"XDG_CACHE_HOME": cache}
        environment |= {"CC": " ".join((name, *FLAGS)), "SSMZOO_BUILD_SECONDS": "1200"}
        environment |= {"LD_PRELOAD": ":".join(_libraries(name))}
        # what pytest captures is lost where the process ends
        chosen = ("-s", *(arguments or c_kernels_tests()))
        done = run_pytest(sys.executable, chosen, environment, seconds)
    output, findings = done.stdout[-10_000:], len(FINDING.findall(done.stdout))
    if done.returncode and not findings:
        raise RuntimeError(f"the tests failed, and not by a finding:\n{output}")
    passed = re.search(r"(\d+) passed", done.stdout)
    return Outcome(version, int(passed[1]) if passed else 0, findings, output)


def run_pytest(
    python: str | Path, arguments: Sequence[str], environment: Mapping[str, str], seconds: int
) -> subprocess.CompletedProcess[str]:
    """Run tests by some Python in a process of its own; its errors are in its output, too."""
    return subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=HERE.parents[1],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=seconds,
    )


def c_kernels_tests() -> list[str]:
    """Return the tests of the C kernels as pytest's arguments."""
    files = sorted(HERE.glob("test_*.py"))
    held = [x for x in files if "(contracts." in x.read_text("utf-8")]
    return [*map(str, held), *(str(HERE / x) for x in WHOLE), "-k", _KERNELS]


def main() -> None:
    """Print the row of the table."""
    outcome = run(*sys.argv[1:])
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if outcome.findings:
        sys.stderr.write(outcome.output)
    row = (commit, outcome.compiler, outcome.tests, outcome.findings)
    csv.writer(sys.stdout).writerow(row)


if __name__ == "__main__":
    main()
