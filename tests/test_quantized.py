"""Loading in few bits, in a process of its own, because transformers imports torchao."""

import importlib.util
import os
import subprocess
import sys

import pytest

CODE = """
from ssmzoo.cli.main import main

assert main(["generate", "nobody/nothing", "x"]) == 2  # one line: nothing of torchao's before it

from tests.plugins.sabotage import MISTAKES, NARROW

from ssmzoo import families
from ssmzoo.testing import check

assert len(families()) >= 5
for name in families():
    report = check(name, only=["quantized"])
    assert report.results[0].status == "passed", report.table()
for name, row in {**NARROW, **MISTAKES}.items():
    report = row.report(["quantized"])
    expected = "failed" if "quantized" in (row.fails or {name}) else "passed"
    assert report.results[0].status == expected, f"{name}: {report.table()}"
"""


def test_every_family_loads_in_8_and_4_bits_and_those_that_cannot_are_found():
    folder = os.environ.get("SSMZOO_TEST_TORCHAO")
    if folder is None and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed; `make test` puts it beside the rest")
    paths = [path for path in (folder, os.environ.get("PYTHONPATH")) if path]
    run = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.startswith("ssmzoo: error: no folder 'nobody/nothing' here")
