"""Launches that were seen before, and offsets that were made before."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from ssmzoo_kernels import validation
from ssmzoo_kernels.validation import segment_offsets

pytest.importorskip("triton", reason="triton is not installed")

from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel, make_backend
from triton.runtime import driver, jit

from ssmzoo_kernels import launches
from ssmzoo_kernels.causal_conv1d import triton as conv_triton
from ssmzoo_kernels.declaration import declared
from ssmzoo_kernels.eidetic_attention import triton as attention_triton
from ssmzoo_kernels.eidetic_attention.arguments import Call, Tensors
from ssmzoo_kernels.feedback_scan import triton as feedback_triton
from ssmzoo_kernels.feedback_scan.inputs import Inputs
from ssmzoo_kernels.gated_linear_attention import triton as matrix_triton
from ssmzoo_kernels.linear_scan import triton as linear_triton
from ssmzoo_kernels.rms_norm import triton as norm_triton
from ssmzoo_kernels.scan import triton as skeleton

OPS = (
    *(attention_triton, conv_triton, feedback_triton, linear_triton, matrix_triton, norm_triton),
    skeleton,
)


class Driver:
    """A GPU that keeps what it is asked to launch."""

    def __init__(self):
        self.launched = []
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (1, 2, 32, 0, 1024),
            unload_module=lambda *_: None,
            get_device_properties=lambda _: {"max_shared_mem": 2**18},
        )

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source, metadata):
        def launch(*given):
            grid, values = given[:3], given[9:]
            told = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in values]
            self.launched.append((metadata.name, grid, told))

        return launch


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(launches, "_prepared", {})
    for module in OPS:
        for kernel in vars(module).values():
            if isinstance(kernel, jit.JITFunction):
                monkeypatch.setattr(kernel, "device_caches", _fresh(kernel))
    return driver.active


def _fresh(kernel):
    return type(kernel.device_caches)(kernel.create_binder)


def calls(dtype=torch.bfloat16):
    """Return calls of ops, as a decoding step makes them."""
    x, weight = torch.ones(4, 64, dtype=dtype), torch.ones(64)
    taps, state = torch.ones(64, 4, dtype=dtype), torch.ones(4, 3, 64, dtype=dtype)
    offsets = torch.arange(5)
    keys, start = torch.ones(4, 16, dtype=dtype), torch.ones(4, 64, 16)
    columns = torch.ones(64, 16)
    heads, matrices = torch.ones(4, 2, 16, dtype=dtype), torch.ones(4, 2, 16, 16)
    longhorn = declared()["longhorn_scan"].kernels("triton")
    attended = Tensors(heads, heads, heads, *[None] * 8)
    call = Call(None, None, offsets, torch.zeros(4, dtype=torch.int64), 16, 0, 0.25)
    return {
        "rms_norm": lambda: norm_triton.forward(x, weight, False, 1e-5, 0.0),
        "add_rms_norm": lambda: norm_triton.normalise(x, x, weight, 1e-5, 0.0),
        "conv": lambda: conv_triton.forward(x, taps, None, state, offsets, "silu"),
        "longhorn_scan": lambda: longhorn.forward(
            *(x, keys, keys, x, None, None, None, start, offsets, False)
        ),
        "feedback_scan": lambda: feedback_triton.forward(
            Inputs(x, columns, columns, columns, None, None, None, start), offsets, False
        ),
        "linear_scan": lambda: linear_triton.forward(x, x, None, offsets),
        "gated_linear_attention": lambda: matrix_triton.forward(
            *(heads, heads, heads, None, None, matrices, offsets, False, "additive", 1.0, 64)
        ),
        "eidetic_attention": lambda: attention_triton.forward(attended, call),
    }


@pytest.mark.long
def test_a_launch_that_was_seen_is_the_one_that_triton_makes(gpu, monkeypatch):
    made = calls()
    for run in made.values():
        run()
    theirs, gpu.launched = gpu.launched, []
    monkeypatch.setattr(jit.JITFunction, "run", None)
    for run in made.values():
        run()
    assert len(gpu.launched) == len(made)
    for ours, first in zip(gpu.launched, theirs, strict=True):
        assert ours[:2] == first[:2]
        # new results lie elsewhere; all else is the same number or address
        assert [x for x in ours[2] if type(x) is not int] == [
            x for x in first[2] if type(x) is not int
        ]
        assert len(ours[2]) == len(first[2])


def test_other_arguments_are_another_kernel(gpu):
    calls(torch.bfloat16)["rms_norm"]()
    calls(torch.float32)["rms_norm"]()
    x, weight = torch.ones(4, 65)[:, 1:], torch.ones(64)
    norm_triton.forward(x, weight, False, 1e-5, 0.0)  # rows that begin at no multiple of 16 bytes
    norm_triton.forward(x, weight, False, 1e-6, 0.0)
    assert len(launches._prepared) == 4
    assert all(isinstance(found, CompiledKernel) for found, _ in launches._prepared.values())


def test_arguments_that_are_alike_are_alike_to_triton():
    numbers = [0, 1, 2, 3, 15, 16, 17, 32, 48, -1, -2, -16, -32]
    for edge, step in itertools.product((31, 32, 63), (-17, -16, -2, -1, 0, 1, 16)):
        numbers += [2**edge + step, -(2**edge) + step]
    numbers = [x for x in numbers if -(2**63) <= x < 2**64]
    memory = torch.zeros(100)
    tensors = [memory[i:] for i in range(9)] + [memory.bfloat16()[i:] for i in range(17)]
    backend = make_backend(GPUTarget("cuda", 90, 32))
    specialization = {}
    for x in (*numbers, *tensors, None, 0.5, -1.0):
        theirs = jit.native_specialize_impl(type(backend), x, False, True, True)
        assert specialization.setdefault(tuple(launches.like([x])), theirs) == theirs
    assert len(specialization) > 12


def test_offsets_on_a_gpu_are_made_once_a_stream(monkeypatch):
    made, stream, capturing = [], SimpleNamespace(cuda_stream=7), [False]
    arange = torch.arange
    monkeypatch.setattr(
        torch, "arange", lambda count, device: (made.append(device), arange(count))[1]
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(validation, "Tensor", SimpleNamespace)
    x = SimpleNamespace(shape=(3, 5, 2), device=torch.device("cuda", 0))
    validation._batch_offsets.cache_clear()
    first = segment_offsets("op", x, None)
    assert first.tolist() == [0, 5, 10, 15]
    assert segment_offsets("op", x, None) is first
    stream.cuda_stream = 8  # work of another stream would not wait for them
    assert segment_offsets("op", x, None) is not first
    capturing[0] = True  # a graph would go on reading what the cache lets go of
    assert segment_offsets("op", x, None) is not segment_offsets("op", x, None)
    assert made == [x.device] * 4
    validation._batch_offsets.cache_clear()
