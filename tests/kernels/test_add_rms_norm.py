"""add_rms_norm against a sum and a norm one after the other."""

import pytest
import torch
from tests.kernels import contracts

from ssmzoo_kernels import add_rms_norm, last_backend, rms_norm

DTYPES = [
    (torch.float32, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16, torch.float32),
]


class TestAddRMSNorm(contracts.AddRMSNorm):
    """Every check of the contract."""


def leaves(dtypes, shape=(3, 7, 40)):
    draw = torch.Generator().manual_seed(0)
    shapes = shape, shape, shape[-1:]
    return [
        torch.randn(s, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for s, dtype in zip(shapes, dtypes, strict=True)
    ]


@pytest.mark.parametrize("dtypes", DTYPES)
def test_the_op_is_a_sum_and_then_a_norm_bit_for_bit(dtypes, backend):
    residual, x, weight = leaves(dtypes)
    total, y = add_rms_norm(residual, x, weight, eps=1e-5, backend=backend)
    assert torch.equal(total, residual + x)
    assert torch.equal(y, rms_norm(residual + x, weight, eps=1e-5, backend=backend))


@pytest.mark.parametrize("reads", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_gradients_are_a_sums_and_a_norms(dtypes, reads, backend):
    given = leaves(dtypes)
    losses = [torch.randn(3, 7, 40, generator=torch.Generator().manual_seed(i)) for i in (1, 2)]

    def slopes(total, y):
        pairs = zip((total, y), losses, reads, strict=True)
        loss = sum((part * loss).sum() for part, loss, read in pairs if read)
        found = torch.autograd.grad(loss, given, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, given, strict=True)]

    ours = slopes(*add_rms_norm(*given, eps=0.1, backend=backend))
    total = given[0].double() + given[1].double()
    total = total + (total.detach().to(dtypes[0]).double() - total.detach())  # as it is rounded
    theirs = slopes(total, rms_norm(total, given[2].double(), eps=0.1, backend="reference"))
    for got, exact, x in zip(ours, theirs, given, strict=True):
        assert got.dtype == x.dtype
        # each is rounded to its dtype; before that, an upstream gradient to y's and total's
        error = (got.double() - exact.double()).abs().max()
        assert error <= 4 * max(torch.finfo(d).eps for d in dtypes) * exact.abs().max()


def test_a_residual_that_needs_no_gradient_gives_the_branch_its_own(backend):
    residual, x, weight = leaves(DTYPES[0])
    total, y = add_rms_norm(residual.detach(), x, weight, eps=0.1, backend=backend)
    (total + y).sum().backward()
    total, y = add_rms_norm(residual, x.detach(), weight, eps=0.1, backend=backend)
    (total + y).sum().backward()
    assert torch.equal(x.grad, residual.grad)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"x": torch.ones(2, 3)}, ValueError, r"x must have shape \[B, D\] = \[2, 4\]"),
        ({"residual": torch.ones(1, 2, 4), "x": torch.ones(2, 1, 4)}, ValueError, "x must have"),
        ({"residual": torch.ones(2, 0)}, ValueError, "residual must have at least one channel"),
        ({"residual": [1.0]}, TypeError, "residual must be a tensor .*got list"),
        ({"weight": torch.ones(3)}, ValueError, "weight must have"),
        ({"eps": -1.0}, ValueError, "eps must be"),
        ({"offset": None}, TypeError, "offset must be"),
    ],
)
def test_wrong_arguments_are_named(changes, kind, message):
    arguments = {"residual": torch.ones(2, 4), "x": torch.ones(2, 4), "weight": torch.ones(4)}
    with pytest.raises(kind, match=f"add_rms_norm: {message}"):
        add_rms_norm(**{**arguments, "eps": 1e-5, **changes})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtypes", DTYPES)
def test_kernels_on_a_gpu_equal_a_sum_and_a_norm(dtypes):
    residual, x, weight = (part.detach().cuda() for part in leaves(dtypes, (37, 1500)))
    total, y = add_rms_norm(residual, x, weight, eps=1e-5)
    assert last_backend("add_rms_norm") == "triton"
    assert torch.equal(total, residual + x)
    # a tile of a sum is cut otherwise than a tensor, so that its squares add up in another order
    exact = rms_norm((residual + x).double(), weight.double(), eps=1e-5)
    step = max(torch.finfo(y.dtype).eps, 2e-6)  # which test_rms_norm allows float32
    assert (y.double() - exact).abs().max() <= step * exact.abs().max()
