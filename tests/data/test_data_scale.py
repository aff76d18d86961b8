"""A corpus of any size is read within a gigabyte, by all of a run's processes together."""

import json
import subprocess
import sys

import pytest

LARGE = pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])


@pytest.mark.long
@pytest.mark.parametrize("megabytes", [20, LARGE])
def test_a_corpus_is_read_within_a_gigabyte_stored_and_streamed(megabytes, tmp_path):
    """The large one takes minutes, and three times its size on the disk."""
    command = [sys.executable, "-m", "tests.data.data_scale", tmp_path, str(megabytes), "both", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for found in map(json.loads, done.stdout.splitlines()):
        assert found["megabytes"] == megabytes
        assert found["rss_mib"] < 1024, found
        # all but what fills no batch; lanes, of lengths a little different, are near an epoch's end
        missing = found["documents"] - found["read"]
        assert abs(missing) <= max(2 * (found["lanes"] or 1), 64), found
