"""The Triton kernels of vandermonde and diagonal_step on a real GPU."""

import pytest
import torch

from ssmzoo_kernels import (
    diagonal_step,
    last_backend,
    vandermonde,
    vandermonde_state,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def close(got, expected, tolerance):
    assert got.shape == expected.shape
    error = (got.to(expected.dtype) - expected).abs().max()
    assert error <= tolerance * expected.abs().max(), f"error {error:.2e}"


def modes(heads, count):
    torch.manual_seed(0)
    exponent = torch.complex(
        -0.01 * torch.rand(heads, count, device="cuda").double(),
        3 * torch.randn(heads, count, device="cuda").double(),
    )
    return exponent, torch.rand(heads, count, device="cuda") > 0.5


def results(op, leaves):
    leaves = [x.detach().requires_grad_() for x in leaves]
    y = op(*leaves)
    torch.manual_seed(1)
    loss = (torch.view_as_real(y) if y.is_complex() else y).double()
    weights = torch.randn(loss.shape, dtype=torch.float64, device="cuda")
    return y.detach(), *torch.autograd.grad((loss * weights).sum(), leaves)


@pytest.mark.parametrize(("batch", "length"), [((), 1), ((), 16384), ((3,), 1000)])
@pytest.mark.parametrize(("heads", "count"), [(5, 3), (64, 64)])
def test_sums_of_exponentials_and_gradients_equal_torchs_in_float64(batch, length, heads, count):
    exponent, back = modes(heads, count)
    weight = torch.randn(*batch, heads, count, dtype=torch.complex64, device="cuda")
    options = {"reversed": back, "norm_length": length + 2}
    exact = results(
        lambda w, c: vandermonde(w, c, length, backend="eager", **options),
        (weight.to(torch.complex128), exponent),
    )
    found = results(lambda w, c: vandermonde(w, c, length, **options), (weight, exponent))
    assert last_backend("vandermonde") == "triton"
    for got, expected, budget in zip(found, exact, (2e-6, 1e-5, 1e-5), strict=True):
        close(got, expected, budget)


@pytest.mark.parametrize("length", [1, 130, 16384])
def test_states_and_gradients_equal_torchs_in_float64(length):
    exponent, back = modes(17, 33)
    u = torch.randn(2, length, 17, device="cuda")
    exact = results(
        lambda u, c: vandermonde_state(u, c, reversed=back, backend="eager"),
        (u.double(), exponent),
    )
    found = results(lambda u, c: vandermonde_state(u, c, reversed=back), (u, exponent))
    assert last_backend("vandermonde_state") == "triton"
    for got, expected in zip(found, exact, strict=True):
        close(got, expected, 1e-5)


@pytest.mark.parametrize("driven", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 768, 64), (2, 37, 100)])
def test_diagonal_steps_equal_torchs_in_float64(shape, driven):
    torch.manual_seed(0)
    batch, heads, count = shape
    state = torch.randn(shape, dtype=torch.complex64, device="cuda")
    decay, drive, readout = torch.randn(3, heads, count, dtype=torch.complex64, device="cuda")
    u, D = torch.randn(batch, heads, device="cuda"), torch.randn(heads, device="cuda")
    inputs = [u, state, decay, drive if driven else None, readout, D]
    with torch.no_grad():
        found = diagonal_step(*inputs)
        assert last_backend("diagonal_step") == "triton"
        wide = [
            None if x is None else x.to(torch.complex128 if x.is_complex() else torch.float64)
            for x in inputs
        ]
        exact = diagonal_step(*wide, backend="eager")
    for got, expected in zip(found, exact, strict=True):
        close(got, expected, 4e-6)
