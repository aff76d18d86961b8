"""The Triton kernels of gated_linear_attention on a real GPU."""

import functools

import pytest
import torch
import torch.nn.functional as F

from ssmzoo.testing.accuracy import assert_as_accurate
from ssmzoo_kernels import gated_linear_attention, last_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def draw(batch, length, groups, heads, keys, width, rows, states=None):
    def random(*shape):
        return torch.randn(shape, dtype=torch.float64, device="cuda")

    q, k = random(batch, length, groups, keys), random(batch, length, groups, keys)
    log_decay = (-random(batch, length, heads, rows).exp() / 8).where(
        random(batch, length, heads, rows) < 1.5, -50.0
    )
    beta = random(batch, length, heads).sigmoid()
    state = random(states or batch, heads, keys, width)
    return [q, F.normalize(k, dim=-1), random(batch, length, heads, width), log_decay, beta, state]


def judge(inputs, dtype, **options):
    run = functools.partial(gated_linear_attention, **options)
    reference = functools.partial(run, backend="reference")
    assert_as_accurate(run, reference, inputs, dtype, slack=4)
    assert last_backend("gated_linear_attention") == "triton"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", ["additive", "delta"])
@pytest.mark.parametrize("rows", [1, 64])
def test_outputs_and_gradients_are_as_exact_as_the_reference(rule, rows, dtype):
    judge(draw(2, 150, 2, 4, 64, 64, rows), dtype, rule=rule)


@pytest.mark.parametrize("rule", ["additive", "delta"])
@pytest.mark.parametrize("rows", [1, 128])
def test_wide_heads_are_as_exact_as_the_reference(rule, rows):
    judge(draw(1, 200, 1, 2, 128, 130, rows), torch.bfloat16, rule=rule)


@pytest.mark.parametrize("rows", [1, 37])
def test_packed_sequences_are_as_exact_as_the_reference(rows):
    ends = torch.tensor([0, 0, 1, 17, 90, 90, 154], device="cuda")
    inputs = draw(1, 154, 1, 3, 37, 50, rows, states=6)
    judge(inputs, torch.float32, rule="delta", cu_seqlens=ends)


@pytest.mark.parametrize("rows", [1, 128])
def test_one_token_equals_the_reference(rows):
    inputs = [x.float() for x in draw(3, 1, 4, 8, 128, 128, rows)]
    with torch.no_grad():
        found, known = (
            gated_linear_attention(*inputs, rule="delta", backend=x) for x in ("auto", "reference")
        )
    for got, expected in zip(found, known, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
