"""transformers' own tests of its recurrent models do on our kernels what they do without."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

SUITE = Path(sys.prefix, "transformers-tests")
# tests that do otherwise on our kernels, and why
DIFFERENCES: dict[str, str] = {}


def outcomes(kernels: str, report: Path, root: Path) -> dict[str, str]:
    """Run the tests and return what each did, by ``class::name``."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", f"--junitxml={report}"]
    command += [
        "--timeout",
        "300",
        "-o",
        "addopts=--import-mode=importlib",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
    command += ["tests/transformers_common/every_stock_type.py"]
    threads = {"OMP_NUM_THREADS": "1"}  # each of two workers'
    places = threads | {
        "PYTHONPATH": str(SUITE),
        "SSMZOO_KERNELS": kernels,
        "CUDA_VISIBLE_DEVICES": "",
    }
    subprocess.run(command, env=os.environ | places, cwd=root, check=False, capture_output=True)
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        did = {child.tag for child in case} & {"failure", "error", "skipped"}
        name = f"{case.attrib['classname'].rpartition('.')[2]}::{case.attrib['name']}"
        found[name] = min(did, default="passed")
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_suite_does_the_same(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not SUITE.is_dir():
        pytest.fail("the tests of transformers are not there: make test-transformers brings them")
    root = request.config.rootpath
    stock = outcomes("0", tmp_path / "stock.xml", root)
    ours = outcomes("1", tmp_path / "ours.xml", root)
    assert len(stock) > 1000
    assert sum(did == "passed" for did in stock.values()) > 500
    different = {
        name: f"{stock.get(name)} stock, {ours.get(name)} on our kernels"
        for name in stock.keys() | ours.keys()
        if stock.get(name) != ours.get(name)
    }
    print("\n".join(f"{name}: {told}" for name, told in sorted(different.items())))  # noqa: T201
    assert different.keys() == DIFFERENCES.keys()
