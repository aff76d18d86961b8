"""How Triton kernels are launched: grids of large calls, and options that a target knows."""

import contextlib

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.jit import JITFunction

from ssmzoo_kernels.add_rms_norm import triton as sum_triton
from ssmzoo_kernels.causal_conv1d import triton as conv_triton
from ssmzoo_kernels.companion_step import triton as companion_triton
from ssmzoo_kernels.declaration import declared
from ssmzoo_kernels.diagonal_step import triton as step_triton
from ssmzoo_kernels.eidetic_attention import triton as attention_triton
from ssmzoo_kernels.eidetic_attention.arguments import Call, Tensors
from ssmzoo_kernels.feedback_scan import triton as feedback_triton
from ssmzoo_kernels.feedback_scan.inputs import Inputs, Stop
from ssmzoo_kernels.feedback_scan.newton import NotConverged
from ssmzoo_kernels.innovation import triton as innovation_triton
from ssmzoo_kernels.vandermonde import triton as vandermonde_triton
from ssmzoo_kernels.vandermonde.tables import Lags

MANY = 70_000  # more than the 65,535 programs that a grid's second and third axis may have


@pytest.fixture
def launches(monkeypatch):
    """Collects grids and options of launches, which launch nothing."""
    seen = []
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *_, grid, warmup, **named: seen.append((grid, named))
    )
    return seen


def feedback(width, states, sequences=1):
    u, columns = torch.zeros(4 * sequences, width), torch.zeros(width, states)
    offsets = torch.arange(sequences + 1) * 4
    inputs = Inputs(u, columns, columns, columns, None, None, None, None)
    out, final, saved = feedback_triton.forward(inputs, offsets, True)
    feedback_triton.backward(out, final, inputs, offsets, saved)
    with contextlib.suppress(NotConverged):  # residuals of nothing are what memory held
        feedback_triton.newton(inputs, offsets, False, Stop(1e-6, None, 0.0))


def diagonal(batch):
    shared = torch.ones(1, 1, dtype=torch.complex64)
    state = torch.ones(batch, 1, 1, dtype=torch.complex64)
    step_triton.forward(torch.ones(batch, 1), state, shared, shared, shared, torch.ones(1))


def exponentials(batch):
    weight = torch.ones(batch, 1, 1, dtype=torch.complex64)
    exponent = -torch.ones(1, 1, dtype=torch.complex128)
    lags = Lags(2, 0, 0, False)
    found = vandermonde_triton.synthesize(weight, exponent, lags)
    vandermonde_triton.analyze(found, exponent, lags, True)


def norms(count):
    x, weight = torch.zeros(count, 2), torch.zeros(2)
    total, y, roots = sum_triton.forward(x, x, weight, True, 1e-5, 0.0)
    sum_triton.backward(total, y, total, weight, roots, 1e-5, 0.0)


def companion(batch):
    ring, position = torch.zeros(batch, 2, 1), torch.zeros(batch, dtype=torch.int64)
    one = torch.ones(1, 1)
    companion_triton.forward(torch.zeros(batch, 1), ring, position, one, one, one[0])


def convolution(count):
    x, taps, offsets = torch.zeros(count, 1), torch.zeros(1, 2), torch.arange(count + 1)
    inputs = (x, taps, None, torch.zeros(count, 1, 1), offsets, "silu")
    y, final = conv_triton.forward(*inputs)
    conv_triton.backward(y, final, *inputs)


def errors(count):
    history, offsets = torch.zeros(count, 1, 1), torch.arange(count + 1)
    innovation_triton.forward(torch.zeros(count, 1), history, offsets, [1.0], False)


def matrix_states(count):
    rows, offsets = torch.zeros(count, 1, 1), torch.arange(count + 1)
    inputs = (rows, rows, rows, rows, rows[..., 0], torch.zeros(count, 1, 1, 1), offsets)
    how = ("delta", 1.0, 16)
    kernels = declared()["gated_linear_attention"].kernels("triton")
    out, final, saved = kernels.forward(*inputs, True, *how)
    kernels.backward(out, final, *inputs, saved, *how)


def attention(count):
    rows, seen = torch.zeros(count, 1, 16), torch.zeros(count, dtype=torch.int64)
    memory = torch.zeros(count, 1, 1, 16)
    tensors = Tensors(rows, rows, rows, memory, memory, *[None] * 6)
    call = Call(seen, None, torch.arange(count + 1), seen, 16, 0, 1.0)
    out, lse = attention_triton.forward(tensors, call)
    attention_triton.backward(out, out, lse, tensors, call)


@pytest.mark.parametrize(
    ("run", "count"),
    [
        (lambda: feedback(MANY, 64), 3),  # a block of Newton's is one channel, vmap makes channels
        (lambda: feedback(2, 4, MANY), 3),
        (lambda: diagonal(MANY), 1),
        (lambda: exponentials(MANY), 2),
        (lambda: norms(20 * MANY), 3),
        (lambda: companion(MANY), 1),
        (lambda: convolution(MANY), 2),
        (lambda: errors(MANY), 1),
        (lambda: matrix_states(MANY), 6),
        (lambda: attention(MANY), 4),
    ],
)
def test_large_batches_and_widths_fit_into_a_grid(launches, run, count):
    run()
    assert len(launches) >= count  # how often Newton's method steps depends on what memory held
    assert max(max(grid) for grid, _ in launches) >= MANY // 16
    for grid, _ in launches:
        assert all(x <= 65_535 for x in grid[1:]), grid


@pytest.mark.parametrize("hip", [None, "6.2"])
def test_the_cap_on_registers_is_an_option_of_nvidia_alone(launches, monkeypatch, hip):
    monkeypatch.setattr(torch.version, "hip", hip)
    feedback(4, 2)
    rows, keys, offsets = torch.zeros(4, 2), torch.zeros(4, 3), torch.tensor([0, 4])
    inputs = (rows, keys, keys, rows, None, None, None, None, offsets)
    longhorn = declared()["longhorn_scan"].kernels("triton")
    out, final, saved = longhorn.forward(*inputs, True)
    longhorn.backward(out, final, *inputs, saved)
    capped = ["maxnreg" in named for _, named in launches]
    assert any(capped) == (hip is None)
