"""diagonal_step: the C kernel against the formula in float64."""

import pytest
import torch
from tests.kernels import contracts

from ssmzoo_kernels import diagonal_step, last_backend


class TestDiagonalStep(contracts.DiagonalStep):
    """Every check of the contract."""


NAMES = ("u", "state", "decay", "drive", "readout", "D")


def draw(B=2, H=5, N=3, dtype=torch.complex64):
    state = torch.randn(B, H, N, dtype=dtype)
    decay, drive, readout = torch.randn(3, H, N, dtype=dtype)
    real = dtype.to_real()
    return [torch.randn(B, H, dtype=real), state, decay, drive, readout, torch.randn(H, dtype=real)]


def formula(u, state, decay, drive, readout, D):
    """Step mode by mode, in Python's complex numbers."""
    next_state, y = state.to(torch.complex128).clone(), u.double().clone()
    for b, h in torch.cartesian_prod(torch.arange(u.shape[0]), torch.arange(u.shape[1])):
        x, total = u[b, h].item(), 0.0
        for n in range(state.shape[2]):
            entering = x if drive is None else drive[h, n].item() * x
            z = decay[h, n].item() * state[b, h, n].item() + entering
            next_state[b, h, n] = z
            total += (readout[h, n].item() * z).real
        y[b, h] = total + (0.0 if D is None else D[h].item() * x)
    return y, next_state


@pytest.fixture(params=["reference", "eager", "cpu"])
def backend(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 7), (3, 2, 8), (1, 5, 33), (2, 2, 64)])
@pytest.mark.parametrize("absent", [(), ("drive",), ("D",), ("drive", "D")])
def test_the_step_equals_the_formula(backend, shape, absent, dtype):
    inputs = [None if n in absent else x for n, x in zip(NAMES, draw(*shape, dtype), strict=True)]
    with torch.no_grad():
        got = diagonal_step(*inputs, backend=backend)
    assert last_backend("diagonal_step") == backend
    for a, b in zip(got, formula(*inputs), strict=True):
        assert a.shape == b.shape
        # sums of 2 N products, each rounded, of entries of order one
        allowed = torch.finfo(dtype).eps * (2 * shape[2] + 4) * max(1.0, b.abs().max())
        assert (a - b).abs().max() <= allowed


def test_steps_in_a_row_are_the_recurrence_of_vandermonde(backend):
    from ssmzoo_kernels import fft_conv, vandermonde

    exponent = torch.complex(-torch.rand(4, 6), 3 * torch.randn(4, 6)).cdouble()
    readout, D = torch.randn(4, 6, dtype=torch.complex128), torch.randn(4).double()
    u = torch.randn(2, 40, 4).double()
    expected, _ = fft_conv(u, vandermonde(readout, exponent, 40), D)
    state = torch.zeros(2, 4, 6, dtype=torch.complex128)
    for t in range(40):
        y, state = diagonal_step(u[:, t], state, exponent.exp(), None, readout, D, backend=backend)
        torch.testing.assert_close(y, expected[:, t], rtol=0, atol=1e-12 * expected.abs().max())


def test_the_initial_state_is_not_modified(backend):
    u, state, *rest = draw()
    before = state.clone()
    diagonal_step(u, state, *rest, backend=backend)
    assert torch.equal(state, before)


def test_gradients_run_in_torch_and_named_kernels_refuse_them():
    inputs = draw(dtype=torch.complex128)
    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *x: diagonal_step(*x), leaves)
    assert last_backend("diagonal_step") == "eager"
    with pytest.raises(ValueError, match=r"has no gradients.*no_grad"):
        diagonal_step(*leaves, backend="cpu")
    with torch.no_grad():
        diagonal_step(*leaves)
    assert last_backend("diagonal_step") == "cpu"


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("u", torch.randn(2, 1, 5), ValueError, r"u must have shape \[B, H\]"),
        ("state", torch.randn(2, 5, 3), TypeError, "state must be complex64 or complex128"),
        ("state", torch.randn(2, 15), ValueError, r"state must have shape \[B, H, N\]"),
        ("decay", torch.randn(5, 4).cfloat(), ValueError, r"decay must have .*= \[5, 3\]"),
        ("drive", torch.randn(5, 3), TypeError, "drive must be complex64"),
        ("readout", None, TypeError, "readout must be a tensor"),
        ("D", torch.randn(4), ValueError, r"D must have shape \[H\] = \[5\]"),
        ("backend", "fast", ValueError, "backend must be one of"),
    ],
)
def test_wrong_arguments_are_named(name, value, error, message):
    arguments = dict(zip(NAMES, draw(), strict=True)) | {name: value}
    with pytest.raises(error, match=f"diagonal_step.*{message}"):
        diagonal_step(**arguments)
