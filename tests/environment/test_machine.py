"""What a figure is recorded with: commit, vector instructions, threads."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from ssmzoo_kernels import machine, native

ROOT = Path(__file__).resolve().parents[2]


def git(folder, *words):
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def tracked(tmp_path):
    """A file in a checkout of its own, beside results that runs write."""
    package = tmp_path / "src" / "package"
    results = tmp_path / "eval" / "results"
    for folder in (package, results):
        folder.mkdir(parents=True)
    (package / "machine.py").write_text("1\n")
    (results / "a.json").write_text("{}\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    machine.checkout.cache_clear()
    yield package / "machine.py"
    machine.checkout.cache_clear()


def checkout_of(file):
    machine.checkout.cache_clear()
    return machine.checkout(file)


def test_the_commit_is_that_of_the_checkout_and_changed_code_makes_it_dirty(tracked, tmp_path):
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert checkout_of(tracked) == (commit[:12], False)
    (tmp_path / "eval" / "results" / "a.json").write_text("[]\n")
    (tmp_path / "notes.txt").write_text("not tracked\n")
    assert checkout_of(tracked) == (commit[:12], False)
    tracked.write_text("2\n")
    assert checkout_of(tracked) == (commit[:12], True)


def test_the_commit_is_none_without_git_or_for_an_untracked_file(tracked, tmp_path, monkeypatch):
    beside = tracked.with_name("other.py")
    beside.write_text("")
    assert checkout_of(beside) == (None, None)
    (tmp_path / ".git" / "HEAD").write_text("nonsense")
    assert checkout_of(tracked) == (None, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkout_of(tracked) == (None, None)


def test_the_commit_is_none_in_a_folder_that_git_does_not_trust(tracked, monkeypatch):
    # what git does where the folder is another user's
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert checkout_of(tracked) == (None, None)


def test_the_environment_names_threads_and_the_vectors_of_cpu_torch_and_kernels(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = machine.environment()
    assert found["threads"] == torch.get_num_threads()
    assert found["omp_num_threads"] == "3"
    assert found["torch_vectors"] == torch.backends.cpu.get_cpu_capability()
    assert found["kernel_vectors"] == (None if native.missing() else native.vectors())
    if os.path.exists("/proc/cpuinfo"):
        flags = Path("/proc/cpuinfo").read_text()
        assert found["cpu_vectors"] is None or f" {found['cpu_vectors']} " in flags
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert machine.environment()["omp_num_threads"] is None


def test_the_vectors_of_kernels_follow_the_compilers_flags(monkeypatch):
    monkeypatch.setattr(native, "_flags", lambda: ("-O1",))
    plain = native.vectors.__wrapped__()
    assert plain in ("sse2", "asimd", None)
