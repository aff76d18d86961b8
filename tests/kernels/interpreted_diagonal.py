"""The Triton kernels of vandermonde and diagonal_step in Triton's interpreter.

Not collected by name: ``test_triton_interpreted.py`` runs this file in a process
of its own, where ``TRITON_INTERPRET=1`` holds before anything imports triton.
"""

import pytest
import torch
from tests.kernels.interpreter import repair

from ssmzoo.testing.accuracy import outputs_and_grads
from ssmzoo_kernels import diagonal_step, last_backend, vandermonde, vandermonde_state
from ssmzoo_kernels.vandermonde import triton as vandermonde_triton

repair()


def pairs(*shape):
    return torch.randn(*shape, 2, dtype=torch.float64)


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def judge(op, inputs, dtype, tolerance):
    exact = outputs_and_grads(lambda *x: op(*x, "reference"), inputs, torch.float64)
    found = outputs_and_grads(lambda *x: op(*x, "triton"), inputs, dtype)
    for name, expected in exact.items():
        error = (found[name].double() - expected).abs().max()
        assert error <= tolerance * expected.abs().max(), f"{name}: {error:.2e}"


# entries of the tables and weights are rounded a few times each; a gradient's moment weighs the
# terms with lags, whose cancellation costs the same relative to the largest entry
BUDGET = 1e-5


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("length", "modes"), [(1, 1), (17, 3), (129, 20), (300, 16)])
def test_vandermonde_equals_the_sum(length, modes, mixed):
    back = torch.rand(3, modes) > 0.5 if mixed else None
    exponent = torch.complex(-0.05 * torch.rand(3, modes), torch.randn(3, modes)).cdouble()
    weight = pairs(2, 3, modes)

    def op(weight, exponent, backend):
        return vandermonde(
            torch.view_as_complex(weight),
            torch.view_as_complex(exponent.double()),
            length,
            offset=2,
            reversed=back,
            norm_length=length + 5,
            backend=backend,
        )

    # the exponents are float64 in any case, so they must not be rounded for one side only
    rounded = torch.view_as_real(exponent).float().double()
    judge(op, [weight.float().double(), rounded], torch.float32, BUDGET)
    assert last_backend("vandermonde") == "triton"


def test_a_long_kernel_and_its_gradients_equal_the_sum():
    length = 16384
    exponent = torch.complex(-1e-3 * torch.rand(1, 3), torch.randn(1, 3)).cdouble()
    back = torch.tensor([[False, True, False]])
    lag = torch.arange(length).double()
    lags = torch.where(back[..., None], length - 1 - lag, lag)

    def op(weight, exponent, backend):
        weight, exponent = (torch.view_as_complex(x) for x in (weight, exponent))
        if backend == "triton":
            return vandermonde(weight, exponent.cdouble(), length, reversed=back, backend=backend)
        return (weight[..., None] * torch.exp(exponent[..., None] * lags)).real.sum(-2)

    inputs = [pairs(1, 3).float().double(), torch.view_as_real(exponent).float().double()]
    judge(op, inputs, torch.float32, BUDGET)
    assert last_backend("vandermonde") == "triton"


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("length", "modes"), [(1, 1), (129, 20)])
def test_vandermonde_state_equals_the_sum(length, modes, mixed):
    back = torch.rand(3, modes) > 0.5 if mixed else None
    exponent = torch.complex(-0.05 * torch.rand(3, modes), torch.randn(3, modes)).cdouble()

    def op(u, exponent, backend):
        exponent = torch.view_as_complex(exponent.double())
        state = vandermonde_state(u, exponent, offset=1, reversed=back, backend=backend)
        return torch.view_as_real(state)

    rounded = torch.view_as_real(exponent).float().double()
    u = torch.randn(2, length, 3)
    judge(op, [u, rounded], torch.float32, BUDGET)
    assert last_backend("vandermonde_state") == "triton"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("driven", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 17, 33), (2, 5, 100)])
def test_diagonal_step_equals_the_formula(shape, driven, dtype):
    batch, heads, modes = shape
    u = torch.randn(batch, heads)
    state = torch.randn(shape, dtype=dtype)
    decay, drive, readout = torch.randn(3, heads, modes, dtype=dtype)
    D = torch.randn(heads) if driven else None
    arguments = (decay, drive if driven else None, readout, D)
    got = diagonal_step(u, state, *arguments, backend="triton")
    assert last_backend("diagonal_step") == "triton"
    wide = [x if x is None else x.to(torch.complex128) for x in arguments[:3]]
    expected = diagonal_step(u.double(), state.to(torch.complex128), *wide, D, backend="reference")
    # y comes back in u's float32
    for a, b, kind in zip(got, expected, (torch.float32, dtype), strict=True):
        step = torch.finfo(kind).eps * (modes + 4)
        assert (a - b).abs().max() <= step * max(1.0, b.abs().max())


@pytest.mark.parametrize("falling", [False, True])
def test_tables_are_as_exact_as_their_phases_in_float64(falling):
    exponent = torch.complex(-torch.rand(2, 5).double() / 1000, 400 * torch.randn(2, 5).double())
    exponent[0, 0], exponent[0, 1] = 0.5j * torch.pi, -1e-3 + 1e-9j
    down = torch.full((2, 5), falling, dtype=torch.int8)
    cut = (37, 16, 3, 5)  # rows, columns, and the least lags of rising and falling modes
    for table, step, least in zip(
        vandermonde_triton._tables(exponent, down, slice(0, 2), cut, torch.float64),
        (16, 1),
        (5 if falling else 3, 0),
        strict=True,
    ):
        count = table.shape[1]
        lags = torch.arange(count).double() * step
        lags = (lags.flip(0) if falling else lags) + least
        powers = exponent[:, None] * lags[:, None]
        error = (torch.view_as_complex(table) - powers.exp()).abs()
        # both round the phase once more, and cosine, sine and their product with the size
        assert (error <= 2.0**-53 * (2 * powers.imag.abs() + 16)).all()
