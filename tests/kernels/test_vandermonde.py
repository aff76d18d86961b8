"""vandermonde and its transpose: tables and products against sums of exponentials."""

import functools
from itertools import pairwise

import pytest
import torch
from tests.kernels import contracts

from ssmzoo_kernels import last_backend, vandermonde, vandermonde_state
from ssmzoo_kernels.vandermonde.tables import Lags, blocks, width


class TestVandermonde(contracts.Vandermonde):
    """Every check of the contract."""


class TestVandermondeState(contracts.VandermondeState):
    """Every check of the contract."""


LENGTHS = [1, 2, 127, 128, 129, 1000, 2048]


def draw(H=3, N=4, decay=0.01, batch=(), mixed=True, dtype=torch.complex128):
    exponent = torch.complex(-decay * torch.rand(H, N).double(), 3 * torch.randn(H, N).double())
    weight = torch.randn(*batch, H, N, dtype=dtype)
    return weight, exponent, torch.rand(H, N) > 0.5 if mixed else None


def direct(weight, exponent, length, offset=0, reversed=None, norm_length=None):
    """Sum ``weight e^{c lag}`` in float64 with one exponential per term."""
    lag = (torch.arange(length) + offset).double().expand(*exponent.shape, length)
    if reversed is not None:
        lag = torch.where(reversed[..., None], norm_length - 1 - lag, lag)
    terms = weight.to(torch.complex128)[..., None] * torch.exp(exponent[..., None] * lag)
    return terms.real.sum(-2)


def close(got, expected, tolerance):
    assert got.shape == expected.shape
    if expected.numel():
        error = (got.to(expected.dtype) - expected).abs().max()
        assert error <= tolerance * expected.abs().max(), f"error {error:.2e}"


def results(op, leaves):
    leaves = [x.detach().requires_grad_() for x in leaves]
    y = op(*leaves)
    torch.manual_seed(1)
    loss = (torch.view_as_real(y) if y.is_complex() else y).double()
    grads = torch.autograd.grad((loss * torch.randn(loss.shape).double()).sum(), leaves)
    return y.detach(), *grads


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("modes", [1, 3, 64, 100])
@pytest.mark.parametrize("mixed", [False, True])
def test_any_length_and_number_of_modes_equals_the_direct_sum(length, modes, mixed):
    weight, exponent, back = draw(N=modes, mixed=mixed)
    options = {"reversed": back, "norm_length": length}
    exact = results(lambda w, c: direct(w, c, length, **options), (weight, exponent))
    wide = results(lambda w, c: vandermonde(w, c, length, **options), (weight, exponent))
    assert last_backend("vandermonde") == "eager"
    for got, expected in zip(wide, exact, strict=True):
        close(got, expected, 1e-10)
    weight = weight.to(torch.complex64)
    exact = results(lambda w, c: direct(w, c, length, **options), (weight, exponent))
    narrow = results(lambda w, c: vandermonde(w, c, length, **options), (weight, exponent))
    for got, expected, budget in zip(narrow, exact, (2e-6, 1e-5, 1e-5), strict=True):
        close(got, expected, budget)


@pytest.mark.parametrize("length", [16000, 16384])
@pytest.mark.parametrize("modes", [1, 3, 64, 100])
def test_long_kernels_and_their_gradients_are_as_exact(length, modes):
    weight, exponent, back = draw(H=2, N=modes, decay=1e-3, dtype=torch.complex64)
    options = {"reversed": back, "norm_length": length}
    exact = results(lambda w, c: direct(w, c, length, **options), (weight, exponent))
    for dtype, budgets in ((torch.complex128, [1e-10] * 3), (torch.complex64, (2e-6, 1e-5, 1e-5))):
        leaves = (weight.to(dtype), exponent)
        found = results(lambda w, c: vandermonde(w, c, length, **options), leaves)
        for got, expected, budget in zip(found, exact, budgets, strict=True):
            close(got, expected, budget)


def test_states_of_long_sequences_and_their_gradients_are_as_exact():
    length = 16384
    _, exponent, back = draw(H=2, N=64, decay=1e-3)
    u = torch.randn(1, length, 2)
    lag = torch.arange(length).double()
    lags = torch.where(back[..., None], lag, length - 1 - lag)

    def summed(u, c):
        return torch.einsum("blh,hnl->bhn", u.to(c.dtype), torch.exp(c[..., None] * lags))

    exact = results(summed, (u.double(), exponent))
    for dtype, budget in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        op = functools.partial(vandermonde_state, reversed=back)
        for got, expected in zip(results(op, (u.to(dtype), exponent)), exact, strict=True):
            close(got, expected, budget)


@pytest.mark.parametrize(("length", "offset", "past"), [(5, 3, 0), (40, 0, 9), (129, 7, 100)])
def test_offset_and_norm_length_move_the_window(length, offset, past):
    weight, exponent, back = draw(batch=(2, 1))
    norm = offset + length + past
    options = {"offset": offset, "reversed": back, "norm_length": norm}
    close(
        vandermonde(weight, exponent, length, **options),
        direct(weight, exponent, length, offset, back, norm),
        1e-11,
    )
    whole = vandermonde(weight, exponent, norm, reversed=back, norm_length=norm)
    window = whole[..., offset : offset + length]
    close(vandermonde(weight, exponent, length, **options), window, 1e-11)


def test_the_reference_is_the_direct_sum():
    weight, exponent, back = draw(batch=(2,))
    options = {"offset": 2, "reversed": back, "norm_length": 30}
    got = vandermonde(weight, exponent, 20, **options, backend="reference")
    close(got, direct(weight, exponent, 20, 2, back, 30), 1e-13)
    assert last_backend("vandermonde") == "reference"


@pytest.mark.parametrize("length", [1, 16, 17, 200])
def test_reversed_modes_of_strong_decay_stay_finite_whatever_the_last_row(length):
    weight, exponent, _ = draw(decay=0.0)
    exponent = exponent - 300.0
    back = torch.ones(3, 4, dtype=torch.bool)
    y, *grads = results(lambda w, c: vandermonde(w, c, length, reversed=back), (weight, exponent))
    assert all(x.isfinite().all() for x in (y, *grads))
    close(y[..., -1], weight.real.sum(-1), 1e-12)
    assert y[..., :-1].abs().sum() < 1e-100


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("length", [7, 64, 100, 16384])
def test_rows_of_the_reflected_softmax_equal_the_shifted_one_and_sum_to_one(length, sign):
    c = torch.complex(sign * (0.05 + torch.rand(3, 1).double()), torch.randn(3, 1).double())
    decaying = sign * -1.0 * c
    back = torch.full((3, 1), sign > 0)
    rho = torch.expm1(decaying) / torch.expm1(decaying * length)
    parts = [vandermonde(factor * rho, decaying, length, reversed=back) for factor in (1.0, -1.0j)]
    got = torch.complex(*parts)
    positions = torch.arange(length).double()
    shifted = torch.exp(c * positions - c.real * (length - 1 if sign > 0 else 0))
    close(got, shifted / shifted.sum(-1, keepdim=True), 1e-12)
    close(got.sum(-1), torch.ones(3, dtype=torch.complex128), 1e-12)


@pytest.mark.parametrize("length", [1, 2, 17, 128, 300])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_state_is_what_stepping_leaves(length, mixed):
    _, exponent, back = draw(mixed=mixed)
    u = torch.randn(2, length, 3).double()
    steps = torch.arange(length).double()

    def stepped(u, c):
        lag = (length - 1 - steps).expand(3, 4, length)
        if mixed:
            lag = torch.where(back[..., None], 5 + steps, lag)
        return torch.einsum("blh,hnl->bhn", u.to(c.dtype), torch.exp(c[..., None] * lag))

    exact = results(stepped, (u, exponent))
    for dtype, budget in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        rounded = u.to(dtype)
        if dtype is torch.float32:
            exact = results(stepped, (rounded.double(), exponent))
        found = results(
            lambda u, c: vandermonde_state(u, c, offset=5, reversed=back), (rounded, exponent)
        )
        assert found[0].dtype == dtype.to_complex()
        for got, expected in zip(found, exact, strict=True):
            close(got.to(expected.dtype), expected, budget)
    got = vandermonde_state(u, exponent, offset=5, reversed=back, backend="reference")
    close(got, stepped(u, exponent), 1e-12)


def test_chunks_carry_the_state_over_and_packed_sequences_have_their_own():
    _, exponent, _ = draw()
    u = torch.randn(1, 50, 3).double()
    first, second = vandermonde_state(u[:, :20], exponent), vandermonde_state(u[:, 20:], exponent)
    close(torch.exp(30 * exponent) * first + second, vandermonde_state(u, exponent), 1e-12)
    bounds = [0, 20, 20, 25, 45, 50]
    packed = vandermonde_state(u, exponent, cu_seqlens=torch.tensor(bounds))
    for s, (a, b) in enumerate(pairwise(bounds)):
        close(packed[s : s + 1], vandermonde_state(u[:, a:b], exponent), 1e-13)


def test_blocks_of_heads_change_nothing(monkeypatch):
    from ssmzoo_kernels.vandermonde import tables

    weight, exponent, back = draw(H=7, batch=(2,))
    op = lambda w, c: vandermonde(w, c, 100, reversed=back)  # noqa: E731
    whole = results(op, (weight, exponent))
    monkeypatch.setitem(tables.WORKSPACE, "cpu", 1)
    assert len(list(blocks(exponent, Lags(100, 0, 0, False), 1))) == 7
    for got, expected in zip(results(op, (weight, exponent)), whole, strict=True):
        close(got, expected, 1e-14)


def test_no_tensor_has_an_entry_per_head_mode_and_position():
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.numel())
            return out

    weight, exponent, back = draw(H=4, N=64, dtype=torch.complex64)
    with Sizes():
        results(lambda w, c: vandermonde(w, c, 4096, reversed=back), (weight, exponent))
    assert 4 * 4096 <= largest <= 2 * 4 * 64 * 2 * width(4096) < 4 * 64 * 4096 / 2


def test_autocast_and_lower_precision_do_not_reach_inside():
    weight, exponent, _ = draw(dtype=torch.complex64)
    expected = vandermonde(weight, exponent, 100)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(vandermonde(weight, exponent, 100), expected)
    u = torch.randn(2, 9, 3).bfloat16()
    assert torch.equal(vandermonde_state(u, exponent), vandermonde_state(u.float(), exponent))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("batch", [1, 2])
def test_compiled_graphs_keep_every_conjugate(compiler, batch):
    weight, exponent, back = draw(batch=(batch,))
    u = torch.randn(batch, 20, 3, dtype=torch.float64)
    ops = torch.ops.ssmzoo

    # each a node of the graph: a lazy conjugate inside one of them would be forgotten
    def nodes(weight, exponent, u):
        kernel = ops.vandermonde(weight.conj(), exponent * 2, back, 20, 1, 2, "eager")
        state = ops.vandermonde_state(u, exponent.conj(), back, 1, "eager")
        return (
            kernel,
            state,
            *ops.vandermonde_backward(kernel, weight, exponent, back, 20, 1, 2, "eager"),
            *ops.vandermonde_state_backward(state.conj(), u, exponent, back, 1, "eager"),
        )

    compiled = torch.compile(nodes, fullgraph=True, backend=compiler)
    expected = nodes(weight, exponent, u)
    for got, wanted in zip(compiled(weight, exponent, u), expected, strict=True):
        close(got, wanted, 1e-13)

    def layer(u, weight, exponent):
        state = vandermonde_state(torch.tanh(u), exponent, reversed=back).conj()
        return vandermonde(state * weight, exponent, 20, reversed=back)

    leaves = (u, weight, exponent)
    compiled = torch.compile(layer, fullgraph=True, backend=compiler)
    pairs = zip(results(compiled, leaves), results(layer, leaves), strict=True)
    for got, wanted in pairs:
        close(got, wanted, 1e-13)


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("mixed", [False, True])
def test_few_or_no_tokens_have_the_gradients_of_the_reference(length, mixed):
    weight, exponent, back = draw(batch=(2,), mixed=mixed)
    u = torch.randn(2, length, 3).double()

    def sums(weight, exponent, backend):
        return vandermonde(weight, exponent, length, offset=1, reversed=back, backend=backend)

    def state(u, exponent, backend):
        return vandermonde_state(u, exponent, reversed=back, backend=backend)

    for op, leaves in ((sums, (weight, exponent)), (state, (u, exponent))):
        got, expected = (
            results(functools.partial(op, backend=x), leaves) for x in ("eager", "reference")
        )
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_empty_sums_are_empty_or_zero():
    weight, exponent, _ = draw()
    assert vandermonde(weight, exponent, 0).shape == (3, 0)
    assert torch.equal(vandermonde(weight[:, :0], exponent[:, :0], 4), torch.zeros(3, 4).double())
    assert vandermonde_state(torch.zeros(2, 0, 3), exponent).abs().max() == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": None}, TypeError, "weight must be a tensor"),
        ({"weight": torch.ones(3, 4)}, TypeError, "weight must be complex64 or complex128"),
        ({"weight": torch.ones(4, 4).cfloat()}, ValueError, r"weight must have shape .*\[3, 4\]"),
        ({"exponent": torch.ones(3, 4)}, TypeError, "exponent must be a complex tensor"),
        ({"exponent": torch.ones(4).cfloat()}, ValueError, r"exponent must have shape \[H, N\]"),
        ({"reversed": torch.ones(3, 4)}, TypeError, "reversed must be a bool tensor"),
        ({"reversed": torch.ones(3, 1).bool()}, ValueError, r"reversed must have shape"),
        ({"length": -1}, ValueError, "length must be at least 0, got -1"),
        ({"offset": -1}, ValueError, "offset must be at least 0, got -1"),
        ({"length": 10.0}, TypeError, "length must be an int, got float"),
        ({"length": True}, TypeError, "length must be an int, got bool"),
        ({"offset": 0.5}, TypeError, "offset must be an int, got float"),
        ({"norm_length": 10.5}, TypeError, "norm_length must be an int, got float"),
        ({"norm_length": 9}, ValueError, r"norm_length must be at least offset \+ length = 10"),
        ({"backend": "cpu"}, ValueError, "no such implementation"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    weight, exponent, back = draw()
    arguments = {"weight": weight, "exponent": exponent, "length": 10, "reversed": back} | change
    with pytest.raises(error, match=f"vandermonde.*{message}"):
        vandermonde(**arguments)
