"""A pytest plugin (``-p tests.skip_guard``): a skip that tests/skips.txt does not list fails.

Each line of the list is ``<test> | <reason>``; both are patterns with ``*``, and a test's
parameters do not count. Blank lines and lines that start with ``#`` do not either.
"""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    default = Path(__file__).with_name("skips.txt")
    parser.addoption("--skips", type=Path, default=default, help="the list of allowed skips")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers report to the process that judges
        config.pluginmanager.register(SkipGuard(config.getoption("--skips")))


class SkipGuard:
    """Collects the skips of a session and compares them with the list."""

    def __init__(self, path: Path):
        self.path = path
        self.allowed = [_entry(path, line) for line in path.read_text("utf-8").splitlines()]
        self.unlisted: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._judge(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._judge(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unlisted and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unlisted:
            terminalreporter.section(f"FAILED: skips that {self.path.name} does not list", red=True)
            for line in self.unlisted:
                terminalreporter.line(line)

    def _judge(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        test = report.nodeid.partition("[")[0].partition("@")[0]  # xdist appends "@group"
        where = report.longrepr
        reason = where[2] if isinstance(where, tuple) else str(where)
        reason = reason.removeprefix("Skipped: ")
        for pattern, why in filter(None, self.allowed):
            if fnmatchcase(test, pattern) and fnmatchcase(reason, why):
                return
        self.unlisted.append(f"{report.nodeid} | {reason}")


def _entry(path: Path, line: str) -> tuple[str, str] | None:
    if not line.strip() or line.startswith("#"):
        return None
    test, bar, reason = (part.strip() for part in line.partition("|"))
    if not (test and bar and reason):
        raise pytest.UsageError(f"{path}: a line must be '<test> | <reason>', got {line!r}")
    return test, reason
