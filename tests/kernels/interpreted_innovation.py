"""innovation's Triton kernel against the reference in Triton's interpreter.

Not collected by name: ``test_triton_interpreted.py`` runs this file in a process of its own, where
``TRITON_INTERPRET=1`` holds before anything imports triton.
"""

import pytest
import torch
import triton
from tests.kernels.interpreter import repair

from ssmzoo_kernels import innovation, last_backend
from ssmzoo_kernels.innovation import triton as innovation_triton

WEIGHTS = (0.4, 0.3, 0.2, 0.1)

repair()


def draw(length, width, dtype, span=4, segments=6):
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, length, width), (segments, span, width))
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes]


def assert_alike(y, weights, history, **options):
    wide = (y.double(), weights, history.double())
    exact, _ = innovation(*wide, backend="reference", **options)
    known, end = innovation(y, weights, history, backend="reference", **options)
    scores, after = innovation(y, weights, history, backend="triton", **options)
    assert last_backend("innovation") == "triton"
    assert scores.dtype == known.dtype
    assert torch.equal(after, end)
    rounding = torch.finfo(scores.dtype).eps * exact.abs().max()
    error, usual = ((x.double() - exact).abs().max() for x in (scores, known))
    assert error <= 2 * (usual + rounding), f"{error:.1e}, usual {usual:.1e}"


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_packed_segments(monkeypatch, dtype, relative):
    monkeypatch.setattr(innovation_triton, "CHUNK", 8)
    y, history = draw(30, 5, dtype)
    bounds = torch.tensor([0, 0, 9, 10, 13, 30, 30])
    assert_alike(y, WEIGHTS, history, cu_seqlens=bounds, relative=relative)


@pytest.mark.parametrize("relative", [False, True])
def test_blocks_of_channels_add_up(monkeypatch, relative):
    monkeypatch.setattr(innovation_triton, "WIDEST", 16)
    y, history = draw(7, 37, torch.float32, segments=1)
    assert_alike(y, WEIGHTS, history, relative=relative)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65])
def test_lengths_around_a_chunk(length):
    y, history = draw(length, 3, torch.float32, segments=1)
    if length:
        assert_alike(y, WEIGHTS, history)
    else:
        scores, after = innovation(y, WEIGHTS, history, backend="triton")
        assert scores.shape == (1, 0)
        assert torch.equal(after, history)


@pytest.mark.parametrize("span", [1, 2, 9])
def test_any_span(span):
    y, history = draw(12, 4, torch.float32, span, segments=1)
    assert_alike(y, [1 / span] * span, history)


def test_this_process_interprets():
    assert not isinstance(innovation_triton.innovation_fwd_kernel, triton.JITFunction)
