"""A pytest plugin (``-p tests.kit_report``): write the kit's outcomes to ``tests/kit.csv``."""

import csv
from pathlib import Path

import pytest

PATH = Path(__file__).with_name("kit.csv")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers report to the process that writes
        config.pluginmanager.register(KitReport())


class KitReport:
    """Collects one row for each suite and check: suite, check, outcome, seconds."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "::test_promise[" not in report.nodeid:
            return
        if report.when == "call" or report.failed:
            suite, _, rest = report.nodeid.partition("::test_promise[")
            row = suite, rest.partition("]")[0], report.outcome, f"{report.duration:.1f}"
            self.rows.append(row)

    def pytest_sessionfinish(self) -> None:
        with PATH.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("suite", "check", "outcome", "seconds"))
            writer.writerows(sorted(self.rows))
