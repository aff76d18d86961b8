"""rms_norm against the loop over rows, and against torch's own norm."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.kernels import contracts

from ssmzoo_kernels import last_backend, rms_norm


class TestRMSNorm(contracts.RMSNorm):
    """Every check of the contract."""


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (2, 1, 3, 7), (0, 7), (2, 0, 7)])
def test_any_leading_axes_are_rows(shape, backend):
    if len(shape) == 1:
        with pytest.raises(ValueError, match=r"rms_norm: x must have shape \[B, D\], got \[7\]"):
            rms_norm(torch.ones(shape), torch.ones(7), eps=0.0, backend=backend)
        return
    x, weight = torch.randn(shape, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    y = rms_norm(x, weight, eps=1e-5, backend=backend)
    torch.testing.assert_close(y, F.rms_norm(x, (7,), weight, 1e-5), rtol=1e-14, atol=1e-14)


def test_rows_of_torch_have_the_same_gradients(backend):
    x = torch.randn(40, 24, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(24, dtype=torch.float64, requires_grad=True)
    loss = torch.randn(40, 24, dtype=torch.float64)
    ours = torch.autograd.grad(
        (rms_norm(x, weight, eps=0.1, backend=backend) * loss).sum(), (x, weight)
    )
    theirs = torch.autograd.grad((F.rms_norm(x, (24,), weight, 0.1) * loss).sum(), (x, weight))
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


def test_a_row_of_one_size_becomes_the_weight(backend):
    weight = torch.randn(33)
    y = rms_norm(torch.full((2, 33), -3.0), weight, eps=0.0, offset=1.0, backend=backend)
    torch.testing.assert_close(y, -(1 + weight).expand(2, 33))


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_the_result_and_gradients_have_their_dtypes(dtypes, backend):
    x = torch.randn(6, 20, dtype=torch.float64).to(dtypes[0]).requires_grad_()
    weight = torch.randn(20, dtype=torch.float64).to(dtypes[1]).requires_grad_()
    y = rms_norm(x, weight, eps=1e-5, backend=backend)
    y.float().square().sum().backward()
    assert (y.dtype, x.grad.dtype, weight.grad.dtype) == (dtypes[1], *dtypes)
    exact = F.rms_norm(x.detach().double(), (20,), weight.detach().double(), 1e-5)
    assert (y.double() - exact).abs().max() <= torch.finfo(dtypes[1]).eps * exact.abs().max()


def test_rows_that_lie_apart_are_read_where_they_are(backend):
    x, weight = torch.randn(6, 50)[:, 3:23], torch.randn(20)
    y = rms_norm(x, weight, eps=1e-5, backend=backend)
    assert torch.equal(y, rms_norm(x.contiguous(), weight, eps=1e-5, backend=backend))


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"x": [1.0]}, TypeError, "x must be a tensor .*got list"),
        ({"x": torch.ones(2, 0)}, ValueError, "x must have at least one channel"),
        ({"x": torch.ones(2, 3, 0)}, ValueError, "x must have"),
        ({"x": torch.ones(2, 4).int()}, TypeError, "x must be floating point, got torch.int32"),
        ({"weight": torch.ones(3)}, ValueError, r"weight must have shape \[D\] = \[4\], got \[3\]"),
        ({"weight": torch.ones(4, device="meta")}, ValueError, "weight must be on cpu, got meta"),
        ({"eps": None}, TypeError, "eps must be a number, got None"),
        ({"eps": True}, TypeError, "eps must be a number, got True"),
        ({"eps": -1e-6}, ValueError, "eps must be finite and at least 0, got -1e-06"),
        ({"eps": math.nan}, ValueError, "eps must be finite and at least 0, got nan"),
        ({"offset": "1"}, TypeError, "offset must be a number, got '1'"),
        ({"offset": math.inf}, ValueError, "offset must be finite, got inf"),
    ],
)
def test_wrong_arguments_are_named(changes, kind, message):
    arguments = {"x": torch.ones(2, 4), "weight": torch.ones(4), "eps": 1e-5} | changes
    with pytest.raises(kind, match=f"rms_norm: {message}"):
        rms_norm(**arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("rows", "width"), [(2048, 4096), (37, 1500), (3, 16)])
def test_kernels_on_a_gpu_equal_the_reference(rows, width):
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, width, generator=generator, device="cuda", requires_grad=True)
    weight = torch.randn(width, generator=generator, device="cuda", requires_grad=True)
    loss = torch.randn(rows, width, generator=generator, device="cuda")
    wide = x.double(), weight.double()
    ys = rms_norm(x, weight, eps=1e-5), F.rms_norm(wide[0], (width,), wide[1], 1e-5)
    found = [
        (y, *torch.autograd.grad((y * loss).sum(), leaves))
        for y, leaves in zip(ys, ((x, weight), wide), strict=True)
    ]
    assert last_backend("rms_norm") == "triton"
    for got, truth in zip(*found, strict=True):
        assert (got.double() - truth).abs().max() <= 2e-6 * truth.abs().max()
