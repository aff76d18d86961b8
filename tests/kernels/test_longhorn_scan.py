"""longhorn_scan: every fast backend against the loop over time, and the paper's golden checks."""

import functools

import pytest
import torch
import torch.nn.functional as F
from tests.kernels import contracts

from ssmzoo.testing.accuracy import outputs_and_grads
from ssmzoo_kernels import longhorn_scan


class TestLonghornScan(contracts.LonghornScan):
    """Every check of the contract."""


def draw(B=2, L=9, D=5, N=4, segments=None, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    wide, narrow = (B, L, D), (B, L, N)
    shapes = (wide, narrow, narrow, wide, (D,), (D,), wide, (segments or B, D, N))
    tensors = [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]
    return [x.to(dtype) for x in tensors]


def close(got, expected, tolerance):
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    error = (got.double() - expected.double()).abs().max()
    assert error <= tolerance * expected.double().abs().max(), f"error {error:.2e}"


# --- golden checks of the paper's specification ----------------------------------------------


def eps_of(k, a, backend):
    """The write strength, read back: from S = 0 and u = 1, the new S is eps k."""
    u, logits = torch.ones(1, 1, 1, dtype=k.dtype), torch.full((1, 1, 1), a, dtype=k.dtype)
    state = longhorn_scan(u, k[None, None], k[None, None], logits, backend=backend)[1]
    return state[0, 0] / k


@pytest.mark.parametrize("a", [-30.0, -3.0, 0.0, 2.5, 30.0])
def test_write_strength_is_the_normalised_beta(backend, a):
    k = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64)
    beta, energy = torch.sigmoid(torch.tensor(a, dtype=torch.float64)), k.square().sum()
    expected = beta / (1 + beta * energy)
    close(eps_of(k, a, backend), expected.expand(3), 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_write_strength_has_its_limits_exactly(backend, dtype):
    k = torch.tensor([0.5, 2.0], dtype=dtype)
    assert torch.equal(eps_of(k, -800.0, backend), torch.zeros(2, dtype=dtype))
    close(eps_of(k, 800.0, backend), (1 / (1 + k.square().sum())).expand(2), 2e-7)
    u, q, _, dt, *_, state = draw(L=3, dtype=dtype)
    key = torch.randn(2, 3, 4, dtype=dtype)
    inputs = [x.requires_grad_() for x in (u, q, key, torch.full_like(dt, -800.0), state)]
    final = longhorn_scan(*inputs[:4], initial_state=inputs[4], backend=backend)[1]
    assert torch.equal(final, state)
    for logit in (-800.0, 800.0):
        dt = torch.full_like(inputs[3], logit).requires_grad_()
        out, final = longhorn_scan(*inputs[:3], dt, initial_state=inputs[4], backend=backend)
        grads = torch.autograd.grad(out.sum() + final.sum(), [*inputs[:3], dt])
        assert all(g.isfinite().all() for g in grads)
        assert grads[3].abs().max() <= 1e-30


def test_hand_example(backend):
    u = torch.tensor([[[1.0], [2.0]]])
    k = torch.tensor([[[1.0, 0.0], [1.0, 1.0]]])
    q = torch.tensor([[[1.0, 1.0], [1.0, -1.0]]])
    out, final = longhorn_scan(u, q, k, torch.zeros(1, 2, 1), backend=backend)
    torch.testing.assert_close(out.flatten(), torch.tensor([1 / 3, 1 / 4]))
    torch.testing.assert_close(final.flatten(), torch.tensor([3 / 4, 1 / 2]))


def test_one_state_column_or_a_one_hot_key_follows_the_exact_rule(backend):
    single = draw(N=1)
    one_hot = draw(N=4)
    one_hot[2] = F.one_hot(torch.arange(9) % 4, 4).double().expand(2, 9, 4) * 1.7
    for inputs in (single, one_hot):
        got = longhorn_scan(*inputs, backend=backend)
        for a, b in zip(got, longhorn_scan(*inputs, transition="exact"), strict=True):
            close(a, b, 1e-13)


def test_writing_the_same_pair_for_ever_reaches_the_rules_limit(backend):
    k = torch.tensor([0.6, -1.1, 0.9, 1.4])
    u, a = torch.tensor([2.0]), torch.tensor([1.0])
    row = [x.expand(1, 500, -1) for x in (u, k, k, a)]
    out, final = longhorn_scan(*row, backend=backend)
    torch.testing.assert_close(final[0, 0], u / k)
    torch.testing.assert_close(out[0, -1], 4 * u)


def test_decays_keep_their_bounds(backend):
    """With u = 0 a state of ones shows the decay."""
    _, q, k, dt, *_ = draw(B=64, L=1, D=6, N=5)
    ones = torch.ones(64, 6, 5, dtype=torch.float64)
    decay = longhorn_scan(torch.zeros_like(dt), q, k, dt, initial_state=ones, backend=backend)[1]
    strength = torch.sigmoid(dt[:, 0]) * k[:, 0].square().sum(-1, keepdim=True)
    assert ((decay <= 1) & (decay >= (1 / (1 + strength))[:, :, None] - 1e-15)).all()
    close((1 - decay).sum(-1), 1 - 1 / (1 + strength), 1e-12)


def extreme_inputs(length, extreme):
    """Logits of -30 to 30, keys of zeros, and keys with one entry as large as is asked for."""
    u, q, k, dt, bias, D, z, state = draw(B=1, L=length, D=6, N=4)
    dt = (dt * 10).clamp(-30, 30)
    k[:, ::97, 1] *= extreme
    k[:, ::11] = 0
    return [x.float() for x in (u, q, k, dt, bias, D, z, state)]


@functools.cache
def loop_on_extreme_inputs(extreme):
    op = functools.partial(longhorn_scan, backend="reference")
    return outputs_and_grads(op, extreme_inputs(3000, extreme), torch.float64)


@pytest.mark.parametrize("extreme", [1.0, 30.0, 1000.0])
def test_extreme_keys_and_logits_stay_as_exact_as_the_loop(backend, extreme):
    truth, inputs = loop_on_extreme_inputs(extreme), extreme_inputs(3000, extreme)
    op = functools.partial(longhorn_scan, backend=backend)
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        for name, got in outputs_and_grads(op, inputs, dtype).items():
            error = (got.double() - truth[name]).abs().max()
            assert error <= tolerance * truth[name].abs().max(), (name, dtype)


@pytest.mark.parametrize("extreme", [1.0, 30.0, 1000.0])
def test_a_long_sequence_with_extreme_keys_and_logits_stays_exact(extreme):
    """Judged by the same C in float64, which the test above judges by the loop."""
    inputs = extreme_inputs(32768, extreme)
    op = functools.partial(longhorn_scan, backend="cpu")
    truth = outputs_and_grads(op, inputs, torch.float64)
    for name, got in outputs_and_grads(op, inputs, torch.float32).items():
        error = (got.double() - truth[name]).abs().max()
        assert error <= 1e-5 * truth[name].abs().max(), name


def test_results_are_linear_in_the_values(backend):
    u, q, k, dt, bias, D, z, state = draw(L=40)
    other = torch.randn_like(u)
    run = functools.partial(longhorn_scan, q=q, k=k, dt=dt, dt_bias=bias, D=D, z=z, backend=backend)
    both = run(u + 3 * other, initial_state=4 * state)
    parts = (run(u, initial_state=state), run(3 * other, initial_state=3 * state))
    for got, a, b in zip(both, *parts, strict=True):
        close(got, a + b, 1e-12)


def test_gauges_leave_outputs_unchanged_and_rotations_do_not(backend):
    u, q, k, dt, _, _, _, state = draw(L=20)
    run = functools.partial(longhorn_scan, u, backend=backend)
    out, _ = run(q, k, dt, initial_state=state)
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0])
    close(run(q * signs, k * signs, dt, initial_state=state * signs)[0], out, 1e-13)
    order = torch.tensor([2, 0, 3, 1])
    permuted = run(q[..., order], k[..., order], dt, initial_state=state[..., order])[0]
    close(permuted, out, 1e-13)
    # (q, k, 1/eps) -> (c q, c k, c^2/eps) with the state over c
    c, energy = 0.9, k.square().sum(-1, keepdim=True)
    inverse = c**2 * (1 + torch.exp(-dt) + energy)
    logits = -torch.log(inverse - 1 - c**2 * energy)
    kept = logits.isfinite().all(dim=-1)[0].int().cumprod(0).bool()  # while beta stays below 1
    assert kept.sum() >= 1
    scaled = run(c * q, c * k, torch.where(logits.isfinite(), logits, 0), initial_state=state / c)
    close(scaled[0][0, kept], out[0, kept], 1e-12)
    angle = torch.tensor(0.7)
    turn = torch.eye(4, dtype=torch.float64)
    turn[0, 0] = turn[1, 1] = angle.cos()
    turn[0, 1], turn[1, 0] = -angle.sin(), angle.sin()
    rotated = run(q @ turn, k @ turn, dt, initial_state=state @ turn)[0]
    assert (rotated - out).abs().max() > 1e-2 * out.abs().max()


def test_a_shared_write_strength_is_gated_linear_attention(backend):
    u, q, k, _, _, _, _, state = draw(L=30)
    dt = torch.randn(2, 30, 1, dtype=torch.float64)
    out, final = longhorn_scan(
        u, q, k, dt.expand(-1, -1, 5).clone(), initial_state=state, backend=backend
    )
    eps = 1 / (1 + torch.exp(-dt) + k.square().sum(-1, keepdim=True))
    log_decay, key = torch.log1p(-eps * k * k), eps * k
    for t in range(30):
        state = torch.exp(log_decay[:, t, None]) * state + u[:, t, :, None] * key[:, t, None]
        close(out[:, t], (state * q[:, t, None]).sum(-1), 1e-12)
    close(final, state, 1e-12)


def test_a_zero_key_leaves_the_state_bit_identical(backend):
    u, q, k, dt, bias, D, _, state = draw(L=17, D=18, dtype=torch.float32)
    out, final = longhorn_scan(
        u, torch.zeros_like(q), torch.zeros_like(k), dt, bias, D, None, state, backend=backend
    )
    assert torch.equal(final, state)
    assert torch.equal(out, D * u)
    out, _ = longhorn_scan(u, torch.zeros_like(q), k, dt, bias, D, None, state, backend=backend)
    assert torch.equal(out, D * u)
