"""Threads of the OpenMP that torch has loaded; compilers that build what this CPU cannot run."""

import ctypes.util
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from tests.kernels.test_native import cc_but, fresh  # noqa: F401

from ssmzoo_kernels import innovation, last_backend, native

LLVMS = ctypes.util.find_library("omp")
SCAN = """
import json, os, torch
from ssmzoo_kernels import longhorn_scan, native
torch.set_num_threads(2)
x = torch.randn(2, 400, 128)
x.exp()
before = len(os.listdir("/proc/self/task"))
two = longhorn_scan(x, x, x, x, backend="cpu")[0]
started = len(os.listdir("/proc/self/task")) - before
torch.set_num_threads(1)
one = longhorn_scan(x, x, x, x, backend="cpu")[0]
expected = longhorn_scan(x, x, x, x, backend="reference")[0]
torch.testing.assert_close(one, expected)
print(json.dumps([started, torch.equal(one, two), native._flags(), native.lacks()]))
"""


def scan(folder, cc, preloaded=""):
    """Return a scan's new threads, whether they change a bit, flags, lacks, and what was logged."""
    places = {"CC": cc, "LD_PRELOAD": preloaded, "XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, "-c", SCAN]
    done = subprocess.run(command, env=os.environ | places, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return *json.loads(done.stdout), done.stderr


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="no /proc counts threads here")
def test_gccs_kernels_run_on_torchs_threads(tmp_path):
    started, same, flags, lacks, log = scan(tmp_path, "gcc")
    assert (started, same, lacks, log) == (0, True, "", "")
    assert flags[-1] == "-fopenmp"


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("clang"), reason="clang is not installed")
@pytest.mark.skipif(sys.platform != "linux", reason="torch has LLVM's OpenMP here")
def test_clangs_kernels_run_on_one_thread_beside_gnus_openmp_and_one_line_says_so(tmp_path):
    started, same, flags, lacks, log = scan(tmp_path, "clang")
    assert (started, same, flags[-1]) == (0, True, "-march=native")
    assert lacks.startswith("C kernels run on one thread: clang's code needs LLVM's OpenMP")
    assert lacks.endswith("install gcc, and set CC=gcc")
    assert log.count(lacks) == 1


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("clang"), reason="clang is not installed")
@pytest.mark.skipif(not LLVMS, reason="LLVM's OpenMP is not installed")
@pytest.mark.skipif(sys.platform != "linux", reason="torch has LLVM's OpenMP here")
@pytest.mark.parametrize("cc", ["gcc", "clang"])
def test_where_torch_runs_on_llvms_openmp_kernels_of_both_compilers_run_on_its_threads(
    tmp_path, cc
):
    started, same, flags, lacks, log = scan(tmp_path, cc, LLVMS)
    assert (started, same, lacks, log) == (0, True, "", "")
    assert flags[-1] == "-fopenmp"


@pytest.mark.parametrize("arch", [None, "native"])
def test_what_this_cpu_cannot_run_is_not_used(fresh, monkeypatch, tmp_path, caplog, arch):  # noqa: F811
    """An instruction that no CPU has stands for one that this CPU has not."""
    trap = "s/) store(x/) __builtin_trap(), store(x/"
    instead = f'sed -i \'{trap}\' "${{out%.o}}.c"; exec cc "$@"'
    cc_but(tmp_path, monkeypatch, "-march=*probe.c", instead)
    if arch:
        monkeypatch.setenv("SSMZOO_ARCH", arch)
    innovation(torch.randn(1, 5, 2), [0.5])
    [line] = caplog.messages
    assert "builds what this CPU cannot run: ended by SIG" in line
    if arch:  # what was asked for is not replaced
        assert last_backend("innovation") == "eager"
    else:
        assert last_backend("innovation") == "cpu"
        assert "-march=native" not in native._flags()
        assert line == native.lacks()


@pytest.mark.parametrize("program", ["", None, "/bin/false"])
def test_a_compiler_is_not_judged_by_another_program_than_python(fresh, monkeypatch, program):  # noqa: F811
    monkeypatch.setattr(sys, "executable", program)
    innovation(torch.randn(1, 5, 2), [0.5])
    assert (last_backend("innovation"), native.lacks()) == ("cpu", "")
