"""Triton kernels against their references in Triton's interpreter.

Not collected by name: ``test_triton_interpreted.py`` runs this file in a process of its own, where
``TRITON_INTERPRET=1`` holds before anything imports triton.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.interpreter import repair
from triton.runtime import interpreter

import ssmzoo_kernels
from ssmzoo_kernels import causal_conv1d, last_backend, longhorn_scan, selective_scan
from ssmzoo_kernels.causal_conv1d import triton as conv_triton
from ssmzoo_kernels.longhorn_scan import triton as longhorn_triton
from ssmzoo_kernels.scan import interval
from ssmzoo_kernels.scan import triton as skeleton
from ssmzoo_kernels.selective_scan import triton as selective_triton

# numpy warns where a GPU goes to infinity, as the formulas mean it to
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

repair()


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(skeleton, "CHUNK", 8)
    monkeypatch.setattr(conv_triton, "CHUNK", 8)


@pytest.fixture
def no_load_leaves_its_tensor(monkeypatch):
    """Fails what a launch of the skeleton reads or writes beyond the tensors that it was given."""
    spans = []
    launch = skeleton.launch

    def watched(kernel, grid, made, **own):
        tensors = [x for x in (made.arguments | own).values() if isinstance(x, torch.Tensor)]
        memory = [x.untyped_storage() for x in tensors]
        spans[:] = [(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in memory]
        launch(kernel, grid, made, **own)

    def within(addresses, mask):
        wanted = addresses.data[mask.data]
        inside = sum((wanted >= low) & (wanted < high) for low, high in spans)
        assert np.all(inside), "beyond a tensor"

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def checked_load(self, addresses, mask, *rest):
        within(addresses, mask)
        return load(self, addresses, mask, *rest)

    def checked_store(self, addresses, value, mask, *rest):
        within(addresses, mask)
        return store(self, addresses, value, mask, *rest)

    monkeypatch.setattr(skeleton, "launch", watched)
    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)


def draw(seed, dtype, **shapes):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: shape and torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def results(op, inputs, backend, wide=None, **options):
    """Return an op's outputs and gradients under a fixed random loss on both outputs."""
    leaves = {
        name: x if x is None else x.detach().to(wide or x.dtype).requires_grad_()
        for name, x in inputs.items()
    }
    outputs = op(*leaves.values(), backend=backend, **options)
    generator = torch.Generator().manual_seed(99)
    loss = sum(
        (y.double() * torch.randn(y.shape, generator=generator, dtype=torch.float64)).sum()
        for y in outputs
    )
    present = [name for name, x in leaves.items() if x is not None]
    grads = torch.autograd.grad(loss, [leaves[name] for name in present])
    named = dict(zip(("output", "final_state"), outputs, strict=True))
    return {k: v.detach() for k, v in named.items()} | dict(zip(present, grads, strict=True))


def assert_as_accurate(op, inputs, **options):
    """Fail unless the kernel is about as close to float64 as the reference is."""
    truth = results(op, inputs, "reference", wide=torch.float64, **options)
    usual = results(op, inputs, "reference", **options)
    kernel = results(op, inputs, "triton", **options)
    assert last_backend(op.__name__) == "triton"
    for name, exact in truth.items():
        if not exact.numel():
            continue
        got, expected = kernel[name], usual[name]
        assert got.dtype == expected.dtype, name
        assert got.shape == expected.shape, name
        scale = exact.abs().max()
        step = torch.finfo(got.dtype).eps
        budget = 2 * (expected.double() - exact).abs().max() + 4 * step * scale
        error = (got.double() - exact).abs().max()
        assert error <= budget, f"{name}: off by {error:.2e}, budget {budget:.2e}"


def scan_inputs(batch, length, width, states, *, dtype=torch.float32, segments=None, seed=0):
    return draw(
        seed,
        dtype,
        u=(batch, length, width),
        q=(batch, length, states),
        k=(batch, length, states),
        dt=(batch, length, width),
        dt_bias=(width,),
        D=(width,),
        z=(batch, length, width),
        initial_state=(segments or batch, width, states),
    )


def bounds(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def test_lengths_around_a_chunk_equal_the_reference_when_segments_are_cut(monkeypatch):
    monkeypatch.setattr(skeleton, "FILL", 10**6)
    cu_seqlens = bounds(64, 65)
    assert skeleton.span_of(129, 2, 1, skeleton.CHUNK) == skeleton.CHUNK == 64
    inputs = scan_inputs(1, 129, 5, 3, segments=2)
    assert_as_accurate(longhorn_scan, inputs, cu_seqlens=cu_seqlens)


def test_lengths_around_a_small_chunk_equal_the_reference_when_segments_are_cut(
    monkeypatch, small_chunks
):
    monkeypatch.setattr(skeleton, "FILL", 10**6)
    inputs = scan_inputs(1, 25, 5, 3, segments=5)
    assert_as_accurate(longhorn_scan, inputs, cu_seqlens=bounds(1, 7, 0, 8, 9))


@pytest.mark.parametrize("fill", [1, 10**6], ids=["whole_segments", "spans"])
def test_packed_segments_equal_the_reference(
    monkeypatch, small_chunks, no_load_leaves_its_tensor, fill
):
    monkeypatch.setattr(skeleton, "FILL", fill)
    cu_seqlens = bounds(0, 9, 0, 1, 17, 0)
    inputs = scan_inputs(1, 27, 5, 3, segments=6)
    assert_as_accurate(longhorn_scan, inputs, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("fill", [1, 10**6], ids=["whole_segments", "spans"])
def test_lengths_around_the_tokens_that_are_loaded_ahead_equal_the_reference(
    monkeypatch, small_chunks, no_load_leaves_its_tensor, fill
):
    monkeypatch.setattr(skeleton, "FILL", fill)
    assert (skeleton.TOKENS, longhorn_triton.TRANSITION.tokens) == (4, 2)
    inputs = scan_inputs(1, 24, 5, 3, segments=7)
    assert_as_accurate(longhorn_scan, inputs, cu_seqlens=bounds(0, 1, 3, 0, 4, 5, 11))


def test_whole_segments_of_lengths_around_a_chunk_equal_the_reference(no_load_leaves_its_tensor):
    inputs = scan_inputs(1, 192, 3, 2, segments=3)
    assert_as_accurate(longhorn_scan, inputs, cu_seqlens=bounds(63, 64, 65))


def test_a_span_of_several_chunks_equals_the_reference(monkeypatch, small_chunks):
    monkeypatch.setattr(skeleton, "FILL", 3)
    assert skeleton.span_of(35, 1, 1, 8) == 16
    assert_as_accurate(longhorn_scan, scan_inputs(1, 35, 4, 2))


@pytest.mark.parametrize("fill", [1, 10**6], ids=["whole_segments", "spans"])
def test_intervals_of_several_chunks_equal_the_reference(monkeypatch, small_chunks, fill):
    monkeypatch.setattr(skeleton, "FILL", fill)
    assert interval(10, 8) == 16
    inputs = scan_inputs(1, 27, 5, 10, segments=3)
    assert_as_accurate(longhorn_scan, inputs, cu_seqlens=bounds(0, 26, 1))


@pytest.mark.parametrize(("batch", "width"), [(0, 3), (1, 0)])
def test_nothing_has_gradients_of_its_shape(batch, width):
    leaves = [x.detach().requires_grad_() for x in scan_inputs(batch, 5, width, 2).values()]
    longhorn_scan(*leaves, backend="triton")[0].sum().backward()
    for x in leaves:
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert not x.grad.any()


def test_blocks_that_take_turns_at_a_partial_sum_equal_the_reference(monkeypatch):
    monkeypatch.setattr(skeleton, "parts_of", lambda blocks, width, states: 2)
    assert_as_accurate(longhorn_scan, scan_inputs(1, 5, 90, 3))


@pytest.mark.parametrize("states", [1, 3, 16, 40])
def test_ragged_channels_and_any_state_size_equal_the_reference(states):
    assert_as_accurate(longhorn_scan, scan_inputs(2, 3, 37, states))


def test_bfloat16_inputs_cost_no_more_than_their_rounding():
    assert_as_accurate(longhorn_scan, scan_inputs(1, 7, 5, 3, dtype=torch.bfloat16))


def test_mixed_dtypes_and_strided_views_equal_the_reference():
    inputs = scan_inputs(2, 5, 6, 4)
    wide = torch.stack([inputs["u"], inputs["z"]], dim=2).flatten(2).bfloat16()
    u, z = wide.chunk(2, dim=-1)
    assert not u.is_contiguous()
    transposed = inputs["dt"].transpose(1, 2).contiguous().transpose(1, 2)
    assert transposed.stride(-1) != 1
    inputs |= {"u": u, "z": z, "dt": transposed, "k": inputs["k"].bfloat16()}
    assert_as_accurate(longhorn_scan, inputs)


@pytest.mark.parametrize("absent", [("dt_bias", "D", "z", "initial_state"), ("z",), ("D",)])
def test_absent_inputs_equal_the_reference(absent):
    inputs = scan_inputs(1, 5, 3, 2) | dict.fromkeys(absent)
    assert_as_accurate(longhorn_scan, inputs)


@pytest.mark.parametrize("which", [0, 1], ids=["output", "final_state"])
def test_a_loss_on_one_output_alone_gives_the_reference_gradients(monkeypatch, small_chunks, which):
    monkeypatch.setattr(skeleton, "FILL", 10**6)
    inputs = scan_inputs(1, 18, 3, 2)
    grads = {}
    for backend in ("triton", "reference"):
        leaves = [x.detach().double().requires_grad_() for x in inputs.values()]
        longhorn_scan(*leaves, backend=backend)[which].square().sum().backward()
        grads[backend] = [x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves]
    for got, expected in zip(*grads.values(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_float64_inputs_keep_float64_sums(monkeypatch, small_chunks):
    monkeypatch.setattr(skeleton, "FILL", 10**6)
    inputs = scan_inputs(1, 20, 3, 2, dtype=torch.float64)
    kernel = results(longhorn_scan, inputs, "triton")
    expected = results(longhorn_scan, inputs, "reference")
    for name, x in expected.items():
        torch.testing.assert_close(kernel[name], x, rtol=1e-12, atol=1e-13, msg=name)


def test_extreme_logits_and_keys_stay_finite_and_accurate(monkeypatch, small_chunks):
    monkeypatch.setattr(skeleton, "FILL", 10**6)
    inputs = scan_inputs(1, 20, 4, 3)
    inputs["dt"][0, 2:6] = torch.tensor([-300.0, 300.0, -30.0, 30.0])[:, None]
    inputs["k"][0, 7, 1] = 1000.0
    inputs["k"][0, 8] = 0.0
    kernel = results(longhorn_scan, inputs, "triton")
    truth = results(longhorn_scan, inputs, "reference", wide=torch.float64)
    for name, exact in truth.items():
        error = (kernel[name].double() - exact).abs().max() / exact.abs().max()
        assert error <= 1e-5, f"{name}: {error:.1e}"


def test_a_zero_key_leaves_the_state_bit_identical():
    inputs = scan_inputs(1, 3, 4, 3)
    inputs["k"].zero_()
    _, final_state = longhorn_scan(**inputs, backend="triton")
    assert torch.equal(final_state, inputs["initial_state"])


def test_no_tokens_pass_the_state_through():
    inputs = scan_inputs(2, 0, 4, 3)
    out, final_state = longhorn_scan(**inputs, backend="triton")
    assert out.shape == (2, 0, 4)
    assert torch.equal(final_state, inputs["initial_state"])


def test_the_check_notices_a_transition_that_is_slightly_wrong(monkeypatch):
    @triton.jit
    def doubtful(state, u, k, dt, param):
        return longhorn_triton.step(state, u, k, dt, param) * 0.9999

    wrong = longhorn_triton.TRANSITION._replace(step=doubtful)
    monkeypatch.setattr(longhorn_triton, "TRANSITION", wrong)
    with pytest.raises(AssertionError, match="off by"):
        assert_as_accurate(longhorn_scan, scan_inputs(1, 5, 3, 2))


def selective_inputs(batch, length, width, states, *, dtype=torch.float32, segments=None):
    inputs = draw(
        5,
        dtype,
        u=(batch, length, width),
        dt=(batch, length, width),
        A=(width, states),
        B=(batch, length, states),
        C=(batch, length, states),
        D=(width,),
        z=(batch, length, width),
        dt_bias=(width,),
        initial_state=(segments or batch, width, states),
    )
    inputs["A"] = -inputs["A"].exp()
    return inputs


@pytest.fixture(params=["euler", "zoh"])
def discretization(request):
    return request.param


@pytest.mark.parametrize("fill", [1, 10**6], ids=["whole_segments", "spans"])
def test_packed_selective_scans_equal_the_reference(
    monkeypatch, small_chunks, no_load_leaves_its_tensor, discretization, fill
):
    monkeypatch.setattr(skeleton, "FILL", fill)
    inputs = selective_inputs(1, 36, 5, 3, segments=8)
    options = {"cu_seqlens": bounds(0, 9, 0, 1, 17, 5, 4, 0), "discretization": discretization}
    assert_as_accurate(selective_scan, inputs, **options)


def test_selective_scans_over_intervals_of_several_chunks_equal_the_reference(
    monkeypatch, small_chunks, discretization
):
    monkeypatch.setattr(skeleton, "FILL", 10**6)
    assert interval(10, 8) == 16
    inputs = selective_inputs(1, 27, 5, 10)
    assert_as_accurate(selective_scan, inputs, discretization=discretization)


@pytest.mark.parametrize("states", [1, 3, 16, 40])
def test_selective_scans_of_ragged_channels_equal_the_reference(states, discretization):
    inputs = selective_inputs(2, 3, 37, states)
    assert_as_accurate(selective_scan, inputs, discretization=discretization)


def test_selective_scans_of_bfloat16_cost_no_more_than_their_rounding(discretization):
    inputs = selective_inputs(1, 7, 5, 3, dtype=torch.bfloat16)
    assert_as_accurate(selective_scan, inputs, discretization=discretization)


@pytest.mark.parametrize("absent", [("dt_bias", "D", "z", "initial_state"), ("z",), ("D",)])
def test_selective_scans_without_optional_inputs_equal_the_reference(absent):
    assert_as_accurate(selective_scan, selective_inputs(1, 5, 3, 2) | dict.fromkeys(absent))


def test_selective_scans_keep_float64_sums(monkeypatch, small_chunks, discretization):
    monkeypatch.setattr(skeleton, "FILL", 10**6)
    inputs = selective_inputs(1, 20, 3, 2, dtype=torch.float64)
    inputs["A"][0] = torch.tensor([0.0, -1e-3])  # where the hold goes by its series
    kernel = results(selective_scan, inputs, "triton", discretization=discretization)
    expected = results(selective_scan, inputs, "reference", discretization=discretization)
    for name, x in expected.items():
        torch.testing.assert_close(kernel[name], x, rtol=1e-12, atol=1e-13, msg=name)


def test_extreme_step_sizes_and_rates_stay_finite_and_accurate(
    monkeypatch, small_chunks, discretization
):
    monkeypatch.setattr(skeleton, "FILL", 10**6)
    inputs = selective_inputs(1, 20, 4, 3)
    inputs["dt"][0, 2:7] = torch.tensor([-300.0, 19.9, -30.0, 20.1, 300.0])[:, None]
    inputs["A"][0], inputs["A"][1, 0] = torch.tensor([-1e-9, -1e-3, -0.02]), -1e3
    kernel = results(selective_scan, inputs, "triton", discretization=discretization)
    options = {"wide": torch.float64, "discretization": discretization}
    truth = results(selective_scan, inputs, "reference", **options)
    for name, exact in truth.items():
        error = (kernel[name].double() - exact).abs().max() / exact.abs().max()
        assert error <= 1e-5, f"{name}: {error:.1e}"


@triton.jit
def step_size_kernel(dt, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, selective_triton.step_size(tl.load(dt + at)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_step_sizes_keep_the_digits_of_small_ones(dtype):
    """Rounding dt log2(e) and its factor costs |dt| eps; power, polynomial, product and sum 4."""
    dt = torch.cat([torch.linspace(-80.0, 40.0, 4095, dtype=dtype), torch.zeros(1, dtype=dtype)])
    found = torch.empty_like(dt)
    step_size_kernel[(1,)](dt, found, BLOCK=4096)
    # of float64, too: its own rounding is half a step
    exact = torch.where(
        dt > 20, dt, dt.clamp(min=0).double() + dt.abs().neg().double().exp().log1p()
    )
    error = (found.double() / exact - 1).abs()
    budget = (dt.abs() + 4) * torch.finfo(dtype).eps
    assert (error <= budget).all(), (error / budget).max()
    ends = torch.tensor([-torch.inf, torch.inf, torch.nan, 0.0], dtype=dtype)
    found = torch.empty_like(ends)
    step_size_kernel[(1,)](ends, found, BLOCK=4)
    assert (found[:2].tolist(), found[2].isnan()) == ([0.0, torch.inf], True)


def test_no_step_leaves_the_state_bit_identical(discretization):
    inputs = selective_inputs(1, 3, 4, 3)
    inputs["dt"].fill_(-1e4)
    _, final_state = selective_scan(**inputs, discretization=discretization, backend="triton")
    assert torch.equal(final_state, inputs["initial_state"])


def test_the_check_notices_the_other_discretization(monkeypatch):
    monkeypatch.setitem(selective_triton.TRANSITIONS, "zoh", selective_triton.TRANSITIONS["euler"])
    with pytest.raises(AssertionError, match="off by"):
        assert_as_accurate(selective_scan, selective_inputs(1, 5, 3, 2), discretization="zoh")


def conv_inputs(batch, length, width, taps, *, dtype=torch.float32, segments=None):
    return draw(
        1,
        dtype,
        x=(batch, length, width),
        weight=(width, taps),
        bias=(width,),
        initial_state=(segments or batch, taps - 1, width),
    )


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_convolutions_of_packed_segments_equal_the_reference(small_chunks, taps, activation):
    cu_seqlens = bounds(1, 0, 7, 8, 9, 0)
    inputs = conv_inputs(1, 25, 5, taps, segments=6)
    assert_as_accurate(causal_conv1d, inputs, cu_seqlens=cu_seqlens, activation=activation)


@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_convolutions_of_lengths_around_a_chunk_equal_the_reference(length):
    assert_as_accurate(causal_conv1d, conv_inputs(1, length, 3, 4), activation="silu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_convolutions_of_ragged_channels_equal_the_reference(small_chunks, dtype):
    inputs = conv_inputs(2, 9, 133, 4, dtype=dtype)
    inputs["x"] = torch.cat([inputs["x"], inputs["x"]], dim=-1)[..., 1:134]
    assert_as_accurate(causal_conv1d, inputs, activation="silu")


def test_convolutions_without_bias_and_state_equal_the_reference():
    inputs = conv_inputs(2, 5, 3, 4) | {"bias": None, "initial_state": None}
    assert_as_accurate(causal_conv1d, inputs)


@triton.jit
def compose(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def repairs_kernel(a, b, scanned, x, y, product, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    _, total = tl.associative_scan((tl.load(a + at), tl.load(b + at)), 0, compose)
    tl.store(scanned + at, total)
    square = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(product + square, tl.dot(tl.load(x + square), tl.load(y + square)))


def test_repaired_interpreter_scans_and_multiplies_bfloat16():
    drawn = draw(3, torch.float32, a=(16, 4), b=(16, 4), x=(16, 16), y=(16, 16))
    a, b = drawn["a"], drawn["b"]
    x, y = drawn["x"].bfloat16(), drawn["y"].bfloat16()
    scanned, product = torch.empty(16, 4), torch.empty(16, 16)
    repairs_kernel[(1,)](a, b, scanned, x, y, product, ROWS=16, COLUMNS=4)
    state = torch.zeros(4)
    for t in range(16):
        state = a[t] * state + b[t]
        torch.testing.assert_close(scanned[t], state, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(product, x.float() @ y.float(), rtol=1e-5, atol=1e-5)


def test_this_process_interprets():
    assert ssmzoo_kernels.dispatch.interpreting()
    assert not isinstance(skeleton.scan_fwd_kernel, triton.JITFunction)
