import subprocess
import sys

import pytest

TESTS = """
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_skips(n):
    pytest.skip("needs a CUDA device")

def test_runs():
    pass
"""


@pytest.mark.parametrize(
    ("line", "workers", "status"),
    [
        ("*::test_skips | needs a CUDA*", 0, 0),
        ("# nothing", 1, 1),
        ("*::test_skips | needs a TPU", 0, 1),
        ("*::test_runs | needs a CUDA device", 0, 1),
        ("*::test_skips", 0, 4),
    ],
)
@pytest.mark.long
def test_only_a_listed_skip_for_the_listed_reason_passes(tmp_path, request, line, workers, status):
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "skips.txt").write_text(line)
    command = [sys.executable, "-m", "pytest", f"-n{workers}", "-p", "tests.skip_guard"]
    command += ["-c", tmp_path / "pytest.ini", "--skips", tmp_path / "skips.txt", tmp_path]
    done = subprocess.run(command, cwd=request.config.rootpath, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    if status != 4:
        assert "1 passed, 2 skipped" in done.stdout.splitlines()[-1]
    if status == 1:
        assert "test_some.py::test_skips[2] | needs a CUDA device" in done.stdout
