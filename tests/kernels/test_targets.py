"""The C kernels compiled for narrower vectors than this CPU has, and by another compiler."""

import shutil

import pytest
from tests.kernels.triton_processes import run

from ssmzoo_kernels import native

FILES = ("tests/kernels/c_kernels.py", "tests/kernels/test_few_rows_linear.py")
COMMAND = ("-m", "pytest", *FILES, "-q", "-p", "no:cacheprovider")


def passes(**environment):
    out = run([*COMMAND, "--tb=short"], **environment)
    assert " passed" in out
    assert "skipped" not in out, out


@pytest.mark.parametrize("target", ["x86-64", "x86-64-v3"])
def test_kernels_for_other_vectors_are_as_exact(target):
    try:
        native._check_target(target)
    except ValueError:
        pytest.skip("the CPU has no such vectors")
    passes(SSMZOO_ARCH=target)


def test_kernels_by_clang_are_as_exact():
    if shutil.which("clang") is None:
        pytest.skip("clang is not installed")
    passes(CC="clang")
