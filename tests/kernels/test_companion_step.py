"""companion_step, _scan, _state and _response against the loop over tokens."""

import functools

import pytest
import torch
from tests.kernels import contracts
from tests.kernels.memory import saved_numbers

from ssmzoo.testing.accuracy import outputs_and_grads
from ssmzoo_kernels import (
    companion_response,
    companion_scan,
    companion_state,
    companion_step,
    fft_conv,
    inverse_series,
    last_backend,
    rational_kernel,
    use_backend,
)


class TestCompanionStep(contracts.CompanionStep):
    """Every check of the contract."""


ORDERS = [0, 1, 2, 3, 5, 16, 17, 33, 100]


def draw(order, batch=3, length=7, width=4, denominators=2, dtype=torch.float64):
    """Inputs [B, L, D], a state, stable denominators, numerators and gains."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    a = 2 * torch.rand(denominators, order, generator=generator, dtype=torch.float64) - 1
    drawn = {
        "u": normal(batch, length, width),
        "state": normal(batch, order, width),
        "a": a / max(order, 1),
        "b": normal(width, order),
        "d": normal(width),
        "ring": normal(batch, order + 1, width),
    }
    return {name: x.to(dtype) for name, x in drawn.items()}


def unrolled(ring, position):
    """The states in rings, newest first."""
    rows = zip(ring, position, strict=True)
    return torch.stack([x.roll(-int(p) % len(x), 0)[:-1] for x, p in rows])


def one_place_more(state):
    """A ring that begins at position 0; what lies in the free place must not matter."""
    return torch.cat([state, torch.full_like(state[:, :1], 1e6)], dim=1)


def close(got, expected, tolerance):
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    scale = expected.double().abs().max() if expected.numel() else 1.0
    error = (got.double() - expected.double()).abs().max() if got.numel() else 0.0
    assert error <= tolerance * scale, f"error {error:.2e}, scale {scale:.2e}"


def judge(op, names, inputs, dtype, length):
    """Hold outputs and gradients to the float64 loop, within what rounding does to FFTs.

    An FFT's error is a share of its largest entries, so that what has decayed to nothing by the end
    is measured by what it came from.
    """

    def call(*tensors, backend):
        return op(**dict(zip(names, tensors, strict=True)), backend=backend)

    rounded = [inputs[name].to(dtype) for name in names]
    exact = outputs_and_grads(functools.partial(call, backend="reference"), rounded, torch.float64)
    found = outputs_and_grads(functools.partial(call, backend="auto"), rounded, dtype)
    scale = max(x.abs().max() for x in exact.values())
    allowed = 2 * torch.finfo(dtype).eps * (1 + max(1, length).bit_length()) * scale
    for name, truth in exact.items():
        assert found[name].shape == truth.shape, name
        assert found[name].dtype == dtype, name
        error = (found[name].double() - truth).abs().max()
        assert error <= allowed, f"{name}: error {error:.2e} exceeds {allowed:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", ORDERS)
def test_a_step_is_the_recurrence_wherever_the_ring_begins(backend, order, dtype):
    x = draw(order, batch=order + 1, dtype=dtype)
    position = torch.arange(order + 1)
    arguments = (x["u"][:, 0], x["ring"], position, x["a"], x["b"], x["d"])
    exact = companion_step(
        *(t if t is position else t.double() for t in arguments), backend="reference"
    )
    y, ring, moved = companion_step(*arguments, backend=backend)
    assert last_backend("companion_step") == backend
    tolerance = 4 * torch.finfo(dtype).eps * max(1, order) ** 0.5
    close(y.double(), exact[0], tolerance)
    close(ring.double(), exact[1], tolerance)
    assert torch.equal(moved, exact[2])
    assert ((ring != x["ring"]).sum(1) == 1).all(), "one value a channel is written"
    before, after = unrolled(x["ring"], position), unrolled(ring, moved)
    assert torch.equal(unrolled(ring, position), before), "the old state is still there"
    assert torch.equal(after[:, 1:], before[:, :-1])


@pytest.mark.parametrize("order", [0, 1, 3, 8])
def test_many_steps_are_the_convolution_with_the_exact_kernel(backend, order):
    x = draw(order, length=3 * order + 5)
    ring, position = torch.zeros_like(x["ring"]), torch.zeros(3, dtype=torch.int64)
    outputs = []
    for u in x["u"].unbind(1):
        y, ring, position = companion_step(
            u, ring, position, x["a"], x["b"], x["d"], inplace=True, backend=backend
        )
        outputs.append(y)
    kernel = rational_kernel(x["a"], x["b"], x["u"].shape[1], backend="reference")
    expected = torch.stack(
        [
            x["d"] * x["u"][:, t] + sum(kernel[:, j] * x["u"][:, t - j] for j in range(t + 1))
            for t in range(x["u"].shape[1])
        ],
        dim=1,
    )
    close(torch.stack(outputs, 1), expected, 1e-13)


def test_positions_count_modulo_the_places(backend):
    x = draw(5)
    arguments = (x["a"], x["b"], x["d"])
    here = torch.tensor([0, 3, 5])
    expected = companion_step(x["u"][:, 0], x["ring"], here, *arguments, backend=backend)
    for turns in (6, -12):
        got = companion_step(x["u"][:, 0], x["ring"], here + turns, *arguments, backend=backend)
        for result, known in zip(got[:2], expected[:2], strict=True):
            assert torch.equal(result, known)
        assert torch.equal(got[2], here + turns - 1)


def test_the_ring_is_written_only_where_that_is_allowed(backend):
    x = draw(5)
    position = torch.tensor([0, 3, 4])
    arguments = (position, x["a"], x["b"], x["d"])
    before = x["ring"].clone()
    y, ring, _ = companion_step(x["u"][:, 0], x["ring"], *arguments, backend=backend)
    assert torch.equal(x["ring"], before)
    same, written, _ = companion_step(
        x["u"][:, 0], x["ring"], *arguments, inplace=True, backend=backend
    )
    assert written is x["ring"]
    assert torch.equal(written, ring)
    assert torch.equal(same, y)
    strided = torch.randn(3, 12, 4, dtype=torch.float64)[:, ::2].copy_(before)
    with torch.inference_mode():
        frozen = before.clone()  # torch forbids to write it outside
    for fixed in (strided, frozen):
        kept = fixed.clone()
        _, moved, _ = companion_step(x["u"][:, 0], fixed, *arguments, inplace=True, backend=backend)
        assert torch.equal(moved, ring)
        assert torch.equal(fixed, kept)


def test_inputs_of_other_dtypes_meet_a_state_that_keeps_its_own(backend):
    x = draw(5, dtype=torch.float32)
    position = torch.zeros(3, dtype=torch.int64)
    u = x["u"][:, 0].bfloat16()
    y, ring, _ = companion_step(u, x["ring"], position, x["a"], x["b"], x["d"], backend=backend)
    wide, known, _ = companion_step(
        u.float(), x["ring"], position, x["a"], x["b"], x["d"], backend=backend
    )
    assert y.dtype is torch.bfloat16
    assert ring.dtype is torch.float32
    assert torch.equal(ring, known)
    assert torch.equal(y, wide.bfloat16())


def test_zero_coefficients_are_the_identity_exactly(backend):
    u, ring = torch.randn(2, 4), torch.randn(2, 9, 4)
    position = torch.tensor([3, 0])
    y, _, _ = companion_step(
        u, ring, position, torch.zeros(1, 8), torch.zeros(4, 8), torch.ones(4), backend=backend
    )
    assert torch.equal(y, u)


def test_steps_have_gradients_on_the_tape_and_refuse_kernels_without():
    x = draw(3, length=1)
    leaves = [x["u"][:, 0], x["ring"], x["a"], x["b"], x["d"]]
    leaves = [t.detach().requires_grad_() for t in leaves]
    position = torch.tensor([1, 0, 2])

    def step(u, ring, a, b, d, **options):
        y, ring, moved = companion_step(u, ring, position, a, b, d, inplace=True, **options)
        return y, unrolled(ring, moved)

    assert torch.autograd.gradcheck(step, leaves)
    assert last_backend("companion_step") == "eager"
    for got, known in zip(step(*leaves), step(*leaves, backend="reference"), strict=True):
        close(got, known, 1e-14)
    with pytest.raises(ValueError, match="has no gradients"):
        step(*leaves, backend="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", [1, 16, 40])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 131])
def test_states_and_their_gradients_are_those_of_the_loop(length, order, dtype):
    x = draw(order, length=length)
    x["initial_state"] = x.pop("state")
    judge(companion_state, ("u", "a", "initial_state"), x, dtype, length + order)
    assert last_backend("companion_state") == "eager"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", [1, 16, 40])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 131])
def test_responses_and_their_gradients_are_those_of_the_loop(length, order, dtype):
    op = functools.partial(companion_response, length=length)
    judge(op, ("state", "a", "b"), draw(order), dtype, length + order)


def test_no_tokens_leave_the_state_and_no_order_leaves_nothing():
    x = draw(5, length=0)
    assert torch.equal(companion_state(x["u"], x["a"], x["state"]), x["state"])
    assert not companion_state(x["u"], x["a"]).any()
    assert companion_response(x["state"], x["a"], x["b"], 0).shape == (3, 0, 4)
    x = draw(0)
    assert companion_state(x["u"], x["a"], x["state"]).shape == (3, 0, 4)
    assert torch.equal(
        companion_response(x["state"], x["a"], x["b"], 7), torch.zeros(3, 7, 4, dtype=torch.float64)
    )


@pytest.mark.parametrize("cuts", [(0, 40), (1, 39), (3, 4, 0, 33), (20, 1, 1, 18)])
@pytest.mark.parametrize("order", [1, 4, 30])
def test_chunks_with_a_carried_state_are_the_whole_and_so_are_their_gradients(order, cuts):
    x = draw(order, length=40)
    leaves = [x[name].requires_grad_() for name in ("u", "a", "b", "d", "state")]

    def chunked(u, a, b, d, state):
        outputs = []
        for piece in u.split(cuts, dim=1):
            kernel = rational_kernel(a, b, max(1, piece.shape[1]))
            y, _ = fft_conv(piece, kernel, d)
            outputs.append(y + companion_response(state, a, b, piece.shape[1], kernel=kernel))
            state = companion_state(piece, a, state)
        return torch.cat(outputs, 1), state

    def scanned(u, a, b, d, state):
        outputs = []
        for piece in u.split(cuts, dim=1):
            kernel = rational_kernel(a, b, max(1, piece.shape[1]))
            y, state = companion_scan(piece, a, b, d, state, kernel=kernel)
            outputs.append(y)
        return torch.cat(outputs, 1), state

    def looped(u, a, b, d, state):
        ring, position = one_place_more(state), torch.zeros(3, dtype=torch.int64)
        outputs = []
        for token in u.unbind(1):
            y, ring, position = companion_step(token, ring, position, a, b, d)
            outputs.append(y)
        return torch.stack(outputs, 1), unrolled(ring, position)

    results = []
    for form in (looped, chunked, scanned):
        outputs = form(*leaves)
        loss = sum((y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() for y in outputs)
        results.append((*outputs, *torch.autograd.grad(loss, leaves)))
    for known, *others in zip(*results, strict=True):
        for got in others:
            close(got, known, 1e-12)


def test_a_prefill_is_continued_by_steps(backend):
    x = draw(6, length=30, dtype=torch.float32)
    exact = companion_state(x["u"].double(), x["a"].double(), backend="reference")
    ring = one_place_more(companion_state(x["u"][:, :20], x["a"]))
    position = torch.zeros(3, dtype=torch.int64)
    for u in x["u"][:, 20:].unbind(1):
        _, ring, position = companion_step(
            u, ring, position, x["a"], x["b"], x["d"], backend=backend
        )
    close(unrolled(ring, position).double(), exact, 1e-6)


def test_packed_sequences_are_single_ones():
    lengths = (5, 0, 1, 5, 12)
    x = draw(4, batch=5, length=23)
    u, bounds = x["u"][:1], torch.tensor([0, *lengths]).cumsum(0)
    states = companion_state(u, x["a"], x["state"], cu_seqlens=bounds)
    added = companion_response(x["state"], x["a"], x["b"], 23, cu_seqlens=bounds.int())
    assert added.shape == (1, 23, 4)
    for s, count in enumerate(lengths):
        piece, start = slice(bounds[s], bounds[s + 1]), x["state"][s : s + 1]
        known = companion_state(u[:, piece], x["a"], start, backend="reference")
        close(states[s : s + 1], known, 1e-13)
        known = companion_response(start, x["a"], x["b"], count, backend="reference")
        close(added[:, piece], known, 1e-13)


def test_packed_scans_are_those_of_the_reference_with_their_gradients():
    bounds = torch.tensor([0, 5, 5, 6, 18])
    x = draw(7, batch=4, length=18)
    leaves = [x[name].requires_grad_() for name in ("a", "b", "d", "state")]
    leaves.append(x["u"][:1].detach().requires_grad_())
    results = []
    for backend in ("reference", "auto"):
        with use_backend(backend):
            kernel, *given = rational_kernel(*leaves[:2], 18), leaves[-1], *leaves[:-1]
            y, state = companion_scan(*given, kernel=kernel, cu_seqlens=bounds)
            assert last_backend("companion_scan") == ("eager" if backend == "auto" else backend)
        loss = sum(
            (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() for out in (y, state)
        )
        results.append((y, state, *torch.autograd.grad(loss, leaves)))
    for known, got in zip(*results, strict=True):
        close(got, known, 1e-12)


def test_wrong_arguments_of_a_scan_are_named():
    x = draw(4)
    given = {name: x[name] for name in ("u", "a", "b", "d")} | {"initial_state": x["state"]}
    for name, wrong in (("initial_state", x["ring"]), ("b", x["b"][:2]), ("u", x["u"][0])):
        with pytest.raises(ValueError, match=f"companion_scan: {name} must"):
            companion_scan(**given | {name: wrong}, kernel=x["b"])

    half = {name: value.bfloat16() for name, value in given.items()}
    with pytest.raises(TypeError, match="companion_scan: u must be float32 or float64"):
        companion_scan(**half, kernel=x["b"].bfloat16())
    kernel = rational_kernel(x["a"], x["b"], x["u"].shape[1])
    with pytest.raises(TypeError, match="companion_scan: initial_state must have u's dtype"):
        companion_scan(**given | {"initial_state": x["state"].float()}, kernel=kernel)
    with pytest.raises(ValueError, match=r"companion_scan: kernel must have shape \[D, L\]"):
        companion_scan(**given, kernel=kernel[:, :-1])


def test_a_kernel_of_packed_sequences_is_as_long_as_the_longest(monkeypatch):
    x = draw(4, length=9)
    given = {name: x[name][:1] if name == "u" else x[name] for name in ("u", "a", "b", "d")}
    bounds, kernel = torch.tensor([0, 4, 9]), rational_kernel(x["a"], x["b"], 9)
    full, cut = (
        companion_scan(**given, initial_state=None, kernel=kernel[:, :n], cu_seqlens=bounds)[0]
        for n in (9, 5)
    )
    close(full, cut, 1e-14)
    with pytest.raises(ValueError, match="companion_scan: kernel must have shape"):
        companion_scan(**given, initial_state=None, kernel=kernel[:, :4], cu_seqlens=bounds)
    # as on a GPU, a graph does not look at the boundaries
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    _, last = companion_scan(**given, initial_state=None, kernel=kernel[:, :5], cu_seqlens=bounds)
    assert last.shape[0] == 2


def test_scanning_from_a_state_keeps_no_more_than_from_none():
    x = draw(5, batch=1, length=1000)
    kernel, inverse = rational_kernel(x["a"], x["b"], 1000), inverse_series(x["a"], 1000)
    kept = []
    for state in (None, x["state"]):
        leaves = [x["u"], x["a"], x["b"], x["d"], state, kernel, inverse]
        leaves = [t if t is None else t.detach().requires_grad_() for t in leaves]

        def scan(*given):
            *tensors, kernel, inverse = given
            return companion_scan(*tensors, kernel=kernel, inverse=inverse)

        kept.append(saved_numbers(scan, leaves))
    # the inputs with what the state owes to the first, and what is as long as the order
    assert kept[1] - kept[0] <= x["u"].numel() + 1000, kept


def test_packed_gradients_are_those_of_the_loop():
    bounds = torch.tensor([0, 5, 5, 6, 18])
    x = draw(4, batch=4, length=18)
    x["u"], x["initial_state"] = x["u"][:1], x["state"]
    op = functools.partial(companion_state, cu_seqlens=bounds)
    judge(op, ("u", "a", "initial_state"), x, torch.float64, 18)
    op = functools.partial(companion_response, length=18, cu_seqlens=bounds)
    judge(op, ("state", "a", "b"), x, torch.float64, 18)


def test_a_cached_series_may_be_longer_than_needed():
    x = draw(4, length=9)
    series, kernel = inverse_series(x["a"], 40), rational_kernel(x["a"], x["b"], 40)
    close(companion_state(x["u"], x["a"], inverse=series), companion_state(x["u"], x["a"]), 1e-15)
    close(
        companion_response(x["state"], x["a"], x["b"], 9, kernel=kernel),
        companion_response(x["state"], x["a"], x["b"], 9),
        1e-14,
    )


def test_a_wrong_state_fails_the_check():
    x = draw(4, length=20)

    def doubtful(u, a, initial_state, backend):
        state = companion_state(u, a, initial_state, backend=backend)
        return state if backend == "reference" else state.roll(1, 1)

    x["initial_state"] = x["state"]
    with pytest.raises(AssertionError, match="output 0"):
        judge(doubtful, ("u", "a", "initial_state"), x, torch.float32, 20)


def test_compiled_functions_have_no_graph_break_and_the_same_results(backend):
    x = draw(5, length=9)

    def layer(u, ring, a, b, d):
        state = companion_state(torch.tanh(u), a, ring)
        extra = companion_response(state, a, b, 6)
        with torch.no_grad():
            position = torch.zeros(3, dtype=torch.int64)
            ring = torch.nn.functional.pad(state, (0, 0, 0, 1))
            y, ring, _ = companion_step(u[:, 0], ring, position, a, b, d, backend=backend)
        return extra, y + ring.sum(1)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    inputs = (x["u"], x["state"], x["a"], x["b"], x["d"])
    for got, known in zip(compiled(*inputs), layer(*inputs), strict=True):
        close(got, known, 1e-14)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"u": torch.ones(3, 5)}, ValueError, r"b must have shape \[D, n\] = \[5, 2\]"),
        (
            {"ring": torch.ones(3, 2, 4)},
            ValueError,
            r"ring must have shape \[B, n \+ 1, D\] = \[3, 3, 4\]",
        ),
        ({"ring": torch.ones(3, 3, 4).half()}, TypeError, "ring must be float32 or float64"),
        ({"position": 0}, TypeError, r"position must be an int64 tensor \[B\], got int"),
        ({"position": torch.zeros(3).int()}, TypeError, "got torch.int32"),
        ({"position": torch.zeros(2).long()}, ValueError, r"\[B\] = \[3\], got \[2\]"),
        (
            {"position": torch.zeros(3, device="meta").long()},
            ValueError,
            "position must be on cpu, got meta",
        ),
        ({"a": torch.ones(3, 2)}, ValueError, "the 3 rows of a must divide the 4 rows of b"),
        ({"d": torch.ones(3)}, ValueError, r"d must have shape \[D\] = \[4\]"),
        ({"backend": "triton"}, ValueError, "needs CUDA tensors, got cpu"),
    ],
)
def test_wrong_arguments_of_a_step_are_named(changes, kind, message):
    arguments = {
        "u": torch.ones(3, 4),
        "ring": torch.ones(3, 3, 4),
        "position": torch.zeros(3).long(),
        "a": torch.ones(2, 2),
        "b": torch.ones(4, 2),
        "d": torch.ones(4),
    } | changes
    with pytest.raises(kind, match=f"companion_step.*{message}"):
        companion_step(**arguments)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"u": torch.ones(3, 4)}, ValueError, r"u must have shape \[B, L, D\]"),
        ({"a": torch.ones(3, 2)}, ValueError, "the 3 rows of a must divide the 4 channels of u"),
        ({"initial_state": torch.ones(2, 2, 4)}, ValueError, r"initial_state must .*\[3, 2, 4\]"),
        ({"inverse": torch.ones(2, 6)}, ValueError, r"inverse must .* or longer = \[2, 7\]"),
        ({"cu_seqlens": torch.tensor([0, 7])}, ValueError, "B = 1, got B = 3"),
        ({"backend": "cpu"}, ValueError, "no such implementation"),
    ],
)
def test_wrong_arguments_of_a_state_are_named(changes, kind, message):
    arguments = {"u": torch.ones(3, 7, 4), "a": torch.ones(2, 2)} | changes
    with pytest.raises(kind, match=f"companion_state.*{message}"):
        companion_state(**arguments)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"state": torch.ones(3, 4)}, ValueError, r"state must have shape \[B, n, D\]"),
        ({"b": torch.ones(2, 2)}, ValueError, r"b must have shape \[D, n\] = \[4, 2\]"),
        ({"length": -1}, ValueError, "length must be at least 0, got -1"),
        ({"length": 2.0}, TypeError, "length must be an int, got float"),
        ({"kernel": torch.ones(4, 6)}, ValueError, r"kernel must .* or longer = \[4, 7\]"),
        ({"cu_seqlens": torch.tensor([0, 7])}, ValueError, "one sequence per state, 4 boundaries"),
        ({"cu_seqlens": torch.tensor([0, 3, 4, 6])}, ValueError, "must rise from 0 to L = 7"),
        ({"backend": "triton"}, ValueError, "no such implementation"),
    ],
)
def test_wrong_arguments_of_a_response_are_named(changes, kind, message):
    arguments = {"state": torch.ones(3, 2, 4), "a": torch.ones(2, 2), "b": torch.ones(4, 2)}
    with pytest.raises(kind, match=f"companion_response.*{message}"):
        companion_response(**(arguments | {"length": 7} | changes))
