"""Runs ``interpreted_triton.py`` where it can run: in a process that interprets Triton kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")


def test_interpreted_kernels_equal_their_references():
    cases = Path(__file__).with_name("interpreted_triton.py")
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(cases),
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{' '.join(command)}\n{run.stdout}\n{run.stderr}"
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout, run.stdout
