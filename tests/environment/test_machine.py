"""What a figure is recorded with: commit, vector instructions, threads; other systems, played.

Nobody here has a Mac or Windows: a process of Linux is made to look like one, as far as Python
shows it, after torch and transformers are imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.zoo import OURS, language_model

from ssmzoo.analysis import doctor
from ssmzoo_kernels import dispatch, machine, native

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "machines.md"


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


@pytest.fixture
def saved(tmp_path):
    """A folder with a tiny model, and the tokens that it writes after 1, 2."""
    model = language_model("longhorn")
    model.save_pretrained(tmp_path / "model")
    written = model.generate(torch.tensor([[1, 2]]), max_new_tokens=4, do_sample=False)
    return tmp_path / "model", written[0].tolist()


GENERATE = """
import json
import ssmzoo, ssmzoo.auto
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
written = model.generate(torch.tensor([[1, 2]]), max_new_tokens=4, do_sample=False)
from ssmzoo.analysis.doctor import examine_machine
from ssmzoo_kernels import last_backend, machine, native
print(json.dumps([
    written[0].tolist(), last_backend("longhorn_scan"), examine_machine("cpu"),
    None if native.missing() else native._flags(),
]))
"""
WINDOWS = """
import os, platform, signal, sys, torch
for name in ("fcntl", "resource", "pwd", "grp", "posix", "termios"):
    sys.modules[name] = None
for name in ("statvfs", "getuid", "getpgid", "killpg", "fork", "sched_getaffinity", "O_DIRECTORY"):
    delattr(os, name)
for name in ("SIGKILL", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU", "pthread_sigmask"):
    delattr(signal, name)
sys.platform, platform.machine = "win32", lambda: "AMD64"
"""


@pytest.mark.xdist_group("forks")
def test_on_windows_a_saved_model_writes_by_eager_and_one_line_says_so(forks, saved):
    folder, expected = saved
    done = forks.run(WINDOWS + GENERATE, str(folder))
    assert done.status == 0, done.log
    written, backend, found, _ = json.loads(done.out)
    assert (written, backend) == (expected, "eager")
    assert found["compiler"] == "C kernels are not built on Windows; use WSL"
    assert found["machine"].startswith("Windows, none: ")
    assert done.log.count("CPU ops take the slow eager path: C kernels are not built on") == 1


# what Apple's clang takes and refuses, by its documents; LLVM's runtime by the one function that
# tells it
APPLES_CLANG = """
case "$*" in
*--version*) echo "Apple clang version 14.0.3"; exit;;
*-march=native*) echo "error: the clang compiler does not support '-march=native'" >&2; exit 1;;
*" -shared "*) case "$*" in
    *"-Wl,-undefined,dynamic_lookup"*) ;;
    *) echo "Undefined symbols for architecture arm64" >&2; exit 1;; esac;;
*" -fopenmp"*) case "$*" in
    *"-Xclang -fopenmp"*) ;;
    *) echo "error: unsupported option '-fopenmp'" >&2; exit 1;; esac;;
esac
for x; do
  shift
  case "$x" in -mcpu=native|-Xclang|-fopenmp|-Wl,*) ;; *) set -- "$@" "$x";; esac
done
exec cc "$@"
"""
RUNTIME = "void __kmpc_fork_call(void) {}"
SYSCTL = """machdep.cpu.brand_string: Apple M2
hw.optional.AdvSIMD: 1
hw.optional.arm.FEAT_BF16: 1
hw.optional.arm.FEAT_SME: 0
"""
MACOS = """
import ctypes, io, os, pathlib, platform, subprocess, sys, torch
run, read = subprocess.run, pathlib.Path.read_text
def asked(command, **options):
    if command[0] == "/usr/sbin/sysctl":
        return subprocess.CompletedProcess(command, 0, sys.argv[2], "")
    return run(command, **options)
def told(path, *options, **more):
    if str(path).startswith("/proc"):
        raise FileNotFoundError(path)
    return read(path, *options, **more)
subprocess.run, pathlib.Path.read_text = asked, told
del os.ST_NOEXEC, os.sched_getaffinity
sys.platform, torch.__file__ = "darwin", sys.argv[3]
brought = pathlib.Path(sys.argv[3]).with_name("lib") / "libomp.dylib"
if brought.exists():  # as torch itself does there
    ctypes.CDLL(str(brought))
platform.machine, platform.processor = lambda: "arm64", lambda: "arm"
"""


@pytest.fixture
def mac(forks, saved, tmp_path):
    """Run the model on a Mac, whose torch brings LLVM's OpenMP or none."""
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh{APPLES_CLANG}")
    compiler.chmod(0o755)
    package = tmp_path / "torch"
    (package / "lib").mkdir(parents=True)

    def run(script=GENERATE, brings=True):
        if brings:
            command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", package / "lib/libomp.dylib"]
            subprocess.run(command, input=RUNTIME, text=True, check=True)
        places = {"CC": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        words = (str(saved[0]), SYSCTL, str(package / "__init__.py"))
        done = forks.run(MACOS + script, *words, environment=places)
        assert done.status == 0, done.log
        return json.loads(done.out), done.log

    return run


@pytest.mark.long
@pytest.mark.xdist_group("forks")
def test_on_a_mac_kernels_have_the_threads_of_torchs_own_openmp(mac, saved):
    (written, backend, found, flags), log = mac()
    assert (written, backend) == (saved[1], "cpu")
    assert flags[-3:] == ["-mcpu=native", "-Xclang", "-fopenmp"]
    assert found["compiler"] == "ok"
    assert found["device"].startswith("Apple M2, ")
    assert found["machine"].startswith("macOS, clang: ")
    assert "C kernels" not in log


@pytest.mark.long
@pytest.mark.xdist_group("forks")
def test_on_a_mac_without_an_openmp_one_line_says_so(mac):
    (_, backend, found, flags), log = mac(brings=False)
    assert backend == "cpu"
    assert not {"-fopenmp", "-Xclang"} & {*flags}
    assert found["compiler"].startswith("C kernels run on one thread: ")
    assert "PyPI" in found["compiler"]
    assert log.count("C kernels run on one thread: ") == 1


FACTS = """
import json
from pathlib import Path
from ssmzoo.files import write_folder
from ssmzoo_kernels import machine
for text in ("old", "new"):
    write_folder(Path(sys.argv[1], "folder"), lambda folder: (folder / "a").write_text(text))
print(json.dumps([
    machine._cpu_vectors(), machine.vendor(), machine.instructions(),
    machine.memory_growth(lambda: torch.ones(2**25), torch.device("cpu")) / 2**27,
    (Path(sys.argv[1], "folder", "a")).read_text(),
]))
"""


@pytest.mark.xdist_group("forks")
def test_on_a_mac_sysctl_tells_of_the_cpu_and_a_folder_is_replaced(mac):
    (vectors, vendor, instructions, _, text), _ = mac(FACTS, brings=False)
    assert (vectors, vendor, text) == ("asimd", "", "new")
    assert instructions == "asimd feat_bf16"


def test_another_cpu_in_a_shared_home_is_another_library(monkeypatch):
    names = []
    monkeypatch.setattr(native, "_cached", lambda folder, key: names.append(key))
    monkeypatch.setattr(native, "_made", lambda folder, key, *_: None)
    for flags in ({"flags": "sse2 avx2"}, {"flags": "sse2"}, {"features": "asimd sve"}):
        monkeypatch.setattr(machine, "_cpu_facts", lambda flags=flags: flags)
        native._machine.cache_clear()
        native._build("probe", "", ())
    native._machine.cache_clear()
    assert len({*names}) == 3


@pytest.fixture(scope="module")
def on_apple():
    """How far a device that is played like Apple's GPU is from the CPU, by family."""
    command = [sys.executable, "-m", "tests.environment.on_apple"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("apple has no float64: what needs it is computed on the CPU") == 1
    return json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.xdist_group("apple")
@pytest.mark.parametrize("name", OURS)
def test_a_device_without_float64_gives_the_cpus_numbers(on_apple, name):
    found = [x for key, x in on_apple.items() if key.split()[0] == name]
    # the same operations; gradients of a weight may be added in another order
    bound = 8 * torch.finfo(torch.float32).eps
    assert found
    for difference in found:
        assert max(difference.values()) < bound, difference


@pytest.mark.long
@pytest.mark.xdist_group("apple")
def test_the_played_device_refuses_float64_and_tensors_of_the_cpu():
    code = (
        "import torch; from tests.environment.on_apple import OnApple\n"
        "x = OnApple(torch.ones(2))\n"
        "index = OnApple(torch.zeros(1, dtype=torch.long))\n"
        "for wrong in (x.double, lambda: x + torch.ones(2), lambda: torch.ones(2)[index]):\n"
        "    try: wrong()\n"
        "    except (TypeError, RuntimeError) as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [line.split(": ")[-1] for line in done.stdout.splitlines()] == [
        "the MPS framework doesn't support float64",
        "tensors on apple:0 and cpu",
        "tensors on apple:0 and cpu",
    ]


def test_every_op_is_eager_on_mps():
    kernel = (torch.float32,)
    assert dispatch.choose("longhorn_scan", "auto", "mps", dispatch.ALL, kernel) == "eager"
    with pytest.raises(ValueError, match="needs CPU tensors, got mps"):
        dispatch.choose("longhorn_scan", "cpu", "mps", dispatch.ALL, kernel)


def test_the_page_has_the_doctors_row_of_every_machine():
    rows = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    told = {tuple(cell.strip() for cell in cells[1:4]) for cells in rows if len(cells) == 5}
    assert {*doctor._MACHINES.values()} <= told
