"""The Triton kernels on a real GPU."""

import pytest
import torch

from ssmzoo_kernels import causal_conv1d, last_backend, longhorn_scan, selective_scan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def draw(shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, device="cuda").to(dtype)
        for name, shape in shapes.items()
    }


def scan_shapes(batch, length, width, states, segments=None):
    wide, narrow = (batch, length, width), (batch, length, states)
    return {
        "u": wide,
        "q": narrow,
        "k": narrow,
        "dt": wide,
        "dt_bias": (width,),
        "D": (width,),
        "z": wide,
        "initial_state": (segments or batch, width, states),
    }


def selective_inputs(batch, length, width, states, dtype=torch.float32, segments=None):
    wide, narrow = (batch, length, width), (batch, length, states)
    shapes = {
        "u": wide,
        "dt": wide,
        "A": (width, states),
        "B": narrow,
        "C": narrow,
        "D": (width,),
        "z": wide,
        "dt_bias": (width,),
        "initial_state": (segments or batch, width, states),
    }
    inputs = draw(shapes, dtype)
    return inputs | {"A": -inputs["A"].exp()}


def conv_shapes(batch, length, width, taps, segments=None):
    state = (segments or batch, taps - 1, width)
    return {
        "x": (batch, length, width),
        "weight": (width, taps),
        "bias": (width,),
        "initial_state": state,
    }


def results(op, inputs, backend, wide=None, **options):
    leaves = {k: x.detach().to(wide or x.dtype).requires_grad_() for k, x in inputs.items()}
    outputs = op(*leaves.values(), backend=backend, **options)
    generator = torch.Generator(device="cuda").manual_seed(99)
    loss = sum(
        (y.double() * torch.randn(y.shape, generator=generator, device="cuda")).sum()
        for y in outputs
    )
    grads = torch.autograd.grad(loss, list(leaves.values()))
    named = dict(zip(("output", "final_state"), (y.detach() for y in outputs), strict=True))
    return named | dict(zip(leaves, grads, strict=True))


def assert_as_accurate(op, inputs, **options):
    # the quotients of "zoh" begin where numbers that are 2 units of float32 off cancel to an eighth
    quotients = 16 * torch.finfo(torch.float32).eps * (options.get("discretization") == "zoh")
    truth = results(op, inputs, "reference", wide=torch.float64, **options)
    usual = results(op, inputs, "reference", **options)
    kernel = results(op, inputs, "triton", **options)
    assert last_backend(op.__name__) == "triton"
    for name, exact in truth.items():
        if not exact.numel():  # a convolution of one tap has no state
            continue
        step = torch.finfo(usual[name].dtype).eps
        # a GPU's power of two errs by 2 units in the last place
        rounding = (4 * step + quotients) * exact.abs().max()
        budget = 4 * (usual[name].double() - exact).abs().max() + rounding
        error = (kernel[name].double() - exact).abs().max()
        assert error <= budget, f"{name}: off by {error:.2e}, budget {budget:.2e}"


def bounds(*lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "length", "width", "states"),
    [(1, 700, 1536, 16), (40, 130, 1536, 16), (2, 65, 37, 3), (1, 200, 96, 1), (1, 130, 64, 128)],
)
def test_scans_equal_the_reference(batch, length, width, states, dtype):
    assert_as_accurate(longhorn_scan, draw(scan_shapes(batch, length, width, states), dtype))


def test_packed_scans_equal_the_reference():
    inputs = draw(scan_shapes(1, 713, 64, 16, segments=7))
    assert_as_accurate(longhorn_scan, inputs, cu_seqlens=bounds(1, 7, 63, 0, 64, 65, 513))


@pytest.mark.parametrize("discretization", ["euler", "zoh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "length", "width", "states"),
    [(1, 700, 1536, 16), (40, 130, 1536, 16), (2, 65, 37, 3), (1, 200, 96, 1), (1, 130, 64, 128)],
)
def test_selective_scans_equal_the_reference(batch, length, width, states, dtype, discretization):
    inputs = selective_inputs(batch, length, width, states, dtype)
    assert_as_accurate(selective_scan, inputs, discretization=discretization)


@pytest.mark.parametrize("discretization", ["euler", "zoh"])
def test_packed_selective_scans_equal_the_reference(discretization):
    inputs = selective_inputs(1, 713, 64, 16, segments=7)
    options = {"cu_seqlens": bounds(1, 7, 63, 0, 64, 65, 513), "discretization": discretization}
    assert_as_accurate(selective_scan, inputs, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taps", [1, 4])
def test_convolutions_equal_the_reference(taps, dtype):
    inputs = draw(conv_shapes(1, 200, 133, taps, segments=6), dtype)
    lengths = bounds(1, 7, 63, 0, 64, 65)
    assert_as_accurate(causal_conv1d, inputs, cu_seqlens=lengths, activation="silu")


@pytest.mark.parametrize("op", [longhorn_scan, selective_scan])
def test_the_same_inputs_give_the_same_bits(op):
    inputs = draw(scan_shapes(1, 3000, 512, 16), torch.bfloat16)
    if op is selective_scan:
        inputs = selective_inputs(1, 3000, 512, 16, torch.bfloat16)
    first, second = (results(op, inputs, "triton") for _ in range(2))
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


def test_tensors_beyond_32_bit_offsets_are_addressed():
    length, width = 2**31 // 4096 + 256, 4096
    tail = draw(scan_shapes(1, 128, width, 16), torch.bfloat16)
    inputs = draw(scan_shapes(1, length, width, 16), torch.bfloat16, seed=1)
    for name in ("u", "q", "k", "dt", "z"):
        inputs[name][:, -128:] = tail[name]
    vectors = (inputs["dt_bias"], inputs["D"])
    rows = ("u", "q", "k", "dt")
    _, before = longhorn_scan(*(inputs[x][:, :-128] for x in rows), *vectors, inputs["z"][:, :-128])
    expected, _ = longhorn_scan(
        *(tail[x] for x in rows), *vectors, tail["z"], before, backend="reference"
    )
    out, _ = longhorn_scan(*(inputs[x] for x in rows), *vectors, inputs["z"])
    torch.testing.assert_close(out[:, -128:], expected, rtol=2e-2, atol=2e-2)


def test_compiled_models_give_the_same_outputs_and_gradients():
    inputs = draw(scan_shapes(2, 300, 64, 16))

    def run(*leaves, backend):
        return longhorn_scan(*leaves, backend=backend)

    eager = results(longhorn_scan, inputs, "triton")
    compiled = results(torch.compile(run, fullgraph=True), inputs, "triton")
    for name, x in eager.items():
        torch.testing.assert_close(compiled[name], x, msg=name)
