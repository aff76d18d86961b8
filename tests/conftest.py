"""What holds for all tests: seeds, threads, the GPU's absence, and memory that shows its age."""

import gc
import os
import signal
import sys

import pytest
import torch
from tests.environments import installed, wheel  # noqa: F401
from tests.forks import forks  # noqa: F401

# a shell lets what it starts in the background ignore Ctrl-C, which runs then do, too
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden anew, to review as a diff"
    )


# checks of the conformance kit that `make quick` leaves out, as it does tests marked `long`
LONG_PROMISES = ("assisted", "compile", "export", "fullgraph", "onnx", "standalone", "trainer")

# of another setting of a family, what its other checks and the family's own say nearly as well;
# Trainer's: gradients, flattening_collator and save_and_load
SLOW_OF_VARIANTS = {"compile", "export", "fullgraph", "jit_trace", "onnx", "standalone", "trainer"}


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


def pytest_collection_modifyitems(items):
    for item in items:
        if getattr(item, "originalname", "") != "test_promise":
            continue
        check, variant = item.callspec.id, item.get_closest_marker("variant")
        if variant and check in SLOW_OF_VARIANTS:
            item.add_marker(pytest.mark.slow)
        if check in LONG_PROMISES:
            item.add_marker(pytest.mark.long)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
