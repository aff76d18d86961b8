"""Building the C kernels: once, safely, and never without saying why not."""

import ctypes
import errno
import logging
import os
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ssmzoo_kernels import (
    compiling,
    dispatch,
    innovation,
    last_backend,
    longhorn_scan,
    machine,
    native,
    prebuilt,
)
from ssmzoo_kernels.innovation import cpu as predictor
from ssmzoo_kernels.scan import cpu

PACKAGE = Path(native.__file__).parent
CACHED = (
    native.missing, native.vectors, native.library, native._settings, native._brought,
    native._machine, native._tell_of_the_private_folder, machine._folder_of,
    compiling.command, compiling.version,
    dispatch.compiler_missing, dispatch._best, dispatch._why_no_kernel, dispatch.kernel_missing,
    dispatch._warn_of_slowness, cpu.load, predictor.load, prebuilt.kind,
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
    native._failed.clear()
    dispatch._failures.clear()


def fake_compiler(folder, script):
    path = folder / "fakecc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def scan(**options):
    x = torch.randn(1, 20, 3)
    return longhorn_scan(x, x, x, x, **options)


def test_a_library_is_built_once_and_found_again(fresh, monkeypatch):
    innovation(torch.randn(1, 5, 2), [0.5], backend="cpu")
    built = {path: path.stat().st_mtime_ns for path in fresh.iterdir()}
    assert {path.name.split("-")[0] for path in built} == {"probe", "threads", "innovation"}
    forget()
    run = compiling.run

    def only_the_version(command, what, **variables):
        assert "--version" in command
        return run(command, what, **variables)

    monkeypatch.setattr(compiling, "run", only_the_version)
    innovation(torch.randn(1, 5, 2), [0.5], backend="cpu")
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


def test_arrays_as_long_as_a_caller_says_are_not_built(fresh, tmp_path):
    source = tmp_path / "stack.c"
    source.write_text(
        "int last(int n) {\n  int all[n];\n  all[n - 1] = n;\n  return all[n - 1];\n}\n"
    )
    with pytest.raises(RuntimeError, match="variable length array"):
        native.library(source, torch.float32)


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


@pytest.mark.long
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


def test_no_mask_makes_the_cache_or_its_parents_writable_by_others(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a" / "b"))
    before = os.umask(0)
    try:
        folder = native.cache_folder()
    finally:
        os.umask(before)
    assert folder == tmp_path / "a" / "b" / "ssmzoo"
    for part in (folder, folder.parent, folder.parent.parent):
        assert part.stat().st_mode & 0o777 == 0o700, part


@pytest.mark.parametrize(
    ("mode", "own_group", "safe"),
    [
        (0o755, False, True),
        (0o777, True, False),
        (0o1777, False, True),
        (0o775, False, False),
        (0o775, True, True),
        (0o757, True, False),
    ],
)
def test_a_parent_in_which_others_may_move_folders_is_refused(
    fresh, monkeypatch, caplog, mode, own_group, safe
):
    fresh.mkdir(parents=True, mode=0o700)
    fresh.parent.chmod(mode)
    monkeypatch.setattr(machine, "_is_own_group", lambda group: own_group)
    with caplog.at_level(logging.INFO, logger="ssmzoo"):
        assert (native.cache_folder() == fresh) == safe
    assert (f"{fresh.parent} is writable by others" in caplog.text) != safe


@pytest.mark.parametrize(("user", "safe"), [(os.getuid(), True), (0, True), (12345, False)])
def test_a_parent_belongs_to_the_user_or_to_root(user, safe):
    status = SimpleNamespace(st_uid=user, st_gid=0, st_mode=0o755)
    folder = SimpleNamespace(stat=lambda: status)
    with nullcontext() if safe else pytest.raises(PermissionError, match="to another user"):
        machine._require_safe(folder)


def test_a_library_of_another_user_is_built_again(fresh, monkeypatch, tmp_path):
    source = tmp_path / "answer.c"
    source.write_text("int answer = 42;\n")
    native.library(source, torch.float32)
    [path] = fresh.glob("answer-*.so")
    theirs = path.stat().st_ino
    monkeypatch.setattr(machine, "is_of_another", lambda status: status.st_ino == theirs)
    kept = path.rename(fresh / "kept")  # so that the new file has another number
    os.link(kept, path)
    native.library.cache_clear()
    native.library(source, torch.float32)
    [path] = fresh.glob("answer-*.so")
    assert path.stat().st_ino != theirs


@pytest.mark.long
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


@pytest.mark.long
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
    with pytest.raises(RuntimeError, match=r"no C kernel here: no compiler found: none of cc"):
        scan(backend="cpu")


def test_a_failing_compiler_is_quoted(fresh, monkeypatch, tmp_path):
    script = 'echo "In file included from x:" >&2; echo "fatal error: no headers" >&2; exit 1'
    monkeypatch.setenv("CC", fake_compiler(tmp_path, script))
    assert "fakecc failed on probe.c: fatal error: no headers; " in native.missing()
    scan()
    assert last_backend("longhorn_scan") == "eager"


# --- what fails after the probe was built ----------------------------------------------------

FAILS = 'case "$*" in *{}*) {} ;; esac\n'
OUTPUT = 'for x in "$@"; do out=$x; done\n'  # the name of the library is the last argument


def cc_but(tmp_path, monkeypatch, pattern, instead):
    """Set a compiler that is cc, but does something else where its arguments match a pattern."""
    script = OUTPUT + FAILS.format(pattern, instead) + 'exec cc "$@"'
    monkeypatch.setenv("CC", fake_compiler(tmp_path, script))


def scan_as_the_reference(backend, *shape, **options):
    """Run the scan and its gradient by a backend that must be chosen; both must be right."""
    x = torch.randn(*shape, requires_grad=True, **options)
    y, _ = longhorn_scan(x, x, x, x)
    assert last_backend("longhorn_scan") == backend
    expected, _ = longhorn_scan(x, x, x, x, backend="reference")
    torch.testing.assert_close(y, expected)
    got, known = (torch.autograd.grad(z.sum(), x)[0] for z in (y, expected))
    torch.testing.assert_close(got, known)


def slow_in_eager(caplog, *words):
    """Run the scan, and its gradient, twice; one warning must hold these words."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="ssmzoo"):
        for _ in range(2):
            scan_as_the_reference("eager", 1, 20, 3)
    [record] = caplog.records
    for word in ("CPU ops take the slow eager path", *words):
        assert word in record.getMessage()
    cause = re.escape(words[0])
    with pytest.raises(RuntimeError, match=rf'longhorn_scan\(backend="cpu"\) has .*{cause}'):
        scan(backend="cpu")
    with dispatch.use_backend("cpu"), pytest.raises(RuntimeError, match=cause):
        scan()
    assert words[0] in dispatch.why_not_faster("longhorn_scan", "eager", "cpu")


# by what happens: the command to which it happens, what the compiler does instead, what is said
LIBRARIES = {
    "dies": (
        "-c",
        "echo fatal error: no luck >&2; exit 1",
        "failed on longhorn_scan.c: fatal error",
    ),
    "is killed": ("-c", "kill -9 $$", "failed on longhorn_scan.c: ended by SIGKILL"),
    "is silent": ("-c", "exit 3", "failed on longhorn_scan.c: exit status 3, no message"),
    "writes nothing": ("-shared", "exit 0", "failed on longhorn_scan.c: exit status 0, no message"),
    "writes rubbish": (
        "-shared",
        'echo rubbish > "$out"; exit 0',
        "longhorn_scan.c cannot be loaded: ",
    ),
    "writes another": (
        "-shared",
        'echo "int x;" > "$out.c"; exec cc -shared -o "$out" "$out.c"',
        "undefined symbol: scan_forward",
    ),
}


@pytest.mark.parametrize("accident", LIBRARIES)
def test_a_kernel_that_cannot_be_built_runs_in_eager_and_the_others_in_c(
    fresh, monkeypatch, tmp_path, caplog, accident
):
    command, instead, words = LIBRARIES[accident]
    cc_but(tmp_path, monkeypatch, f"{command}*longhorn_scan.", instead)
    slow_in_eager(caplog, words)
    if accident != "writes another":
        assert not list(fresh.glob("longhorn_scan-*"))
    if accident == "dies":  # gcc takes a second for a library
        innovation(torch.randn(1, 5, 2), [0.5])
        assert last_backend("innovation") == "cpu"


def test_a_compiled_model_takes_eager_where_a_kernel_cannot_be_built(fresh, monkeypatch, tmp_path):
    cc_but(tmp_path, monkeypatch, "longhorn_scan.c", "exit 1")
    x = torch.randn(1, 20, 3, requires_grad=True)
    torch.compiler.reset()
    y = torch.compile(lambda x: longhorn_scan(x, x, x, x)[0], backend="aot_eager")(x)
    got = torch.autograd.grad(y.sum(), x)[0]
    assert last_backend("longhorn_scan") == "eager"
    torch.compiler.reset()
    expected = longhorn_scan(x, x, x, x, backend="reference")[0]
    torch.testing.assert_close(got, torch.autograd.grad(expected.sum(), x)[0])


def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(monkeypatch, tmp_path):
    note = tmp_path / "child"

    def until_its_child_runs(process, timeout):
        while not (note.exists() and note.read_text().endswith("\n")):
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", until_its_child_runs)
    monkeypatch.setenv("SSMZOO_BUILD_SECONDS", "7")
    with pytest.raises(RuntimeError, match="sh took more than 7 seconds for a file; SSMZOO"):
        compiling.run(["sh", "-c", f"sleep 1000 & echo $! > {note}; wait"], "a file")
    child = Path("/proc", note.read_text().strip(), "stat")
    while child.exists() and child.read_text().split()[2] != "Z":
        time.sleep(0.01)  # a signal takes its time


def test_after_the_time_limit_a_kernel_runs_in_eager(fresh, monkeypatch, caplog):
    run = compiling.run
    asked = []

    def hangs(command, what, **variables):
        asked.append(what)
        if what == "longhorn_scan.c":
            command = ["sleep", "1000"]
            monkeypatch.setenv("SSMZOO_BUILD_SECONDS", "0.1")
        return run(command, what, **variables)

    monkeypatch.setattr(compiling, "run", hangs)
    slow_in_eager(caplog, "took more than 0.1 seconds for longhorn_scan.c")
    assert asked.count("longhorn_scan.c") == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_cache_is_left_for_a_private_folder(fresh, monkeypatch, tmp_path, caplog, number):
    words = os.strerror(number)
    script = f'case "$TMPDIR" in {fresh}*) echo "cc: error writing: {words}" >&2; exit 1;; esac\n'
    monkeypatch.setenv("CC", fake_compiler(tmp_path, script + 'exec cc "$@"'))
    with caplog.at_level(logging.INFO, logger="ssmzoo"):
        innovation(torch.randn(1, 5, 2), [0.5], backend="cpu")
    assert caplog.messages == [f"C kernels are built anew for this process: {words}: {fresh}"]
    assert native.cache_folder() == machine.private_folder()
    assert not list(fresh.iterdir())


FORK = """
import multiprocessing
from ssmzoo_kernels import machine
print(machine.private_folder(), flush=True)
child = lambda: print(machine.private_folder(), flush=True)
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
print(machine.private_folder().is_dir())
"""


@pytest.mark.long
def test_a_forked_process_has_a_private_folder_of_its_own_and_removes_it():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    own, of_a_child, still_there = done.stdout.split()
    assert own != of_a_child
    assert still_there == "True"
    assert not Path(own).exists()
    assert not Path(of_a_child).exists()


def test_a_limit_longer_than_the_system_waits_is_no_limit(fresh, monkeypatch):
    monkeypatch.setenv("SSMZOO_BUILD_SECONDS", "1e300")
    assert compiling.run(["true"], "nothing").returncode == 0


def test_a_compiler_that_is_no_command_is_named(fresh, monkeypatch):
    monkeypatch.setenv("CC", 'gcc "')
    with pytest.raises(RuntimeError, match="CC must be a command, got 'gcc \"': No closing"):
        innovation(torch.randn(1, 5, 2), [0.5], backend="cpu")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_cache_folders_are_named_as_the_cause(fresh, monkeypatch, tmp_path, caplog, number):
    words = os.strerror(number)
    instead = f'echo "as: error writing to x.s: {words}" >&2; exit 1'
    cc_but(tmp_path, monkeypatch, "longhorn_scan.c", instead)
    slow_in_eager(caplog, f"{words}: {fresh}; {words}: ", "set XDG_CACHE_HOME to a folder")


def test_a_library_that_cannot_be_kept_is_used(fresh, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(native.os, "replace", full)
    innovation(torch.randn(1, 5, 2), [0.5], backend="cpu")
    assert not list(fresh.iterdir())


def noexec(monkeypatch, *folders):
    """Let folders seem to be mounted so that nothing in them can be loaded."""
    status, load = os.statvfs, ctypes.CDLL

    def inside(path):
        return any(folder in (path, *path.parents) for folder in folders)

    def seen(path):
        found = list(status(path))
        found[8] |= os.ST_NOEXEC if inside(Path(path)) else 0
        return os.statvfs_result(found)

    def loaded(path, *mode):
        if path and inside(Path(path)):
            raise OSError(f"{path}: failed to map segment from shared object")
        return load(path, *mode)

    monkeypatch.setattr(native.os, "statvfs", seen)
    monkeypatch.setattr(native.ctypes, "CDLL", loaded)


def test_a_cache_mounted_noexec_is_left_for_a_private_folder(fresh, monkeypatch, tmp_path, caplog):
    noexec(monkeypatch, fresh)
    with caplog.at_level(logging.INFO, logger="ssmzoo"):
        innovation(torch.randn(1, 5, 2), [0.5], backend="cpu")
    assert caplog.messages == [
        f"C kernels are built anew for this process: mounted noexec: {fresh}"
    ]


def test_noexec_folders_are_blamed_instead_of_the_compiler(fresh, monkeypatch, caplog):
    noexec(monkeypatch, fresh, machine.private_folder())
    words = f"mounted noexec: {fresh}; mounted noexec: "
    slow_in_eager(caplog, words, "set XDG_CACHE_HOME to a folder that has room and may hold")
    assert "gcc" not in native.missing()


@pytest.mark.long
def test_a_limit_on_the_size_of_files_does_not_end_a_model(fresh):
    command = f"ulimit -f 4; exec {sys.executable} -c '{RUN}'"
    environment = os.environ | {"XDG_CACHE_HOME": str(fresh.parent), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        ["sh", "-c", command.replace('"', '"')], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("eager ")
    assert run.stderr.count("CPU ops take the slow eager path: ") == 1
    assert run.stderr.count("\n") == 1


def test_where_torch_has_another_openmp_kernels_are_built_for_one_thread(fresh, monkeypatch):
    monkeypatch.setattr(native, "has_openmp", lambda entry: False)
    innovation(torch.randn(1, 5, 2), [0.5], backend="cpu")
    assert "-fopenmp" not in native._flags()
    assert "-march=native" in native._flags()
    assert native.lacks().startswith("C kernels run on one thread: gcc's code needs GNU's OpenMP")


# --- a wheel's kernels -----------------------------------------------------------------------


COMPILERS = os.environ["PATH"]


@pytest.fixture
def brought(fresh, monkeypatch, tmp_path):
    """Kernels that came for the narrowest kind of CPU alone, and no compiler."""
    files = [x for x in prebuilt.sources() if x[0].stem in ("innovation", "longhorn_scan")]
    monkeypatch.setattr(prebuilt, "sources", lambda: files)
    here = platform.machine()
    monkeypatch.setattr(prebuilt, "KINDS", {here: prebuilt.KINDS[here][-1:]})
    prebuilt.build(here, tmp_path / "kernels")
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "kernels")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    forget()
    return fresh


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wheels_kernels_need_no_compiler(brought, caplog, dtype):
    scan_as_the_reference("cpu", 2, 40, 24, dtype=dtype)
    assert (native.missing(), native.lacks(), native.compiler()) == ("", "", "gcc")
    assert native.vectors() == prebuilt.kind().vectors
    assert native.cache_folder() == prebuilt.FOLDER
    assert not caplog.messages
    assert not brought.exists()


def test_a_package_of_its_own_builds_its_kernels(brought, monkeypatch, tmp_path):
    source = tmp_path / "innovation.c"
    source.write_text("int answer = 42;\n")
    with pytest.raises(RuntimeError, match="no compiler found"):
        native.library(source, torch.float32)
    monkeypatch.setenv("PATH", COMPILERS)
    forget()
    assert ctypes.c_int.in_dll(native.library(source, torch.float32), "answer").value == 42


@pytest.mark.parametrize("asked", ["CC", "SSMZOO_ARCH"])
def test_a_compiler_or_target_that_is_named_is_used_in_place_of_a_wheels_kernels(
    brought, monkeypatch, asked
):
    monkeypatch.setenv(asked, "no-such")
    assert native.missing()


@pytest.mark.parametrize("lacking", ["the CPU's instructions", "an OpenMP", "the machine"])
def test_a_wheels_kernels_that_do_not_fit_are_left_alone(brought, monkeypatch, lacking):
    if lacking == "an OpenMP":
        monkeypatch.setattr(native, "has_openmp", lambda entry: False)
    elif lacking == "the machine":
        monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    else:
        [kind] = prebuilt.KINDS[platform.machine()]
        lacking = kind._replace(needs=frozenset({"what no CPU has"}))
        monkeypatch.setattr(prebuilt, "KINDS", {platform.machine(): (lacking,)})
    prebuilt.kind.cache_clear()
    assert "no compiler found" in native.missing()


# --- settings --------------------------------------------------------------------------------


def test_a_relative_cache_folder_is_ignored(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert native.cache_folder() == tmp_path / ".cache" / "ssmzoo"
    assert not Path("relative").exists()


@pytest.mark.parametrize("wrong", ["soon", "0", "-1", "nan", "inf"])
def test_a_wrong_time_limit_is_one_error(fresh, monkeypatch, wrong):
    monkeypatch.setenv("SSMZOO_BUILD_SECONDS", wrong)
    with pytest.raises(ValueError, match=f"SSMZOO_BUILD_SECONDS must be .*, got '{wrong}'; unset"):
        scan()


def test_a_target_that_the_compiler_does_not_know_is_one_error(fresh, monkeypatch):
    monkeypatch.setenv("SSMZOO_ARCH", "pdp-11")
    for backend in ("auto", "cpu"):
        with pytest.raises(ValueError, match=r"SSMZOO_ARCH must be .* knows, got 'pdp-11'"):
            scan(backend=backend)


def test_a_target_that_the_cpu_cannot_run_is_one_error(fresh, monkeypatch, tmp_path):
    instead = 'echo "#define __AVX1024__ 1"; exit 0'
    cc_but(tmp_path, monkeypatch, "-march=future", instead)
    monkeypatch.setenv("SSMZOO_ARCH", "future")
    with pytest.raises(ValueError, match=r"SSMZOO_ARCH must .*, got 'future', which needs AVX1024"):
        scan()


@pytest.mark.long
@pytest.mark.parametrize("source", sorted(PACKAGE.rglob("*.c")), ids=lambda path: path.stem)
def test_the_sources_compile_without_warnings(source, tmp_path):
    command = [
        *compiling.command(), "-O1", "-std=gnu11", "-fopenmp", "-Wall", "-Wextra", "-Werror",
        "-Wno-psabi", "-DCHUNK=16", "-DPAIRS=1", f"-I{PACKAGE}", f"-I{PACKAGE / 'scan'}",
        "-c", str(source), "-o", str(tmp_path / "x.o"),
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
