"""linear_scan: every fast backend against the loop over time."""

import pytest
import torch
from tests.kernels.triton_processes import assert_interpreted, assert_no_spills, compiled

from ssmzoo.testing.accuracy import assert_as_accurate, outputs_and_grads
from ssmzoo_kernels import last_backend, linear_scan, use_backend
from ssmzoo_kernels.linear_scan import eager, reference

NAMES = ("a", "b", "initial_state")
PAIRED = pytest.mark.parametrize("paired", [False, True], ids=["real", "complex"])


def draw(B=2, L=9, D=5, segments=None, paired=False, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, L, D), (B, L, D), (segments or B, D))
    tail = (2,) if paired else ()
    a, b, state = (torch.randn(*x, *tail, generator=generator, dtype=torch.float64) for x in shapes)
    # some factors above 1, products that neither vanish nor explode
    return [x.to(dtype) for x in (a / (1.5 if paired else 1.0), b, state)]


def bounds(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def on(backend, paired=False, **options):
    """The op; complex numbers come and go as pairs of reals."""

    def run(*inputs):
        if paired:
            inputs = [x if x is None else torch.view_as_complex(x) for x in inputs]
        found = linear_scan(*inputs, backend=backend, **options)
        return tuple(torch.view_as_real(x) for x in found) if paired else found

    return run


def judge(inputs, backend, paired=False, dtype=torch.float32, **options):
    candidate, known = on(backend, paired, **options), on("reference", paired, **options)
    assert_as_accurate(candidate, known, inputs, dtype)
    assert last_backend("linear_scan") == backend


def close(got, expected, tolerance):
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    error = (got - expected).abs().max()
    assert error <= tolerance * expected.abs().max(), f"error {error:.2e}"


# --- accuracy: states, final state, all gradients --------------------------------------------


@PAIRED
@pytest.mark.parametrize("length", [0, 1, 2, 7, 63, 64, 65, 1000])
def test_any_length_is_as_exact_as_the_loop(backend, paired, length):
    judge(draw(L=length, paired=paired), backend, paired)


@PAIRED
@pytest.mark.parametrize("width", [0, 1, 3, 64, 129, 300])
def test_any_width_is_as_exact_as_the_loop(backend, paired, width):
    judge(draw(L=33, D=width, paired=paired), backend, paired)


@PAIRED
def test_sequences_cut_into_chunks_are_as_exact_as_the_loop(backend, paired):
    """Long and narrow: both backends cut, and join the pieces."""
    assert eager.chunks_of(4999, 3) > 1
    judge(draw(B=1, L=4999, D=3, paired=paired), backend, paired)


@PAIRED
def test_packed_sequences_are_as_exact_as_the_loop(backend, paired):
    cu_seqlens = bounds(0, 1, 16, 17, 0, 33, 2500)
    inputs = draw(B=1, L=int(cu_seqlens[-1]), D=3, segments=7, paired=paired)
    judge(inputs, backend, paired, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_as_exact_as_the_loop(backend, dtype):
    judge(draw(L=40, D=33), backend, dtype=dtype)


def test_complex128_is_as_exact_as_the_loop(backend):
    judge(draw(L=40, D=3, paired=True), backend, True, torch.float64)


@PAIRED
def test_the_initial_state_may_be_absent(backend, paired):
    judge([*draw(L=20, paired=paired)[:2], None], backend, paired)


def test_mixed_dtypes_as_under_autocast(backend):
    a, b, state = draw(L=20)
    leaves = [x.requires_grad_() for x in (a.float(), b.bfloat16(), state.float())]
    results = {}
    for name in (backend, "reference"):
        h, final = linear_scan(*leaves, backend=name)
        assert (h.dtype, final.dtype) == (torch.bfloat16, torch.float32)
        grads = torch.autograd.grad(h.double().sum() + final.double().sum(), leaves)
        assert [g.dtype for g in grads] == [x.dtype for x in leaves]
        results[name] = (h, final, *grads)
    for got, expected in zip(results[backend], results["reference"], strict=True):
        close(got, expected, 4 * torch.finfo(expected.dtype).eps)


def test_half_inputs_keep_a_float32_state(backend):
    """Small additions to a large state, which bfloat16 would drop."""
    a, b = torch.ones(1, 1000, 3).bfloat16(), torch.full((1, 1000, 3), 2.0**-9).bfloat16()
    h, final = linear_scan(a, b, torch.ones(1, 3), backend=backend)
    assert final.dtype == torch.float32
    assert torch.equal(final, torch.full((1, 3), 1 + 1000 * 2.0**-9))
    assert h.dtype == torch.bfloat16


def test_a_wrong_op_fails_the_accuracy_check():
    inputs = draw(L=33)

    def forgets_the_state(a, b, state):
        return on("reference")(a, b, state.detach() * 1.0)

    def shifts_the_factors(a, b, state):
        return on("reference")(a.roll(1, 1), b, state)

    for wrong, name in ((forgets_the_state, "gradient of input 2"), (shifts_the_factors, "output")):
        with pytest.raises(AssertionError, match=name):
            assert_as_accurate(wrong, on("reference"), inputs, torch.float32)


@PAIRED
def test_gradients_pass_gradcheck(backend, paired):
    inputs = [x.requires_grad_() for x in draw(B=1, L=9, D=2, paired=paired)]
    assert torch.autograd.gradcheck(on(backend, paired), inputs)


@pytest.mark.parametrize("which", [0, 1], ids=["states", "final_state"])
def test_a_loss_on_one_output_alone_gives_the_loops_gradients(backend, which):
    inputs = [x.requires_grad_() for x in draw(L=18)]
    got, expected = (
        torch.autograd.grad(linear_scan(*inputs, backend=x)[which].square().sum(), inputs)
        for x in (backend, "reference")
    )
    for a, b in zip(got, expected, strict=True):
        close(a, b, 1e-12)


# --- products that overflow and underflow -----------------------------------------------------


@PAIRED
@pytest.mark.parametrize("length", [128, 6000])
def test_products_that_overflow_and_underflow_change_no_state(backend, paired, length):
    """Factors of size 50 and 1/50 in runs: products reach 50^40 either way, states never do."""
    a, _, state = draw(B=1, L=length, D=2, paired=paired)
    power = torch.tensor([1.0] * 40 + [-1.0] * 40).repeat(length // 80 + 1)[:length]
    power = power.view(1, length, *[1] * (a.dim() - 2))
    near = 1 + 1e-3 * torch.randn_like(power)  # equal factors would round equally, time after time
    a = (a / size(a, paired) * 50.0**power * near).float()
    inputs = [a, torch.zeros_like(a), (state * 1e-35).float()]
    exact = on("reference", paired)(*(x.double() for x in inputs))[0]
    loop, found = (on(x, paired)(*inputs)[0] for x in ("reference", backend))
    assert loop.isfinite().all()
    assert torch.finfo(torch.float32).max < 50.0**40
    errors = [(size(x - exact, paired) / size(exact, paired)).max() for x in (found, loop)]
    assert errors[0] <= 4 * errors[1], errors


def size(x, paired):
    return torch.hypot(*x.unbind(-1)).unsqueeze(-1) if paired else x.abs()


@PAIRED
def test_products_of_a_chunk_beyond_all_exponents_change_no_state(backend, paired):
    """Factors of 2^100 on zero states, then a product of 2^-100 on large ones."""
    length = 6000
    a = torch.full((1, length, 2), 2.0**100)
    a[:, length // 2 :] = 2.0**-100
    b = torch.zeros_like(a)
    b[:, length // 2] = 1e30
    if paired:
        a, b = (torch.stack([x, torch.zeros_like(x)], dim=-1) for x in (a, b))
    inputs = [x.requires_grad_() for x in (a, b)]
    loop, found = (on(x, paired)(*inputs) for x in ("reference", backend))
    for got, expected in zip(found, loop, strict=True):
        assert expected.isfinite().all()
        close(got, expected, 1e-6)


def test_nan_and_infinity_stay_in_their_column_and_sequence(backend):
    a, b, state = draw(L=20, dtype=torch.float32)
    b[0, 9, 3] = float("nan")
    b[0, 9, 4] = float("inf")
    h, _ = linear_scan(a, b, state, backend=backend)
    assert h[0, :9].isfinite().all()
    assert h[0, 9:, 3].isnan().all()
    assert not h[0, 9:, 4].isfinite().any()
    assert h[0, :, :3].isfinite().all()
    assert h[1].isfinite().all()


# --- sequences: halves, packed rows, batches --------------------------------------------------


@PAIRED
@pytest.mark.parametrize("cut", [1, 20, 39])
def test_two_halves_with_the_state_carried_equal_the_whole(backend, paired, cut):
    inputs = draw(L=40, paired=paired)

    def halves(a, b, state):
        first, state = on(backend, paired)(a[:, :cut], b[:, :cut], state)
        second, state = on(backend, paired)(a[:, cut:], b[:, cut:], state)
        return torch.cat([first, second], dim=1), state

    whole = outputs_and_grads(on(backend, paired), inputs, torch.float64)
    for name, got in outputs_and_grads(halves, inputs, torch.float64).items():
        close(got, whole[name], 1e-12)


def test_decoding_token_by_token_equals_one_pass(backend):
    a, b, state = draw(L=12, dtype=torch.float32)
    h, final = linear_scan(a, b, state, backend=backend)
    steps = []
    for t in range(12):
        step, state = linear_scan(a[:, t : t + 1], b[:, t : t + 1], state, backend=backend)
        steps.append(step)
    close(torch.cat(steps, dim=1), h, 1e-6)
    close(state, final, 1e-6)


def test_packed_sequences_equal_single_ones(backend):
    lengths = (5, 0, 16, 1, 40)
    a, b, state = draw(B=1, L=sum(lengths), segments=len(lengths), dtype=torch.float32)
    cu = bounds(*lengths)
    packed, finals = linear_scan(a, b, state, cu_seqlens=cu.int(), backend=backend)
    for s in range(len(lengths)):
        part = slice(cu[s], cu[s + 1])
        h, final = linear_scan(a[:, part], b[:, part], state[s : s + 1], backend=backend)
        assert torch.equal(packed[:, part], h)
        assert torch.equal(finals[s : s + 1], final)


def test_an_empty_sequence_hands_its_state_on(backend):
    inputs = [x.requires_grad_() for x in draw(L=0)]
    h, final = linear_scan(*inputs, backend=backend)
    assert h.shape == (2, 0, 5)
    assert torch.equal(final, inputs[2])
    (grad,) = torch.autograd.grad(final.square().sum(), inputs[2])
    assert torch.equal(grad, 2 * inputs[2])


def test_the_order_of_a_batch_is_irrelevant(backend):
    inputs = draw(B=3, L=21, dtype=torch.float32)
    order = torch.tensor([2, 0, 1])
    shuffled = linear_scan(*(x[order] for x in inputs), backend=backend)
    for got, expected in zip(shuffled, linear_scan(*inputs, backend=backend), strict=True):
        assert torch.equal(got, expected[order])


def test_strided_and_lazily_conjugated_inputs_give_the_same_results(backend):
    a, b, state = (torch.view_as_complex(x) for x in draw(L=20, paired=True))
    wide = torch.stack([a, b], dim=3).flatten(2)
    views = (wide[..., ::2], wide[..., 1::2].conj(), state.conj())
    assert views[1].is_conj()
    results = []
    for tensors in (views, [x.resolve_conj().contiguous() for x in views]):
        leaves = [x.detach().requires_grad_() for x in tensors]
        h, final = linear_scan(*leaves, backend=backend)
        loss = (h.abs().square().sum() + final.abs().square().sum()).real
        with torch.no_grad():
            plain = linear_scan(*tensors, backend=backend)
        results.append((h, final, *plain, *torch.autograd.grad(loss, leaves)))
    for got, expected in zip(*results, strict=True):
        close(got, expected, 1e-12)


@PAIRED
@pytest.mark.parametrize("packed", [False, True])
def test_any_number_of_threads_gives_the_same_bits(paired, packed):
    options = {"cu_seqlens": bounds(300, 1, 0, 29699)} if packed else {}
    inputs = draw(1, 30000, 5, segments=4 if packed else None, paired=paired)
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 3):
            torch.set_num_threads(count)
            results.append(outputs_and_grads(on("cpu", paired, **options), inputs, torch.float32))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for name, expected in results[0].items():
            assert torch.equal(other[name], expected), name


def test_training_keeps_factors_and_states_and_nothing_else(backend):
    inputs = [x.requires_grad_() for x in draw(L=400, dtype=torch.float32)]
    own = {x.untyped_storage().data_ptr() for x in inputs}
    kept = {}

    def pack(x):
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        h, _ = linear_scan(*inputs, backend=backend)
    assert [x.data_ptr() for x in kept.values()] == [h.data_ptr()]


# --- torch.library and torch.compile ----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_registered_ops_of_other_dtypes_pass_opcheck(backend, dtype):
    a, b = (torch.randn(20, 3, dtype=dtype, requires_grad=True) for _ in range(2))
    exact = torch.promote_types(torch.float32, dtype)
    state, offsets = torch.randn(3, 3, dtype=exact, requires_grad=True), bounds(8, 0, 12)
    for start in (state, None):
        torch.library.opcheck(torch.ops.ssmzoo.linear_scan.default, (a, b, start, offsets, backend))
        h, grad_h, grad_final = (torch.randn(x, 3, dtype=exact) for x in (20, 20, 3))
        start = None if start is None else start.detach()
        torch.library.opcheck(
            torch.ops.ssmzoo.linear_scan_backward.default,
            (grad_h, grad_final, a.detach(), h, start, offsets, backend),
        )


def test_compiled_functions_have_no_graph_break_and_the_same_results(backend):
    inputs = draw(L=20, dtype=torch.float32)

    def layer(a, b, state):
        h, final = linear_scan(torch.tanh(a), b, state, backend=backend)
        return torch.sin(h), final

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = outputs_and_grads(layer, inputs, torch.float32)
    for name, got in outputs_and_grads(compiled, inputs, torch.float32).items():
        close(got, expected[name], 1e-6)


def test_use_backend_redirects_auto(backend):
    with use_backend(backend):
        linear_scan(*draw())
    assert last_backend("linear_scan") == backend


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("a", [1.0], TypeError, "a must be a tensor .*got list"),
        ("a", torch.ones(2, 5), ValueError, r"a must have shape \[B, L, D\]"),
        ("a", torch.ones(2, 9, 5).int(), TypeError, "a must be floating point, got torch.int32"),
        ("a", torch.ones(2, 9, 5).cfloat(), TypeError, "b must be complex64 or complex128, got"),
        ("b", torch.ones(2, 9, 5).cfloat(), TypeError, "b must be floating point, got"),
        ("b", torch.ones(2, 8, 5), ValueError, r"b must have shape .*got \[2, 8, 5\]"),
        ("b", torch.ones(2, 9, 5, device="meta"), ValueError, "b must be on cpu, got meta"),
        ("initial_state", torch.ones(2, 4), ValueError, r"initial_state must have shape \[B, D\]"),
    ],
)
def test_wrong_tensors_are_named(name, value, error, message):
    inputs = dict(zip(NAMES, draw(), strict=True)) | {name: value}
    with pytest.raises(error, match=f"linear_scan: {message}"):
        linear_scan(**inputs)


def test_wrong_boundaries_and_backends_are_refused():
    with pytest.raises(ValueError, match="rise from 0 to L = 9"):
        linear_scan(*draw(B=1), cu_seqlens=torch.tensor([0, 8]))
    with pytest.raises(ValueError, match="B = 1, got B = 2"):
        linear_scan(*draw(), cu_seqlens=torch.tensor([0, 9]))
    with pytest.raises(ValueError, match="needs CUDA tensors, got cpu"):
        linear_scan(*draw(), backend="triton")


def test_the_reference_runs_when_asked_for_by_name():
    linear_scan(*draw(), backend="reference")
    assert last_backend("linear_scan") == "reference"
    assert reference.linear_scan(*draw())[0].shape == (2, 9, 5)


# --- the Triton kernels -----------------------------------------------------------------------


def test_the_interpreted_kernels_equal_the_reference():
    pytest.importorskip("triton", reason="triton is not installed")
    assert_interpreted("interpreted_linear.py")


def test_the_kernels_compile_without_spills():
    pytest.importorskip("triton", reason="triton is not installed")
    cases = ("model", "complex")
    records = compiled("compiled_linear.py", *cases)
    assert {(r["case"], r["kernel"], r["target"]) for r in records} == {
        (case, f"linear_scan_{way}_kernel", target)
        for case in cases
        for way in ("fwd", "bwd")
        for target in ("sm_80", "sm_90")
    }
    assert_no_spills(records, {"sm_80": 48 * 1024, "sm_90": 48 * 1024})
