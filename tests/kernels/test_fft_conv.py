"""fft_conv: torch's FFTs against the sum over taps."""

import functools
from itertools import pairwise

import pytest
import torch
from tests.kernels import contracts
from tests.kernels.memory import peak_bytes

from ssmzoo.testing.accuracy import outputs_and_grads
from ssmzoo_kernels import fft_conv, last_backend, use_backend
from ssmzoo_kernels.fft_conv import circle, cpu, eager, pieces
from ssmzoo_kernels.segments import by_magnitude


class TestFftConv(contracts.FftConv):
    """Every check of the contract."""


NAMES = ("u", "kernel", "D", "initial_state", "future_kernel")


def draw(B=2, L=9, D=5, K=7, F=4, segments=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, L, D), (D, K), (D,), (segments or B, K - 1, D), (D, F))
    tensors = [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]
    return [x.to(dtype) for x in tensors]


def run(u, kernel, D, initial_state, future_kernel, **options):
    y, state = fft_conv(
        u, kernel, D, initial_state, future_kernel=future_kernel, output_final_state=True, **options
    )
    return y, state


def bounds(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def close(got, expected, tolerance):
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    if expected.numel():
        error = (got.double() - expected.double()).abs().max()
        assert error <= tolerance * expected.double().abs().max(), f"error {error:.2e}"


def judge(inputs, backend, dtype=torch.float64, tolerance=1e-12, **options):
    """Compare results and gradients with the float64 sum of the same inputs."""
    inputs = [None if x is None else x.to(dtype) for x in inputs]
    known = functools.partial(run, backend="reference", **options)
    found = outputs_and_grads(functools.partial(run, backend=backend, **options), inputs, dtype)
    assert last_backend("fft_conv") == backend
    for name, expected in outputs_and_grads(known, inputs, torch.float64).items():
        assert found[name].dtype == dtype
        close(found[name].double(), expected, tolerance)


@pytest.mark.parametrize("length", [1, 2, 64, 65])
@pytest.mark.parametrize("taps", [1, 7, 100])
def test_any_length_and_filter_equal_the_sum(backend, length, taps):
    whole = draw(L=length, K=taps, D=3)
    judge(whole, backend)
    judge([*whole[:2], None, None, None], backend)


@pytest.mark.parametrize("ahead", [0, 1, 8, 9, 40])
def test_the_future_filter_sees_only_later_inputs_of_its_sequence(backend, ahead):
    judge(draw(F=ahead), backend)
    judge(draw(F=ahead, segments=3, B=1, L=11), backend, cu_seqlens=bounds(1, 8, 2))


@pytest.mark.parametrize("width", [1, 15, 16, 17, 40])
def test_blocks_of_channels_and_rows_change_nothing(backend, width, monkeypatch):
    inputs = draw(B=3, L=20, D=width)
    whole = outputs_and_grads(functools.partial(run, backend=backend), inputs, torch.float64)
    monkeypatch.setitem(eager.BLOCK, "cpu", 1)
    monkeypatch.setattr(cpu, "BLOCK", 1)
    rooms = {"eager": eager._Room, "cpu": cpu._Room}
    if backend in rooms:
        room = rooms[backend](*(inputs[i] for i in (0, 1, 3, 4)), 1 << 28)
        assert (room.channels, room.rows) == (min(16, width), 1)
    for name, got in outputs_and_grads(
        functools.partial(run, backend=backend), inputs, torch.float64
    ).items():
        close(got, whole[name], 1e-13)


def test_blocks_and_threads_change_no_bit(monkeypatch):
    inputs = draw(B=3, L=200, D=50, K=90, dtype=torch.float32)
    op = functools.partial(run, backend="cpu")
    whole = outputs_and_grads(op, inputs, torch.float32)
    threads = torch.get_num_threads()
    try:
        for block, count in ((1, 1), (1 << 14, 1), (1 << 14, 2), (1 << 20, 2)):
            monkeypatch.setattr(cpu, "BLOCK", block)
            torch.set_num_threads(count)
            for name, got in outputs_and_grads(op, inputs, torch.float32).items():
                assert torch.equal(got, whole[name]), name
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("cut", [0, 1, 17])
@pytest.mark.parametrize("taps", [1, 4, 60])
def test_two_halves_with_the_state_carried_equal_the_whole(backend, cut, taps):
    inputs = [*draw(L=24, K=taps)[:4], None]

    def halves(u, kernel, D, state, _):
        first, state = run(u[:, :cut], kernel, D, state, None, backend=backend)
        second, state = run(u[:, cut:], kernel, D, state, None, backend=backend)
        return torch.cat([first, second], dim=1), state

    kept = [x for x in inputs if x is not None]
    whole = outputs_and_grads(lambda *x: run(*x, None, backend=backend), kept, torch.float64)
    for name, got in outputs_and_grads(lambda *x: halves(*x, None), kept, torch.float64).items():
        close(got, whole[name], 1e-12)


TIGHT = 1  # bytes of workspace: the smallest pieces there are, 64 places


@pytest.fixture
def cuts(monkeypatch):
    """How each convolution was cut; None if it was not."""
    found, of = [], pieces.Cut.of
    monkeypatch.setattr(pieces.Cut, "of", lambda *x: found.append(of(*x)) or found[-1])
    return found


@pytest.mark.parametrize(("length", "taps"), [(130, 130), (200, 7), (65, 300), (300, 32), (97, 1)])
@pytest.mark.parametrize("ahead", [0, 5, 200])
def test_pieces_equal_the_sum(backend, length, taps, ahead, cuts):
    inputs = draw(L=length, K=taps, D=3, F=ahead)
    for given in (inputs, [*inputs[:3], None, inputs[4]], [*inputs[:2], None, None, None]):
        cuts.clear()
        judge(given, backend, workspace=TIGHT)
        assert len(cuts) == 2  # forward and backward
        assert all(cut.span < length or cut.block < taps for cut in cuts)


def test_pieces_take_turns_at_channels_rows_and_packed_sequences(backend, cuts):
    inputs = draw(B=3, L=150, D=37, K=90, F=20)
    judge(inputs, backend, workspace=TIGHT)
    assert {(cut.channels, cut.rows) for cut in cuts} == {(16, 1)}
    cuts.clear()
    lengths = (70, 0, 200, 3, 129)
    packed = draw(B=1, L=sum(lengths), D=3, K=20, F=90, segments=len(lengths))
    judge(packed, backend, workspace=TIGHT, cu_seqlens=bounds(*lengths))
    assert any(cuts)
    assert not all(cuts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_round_no_worse_than_whole_sequences(backend, dtype):
    # sums of pieces are float32: each has the budget of its own transforms, of 7 levels
    inputs = draw(L=1000, K=700, D=3, F=90)
    eps = torch.finfo(torch.float32).eps
    tolerance = 3 * 11 * eps + (0 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps)
    judge(inputs, backend, dtype, tolerance, workspace=TIGHT)


def test_pieces_without_their_past_are_noticed(backend, monkeypatch):
    seen = pieces._Inputs.seen
    forget = lambda *x: None if seen(*x) is None else (seen(*x)[0], None)  # noqa: E731
    monkeypatch.setattr(pieces._Inputs, "seen", forget)
    with pytest.raises(AssertionError, match="error"):
        judge(draw(L=200, K=20), backend, workspace=TIGHT)


@pytest.mark.parametrize("taps", [1 << 11, 200])
def test_memory_falls_with_the_workspace_and_stays_within_it(backend, taps, cuts):
    length, width = 1 << 11, 16
    u, kernel, D, *_ = draw(B=1, L=length, D=width, K=taps, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in (u, kernel, D)]
    grad = torch.randn(1, length, width)
    results = u.numel() * u.element_size() + kernel.numel() * kernel.element_size()
    peaks = []
    for workspace in (None, 1 << 19, 1 << 18):
        cuts.clear()
        y = fft_conv(*leaves, backend=backend, workspace=workspace)[0]
        peaks.append(
            (
                peak_bytes(lambda w=workspace: fft_conv(*leaves, backend=backend, workspace=w)),
                peak_bytes(lambda y=y: torch.autograd.grad(y, leaves, grad, retain_graph=True)),
            )
        )
        assert all((cut is None) == (workspace is None) for cut in cuts)
        if workspace is not None:
            assert max(peaks[-1]) <= workspace + results
    for larger, smaller in pairwise(peaks):
        assert smaller[0] < larger[0]
        assert smaller[1] < larger[1]


def test_sequences_of_131072_tokens_and_taps_are_whole_by_default():
    for length, whole in ((1 << 17, True), (1 << 18, False)):
        u = torch.empty(1, length, 64, device="meta")
        kernel = torch.empty(64, length, device="meta")
        cut = pieces.Cut.of(u, kernel, None, None, pieces.default_workspace(u))
        assert (cut is None) == whole


def test_a_ragged_batch_runs_in_few_groups_with_less_filling_than_tokens(backend):
    lengths = [1 + 7 * i % 50 for i in range(50)]
    assert len(set(lengths)) == 50
    groups = by_magnitude(bounds(*lengths))
    assert len(groups) <= 6
    assert sum(group.places.numel() for group in groups) < 2 * sum(lengths)
    judge(draw(B=1, L=sum(lengths), D=2, segments=50), backend, cu_seqlens=bounds(*lengths))


def test_filler_of_a_group_does_not_leak_into_results(backend):
    u, kernel, D, _, future = draw(B=1, L=15, segments=3)
    wild = torch.full_like(u[:, :1], float("inf"))
    # places past a segment's end are read from the row's first token
    y, _ = run(
        torch.cat([wild, u], dim=1), kernel, D, None, future,
        cu_seqlens=bounds(1, 7, 3, 5), backend=backend,
    )  # fmt: skip
    expected, _ = run(u, kernel, D, None, future, cu_seqlens=bounds(7, 3, 5), backend=backend)
    close(y[:, 1:], expected, 1e-12)


def test_the_kept_state_is_the_last_inputs_bit_for_bit(backend):
    u, kernel, D, state, _ = draw(L=4, K=7, dtype=torch.float32)
    _, final = run(u, kernel, D, state, None, backend=backend)
    assert torch.equal(final, torch.cat([state[:, 4:], u], dim=1))
    long = torch.randn(2, 30, 5)
    _, final = run(long, kernel, D, None, None, backend=backend)
    long.zero_()  # the caller's memory is not the state's
    assert final.abs().min() > 0
    assert fft_conv(u, kernel, backend=backend)[1] is None


def test_a_later_input_changes_earlier_outputs_by_rounding_only(backend):
    u, kernel, D, *_ = draw(L=50, K=50, dtype=torch.float32)
    changed = u.clone()
    changed[:, -1] += 1.0
    y, other = (fft_conv(x, kernel, D, backend=backend)[0] for x in (u, changed))
    # each of the three transforms of size 100 may leave some roundings of its largest entry
    allowed = 3 * 7 * torch.finfo(torch.float32).eps * y.abs().max()
    assert (y - other)[:, :-1].abs().max() <= allowed
    assert (y - other)[:, -1].abs().max() > 1e-3


def test_an_impulse_in_the_past_never_meets_the_future_filter(backend):
    u = torch.zeros(1, 12, 1, dtype=torch.float64)
    u[0, 4] = 1.0
    future = torch.arange(1.0, 9.0, dtype=torch.float64).view(1, 8)
    y, _ = fft_conv(u, torch.zeros(1, 3).double(), future_kernel=future, backend=backend)
    expected = torch.tensor([4.0, 3, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    close(y.flatten(), expected, 1e-13)


def test_a_circle_too_small_is_found_out(backend, monkeypatch):
    for module in (eager, cpu):
        monkeypatch.setattr(module, "good_size", lambda least: circle.good_size(least) - 2)
    with pytest.raises(AssertionError, match="error"):
        judge(draw(L=24, K=25, F=0), backend)


def test_good_sizes_are_even_small_and_have_small_factors():
    for least in (1, 2, 3, 511, 512, 513, 1999, 4095, 16383 * 2, 31999):
        size = circle.good_size(least)
        assert size % 2 == 0
        assert max(2, least) <= size <= max(2, 1.16 * least + 1)
        for prime in (2, 3, 5):
            while size % prime == 0:
                size //= prime
        assert size == 1


def test_saved_for_the_backward_are_inputs_and_kernels_only(backend):
    saved = []
    inputs = [x.requires_grad_() for x in draw(B=2, L=64, K=64, D=8)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        fft_conv(*inputs[:3], backend=backend)
    assert sum(x.numel() for x in saved) == sum(x.numel() for x in inputs[:3])


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_compiled_backward_keeps_every_conjugate(backend, packed, compiler):
    inputs = draw(B=1, L=20, D=6, segments=3, dtype=torch.float32)
    options = {"cu_seqlens": bounds(12, 0, 8)} if packed else {}
    if not packed:
        inputs[3] = inputs[3][:1]

    # a node of its own: a lazy conjugate inside it would be forgotten
    def adjoint(grad, *rest):
        offsets = options.get("cu_seqlens")
        return torch.ops.ssmzoo.fft_conv_backward(grad * 1, *rest, offsets, 1 << 28, name)

    name = "eager" if backend == "reference" else backend
    known = adjoint(inputs[0], *inputs)
    compiled = torch.compile(adjoint, fullgraph=True, backend=compiler)
    for got, wanted in zip(compiled(inputs[0], *inputs), known, strict=True):
        close(got, wanted, 1e-6)


def test_a_missing_backend_is_refused_by_name_and_ignored_in_use_backend():
    u, kernel, *_ = draw()
    with pytest.raises(ValueError, match=r"fft_conv: backend must be .*got 'triton'"):
        fft_conv(u, kernel, backend="triton")
    with use_backend("triton"):
        fft_conv(u, kernel)
    assert last_backend("fft_conv") == "cpu"
    with use_backend("eager"):
        fft_conv(u, kernel)
    assert last_backend("fft_conv") == "eager"


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("kernel", torch.randn(5, 0), ValueError, "at least one tap"),
        ("workspace", 0, ValueError, "workspace must be at least 1, got 0"),
        ("workspace", 1e6, TypeError, "workspace must be an int, got float"),
    ],
)
def test_wrong_arguments_are_named(name, value, error, message):
    arguments = dict(zip(NAMES, draw(), strict=True)) | {name: value}
    with pytest.raises(error, match=f"fft_conv.*{message}"):
        fft_conv(**arguments)
