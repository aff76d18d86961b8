"""causal_conv1d: every fast backend against the sum over taps."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels import contracts

from ssmzoo_kernels import causal_conv1d
from ssmzoo_kernels.validation import Packing


class TestCausalConv1d(contracts.CausalConv1d):
    """Every check of the contract."""


def draw(B=2, L=9, D=5, K=4, segments=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, L, D), (D, K), (D,), (segments or B, K - 1, D))
    tensors = [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]
    return [x.to(dtype) for x in tensors]


def close(got, expected, tolerance):
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    error = (got.double() - expected.double()).abs().max()
    assert error <= tolerance * expected.double().abs().max(), f"error {error:.2e}"


def test_causal_conv1d_equals_torchs_convolution(backend):
    x, weight, bias, _ = draw(L=30, D=18)
    padded = F.pad(x.transpose(1, 2), (3, 0))
    expected = F.silu(F.conv1d(padded, weight[:, None], bias, groups=18)).transpose(1, 2)
    out, final = causal_conv1d(x, weight, bias, activation="silu", backend=backend)
    close(out, expected, 1e-13)
    assert torch.equal(final, x[:, -3:])


def test_nan_and_infinity_keep_their_meaning(backend):
    x, weight, bias, state = draw(L=20, D=18, dtype=torch.float32)
    op = functools.partial(causal_conv1d, activation="silu", backend=backend)
    x[0, 9, 3] = float("nan")
    out, final = op(x, weight, bias, state)
    assert out[0, 9:13, 3].isnan().all()
    assert out.isnan().sum() == 4
    assert final.isfinite().all()
    x[0, 9, 3] = float("inf")
    weight = weight.abs()
    out, _ = op(x, weight, bias, state)
    assert (out[0, 9:13, 3] == float("inf")).all()


def test_silu_has_its_limits_exactly(backend):
    x = torch.tensor([-800.0, -100.0, 0.0, 100.0, 800.0]).view(1, 5, 1)
    out, _ = causal_conv1d(x, torch.ones(1, 1), activation="silu", backend=backend)
    assert torch.equal(out, x.clamp(min=0))
    leaf = x.clone().requires_grad_()
    causal_conv1d(leaf, torch.ones(1, 1), activation="silu", backend=backend)[0].sum().backward()
    torch.testing.assert_close(leaf.grad.flatten(), torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]))


def test_boundaries_that_were_checked_under_inference_mode_serve_a_gradient():
    x, weight = torch.randn(1, 6, 4, requires_grad=True), torch.randn(4, 3)
    with torch.inference_mode():
        packing = Packing.of(torch.tensor([0, 3, 6]), 6)
    causal_conv1d(x, weight, cu_seqlens=packing)[0].sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("boundaries", [[0, 3, 6], np.array([0, 3, 6])], ids=["list", "numpy"])
def test_boundaries_that_are_no_tensor_are_named(boundaries):
    kind = type(boundaries).__name__
    with pytest.raises(TypeError, match=rf"cu_seqlens must be an int32 .* tensor .*got {kind}"):
        causal_conv1d(torch.randn(1, 6, 4), torch.randn(4, 3), cu_seqlens=boundaries)
