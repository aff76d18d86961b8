"""The Triton kernels of rms_norm and add_rms_norm against the reference in Triton's interpreter.

Not collected by name: ``test_triton_interpreted.py`` runs this file in a process of its own, where
``TRITON_INTERPRET=1`` holds before anything imports triton.
"""

import pytest
import torch
from tests.kernels import contracts
from tests.kernels.interpreter import repair

from ssmzoo.testing.accuracy import assert_as_accurate
from ssmzoo_kernels import add_rms_norm, rms_norm
from ssmzoo_kernels.rms_norm import triton as norm_triton

# numpy warns where a GPU goes to infinity, as the formulas mean it to
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")

repair()


def judge(count, width, dtype=torch.float32):
    torch.manual_seed(0)

    def on(backend):
        return lambda x, weight: rms_norm(x, weight, eps=1e-5, offset=1.0, backend=backend)

    inputs = (torch.randn(count, width), torch.randn(width))
    assert_as_accurate(on("triton"), on("reference"), inputs, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [3, 16, 37])
def test_blocks_of_channels_add_up(monkeypatch, width, dtype):
    monkeypatch.setattr(norm_triton, "WIDEST", 16)
    judge(5, width, dtype)


@pytest.mark.parametrize("count", [2, 15, 16, 17, 40])
def test_shares_of_rows_add_up(monkeypatch, count):
    monkeypatch.setattr(norm_triton, "MOST_SHARES", 2)
    monkeypatch.setattr(norm_triton, "LEAST_ROWS", 4)
    monkeypatch.setattr(norm_triton, "TILE", 64)
    judge(count, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [3, 16, 37])
def test_sums_are_normalised_as_they_are_rounded(monkeypatch, width, dtype):
    monkeypatch.setattr(norm_triton, "WIDEST", 16)
    torch.manual_seed(0)

    def on(backend):
        return lambda *given: add_rms_norm(*given, eps=1e-5, offset=1.0, backend=backend)

    inputs = (torch.randn(17, width), torch.randn(17, width), torch.randn(width))
    assert_as_accurate(on("triton"), on("reference"), inputs, dtype)
    residual, x, weight = (part.to(dtype) for part in inputs)
    residual = residual.to(torch.promote_types(torch.float32, dtype))
    total, y = add_rms_norm(residual, x, weight, eps=1e-5, backend="triton")
    assert torch.equal(total, residual + x)
    assert torch.equal(y, rms_norm(total, weight, eps=1e-5, backend="triton"))


def test_no_rows_have_no_gradient():
    x, weight = torch.ones(0, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    y = rms_norm(x, weight, eps=0.0, backend="triton")
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 4)
    assert not weight.grad.any()


class TestNonfinite(contracts.RMSNorm):
    """What NaN and infinity reach."""

    backends = ("triton",)
    exempt = {
        name: "small sizes are above, and torch's own checks in interpreted_every_op.py"
        for name in contracts.RMSNorm.checks()
        if name != "test_nonfinite_values_reach_what_they_reach_in_the_reference"
    }


class TestNonfiniteSums(contracts.AddRMSNorm):
    """What NaN and infinity reach."""

    backends, exempt = ("triton",), TestNonfinite.exempt
