"""How Triton kernels are launched: grids of large calls, and options that a target knows."""

import contextlib

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.jit import JITFunction

from ssmzoo_kernels.declaration import declared
from ssmzoo_kernels.diagonal_step import triton as step_triton
from ssmzoo_kernels.feedback_scan import triton as feedback_triton
from ssmzoo_kernels.feedback_scan.newton import NotConverged
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


def feedback(width, states):
    u, columns = torch.zeros(4, width), torch.zeros(width, states)
    offsets = torch.tensor([0, 4])
    inputs = (u, columns, columns, columns, None, None, None, None, offsets)
    out, final, saved = feedback_triton.forward(*inputs, True)
    feedback_triton.backward(out, final, *inputs, saved)
    with contextlib.suppress(NotConverged):  # residuals of nothing are what memory held
        feedback_triton.newton(*inputs, False, tolerance=1e-6, max_iterations=None, damping=0.0)


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


def test_large_batches_and_widths_fit_into_a_grid(launches):
    feedback(MANY, 64)  # a block of Newton's is one channel, and vmap makes channels
    diagonal(MANY)
    exponentials(MANY)
    assert len(launches) == 6
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
