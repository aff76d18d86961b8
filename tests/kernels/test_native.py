"""Building the C kernels: once, safely, and never without saying why not."""

import ctypes
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ssmzoo_kernels import dispatch, last_backend, longhorn_scan, native
from ssmzoo_kernels.scan import cpu

PACKAGE = Path(native.__file__).parent
CACHED = (
    native.missing, native.library, native._flags, native._compiler, native._machine,
    native.cache_folder, dispatch.compiler_missing, dispatch._best, cpu._library,
)  # fmt: skip
RUN = """
import torch
from pathlib import Path
from ssmzoo_kernels import last_backend, longhorn_scan
x = torch.ones(1, 20, 3)
longhorn_scan(x, x, x, x)
maps = Path("/proc/self/maps")
loaded = {x.split()[-1] for x in maps.read_text().splitlines()} if maps.exists() else set()
print(last_backend("longhorn_scan"), sum("gomp" in x for x in loaded))
"""


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has built nothing yet, with an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache" / "ssmzoo"
    monkeypatch.undo()
    forget()


def forget():
    for function in CACHED:
        function.cache_clear()


def fake_compiler(folder, script):
    path = folder / "fakecc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def scan(**options):
    x = torch.randn(1, 20, 3)
    return longhorn_scan(x, x, x, x, **options)


def test_a_library_is_built_once_and_found_again(fresh, monkeypatch):
    scan(backend="cpu")
    built = {path: path.stat().st_mtime_ns for path in fresh.iterdir()}
    assert {path.name.split("-")[0] for path in built} == {"probe", "longhorn_scan"}
    forget()
    run = subprocess.run

    def only_the_version(command, **options):
        assert "--version" in command
        return run(command, **options)

    monkeypatch.setattr(native.subprocess, "run", only_the_version)
    scan(backend="cpu")
    assert {path: path.stat().st_mtime_ns for path in fresh.iterdir()} == built


def test_the_cache_folder_is_private(fresh):
    assert native.missing() == ""
    assert fresh.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", ["empty", "text", "half", "text with its digest"])
def test_a_damaged_library_is_built_again(fresh, tmp_path, damage):
    source = tmp_path / "answer.c"
    source.write_text("int answer = 42;\n")
    native.library(source, torch.float32)
    [path] = fresh.glob("answer-*.so")
    whole = path.read_bytes()
    path.unlink()  # a new file then, because this process has the old one mapped
    path.write_bytes({"empty": b"", "half": whole[: len(whole) // 2]}.get(damage, b"text"))
    if "digest" in damage:
        key = path.stem.rpartition("-")[0]
        path.rename(fresh / f"{key}-{native._digest(path)}.so")
    native.library.cache_clear()
    again = native.library(source, torch.float32)
    assert ctypes.c_int.in_dll(again, "answer").value == 42
    [path] = fresh.glob("answer-*.so")
    assert len(path.read_bytes()) == len(whole)


def test_another_source_flag_or_macro_is_another_library(fresh, tmp_path):
    source = tmp_path / "answer.c"
    source.write_text("#ifndef ANSWER\n#define ANSWER 1\n#endif\nint answer = ANSWER;\n")
    libraries = [
        native.library(source, torch.float32),
        native.library(source, torch.float64),
        native.library(source, torch.float32, ANSWER=2),
    ]
    answers = [ctypes.c_int.in_dll(x, "answer").value for x in libraries]
    assert answers == [1, 1, 2]
    source.write_text("int answer = 3;\n")
    native.library.cache_clear()
    changed = native.library(source, torch.float32)
    assert ctypes.c_int.in_dll(changed, "answer").value == 3
    assert len(list(fresh.glob("answer-*.so"))) == 4


def test_processes_that_build_at_the_same_time_all_get_a_whole_library(fresh):
    """And one OpenMP runtime: torch's threads and ours would wait for each other's cores."""
    environment = os.environ | {"XDG_CACHE_HOME": str(fresh.parent), "OMP_NUM_THREADS": "1"}

    def start(_):
        command = [sys.executable, "-c", RUN]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(start, range(2)))
    for done in runs:
        assert done.returncode == 0, done.stderr
        ran, runtimes = done.stdout.split()
        assert ran == "cpu"
        assert int(runtimes) <= 1
    assert len(list(fresh.glob("longhorn_scan-*.so"))) == 1
    assert not list(fresh.glob("build-*"))


def test_an_unwritable_cache_folder_is_not_used(fresh):
    fresh.parent.write_text("a file where the folder should be")
    assert native.missing() == ""
    folder = native.cache_folder()
    assert folder.name.startswith("ssmzoo-")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.glob("probe-*.so"))


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no users here")
def test_another_users_cache_folder_is_refused(fresh, monkeypatch, caplog):
    fresh.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(native.os, "getuid", lambda: 12345)
    with caplog.at_level(logging.INFO, logger="ssmzoo"):
        assert native.cache_folder() != fresh
    assert "belongs to another user" in caplog.text


def test_a_cache_folder_that_others_may_write_is_refused(fresh, caplog):
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)
    with caplog.at_level(logging.INFO, logger="ssmzoo"):
        assert native.cache_folder() != fresh
    assert "writable by others" in caplog.text


def test_a_compiler_without_openmp_still_builds(fresh, monkeypatch, tmp_path):
    script = (
        'for x in "$@"; do [ "$x" = -fopenmp ] && echo "error: no openmp" >&2 && exit 1; done\n'
    )
    monkeypatch.setenv("CC", fake_compiler(tmp_path, script + 'exec cc "$@"'))
    threaded = torch.randn(1, 50, 40)
    out, _ = longhorn_scan(threaded, threaded, threaded, threaded, backend="cpu")
    assert "-fopenmp" not in native._flags()
    assert "-march=native" in native._flags()
    expected, _ = longhorn_scan(threaded, threaded, threaded, threaded, backend="reference")
    torch.testing.assert_close(out, expected)


def test_a_compiler_that_knows_no_native_tuning_still_builds(fresh, monkeypatch, tmp_path):
    script = (
        'for x in "$@"; do [ "$x" = -march=native ] && echo "error: what" >&2 && exit 1; done\n'
    )
    monkeypatch.setenv("CC", fake_compiler(tmp_path, script + 'exec cc "$@"'))
    x = torch.randn(1, 50, 40)
    out, _ = longhorn_scan(x, x, x, x, backend="cpu")  # narrow vectors, 8 states a tile
    assert "-march=native" not in native._flags()
    torch.testing.assert_close(out, longhorn_scan(x, x, x, x, backend="reference")[0])


def test_no_compiler_falls_back_to_eager_with_one_warning(fresh, monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING, logger="ssmzoo"):
        scan()
        scan()
    assert last_backend("longhorn_scan") == "eager"
    [record] = caplog.records
    assert "no compiler found: CC=no-such-compiler is not on the PATH" in record.getMessage()
    assert "install gcc or clang" in record.getMessage()


def test_no_compiler_is_an_error_where_the_backend_was_named(fresh, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"needs a C compiler: no compiler found: none of cc"):
        scan(backend="cpu")


def test_a_failing_compiler_is_quoted(fresh, monkeypatch, tmp_path):
    script = 'echo "In file included from x:" >&2; echo "fatal error: no headers" >&2; exit 1'
    monkeypatch.setenv("CC", fake_compiler(tmp_path, script))
    assert native.missing().endswith("failed on probe.c: fatal error: no headers")
    scan()
    assert last_backend("longhorn_scan") == "eager"


@pytest.mark.parametrize("source", sorted(PACKAGE.rglob("*.c")), ids=lambda path: path.stem)
def test_the_sources_compile_without_warnings(source, tmp_path):
    command = [
        *native._compiler(), "-O1", "-std=gnu11", "-fopenmp", "-Wall", "-Wextra", "-Werror",
        "-Wno-psabi", "-DCHUNK=16", "-DPAIRS=1", f"-I{PACKAGE}", f"-I{PACKAGE / 'scan'}",
        "-c", str(source), "-o", str(tmp_path / "x.o"),
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
