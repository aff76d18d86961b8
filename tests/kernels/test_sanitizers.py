"""The C kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""

import csv

import pytest
from tests.kernels.sanitizers import TABLE, compiler, run

sanitized = pytest.mark.skipif(compiler() is None, reason="gcc has no sanitizers here")

FAULTY = """
import torch, ctypes
from pathlib import Path
from ssmzoo_kernels import native

def test_it(tmp_path):
    source = tmp_path / "faulty.c"
    source.write_text('''#include "vector.h"
    REAL faulty(int64_t at) {{
      REAL *x = malloc((size_t)at * sizeof(REAL));
      return x[at] = 1;
    }}
    int64_t twice(int64_t x) {{ return 2 * x; }}
    ''')
    kernel = native.library(source, torch.float32).{name}
    kernel.argtypes = [ctypes.c_int64]
    kernel({argument})
"""


def test_the_committed_run_found_nothing():
    (row,) = csv.DictReader(TABLE.read_text("utf-8").splitlines())
    assert int(row["findings"]) == 0
    assert int(row["tests"]) > 1000


@sanitized
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "argument", "word"),
    [
        ("faulty", 8, "heap-buffer-overflow"),
        ("twice", 2**62, "signed integer overflow"),
        ("twice", 1, ""),
    ],
)
def test_a_fault_is_found(name, argument, word, tmp_path):
    path = tmp_path / "test_faulty.py"
    path.write_text(FAULTY.format(name=name, argument=argument))
    found = run(str(path))
    assert word in found.output
    assert found.findings == bool(word)


@sanitized
@pytest.mark.slow
def test_kernels_touch_no_memory_but_their_own():
    found = run()
    assert not found.findings, found.output
