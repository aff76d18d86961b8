"""The plugin that holds transformers' own tests to tests/transformers_common/listed.txt."""

import subprocess
import sys

import pytest
from tests.transformers_common.listed import LIST, Line, read

TESTS = """
import unittest

class TestSome(unittest.TestCase):
    def test_passes(self):
        pass

    def test_passes_too(self):
        pass

    def test_skips(self):
        self.skipTest("why")

    def test_fails(self):
        self.fail("why")

    def test_one_subtest_fails(self):
        for wanted in (1, 2):
            with self.subTest(wanted):
                self.assertEqual(wanted, 1)

    def test_one_subtest_skips(self):
        for wanted in (1, 2):
            with self.subTest(wanted):
                if wanted == 2:
                    self.skipTest("why")
"""
RIGHT = """
# what these do
TestSome::test_skips | skips | because
*::test_*fails | fails | because
*::test_one_subtest_skips | skips | because
"""
WRONG = """
*::test_passes | skips | because
*::test_passes_too | fails | because
TestMore::test_skips | skips | because
*::test_fails | skips | because
"""


def run(tmp_path, request, listed, workers):
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "listed.txt").write_text(listed)
    command = [sys.executable, "-m", "pytest", f"-n{workers}", "-p"]
    command += ["tests.transformers_common.listed", "-c", tmp_path / "pytest.ini"]
    command += ["--listed", tmp_path / "listed.txt", tmp_path]
    return subprocess.run(command, cwd=request.config.rootpath, capture_output=True, text=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_that_does_what_the_list_says_passes(workers, tmp_path, request):
    done = run(tmp_path, request, RIGHT, workers)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TestSome: passes 2, skips 2, fails 2" in done.stdout


def test_a_listed_test_that_passes_fails_the_run(tmp_path, request):
    done = run(tmp_path, request, RIGHT + "*::test_passes | fails | because", 0)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "TestSome::test_passes passes, expected: it fails" in done.stdout


def test_every_other_outcome_fails_the_run_and_is_named(tmp_path, request):
    done = run(tmp_path, request, WRONG, 0)
    assert done.returncode == 1, done.stdout + done.stderr
    surprises = done.stdout.partition("other outcomes than the list says")[2]
    for name, did, expected in (
        ("test_passes", "passes", "skips"),
        ("test_passes_too", "passes", "fails"),
        ("test_skips", "skips", "passes"),
        ("test_fails", "fails", "skips"),
        ("test_one_subtest_fails", "fails", "passes"),
        ("test_one_subtest_skips", "skips", "passes"),
    ):
        assert f"TestSome::{name} {did}, expected: it {expected}" in surprises


def test_a_reason_may_hold_a_bar(tmp_path):
    (tmp_path / "listed.txt").write_text("# no line\n\nA::b* | fails | x | y")
    assert read(tmp_path / "listed.txt") == [Line("A::b*", "fails", "x | y")]
    assert read(LIST)


@pytest.mark.parametrize("line", ["*::test | skips", "*::test | passes | because", "| skips | so"])
def test_a_line_of_another_form_is_refused(line, tmp_path):
    (tmp_path / "listed.txt").write_text(line)
    with pytest.raises(pytest.UsageError, match=r"a line must be '<test> \| skips or fails"):
        read(tmp_path / "listed.txt")
