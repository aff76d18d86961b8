"""What holds for all tests: seeds, threads, the GPU's absence, and memory that shows its age."""

import gc
import os
import signal
import sys
import zlib
from datetime import date

import pytest
import torch
from tests.environments import installed, wheel  # noqa: F401

# a shell lets what it starts in the background ignore Ctrl-C, which runs then do, too
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden anew, to review as a diff"
    )


# what takes long takes turns: in `make test` a test marked `turns` runs on one day of TURNS, and so
# does each long check of the conformance kit of each family
LONG_PROMISES = ("assisted", "compile", "export", "fullgraph", "onnx", "standalone", "trainer")
TURNS = 14


def pytest_configure():
    # the day is read once: pytest-xdist's workers inherit it, and must collect the same tests
    os.environ.setdefault("SSMZOO_TURN", str(date.today().toordinal()))


def pytest_report_header():
    return f"tests that take turns: SSMZOO_TURN={os.environ['SSMZOO_TURN']} (all, or any number)"


# a GPU backend joins where there is a GPU: tests/kernels/test_triton_gpu.py
BACKENDS = ("eager", "cpu")


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Each fast implementation of an op that runs on a CPU."""
    return request.param


@pytest.fixture(scope="session", autouse=True)
def threads():
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", min(2, os.cpu_count() or 1))))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def no_accelerator_of_another_module():
    """Let Accelerate forget the precision that trainers of other modules asked for."""
    if accelerate := sys.modules.get("accelerate.state"):
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session", autouse=True)
def unwritten_memory_is_nan():
    """Let what our library allocates and does not write show up as NaN."""
    with torch.device("meta"):
        torch.empty(0)  # lets torch note which functions take a device, before they are replaced
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch.Tensor, "new_empty"),
        ):
            patch.setattr(owner, name, _filled(getattr(owner, name)))
        yield


def _filled(allocate):
    def allocate_nan(*args, **options):
        memory = allocate(*args, **options)
        if torch.compiler.is_compiling() or not memory.is_floating_point():
            return memory
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return memory.fill_(float("nan")) if caller.startswith("ssmzoo") else memory

    return allocate_nan


def pytest_collection_finish():
    """Spare full garbage collections, one at the end of every run, what is imported by now."""
    gc.collect()
    gc.freeze()


def take_turns(items, turn):
    """Mark as slow what has its turn on another day, and as `waits` a family's quick checks."""
    if turn == "all":
        return
    for item in items:
        promise = getattr(item, "originalname", "") == "test_promise"
        if not promise and not item.get_closest_marker("turns"):
            continue
        group = item.get_closest_marker("xdist_group")  # its tests share what they build
        quick = promise and item.callspec.id not in LONG_PROMISES
        own = f"{item.cls.__name__ if promise else item.path.stem}{'' if quick else item.name}"
        # the name alone decides: any selection of tests runs the same ones
        if (zlib.crc32((group.args[0] if group else own).encode()) - int(turn)) % TURNS:
            item.add_marker(pytest.mark.waits if quick else pytest.mark.slow)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("variant") and item.name.endswith("[compile]"):
            item.add_marker(pytest.mark.slow)
    take_turns(items, os.environ["SSMZOO_TURN"])
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
