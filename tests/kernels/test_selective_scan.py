"""selective_scan: every fast backend against the loop over time, and transformers' own Mamba."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from tests.kernels import contracts
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

from ssmzoo.testing.accuracy import assert_as_accurate, outputs_and_grads
from ssmzoo_kernels import selective_scan


@pytest.fixture(params=["euler", "zoh"])
def discretization(request):
    return request.param


class TestSelectiveScan(contracts.SelectiveScan):
    """Every check of the contract."""


def draw(B=2, L=9, D=5, N=4, segments=None, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    wide, narrow = (B, L, D), (B, L, N)
    shapes = (wide, wide, (D, N), narrow, narrow, (D,), wide, (D,), (segments or B, D, N))
    tensors = [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]
    tensors[2] = -tensors[2].exp()
    return [x.to(dtype) for x in tensors]


def close(got, expected, tolerance):
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    error = (got.double() - expected.double()).abs().max()
    assert error <= tolerance * expected.double().abs().max(), f"error {error:.2e}"


def judge(inputs, backend, dtype=torch.float32, **options):
    candidate = functools.partial(selective_scan, backend=backend, **options)
    known = functools.partial(selective_scan, backend="reference", **options)
    assert_as_accurate(candidate, known, inputs, dtype)


def judge_float64(inputs, backend, **options):
    candidate = functools.partial(selective_scan, backend=backend, **options)
    known = functools.partial(selective_scan, backend="reference", **options)
    truth = outputs_and_grads(known, inputs, torch.float64)
    for name, got in outputs_and_grads(candidate, inputs, torch.float64).items():
        close(got, truth[name], 1e-12)


# --- step sizes -------------------------------------------------------------------------------


def step_sizes(dt, backend):
    """The softplus, read back: from h = 0, A = 0 and u = B = 1, the new state is delta."""
    ones = torch.ones_like(dt)[None, None]
    A = torch.zeros(dt.numel(), 1, dtype=dt.dtype)
    return selective_scan(ones, dt[None, None], A, ones[..., :1], ones[..., :1], backend=backend)[
        1
    ].flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_step_sizes_are_torchs_softplus_with_its_threshold(backend, dtype):
    low = -80 if dtype is torch.float32 else -700
    dt = torch.cat([torch.linspace(low, 40, 4001, dtype=dtype), torch.tensor([20.0, 20.1])])
    dt.requires_grad_()
    got = step_sizes(dt, backend)
    expected = F.softplus(dt)
    assert ((got - expected).abs() <= 4 * torch.finfo(dtype).eps * expected).all()
    assert torch.equal(got[dt > 20], dt[dt > 20])
    slopes, known = (torch.autograd.grad(x.sum(), dt)[0] for x in (got, expected))
    assert ((slopes - known).abs() <= 4 * torch.finfo(dtype).eps * known).all()


def test_huge_and_tiny_step_sizes_reach_their_limits(backend, discretization):
    u, _, A, B, C, *_, state = draw(L=1, D=4, dtype=torch.float32)
    op = functools.partial(selective_scan, discretization=discretization, backend=backend)
    for logit in (-1e4, -1e30):  # no step at all
        leaves = [x.requires_grad_() for x in (u, torch.full_like(u, logit), A, B, C, state)]
        out, final = op(*leaves[:5], initial_state=leaves[5])
        assert torch.equal(final, state)
        grads = torch.autograd.grad(out.sum(), leaves)
        assert all(g.isfinite().all() for g in grads)
        assert grads[1].abs().max() <= 1e-30
    # everything is forgotten; what is written is delta, or the hold's -1 / A
    for logit in (1e4, 1e15, 1e30):
        leaves = [x.requires_grad_() for x in (u, torch.full_like(u, logit), A, B, C, state)]
        out, final = op(*leaves[:5], initial_state=leaves[5])
        weight = logit if discretization == "euler" else -1 / A.detach()
        close(final.detach(), (weight * B[:, 0, None] * u[:, 0, :, None]).detach(), 1e-6)
        grads = torch.autograd.grad(out.sum(), leaves)
        assert all(g.isfinite().all() for g in grads)
        assert torch.equal(grads[5], torch.zeros_like(state))
        if discretization == "zoh":  # d (-1 / A) / d A
            expected = (C * B)[:, 0, None] * u[:, 0, :, None] / A**2
            close(grads[2], expected.sum(0).detach(), 1e-5)


def test_decays_are_exact_over_their_whole_range(backend):
    """With u = 0 a state of ones shows the decay; above 20 delta is dt itself."""
    x = torch.cat([-torch.logspace(-9, 2.2, 3001), torch.tensor([0.0, -200.0, -1e9])])
    ones = torch.ones(1, len(x), 1)
    for dtype in (torch.float32, torch.float64):
        A = (x.to(dtype) / 32).unsqueeze(1)
        row, dt = torch.zeros(1, 1, len(x), dtype=dtype), torch.full((1, 1, len(x)), 32.0)
        vector = torch.ones(1, 1, 1, dtype=dtype)
        state = selective_scan(
            row, dt.to(dtype), A, vector, vector, initial_state=ones, backend=backend
        )[1].flatten()
        expected = torch.exp(32 * A.flatten().double())
        # one rounding of the exponent, few of the result; subnormal results may be 0
        eps = torch.finfo(dtype).eps
        allowed = eps * (2 + (32 * A.flatten().double()).abs()) * expected
        assert ((state.double() - expected).abs() <= allowed + torch.finfo(dtype).tiny).all()
        assert state[-3] == 1
        assert state[-1] == 0


def test_slow_decays_have_no_bias(backend):
    """A decay that errs in one direction by a rounding would show a thousandfold here."""
    L = 1500
    u, dt, A, B, C, *_ = draw(B=1, L=L, D=3, N=2)
    judge([u.abs(), torch.full_like(dt, -7) + 0.1 * dt, A / A.abs(), B.abs(), C], backend)


@pytest.mark.parametrize("rate", [0.0, 1e-30, 1e-12, 1e-6, 1e-3, 0.1])
def test_the_hold_has_its_limit_at_a_rate_of_zero(backend, rate):
    """In value and gradient: by the series of the hold in powers of A."""
    inputs = draw(L=7, D=4)
    inputs[2] = torch.full_like(inputs[2], -rate)
    judge(inputs, backend, discretization="zoh")
    judge_float64(inputs, backend, discretization="zoh")
    u, dt, A, B, C = (x.requires_grad_() for x in inputs[:5])
    state = selective_scan(
        u[:, :1], dt[:, :1], A, B[:, :1], C[:, :1], discretization="zoh", backend=backend
    )[1]
    delta, written = F.softplus(dt[:, 0, :, None]), u[:, 0, :, None] * B[:, 0, None]
    weight = delta if rate == 0 else torch.special.expm1(delta * A) / A
    close(state, weight * written, 16 * torch.finfo(torch.float64).eps)  # roundings of both
    got = torch.autograd.grad(state.sum(), A)[0]
    # d/dA expm1(dA)/A = sum_k (k + 1) / (k + 2)! d^(k + 2) A^k
    slope = sum((k + 1) / math.factorial(k + 2) * delta ** (k + 2) * A**k for k in range(30))
    close(got, (slope * written).sum(0), 1e-12)


# --- golden checks ----------------------------------------------------------------------------


def mixer():
    torch.manual_seed(0)
    config = MambaConfig(
        hidden_size=24, state_size=5, expand=2, conv_kernel=4, num_hidden_layers=1, vocab_size=8
    )
    made = MambaMixer(config, layer_idx=0)
    with torch.no_grad():  # away from the initial values, which hide much
        made.A_log += 0.3 * torch.randn_like(made.A_log)
        made.D += torch.randn_like(made.D)
    return made


def our_mixer(theirs, x, backend):
    """Transformers' mixer with its scan replaced."""
    u, z = theirs.in_proj(x).chunk(2, dim=-1)
    u = F.silu(theirs.conv1d(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
    rank, N = theirs.time_step_rank, theirs.ssm_state_size
    dt, B, C = theirs.x_proj(u).split([rank, N, N], dim=-1)
    dt = dt @ theirs.dt_proj.weight.T
    A = -torch.exp(theirs.A_log)
    y, _ = selective_scan(u, dt, A, B, C, theirs.D, z, theirs.dt_proj.bias, backend=backend)
    return theirs.out_proj(y)


def test_eulers_step_is_transformers_mamba(backend):
    theirs = mixer()
    x = torch.randn(2, 33, 24, requires_grad=True)
    leaves = [x, *theirs.parameters()]
    loss = torch.randn(2, 33, 24)
    expected = theirs(x)
    got = our_mixer(theirs, x, backend)
    close(got, expected, 1e-6)
    pairs = zip(
        torch.autograd.grad(got, leaves, loss),
        torch.autograd.grad(expected, leaves, loss),
        strict=True,
    )
    for a, b in pairs:
        close(a, b, 1e-5)


def test_the_hold_is_s6_of_the_coffee_paper(backend):
    """SPEC-coffee, G3: one feature's B, C and step sizes from the input itself."""
    u = torch.tensor([[[1.0, -1.0], [0.5, 2.0]]], dtype=torch.float64)
    W_B, W_C = (torch.tensor(x, dtype=torch.float64) for x in ((1.0, 0.5), (-0.5, 1.0)))
    W_D = torch.tensor([[0.2, -0.3], [0.4, 0.1]], dtype=torch.float64)
    A = torch.tensor([[-1.0], [-2.0]], dtype=torch.float64)
    B, C = (u @ W_B).unsqueeze(-1), (u @ W_C).unsqueeze(-1)
    y, x = selective_scan(u, u @ W_D.T, A, B, C, discretization="zoh", backend=backend)
    expected = torch.tensor([0.476883, 1.225451], dtype=torch.float64)
    torch.testing.assert_close(x.flatten(), expected, rtol=0, atol=6e-7)
    expected = torch.tensor([0.834546, 2.144540], dtype=torch.float64)
    torch.testing.assert_close(y[0, 1], expected, rtol=0, atol=6e-7)


def test_a_short_hold_is_its_first_order_to_second_order(backend):
    """SPEC-coffee, G14: (1 + A delta) x + delta B u, with an error like delta^2."""
    u, _, A, B, C, *_, state = draw(L=1)
    errors = []
    for delta in (1e-3, 5e-4):
        dt = torch.full_like(u, math.log(math.expm1(delta)))
        x = selective_scan(
            u, dt, A, B, C, initial_state=state, discretization="zoh", backend=backend
        )[1]
        first = (1 + A * delta) * state + delta * B[:, 0, None] * u[:, 0, :, None]
        errors.append((x - first).abs().max())
    assert 3.9 <= errors[0] / errors[1] <= 4.1


def test_a_hold_cut_in_two_is_the_same_hold_and_eulers_step_is_not(backend):
    u, dt, A, B, C, *_, state = draw(L=1)
    halves = torch.log(torch.expm1(F.softplus(dt) / 2)).expand(-1, 2, -1)
    twice = [x.expand(-1, 2, -1) for x in (u, B, C)]
    for rule, alike in (("zoh", True), ("euler", False)):
        op = functools.partial(
            selective_scan, initial_state=state, discretization=rule, backend=backend
        )
        once, cut = op(u, dt, A, B, C)[1], op(twice[0], halves, A, *twice[1:])[1]
        assert ((once - cut).abs().max() <= 1e-12 * once.abs().max()) == alike


def test_a_long_constant_input_comes_to_rest(backend):
    """The hold's fixed point is -B u / A whatever the step size is."""
    u, dt, A, B, C, *_ = draw(B=1, L=1, D=3, N=2)
    row = [x.expand(-1, 400, -1) for x in (u, dt, B, C)]
    final = selective_scan(*row[:2], A, *row[2:], discretization="zoh", backend=backend)[1]
    close(final, -B[:, 0, None] * u[:, 0, :, None] / A, 1e-12)


def test_results_are_linear_in_the_inputs(backend, discretization):
    u, dt, A, B, C, D, z, bias, state = draw(L=40)
    other = torch.randn_like(u)
    run = functools.partial(
        selective_scan, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=bias, backend=backend,
        discretization=discretization,
    )  # fmt: skip
    both = run(u + 3 * other, initial_state=4 * state)
    parts = (run(u, initial_state=state), run(3 * other, initial_state=3 * state))
    for got, a, b in zip(both, *parts, strict=True):
        close(got, a + b, 1e-12)
