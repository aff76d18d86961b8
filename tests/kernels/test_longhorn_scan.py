"""longhorn_scan: every fast backend against the loop over time, and the paper's golden checks."""

import functools
import json
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F

from ssmzoo.testing.accuracy import assert_as_accurate, outputs_and_grads
from ssmzoo_kernels import last_backend, longhorn_scan, scan, use_backend
from ssmzoo_kernels.longhorn_scan import reference
from ssmzoo_kernels.scan import cpu as scan_cpu
from ssmzoo_kernels.scan import eager as scan_eager
from ssmzoo_kernels.scan import interval

NAMES = ("u", "q", "k", "dt", "dt_bias", "D", "z", "initial_state")


def draw(B=2, L=9, D=5, N=4, segments=None, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    wide, narrow = (B, L, D), (B, L, N)
    shapes = (wide, narrow, narrow, wide, (D,), (D,), wide, (segments or B, D, N))
    tensors = [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]
    return [x.to(dtype) for x in tensors]


def bounds(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def close(got, expected, tolerance):
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    error = (got.double() - expected.double()).abs().max()
    assert error <= tolerance * expected.double().abs().max(), f"error {error:.2e}"


def same(got, expected, backend):
    """Bit for bit in C; torch's own sums depend on how memory is aligned."""
    close(got, expected, 0 if backend == "cpu" else 1e-6)


def judge(inputs, backend, dtype=torch.float32, **options):
    candidate = functools.partial(longhorn_scan, backend=backend, **options)
    known = functools.partial(longhorn_scan, backend="reference", **options)
    assert_as_accurate(candidate, known, inputs, dtype)


# --- accuracy: outputs, final state, all gradients ------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 2, 7, 15, 16, 17, 63, 64, 65])
def test_any_length_is_as_exact_as_the_loop(backend, length):
    judge(draw(L=length, D=20), backend)
    assert last_backend("longhorn_scan") == backend


@pytest.mark.parametrize("states", [1, 3, 16, 17, 64])
@pytest.mark.parametrize("width", [1, 16, 63, 130])
def test_any_width_and_state_size_is_as_exact_as_the_loop(backend, width, states):
    judge(draw(L=33, D=width, N=states), backend)


@pytest.mark.parametrize("packed", [False, True])
def test_intervals_of_several_chunks_are_as_exact_as_the_loop(backend, packed):
    assert interval(40, {"cpu": scan_cpu, "eager": scan_eager}[backend].CHUNK) == 48
    options = {"cu_seqlens": bounds(0, 48, 97, 0, 15, 40)} if packed else {}
    judge(draw(B=1, L=200, D=20, N=40, segments=6 if packed else None), backend, **options)


@pytest.mark.parametrize("width", [320, 330, 600])
def test_blocks_that_take_turns_at_a_partial_sum_are_as_exact_as_the_loop(width):
    judge(draw(B=1, L=20, D=width, N=width // 4), "cpu")


def test_segments_that_take_turns_are_as_exact_as_the_loop():
    lengths = [17] * 40
    inputs = draw(B=1, L=sum(lengths), D=6, N=5, segments=40)
    assert len(list(scan_eager.groups(bounds(*lengths), 5))) > 1
    judge(inputs, "eager", cu_seqlens=bounds(*lengths))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_as_exact_as_the_loop(backend, dtype):
    judge(draw(L=40, D=33), backend, dtype)


@pytest.mark.parametrize("absent", [*NAMES[4:], "all"])
def test_optional_inputs_may_be_absent(backend, absent):
    inputs = draw(L=20, D=18)
    dropped = [n >= 4 and absent in (name, "all") for n, name in enumerate(NAMES)]
    kept = [None if drop else x for drop, x in zip(dropped, inputs, strict=True)]
    judge(kept, backend)


def test_inputs_of_mixed_dtypes_as_under_autocast(backend):
    u, q, k, dt, bias, D, z, state = draw(L=40, D=33)
    inputs = [u.bfloat16(), q, k.half(), dt.bfloat16(), bias, D.float(), z.half(), state.float()]
    leaves = [x.requires_grad_() for x in inputs]
    results = {}
    for name in (backend, "reference"):
        out, final = longhorn_scan(*leaves, backend=name)
        assert (out.dtype, final.dtype) == (torch.bfloat16, torch.float32)
        grads = torch.autograd.grad(out.double().sum() + final.double().sum(), leaves)
        assert [g.dtype for g in grads] == [x.dtype for x in leaves]
        results[name] = (out, final, *grads)
    for got, expected in zip(results[backend], results["reference"], strict=True):
        close(got, expected, 2 * torch.finfo(torch.bfloat16).eps)


def test_autocast_changes_nothing_inside(backend):
    inputs = [x.requires_grad_() for x in draw(L=20, D=8, dtype=torch.float32)]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out, final = longhorn_scan(*inputs, backend=backend)
            results.append((out, final, *torch.autograd.grad(out.sum() + final.sum(), inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_wrong_op_fails_the_accuracy_check():
    inputs = draw(L=33, D=17)
    known = functools.partial(longhorn_scan, backend="reference")

    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * (1 + 1e-4)

    def wrong_output(*x):
        out, final = known(*x)
        return out * (1 + 1e-5), final

    def wrong_gradient(u, *rest):
        return known(Half.apply(u), *rest)

    def unwritten(*x):
        out, final = known(*x)
        holes = torch.zeros_like(final)
        holes[0, 0, 0] = float("nan")
        return out, final + holes

    assert_as_accurate(known, known, inputs, torch.float32)
    for wrong, name in (
        (wrong_output, "output 0"),
        (wrong_gradient, "gradient of input 0"),
        (unwritten, "output 1"),
    ):
        with pytest.raises(AssertionError, match=name):
            assert_as_accurate(wrong, known, inputs, torch.float32)


def test_gradients_pass_gradcheck(backend):
    inputs = [x.requires_grad_() for x in draw(B=1, L=19, D=3, N=2)]
    assert torch.autograd.gradcheck(functools.partial(longhorn_scan, backend=backend), inputs)


def test_one_output_alone_has_gradients(backend):
    inputs = [x.requires_grad_() for x in draw(L=18)]
    for pick in (0, 1):
        got, expected = (
            torch.autograd.grad(
                longhorn_scan(*inputs, backend=name)[pick].square().sum(),
                inputs,
                materialize_grads=True,
            )
            for name in (backend, "reference")
        )
        for a, b in zip(got, expected, strict=True):
            close(a, b, 1e-12)


# --- sequences: halves, packed rows, batches -------------------------------------------------


@pytest.mark.parametrize("cut", [1, 16, 20, 39])
def test_two_halves_with_the_state_carried_equal_the_whole(backend, cut):
    inputs = draw(L=40, D=18)

    def halves(u, q, k, dt, bias, D, z, state):
        parts = []
        for a, b in ((0, cut), (cut, 40)):
            u_, q_, k_, dt_, z_ = (x[:, a:b] for x in (u, q, k, dt, z))
            out, state = longhorn_scan(u_, q_, k_, dt_, bias, D, z_, state, backend=backend)
            parts.append(out)
        return torch.cat(parts, dim=1), state

    whole = outputs_and_grads(
        functools.partial(longhorn_scan, backend=backend), inputs, torch.float64
    )
    for name, got in outputs_and_grads(halves, inputs, torch.float64).items():
        close(got, whole[name], 1e-12)


@torch.no_grad()
def test_decoding_token_by_token_equals_one_pass(backend):
    u, q, k, dt, bias, D, z, state = draw(B=3, L=12, D=21, N=19, dtype=torch.float32)
    out, final = longhorn_scan(u, q, k, dt, bias, D, z, state, backend=backend)
    steps = []
    for t in range(12):
        u_, q_, k_, dt_, z_ = (x[:, t : t + 1] for x in (u, q, k, dt, z))
        step, state = longhorn_scan(u_, q_, k_, dt_, bias, D, z_, state, backend=backend)
        steps.append(step)
    close(torch.cat(steps, dim=1), out, 1e-6)
    close(state, final, 1e-6)


def test_packed_sequences_are_as_exact_as_the_loop(backend):
    inputs = draw(B=1, L=117, D=18, segments=7)
    judge(inputs, backend, cu_seqlens=bounds(0, 1, 16, 17, 0, 33, 50))


def test_packed_sequences_equal_single_ones(backend):
    lengths = (5, 0, 16, 1, 40)
    u, q, k, dt, bias, D, z, state = draw(B=1, L=sum(lengths), D=18, segments=len(lengths))
    cu = bounds(*lengths)
    packed, finals = longhorn_scan(
        u, q, k, dt, bias, D, z, state, cu_seqlens=cu.int(), backend=backend
    )
    for s in range(len(lengths)):
        piece = slice(cu[s], cu[s + 1])
        u_, q_, k_, dt_, z_ = (x[:, piece] for x in (u, q, k, dt, z))
        out, final = longhorn_scan(u_, q_, k_, dt_, bias, D, z_, state[s : s + 1], backend=backend)
        if out.numel():
            same(packed[:, piece], out, backend)
        same(finals[s : s + 1], final, backend)


def test_an_empty_sequence_hands_its_state_on(backend):
    inputs = [x.requires_grad_() for x in draw(L=0, D=18)]
    out, final = longhorn_scan(*inputs, backend=backend)
    assert out.shape == (2, 0, 18)
    assert torch.equal(final, inputs[-1])
    grads = torch.autograd.grad(final.square().sum(), inputs, materialize_grads=True)
    assert torch.equal(grads[-1], 2 * inputs[-1])
    assert all(g.abs().sum() == 0 for g in grads[:-1])


def test_the_order_of_a_batch_is_irrelevant(backend):
    inputs = draw(B=3, L=21, D=18, dtype=torch.float32)
    order = torch.tensor([2, 0, 1])
    shuffled = [x if x.dim() == 1 else x[order] for x in inputs]
    for got, expected in zip(
        longhorn_scan(*shuffled, backend=backend),
        longhorn_scan(*inputs, backend=backend),
        strict=True,
    ):
        same(got, expected[order], backend)


def test_nothing_looks_ahead(backend):
    inputs = draw(L=40, D=18)
    disturbed = [x.clone() for x in inputs]
    for x in (*disturbed[:4], disturbed[6]):
        x[:, 23] += 1
    out, changed = (longhorn_scan(*x, backend=backend)[0] for x in (inputs, disturbed))
    assert torch.equal(out[:, :23], changed[:, :23])
    assert not torch.equal(out[:, 23:], changed[:, 23:])


def test_strided_inputs_give_the_same_results(backend):
    inputs = draw(L=20, D=18, dtype=torch.float32)
    strided = []
    for x in inputs:
        roomy = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"))
        strided.append(roomy[..., 1 : x.shape[-1] + 1].copy_(x))
    strided[1] = inputs[1].transpose(1, 2).contiguous().transpose(1, 2)  # columns apart
    assert not any(x.is_contiguous() for x in strided if x.dim() > 1)
    results = []
    for tensors in (inputs, strided):
        leaves = [x.requires_grad_() for x in tensors]
        out, final = longhorn_scan(*leaves, backend=backend)
        loss = out.square().sum() + final.square().sum()
        results.append((out, final, *torch.autograd.grad(loss, leaves)))
    for expected, got in zip(*results, strict=True):
        same(got, expected, backend)


# --- memory -----------------------------------------------------------------------------------


def saved_numbers(backend, states, batch=3, length=200, width=40):
    """Return how many numbers autograd keeps besides the inputs."""
    inputs = [x.requires_grad_() for x in draw(batch, length, width, states)]
    own = {x.untyped_storage().data_ptr() for x in inputs}
    kept = {}

    def pack(x):
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        longhorn_scan(*inputs, backend=backend)
    return sum(kept.values())


@pytest.mark.parametrize("states", [1, 16, 17, 128, 300])
def test_training_keeps_at_most_one_activation_and_a_state_a_sequence(backend, states):
    kept = saved_numbers(backend, states)
    assert 0 < kept <= 3 * 200 * 40 + 3 * 40 * states


def peak_numbers(backend, states, length, path, width=512):
    """Return the most float32 numbers that a forward and backward hold at once."""
    inputs = [x.requires_grad_() for x in draw(1, length, width, states, dtype=torch.float32)]
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        longhorn_scan(*inputs, backend=backend)[0].sum().backward()
    profiler.export_chrome_trace(str(path))
    events = [x for x in json.loads(path.read_text())["traceEvents"] if x["name"] == "[memory]"]
    changes = [x["args"]["Bytes"] for x in sorted(events, key=lambda x: x["ts"])]
    assert changes
    return max(accumulate(changes)) / 4


def growth(backend, path):
    """Return the numbers that a token costs more with 128 states than with 16."""
    small, large = (
        (peak_numbers(backend, n, 256, path) - peak_numbers(backend, n, 128, path)) / 128
        for n in (16, 128)
    )
    return large - small


# keys, queries, their gradients and four partial sums of both: in [T, N], not in [T, D, N]
ALLOWED = 12 * (128 - 16)


def test_peak_memory_has_no_term_in_tokens_times_channels_times_states(backend, tmp_path):
    assert growth(backend, tmp_path / "trace.json") <= ALLOWED


@pytest.mark.parametrize("scheme", ["a state per chunk", "a partial sum per block"])
def test_the_memory_check_notices_such_a_term(monkeypatch, tmp_path, scheme):
    if scheme == "a state per chunk":
        for module in (scan, scan_cpu):
            monkeypatch.setattr(module, "interval", lambda states, chunk: chunk)
    else:
        monkeypatch.setattr(scan_cpu, "parts_of", lambda blocks, width, states: blocks)
    assert growth("cpu", tmp_path / "trace.json") > 1.4 * ALLOWED


# --- determinism ------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_any_number_of_threads_gives_the_same_bits(packed):
    options = {"cu_seqlens": bounds(100, 1, 0, 199)} if packed else {}
    inputs = draw(B=1 if packed else 2, L=300, D=200, N=16, segments=4 if packed else None)
    op = functools.partial(longhorn_scan, backend="cpu", **options)
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 3):
            torch.set_num_threads(count)
            results.append(outputs_and_grads(op, inputs, torch.float32))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for name, expected in results[0].items():
            assert torch.equal(other[name], expected), name


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


def test_nan_and_infinity_keep_their_meaning(backend):
    inputs = draw(L=20, D=18, dtype=torch.float32)
    for n in (0, 1, 2, 3, 6):
        spoiled = [x.clone() for x in inputs]
        spoiled[n][0, 9, 3] = float("nan")
        out, _ = longhorn_scan(*spoiled, backend=backend)
        assert out[0, :9].isfinite().all()
        assert out[0, 9, 3].isnan()
        assert out[1].isfinite().all()
    spoiled = [x.clone() for x in inputs]
    spoiled[0][0, 9, 3] = float("inf")
    assert not longhorn_scan(*spoiled, backend=backend)[0][0, 9, 3].isfinite()


# --- torch.library and torch.compile ----------------------------------------------------------


def test_compiled_functions_have_no_graph_break_and_the_same_results(backend):
    inputs = draw(L=20, D=6, N=3, dtype=torch.float32)

    def layer(u, *rest):
        out, final = longhorn_scan(torch.tanh(u), *rest, backend=backend)
        return torch.sin(out), final

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = outputs_and_grads(layer, inputs, torch.float32)
    for name, got in outputs_and_grads(compiled, inputs, torch.float32).items():
        close(got, expected[name], 1e-6)
    with torch.no_grad():
        close(compiled(*inputs)[0], layer(*inputs)[0], 1e-6)


def test_use_backend_redirects_auto(backend):
    inputs = draw(dtype=torch.float32)
    with use_backend(backend):
        longhorn_scan(*inputs)
    assert last_backend("longhorn_scan") == backend


# --- bad input --------------------------------------------------------------------------------


def change(name, value):
    def make(inputs):
        named = dict(zip(NAMES, inputs, strict=True))
        return named | {name: value(named[name]) if callable(value) else value}

    return make


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (change("u", [1.0]), TypeError, "u must be a tensor .*got list"),
        (change("u", lambda x: x[0]), ValueError, r"u must have shape \[B, L, D\]"),
        (change("u", lambda x: x.int()), TypeError, "u must be floating point, got torch.int32"),
        (change("q", lambda x: x[..., :2]), ValueError, r"q must have shape .*got \[2, 9, 2\]"),
        (change("k", lambda x: x[..., :0]), ValueError, "k must have at least one state column"),
        (change("k", lambda x: x[:, 1:]), ValueError, r"k must have shape .*got \[2, 8, 4\]"),
        (change("dt", lambda x: x[:1]), ValueError, r"dt must have shape .*got \[1, 9, 5\]"),
        (change("dt", lambda x: x.to("meta")), ValueError, "dt must be on cpu, got meta"),
        (change("dt_bias", lambda x: x[1:]), ValueError, r"dt_bias must have shape \[D\] = \[5\]"),
        (change("D", lambda x: x.long()), TypeError, "D must be floating point"),
        (change("z", 3), TypeError, "z must be a tensor .*got int"),
        (
            change("initial_state", lambda x: x[:1]),
            ValueError,
            r"initial_state must have shape \[B, D, N\] = \[2, 5, 4\], got \[1, 5, 4\]",
        ),
        (
            change("initial_state", lambda x: x.transpose(1, 2)),
            ValueError,
            r"initial_state must have shape",
        ),
    ],
)
def test_wrong_tensors_are_named(make, error, message):
    with pytest.raises(error, match=f"longhorn_scan: {message}"):
        longhorn_scan(**make(draw()))


@pytest.mark.parametrize(
    ("cu_seqlens", "error", "message"),
    [
        ([0, 9], TypeError, "int32 or int64"),
        (torch.tensor([0.0, 9.0]), TypeError, "int32 or int64"),
        (torch.tensor([0]), ValueError, r"\[S \+ 1\]"),
        (torch.tensor([[0, 9]]), ValueError, r"\[S \+ 1\]"),
        (torch.tensor([1, 9]), ValueError, "rise from 0 to L = 9"),
        (torch.tensor([0, 8]), ValueError, "rise from 0 to L = 9"),
        (torch.tensor([0, 6, 4, 9]), ValueError, "rise from 0 to L = 9"),
        (torch.tensor([0, 9], device="meta"), ValueError, "cu_seqlens must be on cpu"),
    ],
)
def test_wrong_boundaries_are_refused(cu_seqlens, error, message):
    with pytest.raises(error, match=message):
        longhorn_scan(*draw(B=1)[:4], cu_seqlens=cu_seqlens)


def test_packed_sequences_need_a_single_row_and_one_state_each():
    with pytest.raises(ValueError, match="B = 1, got B = 2"):
        longhorn_scan(*draw()[:4], cu_seqlens=torch.tensor([0, 9]))
    with pytest.raises(ValueError, match=r"\[S, D, N\] = \[2, 5, 4\], got \[1, 5, 4\]"):
        longhorn_scan(*draw(B=1), cu_seqlens=torch.tensor([0, 4, 9]))


def test_unknown_and_impossible_choices_are_refused():
    inputs = draw()
    with pytest.raises(ValueError, match=r"backend must be one of .*got 'cuda'"):
        longhorn_scan(*inputs, backend="cuda")
    with pytest.raises(ValueError, match="transition must be 'diagonal' or 'exact', got 'full'"):
        longhorn_scan(*inputs, transition="full")
    with pytest.raises(ValueError, match="exists only as a reference, got backend='cpu'"):
        longhorn_scan(*inputs, transition="exact", backend="cpu")
    with pytest.raises(ValueError, match="needs CUDA tensors, got cpu"):
        longhorn_scan(*inputs, backend="triton")


def test_the_reference_runs_when_asked_for_by_name():
    longhorn_scan(*draw(), backend="reference")
    assert last_backend("longhorn_scan") == "reference"
    assert reference.longhorn_scan(*draw())[0].shape == (2, 9, 5)
