"""selective_scan: every fast backend against the loop over time, and transformers' own Mamba."""

import functools
import json
import math
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

from ssmzoo.testing.accuracy import assert_as_accurate, outputs_and_grads
from ssmzoo_kernels import last_backend, scan, selective_scan, use_backend
from ssmzoo_kernels.scan import cpu as scan_cpu
from ssmzoo_kernels.scan import eager as scan_eager
from ssmzoo_kernels.scan import interval
from ssmzoo_kernels.selective_scan import reference

NAMES = ("u", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")
ROWS = ("u", "dt", "B", "C", "z")  # what has a row a token
FIRST_OPTIONAL = 5


@pytest.fixture(params=["euler", "zoh"])
def discretization(request):
    return request.param


def draw(B=2, L=9, D=5, N=4, segments=None, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    wide, narrow = (B, L, D), (B, L, N)
    shapes = (wide, wide, (D, N), narrow, narrow, (D,), wide, (D,), (segments or B, D, N))
    tensors = [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]
    tensors[2] = -tensors[2].exp()
    return [x.to(dtype) for x in tensors]


def bounds(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def rows(inputs, piece):
    """The inputs of some tokens; what has no row a token stays."""
    return [x[:, piece] if n in ROWS else x for n, x in zip(NAMES, inputs, strict=True)]


def close(got, expected, tolerance):
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    error = (got.double() - expected.double()).abs().max()
    assert error <= tolerance * expected.double().abs().max(), f"error {error:.2e}"


def same(got, expected, backend):
    """Bit for bit in C; torch's own sums depend on how memory is aligned."""
    close(got, expected, 0 if backend == "cpu" else 1e-6)


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


# --- accuracy: outputs, final state, all gradients ------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 63, 64, 65])
def test_any_length_is_as_exact_as_the_loop(backend, discretization, length):
    judge(draw(L=length, D=20), backend, discretization=discretization)
    assert last_backend("selective_scan") == backend


@pytest.mark.parametrize("states", [1, 3, 16, 17])
@pytest.mark.parametrize("width", [1, 16, 130])
def test_any_width_and_state_size_is_as_exact_as_the_loop(backend, discretization, width, states):
    judge(draw(L=18, D=width, N=states), backend, discretization=discretization)


@pytest.mark.parametrize("packed", [False, True])
def test_intervals_of_several_chunks_are_as_exact_as_the_loop(backend, discretization, packed):
    assert interval(40, {"cpu": scan_cpu, "eager": scan_eager}[backend].CHUNK) == 48
    options = {"cu_seqlens": bounds(0, 48, 57, 0, 15, 40)} if packed else {}
    inputs = draw(B=1, L=160, D=20, N=40, segments=6 if packed else None)
    judge(inputs, backend, discretization=discretization, **options)


@pytest.mark.parametrize("width", [320, 600])
def test_blocks_that_take_turns_at_a_partial_sum_are_as_exact_as_the_loop(width):
    judge(draw(B=1, L=20, D=width, N=width // 4), "cpu")


def test_segments_that_take_turns_are_as_exact_as_the_loop(discretization):
    lengths = [5] * 40
    inputs = draw(B=1, L=sum(lengths), D=6, N=5, segments=40)
    assert len(list(scan_eager.groups(bounds(*lengths), 5))) > 1
    options = {"cu_seqlens": bounds(*lengths), "discretization": discretization}
    judge(inputs, "eager", **options)


@pytest.mark.parametrize(("length", "width", "states"), [(1, 5, 1), (33, 37, 3), (40, 20, 40)])
def test_float64_equals_the_loop(backend, discretization, length, width, states):
    inputs = draw(L=length, D=width, N=states)
    judge_float64(inputs, backend, discretization=discretization)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_as_exact_as_the_loop(backend, discretization, dtype):
    inputs = draw(L=40, D=33)
    judge(inputs, backend, dtype, discretization=discretization)
    final = selective_scan(*[x.to(dtype) for x in inputs], backend=backend)[1]
    assert final.dtype == torch.float32


@pytest.mark.parametrize("absent", [*NAMES[FIRST_OPTIONAL:], "all"])
def test_optional_inputs_may_be_absent(backend, absent):
    inputs = draw(L=20, D=18)
    dropped = [i >= FIRST_OPTIONAL and absent in (name, "all") for i, name in enumerate(NAMES)]
    judge([None if drop else x for drop, x in zip(dropped, inputs, strict=True)], backend)


def test_inputs_of_mixed_dtypes_as_under_autocast(backend, discretization):
    u, dt, A, B, C, D, z, bias, state = draw(L=40, D=33)
    inputs = [u.bfloat16(), dt.bfloat16(), A.float(), B.half(), C, D.float(), z.half(), bias]
    leaves = [x.requires_grad_() for x in (*inputs, state.float())]
    results = {}
    for name in (backend, "reference"):
        out, final = selective_scan(*leaves, discretization=discretization, backend=name)
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
            out, final = selective_scan(*inputs, backend=backend)
            results.append((out, final, *torch.autograd.grad(out.sum() + final.sum(), inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_wrong_op_fails_the_accuracy_check():
    inputs = draw(L=33, D=17)
    known = functools.partial(selective_scan, backend="reference")

    def other_rule(*x):
        return selective_scan(*x, discretization="zoh", backend="reference")

    def wrong_decay(u, dt, A, *rest):
        return known(u, dt, A * (1 + 1e-5), *rest)

    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * (1 + 1e-4)

    def wrong_gradient(u, dt, A, *rest):
        return known(u, dt, Half.apply(A), *rest)

    assert_as_accurate(known, known, inputs, torch.float32)
    for wrong, name in (
        (other_rule, "output 0"),
        (wrong_decay, "output 0"),
        (wrong_gradient, "gradient of input 2"),
    ):
        with pytest.raises(AssertionError, match=name):
            assert_as_accurate(wrong, known, inputs, torch.float32)


def test_gradients_pass_gradcheck(backend, discretization):
    inputs = draw(B=1, L=18, D=3, N=2)
    inputs[2][1] = -1e-3  # where the hold goes by its series
    op = functools.partial(selective_scan, discretization=discretization, backend=backend)
    assert torch.autograd.gradcheck(op, [x.requires_grad_() for x in inputs])


def test_one_output_alone_has_gradients(backend, discretization):
    inputs = [x.requires_grad_() for x in draw(L=18)]
    for pick in (0, 1):
        got, expected = (
            torch.autograd.grad(
                selective_scan(*inputs, discretization=discretization, backend=name)[pick]
                .square()
                .sum(),
                inputs,
                materialize_grads=True,
            )
            for name in (backend, "reference")
        )
        for a, b in zip(got, expected, strict=True):
            close(a, b, 1e-12)


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


# --- sequences: halves, packed rows, batches -------------------------------------------------


@pytest.mark.parametrize("cuts", [(1,), (16,), (20,), (3, 19, 39)])
def test_pieces_with_the_state_carried_equal_the_whole(backend, discretization, cuts):
    inputs = draw(L=40, D=18)
    op = functools.partial(selective_scan, discretization=discretization, backend=backend)

    def pieces(*inputs):
        *rest, state = inputs
        outputs = []
        for a, b in zip((0, *cuts), (*cuts, 40), strict=True):
            out, state = op(*rows([*rest, state], slice(a, b)))
            outputs.append(out)
        return torch.cat(outputs, dim=1), state

    whole = outputs_and_grads(op, inputs, torch.float64)
    for name, got in outputs_and_grads(pieces, inputs, torch.float64).items():
        close(got, whole[name], 1e-12)


@torch.no_grad()
def test_decoding_token_by_token_equals_one_pass(backend, discretization):
    inputs = draw(B=3, L=12, D=21, N=19, dtype=torch.float32)
    op = functools.partial(selective_scan, discretization=discretization, backend=backend)
    out, final = op(*inputs)
    steps = []
    for t in range(12):
        step, inputs[-1] = op(*rows(inputs, slice(t, t + 1)))
        steps.append(step)
    close(torch.cat(steps, dim=1), out, 1e-6)
    close(inputs[-1], final, 1e-6)


def test_packed_sequences_are_as_exact_as_the_loop(backend, discretization):
    inputs = draw(B=1, L=117, D=18, segments=7)
    options = {"cu_seqlens": bounds(0, 1, 16, 17, 0, 33, 50), "discretization": discretization}
    judge(inputs, backend, **options)


def test_packed_sequences_equal_single_ones(backend, discretization):
    lengths = (5, 0, 16, 1, 40)
    inputs = draw(B=1, L=sum(lengths), D=18, segments=len(lengths))
    cu = bounds(*lengths)
    op = functools.partial(selective_scan, discretization=discretization, backend=backend)
    packed, finals = op(*inputs, cu_seqlens=cu.int())
    for s in range(len(lengths)):
        piece = slice(cu[s], cu[s + 1])
        out, final = op(*rows([*inputs[:-1], inputs[-1][s : s + 1]], piece))
        if out.numel():
            same(packed[:, piece], out, backend)
        same(finals[s : s + 1], final, backend)


def test_an_empty_sequence_hands_its_state_on(backend):
    inputs = [x.requires_grad_() for x in draw(L=0, D=18)]
    out, final = selective_scan(*inputs, backend=backend)
    assert out.shape == (2, 0, 18)
    assert torch.equal(final, inputs[-1])
    grads = torch.autograd.grad(final.square().sum(), inputs, materialize_grads=True)
    assert torch.equal(grads[-1], 2 * inputs[-1])
    assert all(g.abs().sum() == 0 for g in grads[:-1])


def test_the_order_of_a_batch_is_irrelevant(backend):
    inputs = draw(B=3, L=21, D=18, dtype=torch.float32)
    order = torch.tensor([2, 0, 1])
    shuffled = [x[order] if x.dim() == 3 else x for x in inputs]
    for got, expected in zip(
        selective_scan(*shuffled, backend=backend),
        selective_scan(*inputs, backend=backend),
        strict=True,
    ):
        same(got, expected[order], backend)


def test_nothing_looks_ahead(backend):
    inputs = draw(L=40, D=18)
    disturbed = [x.clone() for x in inputs]
    for x in rows(disturbed, slice(23, 24)):
        if x.dim() == 3 and x.shape[1] == 1:
            x += 1
    out, changed = (selective_scan(*x, backend=backend)[0] for x in (inputs, disturbed))
    assert torch.equal(out[:, :23], changed[:, :23])
    assert not torch.equal(out[:, 23:], changed[:, 23:])


def test_strided_inputs_give_the_same_results(backend):
    inputs = draw(L=20, D=18, dtype=torch.float32)
    strided = []
    for x in inputs:
        roomy = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"))
        strided.append(roomy[..., 1 : x.shape[-1] + 1].copy_(x))
    strided[3] = inputs[3].transpose(1, 2).contiguous().transpose(1, 2)  # columns apart
    strided[2] = inputs[2].T.contiguous().T
    assert not any(x.is_contiguous() for x in strided if x.dim() > 1)
    results = []
    for tensors in (inputs, strided):
        leaves = [x.requires_grad_() for x in tensors]
        out, final = selective_scan(*leaves, backend=backend)
        loss = out.square().sum() + final.square().sum()
        results.append((out, final, *torch.autograd.grad(loss, leaves)))
    for expected, got in zip(*results, strict=True):
        same(got, expected, backend)


# --- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("states", [1, 16, 17, 128, 300])
def test_training_keeps_at_most_one_activation_and_a_state_a_sequence(backend, states):
    inputs = [x.requires_grad_() for x in draw(3, 200, 40, states)]
    own = {x.untyped_storage().data_ptr() for x in inputs}
    kept = {}

    def pack(x):
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        selective_scan(*inputs, backend=backend)
    assert 0 < sum(kept.values()) <= 3 * 200 * 40 + 3 * 40 * states


def peak_numbers(backend, states, length, path, **options):
    """Return the most float32 numbers that a forward and backward hold at once."""
    inputs = [x.requires_grad_() for x in draw(1, length, 512, states, dtype=torch.float32)]
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        selective_scan(*inputs, backend=backend, **options)[0].sum().backward()
    profiler.export_chrome_trace(str(path))
    events = [x for x in json.loads(path.read_text())["traceEvents"] if x["name"] == "[memory]"]
    changes = [x["args"]["Bytes"] for x in sorted(events, key=lambda x: x["ts"])]
    assert changes
    return max(accumulate(changes)) / 4


def growth(backend, path, **options):
    """Return the numbers that a token costs more with 128 states than with 16."""
    small, large = (
        (
            peak_numbers(backend, n, 256, path, **options)
            - peak_numbers(backend, n, 128, path, **options)
        )
        / 128
        for n in (16, 128)
    )
    return large - small


# B, C, their gradients and four partial sums of both: in [T, N], not in [T, D, N]
ALLOWED = 12 * (128 - 16)


@pytest.mark.parametrize(
    ("backend", "discretization"), [("cpu", "euler"), ("cpu", "zoh"), ("eager", "euler")]
)
def test_peak_memory_has_no_term_in_tokens_times_channels_times_states(
    backend, discretization, tmp_path
):
    path = tmp_path / "trace.json"
    assert growth(backend, path, discretization=discretization) <= ALLOWED


def test_the_memory_check_notices_such_a_term(monkeypatch, tmp_path):
    for module in (scan, scan_cpu):
        monkeypatch.setattr(module, "interval", lambda states, chunk: chunk)
    assert growth("cpu", tmp_path / "trace.json") > 1.4 * ALLOWED


# --- determinism ------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_any_number_of_threads_gives_the_same_bits(discretization, packed):
    options = {"cu_seqlens": bounds(100, 1, 0, 199)} if packed else {}
    inputs = draw(B=1 if packed else 2, L=300, D=200, N=16, segments=4 if packed else None)
    op = functools.partial(selective_scan, backend="cpu", discretization=discretization, **options)
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


def test_nan_and_infinity_keep_their_meaning(backend, discretization):
    inputs = draw(L=20, D=18, dtype=torch.float32)
    op = functools.partial(selective_scan, discretization=discretization, backend=backend)
    for n in (0, 1, 3, 4, 6):
        spoiled = [x.clone() for x in inputs]
        spoiled[n][0, 9, 3] = float("nan")
        out, _ = op(*spoiled)
        assert out[0, :9].isfinite().all()
        assert out[0, 9, 3].isnan()
        assert out[1].isfinite().all()
    spoiled = [x.clone() for x in inputs]
    spoiled[2][3, 1] = float("nan")
    out, _ = op(*spoiled)
    assert out[:, :, 3].isnan().all()
    assert out[:, :, :3].isfinite().all()
    spoiled = [x.clone() for x in inputs]
    spoiled[0][0, 9, 3] = float("inf")
    assert not op(*spoiled)[0][0, 9, 3].isfinite()


# --- torch.library and torch.compile ----------------------------------------------------------


def test_compiled_functions_have_no_graph_break_and_the_same_results(backend):
    inputs = draw(L=20, D=6, N=3, dtype=torch.float32)

    def layer(u, *rest):
        out, final = selective_scan(torch.tanh(u), *rest, backend=backend)
        return torch.sin(out), final

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = outputs_and_grads(layer, inputs, torch.float32)
    for name, got in outputs_and_grads(compiled, inputs, torch.float32).items():
        close(got, expected[name], 1e-6)
    with torch.no_grad():
        close(compiled(*inputs)[0], layer(*inputs)[0], 1e-6)


def test_use_backend_redirects_auto(backend):
    with use_backend(backend):
        selective_scan(*draw(dtype=torch.float32))
    assert last_backend("selective_scan") == backend


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
        (change("dt", lambda x: x[:1]), ValueError, r"dt must have shape .*got \[1, 9, 5\]"),
        (change("dt", lambda x: x.to("meta")), ValueError, "dt must be on cpu, got meta"),
        (change("A", None), TypeError, r"A must be a tensor \[D, N\], got NoneType"),
        (change("A", lambda x: x[0]), ValueError, r"A must have shape \[D, N\], got \[4\]"),
        (change("A", lambda x: x.long()), TypeError, "A must be floating point"),
        (change("A", lambda x: x[:, :0]), ValueError, "A must have at least one state column"),
        (change("A", lambda x: x.T), ValueError, r"A must have shape .* = \[5, 5\], got \[4, 5\]"),
        (change("B", lambda x: x[:, 1:]), ValueError, r"B must have shape .*got \[2, 8, 4\]"),
        (change("C", lambda x: x[..., :2]), ValueError, r"C must have shape .*got \[2, 9, 2\]"),
        (change("D", lambda x: x.long()), TypeError, "D must be floating point"),
        (change("z", 3), TypeError, "z must be a tensor .*got int"),
        (change("dt_bias", lambda x: x[1:]), ValueError, r"dt_bias must have shape \[D\] = \[5\]"),
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
        (
            change("z", lambda x: x.to("meta")),
            ValueError,
            "z must be on cpu, got meta",
        ),
    ],
)
def test_wrong_tensors_are_named(make, error, message):
    with pytest.raises(error, match=f"selective_scan: {message}"):
        selective_scan(**make(draw()))


@pytest.mark.parametrize(
    ("cu_seqlens", "error", "message"),
    [
        ([0, 9], TypeError, "int32 or int64"),
        (torch.tensor([0.0, 9.0]), TypeError, "int32 or int64"),
        (torch.tensor([0]), ValueError, r"\[S \+ 1\]"),
        (torch.tensor([1, 9]), ValueError, "rise from 0 to L = 9"),
        (torch.tensor([0, 8]), ValueError, "rise from 0 to L = 9"),
        (torch.tensor([0, 6, 4, 9]), ValueError, "rise from 0 to L = 9"),
        (torch.tensor([0, 9], device="meta"), ValueError, "cu_seqlens must be on cpu"),
    ],
)
def test_wrong_boundaries_are_refused(cu_seqlens, error, message):
    with pytest.raises(error, match=message):
        selective_scan(*draw(B=1)[:5], cu_seqlens=cu_seqlens)


def test_packed_sequences_need_a_single_row_and_one_state_each():
    with pytest.raises(ValueError, match="B = 1, got B = 2"):
        selective_scan(*draw()[:5], cu_seqlens=torch.tensor([0, 9]))
    with pytest.raises(ValueError, match=r"\[S, D, N\] = \[2, 5, 4\], got \[1, 5, 4\]"):
        selective_scan(*draw(B=1), cu_seqlens=torch.tensor([0, 4, 9]))


def test_unknown_and_impossible_choices_are_refused():
    inputs = draw()
    with pytest.raises(ValueError, match=r"backend must be one of .*got 'cuda'"):
        selective_scan(*inputs, backend="cuda")
    with pytest.raises(ValueError, match="discretization must be 'euler' or 'zoh', got 'foh'"):
        selective_scan(*inputs, discretization="foh")
    with pytest.raises(ValueError, match="needs CUDA tensors, got cpu"):
        selective_scan(*inputs, backend="triton")


def test_the_reference_runs_when_asked_for_by_name():
    selective_scan(*draw(), backend="reference")
    assert last_backend("selective_scan") == "reference"
    assert reference.selective_scan(*draw())[0].shape == (2, 9, 5)
