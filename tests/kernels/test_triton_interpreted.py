"""Runs ``interpreted_*.py`` where they can run: in processes that interpret Triton kernels."""

import pytest
from tests.kernels.triton_processes import assert_interpreted

pytest.importorskip("triton", reason="triton is not installed")

# few processes, because each loads torch and triton; several, for workers to share
PROCESSES = (
    ("interpreted_ops.py",),
    (
        *("interpreted_eidetic.py", "interpreted_feedback.py", "interpreted_diagonal.py"),
        "interpreted_every_op.py",
    ),
)


@pytest.mark.long
@pytest.mark.parametrize("files", PROCESSES, ids=lambda files: files[0])
def test_interpreted_kernels_equal_their_references(files):
    assert_interpreted(*files)
