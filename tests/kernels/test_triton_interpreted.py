"""Runs ``interpreted_triton.py`` where it can run: in a process that interprets Triton kernels."""

import pytest
from tests.kernels.triton_processes import assert_interpreted

pytest.importorskip("triton", reason="triton is not installed")


def test_interpreted_kernels_equal_their_references():
    assert_interpreted("interpreted_triton.py")
