"""causal_conv1d: every fast backend against the sum over taps."""

import functools

import pytest
import torch
import torch.nn.functional as F

from ssmzoo.testing.accuracy import assert_as_accurate, outputs_and_grads
from ssmzoo_kernels import causal_conv1d, last_backend

NAMES = ("x", "weight", "bias", "initial_state")


def draw(B=2, L=9, D=5, K=4, segments=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, L, D), (D, K), (D,), (segments or B, K - 1, D))
    tensors = [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]
    return [x.to(dtype) for x in tensors]


def bounds(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def judge(inputs, backend, dtype=torch.float32, **options):
    candidate = functools.partial(causal_conv1d, backend=backend, **options)
    known = functools.partial(causal_conv1d, backend="reference", **options)
    assert_as_accurate(candidate, known, inputs, dtype)


def close(got, expected, tolerance):
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    error = (got.double() - expected.double()).abs().max()
    assert error <= tolerance * expected.double().abs().max(), f"error {error:.2e}"


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 7, 64, 127, 128, 129, 300])
def test_any_length_is_as_exact_as_the_sum(backend, length, activation):
    judge(draw(L=length, D=20), backend, activation=activation)
    assert last_backend("causal_conv1d") == backend


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("width", [1, 16, 63, 300])
def test_any_width_and_filter_is_as_exact_as_the_sum(backend, width, taps):
    judge(draw(L=21, D=width, K=taps), backend, activation="silu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_as_exact_as_the_sum(backend, dtype):
    judge(draw(L=40, D=33), backend, dtype, activation="silu")


@pytest.mark.parametrize("absent", [(2,), (3,), (2, 3)])
def test_bias_and_initial_state_may_be_absent(backend, absent):
    inputs = [None if n in absent else x for n, x in enumerate(draw(L=20, D=18))]
    judge(inputs, backend, activation="silu")


def test_it_is_the_convolution_that_torch_computes(backend):
    x, weight, bias, _ = draw(L=30, D=18)
    padded = F.pad(x.transpose(1, 2), (3, 0))
    expected = F.silu(F.conv1d(padded, weight[:, None], bias, groups=18)).transpose(1, 2)
    out, final = causal_conv1d(x, weight, bias, activation="silu", backend=backend)
    close(out, expected, 1e-13)
    assert torch.equal(final, x[:, -3:])


def test_mixed_dtypes_as_under_autocast(backend):
    x, weight, bias, state = draw(L=40, D=33)
    leaves = [x.bfloat16(), weight.float(), bias.half(), state.float()]
    leaves = [x.requires_grad_() for x in leaves]
    results = {}
    for name in (backend, "reference"):
        out, final = causal_conv1d(*leaves, activation="silu", backend=name)
        grads = torch.autograd.grad(out.double().sum() + final.double().sum(), leaves)
        results[name] = (out, final, *grads)
    for got, expected in zip(results[backend], results["reference"], strict=True):
        close(got, expected, 2 * torch.finfo(torch.bfloat16).eps)


def test_a_wrong_op_fails_the_accuracy_check():
    known = functools.partial(causal_conv1d, backend="reference", activation="silu")

    def looks_ahead(x, *rest):
        out, final = known(x, *rest)
        return out + 1e-5 * x.roll(-1, dims=1), final

    with pytest.raises(AssertionError, match="output 0"):
        assert_as_accurate(looks_ahead, known, draw(L=20), torch.float32)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_gradients_pass_gradcheck(backend, activation):
    inputs = [x.requires_grad_() for x in draw(B=1, L=5, D=3)]
    op = functools.partial(causal_conv1d, activation=activation, backend=backend)
    assert torch.autograd.gradcheck(op, inputs)


@pytest.mark.parametrize("pick", [0, 1])
def test_one_output_alone_has_gradients(backend, pick):
    inputs = [x.requires_grad_() for x in draw(L=18)]
    got, expected = (
        torch.autograd.grad(
            causal_conv1d(*inputs, activation="silu", backend=name)[pick].square().sum(),
            inputs,
            materialize_grads=True,
        )
        for name in (backend, "reference")
    )
    for a, b in zip(got, expected, strict=True):
        close(a, b, 1e-12)


@pytest.mark.parametrize("cut", [1, 2, 3, 20])
def test_two_halves_with_the_state_carried_equal_the_whole(backend, cut):
    inputs = draw(L=24, D=18)
    op = functools.partial(causal_conv1d, activation="silu", backend=backend)

    def halves(x, weight, bias, state):
        first, state = op(x[:, :cut], weight, bias, state)
        second, state = op(x[:, cut:], weight, bias, state)
        return torch.cat([first, second], dim=1), state

    whole = outputs_and_grads(op, inputs, torch.float64)
    for name, got in outputs_and_grads(halves, inputs, torch.float64).items():
        close(got, whole[name], 1e-13)


def test_packed_sequences_are_as_exact_as_the_sum(backend):
    lengths = (0, 1, 2, 3, 4, 0, 130)
    inputs = draw(B=1, L=sum(lengths), D=18, segments=len(lengths))
    judge(inputs, backend, cu_seqlens=bounds(*lengths), activation="silu")


def test_packed_sequences_equal_single_ones(backend):
    lengths = (5, 0, 2, 1, 140)
    x, weight, bias, state = draw(B=1, L=sum(lengths), D=18, segments=len(lengths))
    op = functools.partial(causal_conv1d, activation="silu", backend=backend)
    cu = bounds(*lengths)
    packed, finals = op(x, weight, bias, state, cu_seqlens=cu.int())
    for s in range(len(lengths)):
        piece = slice(cu[s], cu[s + 1])
        out, final = op(x[:, piece], weight, bias, state[s : s + 1])
        assert torch.equal(packed[:, piece], out)
        assert torch.equal(finals[s : s + 1], final)


def test_the_order_of_a_batch_is_irrelevant(backend):
    x, weight, bias, state = draw(B=3, L=21, D=18, dtype=torch.float32)
    order = torch.tensor([2, 0, 1])
    op = functools.partial(causal_conv1d, activation="silu", backend=backend)
    for got, expected in zip(
        op(x[order], weight, bias, state[order]), op(x, weight, bias, state), strict=True
    ):
        close(got, expected[order], 0 if backend == "cpu" else 1e-6)


def test_strided_inputs_give_the_same_results(backend):
    inputs = draw(L=20, D=18, dtype=torch.float32)
    strided = []
    for x in inputs:
        roomy = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
        strided.append(roomy[..., : x.shape[-1]].copy_(x))
    op = functools.partial(causal_conv1d, activation="silu", backend=backend)
    results = []
    for tensors in (inputs, strided):
        leaves = [x.requires_grad_() for x in tensors]
        out, final = op(*leaves)
        loss = out.square().sum() + final.square().sum()
        results.append((out, final, *torch.autograd.grad(loss, leaves)))
    for expected, got in zip(*results, strict=True):
        close(got, expected, 1e-6)


def test_any_number_of_threads_gives_the_same_bits():
    inputs = draw(B=2, L=300, D=200)
    op = functools.partial(causal_conv1d, activation="silu", backend="cpu")
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


def test_nan_and_infinity_keep_their_meaning(backend):
    x, weight, bias, state = draw(L=20, D=18, dtype=torch.float32)
    op = functools.partial(causal_conv1d, activation="silu", backend=backend)
    x[0, 9, 3] = float("nan")
    out, final = op(x, weight, bias, state)
    assert out[0, 9:13, 3].isnan().all()
    assert out.isnan().sum() == 4
    assert final.isfinite().all()
    x[0, 9, 3] = float("inf")
    weight = weight.abs()
    out, _ = op(x, weight, bias, state)
    assert (out[0, 9:13, 3] == float("inf")).all()


def test_silu_has_its_limits_exactly(backend):
    x = torch.tensor([-800.0, -100.0, 0.0, 100.0, 800.0]).view(1, 5, 1)
    out, _ = causal_conv1d(x, torch.ones(1, 1), activation="silu", backend=backend)
    assert torch.equal(out, x.clamp(min=0))
    leaf = x.clone().requires_grad_()
    causal_conv1d(leaf, torch.ones(1, 1), activation="silu", backend=backend)[0].sum().backward()
    torch.testing.assert_close(leaf.grad.flatten(), torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]))


def test_compiled_functions_have_no_graph_break_and_the_same_results(backend):
    inputs = draw(L=20, D=6, dtype=torch.float32)

    def layer(x, *rest):
        out, final = causal_conv1d(torch.tanh(x), *rest, activation="silu", backend=backend)
        return torch.sin(out), final

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = outputs_and_grads(layer, inputs, torch.float32)
    for name, got in outputs_and_grads(compiled, inputs, torch.float32).items():
        close(got, expected[name], 1e-6)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("x", None, TypeError, "x must be a tensor .*got NoneType"),
        ("x", torch.randn(9, 5), ValueError, r"x must have shape \[B, L, D\]"),
        ("x", torch.ones(2, 9, 5).long(), TypeError, "x must be floating point"),
        ("weight", torch.randn(4, 4), ValueError, r"weight must have shape \[D, K\] = \[5, 4\]"),
        ("weight", torch.randn(5, 1, 4), ValueError, r"weight must have shape \[D, K\]"),
        ("weight", torch.randn(5, 0), ValueError, "at least one tap"),
        ("bias", torch.randn(4), ValueError, r"bias must have shape \[D\] = \[5\], got \[4\]"),
        ("bias", torch.randn(5, device="meta"), ValueError, "bias must be on cpu, got meta"),
        ("initial_state", torch.randn(2, 4, 5), ValueError, r"= \[2, 3, 5\], got \[2, 4, 5\]"),
        ("activation", "relu", ValueError, "activation must be 'silu' or None, got 'relu'"),
        ("backend", "fast", ValueError, "backend must be one of"),
        ("backend", "triton", ValueError, "needs CUDA tensors, got cpu"),
        ("cu_seqlens", torch.tensor([0, 9]), ValueError, "B = 1, got B = 2"),
    ],
)
def test_wrong_arguments_are_named(name, value, error, message):
    arguments = dict(zip(NAMES, draw(), strict=True)) | {name: value}
    with pytest.raises(error, match=f"causal_conv1d.*{message}"):
        causal_conv1d(**arguments)


def test_wrong_boundaries_are_refused():
    x, weight, *_ = draw(B=1)
    for wrong in ([1, 9], [0, 8], [0, 6, 4, 9]):
        with pytest.raises(ValueError, match="must rise from 0 to L = 9"):
            causal_conv1d(x, weight, cu_seqlens=torch.tensor(wrong))
