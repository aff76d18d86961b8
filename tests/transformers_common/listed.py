"""A pytest plugin (``-p tests.transformers_common.listed``): every test does what listed.txt says.

Each line of the list is ``<test> | skips or fails | <reason>``, the test as ``class::name`` with
``*`` as wildcard. A test that no line names must pass, and one that a line names must do what the
line says: to pass, too, makes the run fail. A test fails, or skips, if one of its subtests does.
"""

from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

LIST = Path(__file__).with_name("listed.txt")


class Line(NamedTuple):
    """What the list says of some tests."""

    test: str
    outcome: str
    reason: str


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--listed", type=Path, default=LIST, help="what is not expected to pass")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers report to the process that judges
        config.pluginmanager.register(Listed(read(config.getoption("--listed"))))


class Listed:
    """Collects what the tests of a session did and compares it with the list."""

    def __init__(self, lines: list[Line]):
        self.lines = lines
        self.outcomes: dict[str, str] = {}
        self.surprises: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport):
        test = report.nodeid.partition("::")[2]
        did = {"failed": "fails", "skipped": "skips"}.get(report.outcome)
        if did == "fails" or test not in self.outcomes:
            self.outcomes[test] = did or "passes"
        elif did == "skips" and self.outcomes[test] == "passes":
            self.outcomes[test] = did
        line = find(self.lines, test)
        if did == "fails" and line is not None and line.outcome == did:
            report.outcome = "skipped"  # with the next line, what pytest calls an expected failure
            report.wasxfail = line.reason
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        for test, outcome in sorted(self.outcomes.items()):
            line = find(self.lines, test)
            expected = "passes" if line is None else line.outcome
            if outcome != expected:
                self.surprises.append(f"{test} {outcome}, expected: it {expected}")
        if self.surprises and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        counts: dict[str, Counter[str]] = {}
        for test, outcome in self.outcomes.items():
            counts.setdefault(test.partition("::")[0], Counter())[outcome] += 1
        terminalreporter.section("what the tests of each class did")
        for name, count in sorted(counts.items()):
            told = (f"{outcome} {count[outcome]}" for outcome in ("passes", "skips", "fails"))
            terminalreporter.line(f"{name}: {', '.join(told)}")
        if self.surprises:
            terminalreporter.section("FAILED: other outcomes than the list says", red=True)
            for line in self.surprises:
                terminalreporter.line(line)


def read(path: Path) -> list[Line]:
    """Return the lines of a list; blank ones and those that start with ``#`` do not count.

    Raises:
        UsageError: A line has another form.
    """
    lines = []
    for text in path.read_text("utf-8").splitlines():
        if not text.strip() or text.startswith("#"):
            continue
        line = Line(*(part.strip() for part in [*text.split("|", 2), "", ""][:3]))
        if line.outcome not in ("skips", "fails") or not (line.test and line.reason):
            raise pytest.UsageError(
                f"{path}: a line must be '<test> | skips or fails | <reason>', got {text!r}"
            )
        lines.append(line)
    return lines


def find(lines: list[Line], test: str) -> Line | None:
    """Return the first line that names a test ``class::name``."""
    return next((line for line in lines if fnmatchcase(test, line.test)), None)
