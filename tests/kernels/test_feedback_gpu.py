"""The Triton kernels of linear_scan and feedback_scan on a real GPU."""

import functools

import pytest
import torch

from ssmzoo_kernels import feedback_scan, last_backend, linear_scan
from ssmzoo_kernels.feedback_scan import SOLVER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OPTIONS = ("w_gamma", "D", "drive", "initial_state")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def bounds(*lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0)


def results(op, inputs, wide=None):
    leaves = [
        None
        if x is None
        else x.detach()
        .to(x.dtype if wide is None else torch.promote_types(x.dtype, wide))
        .requires_grad_()
        for x in inputs
    ]
    outputs = op(*leaves)
    generator = torch.Generator("cuda").manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64, device="cuda")
    for y in outputs:
        numbers = torch.view_as_real(y) if y.is_complex() else y
        weights = torch.randn(numbers.shape, generator=generator, device="cuda")
        loss = loss + (numbers.double() * weights).sum()
    grads = torch.autograd.grad(loss, [x for x in leaves if x is not None])
    return [x.detach() for x in outputs] + list(grads)


def judge(op, inputs, **options):
    """Fail unless the kernel is about as close to float64 as the reference is.

    Besides the reference's own error, a result may err by the roundings of a sum over all tokens;
    and a GPU's power of two, which gates are made of, errs by 2 units in the last place.
    """
    times = 4 if op is feedback_scan else 2
    tokens = inputs[0].shape[0] * inputs[0].shape[1]
    loop = functools.partial(op, backend="reference", cu_seqlens=options.get("cu_seqlens"))
    truth, usual = results(loop, inputs, torch.float64), results(loop, inputs)
    found = results(functools.partial(op, backend="triton", **options), inputs)
    assert last_backend(op.__name__) == "triton"
    for i, (got, expected, exact) in enumerate(zip(found, usual, truth, strict=True)):
        assert got.dtype == expected.dtype
        step = torch.finfo(got.dtype).eps
        rounding = max(4.0, tokens**0.5) * step * exact.abs().max()
        budget = times * (expected - exact).abs().max() + rounding
        error = (got - exact).abs().max()
        assert error <= budget, f"result {i}: off by {error:.2e}, budget {budget:.2e}"


def close(got, expected, tolerance):
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        error = (a.to(b.dtype) - b).abs().max()
        assert error <= tolerance * b.abs().max(), f"result {i}: error {error:.2e}"


# --- linear_scan ------------------------------------------------------------------------------


def factors(batch, length, width, dtype, segments=None):
    exact = torch.promote_types(torch.float32, dtype)
    a, b = torch.randn(2, batch, length, width, dtype=exact, device="cuda")
    state = torch.randn(segments or batch, width, dtype=exact, device="cuda")
    return [(a / (2 if dtype.is_complex else 1)).to(dtype), b.to(dtype), state]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize(
    ("batch", "length", "width"), [(1, 1, 1), (2, 700, 1536), (3, 65, 37), (1, 3000, 3)]
)
def test_linear_scans_equal_the_reference(batch, length, width, dtype):
    judge(linear_scan, factors(batch, length, width, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_packed_linear_scans_equal_the_reference(dtype):
    cu_seqlens = bounds(1, 7, 63, 0, 64, 65, 513)
    judge(linear_scan, factors(1, 713, 64, dtype, 7), cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("paired", [False, True])
def test_products_that_overflow_and_underflow_change_no_state(paired):
    """Factors of size 50 and 1/50 in runs: products reach 50^40 either way, states never do."""
    dtype = torch.complex128 if paired else torch.float64
    a = torch.randn(1, 128, 33, dtype=dtype, device="cuda")
    power = torch.tensor([1.0] * 40 + [-1.0] * 40).repeat(2)[:128].double().cuda()[:, None]
    near = 1 + 1e-3 * torch.randn(128, 33, device="cuda")
    a = (a / a.abs() * 50.0**power * near).to(torch.complex64 if paired else torch.float32)
    b, state = torch.zeros_like(a), 1e-35 * torch.randn_like(a[:, 0])
    exact = linear_scan(*(x.to(dtype) for x in (a, b, state)), backend="reference")[0]
    loop, found = (linear_scan(a, b, state, backend=x)[0] for x in ("reference", "triton"))
    assert loop.isfinite().all()
    errors = [((x - exact).abs() / exact.abs()).max() for x in (found, loop)]
    assert errors[0] <= 4 * errors[1], errors


# --- feedback_scan ----------------------------------------------------------------------------


def draw(batch, length, width, states, segments=None, absent=("drive",), dtype=torch.float32):
    def normal(*shape):
        return torch.randn(*shape, device="cuda")

    # inputs and gates that leave every lane well conditioned, so that rounding does not grow
    inputs = {
        "u": 0.5 * normal(batch, length, width).to(dtype),
        "lam": -torch.rand(width, states, device="cuda"),
        "w": 0.5 * normal(width, states),
        "C": normal(width, states),
        "w_gamma": normal(width, states),
        "D": normal(width),
        "drive": normal(batch, length, width).to(dtype),
        "initial_state": normal(segments or batch, width, states),
    }
    return [None if name in absent else x for name, x in inputs.items()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "length", "width", "states"),
    [(1, 130, 1536, 16), (40, 65, 1536, 16), (2, 65, 37, 3), (1, 200, 96, 1), (1, 130, 64, 128)],
)
def test_marches_equal_the_reference(batch, length, width, states, dtype):
    judge(feedback_scan, draw(batch, length, width, states, dtype=dtype))
    assert last_backend(SOLVER) == "march"


@pytest.mark.parametrize("absent", [(), OPTIONS, ("w_gamma", "D")], ids=str)
def test_packed_marches_equal_the_reference(absent):
    inputs = draw(1, 713, 64, 16, 7, absent)
    judge(feedback_scan, inputs, cu_seqlens=bounds(1, 7, 63, 0, 64, 65, 513))


def test_marches_in_float64_equal_the_reference():
    inputs = [None if x is None else x.double() for x in draw(2, 130, 70, 5, absent=())]
    found, exact = (
        results(functools.partial(feedback_scan, backend=x), inputs)
        for x in ("triton", "reference")
    )
    close(found, exact, 1e-12)


@pytest.mark.parametrize("states", [1, 3, 16])
@pytest.mark.parametrize("length", [1, 64, 300])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("absent", [("drive",), ("w_gamma", "D")], ids=str)
def test_both_solvers_agree_on_one_grid(batch, length, states, absent):
    inputs = draw(batch, length, 40, states, absent=absent)
    loop = functools.partial(feedback_scan, backend="reference")
    exact = results(loop, inputs, torch.float64)
    for solver in ("march", "newton"):
        run = functools.partial(feedback_scan, backend="triton", solver=solver)
        found = results(run, inputs)
        assert (last_backend("feedback_scan"), last_backend(SOLVER)) == ("triton", solver)
        close(found, exact, 1e-4)


def test_packed_newton_solves_and_its_gradients_equal_the_marches():
    inputs = [None if x is None else x.double() for x in draw(1, 713, 33, 16, 7, absent=())]
    march, newton = (
        results(
            functools.partial(
                feedback_scan,
                backend="triton",
                solver=solver,
                tolerance=1e-12,
                cu_seqlens=bounds(1, 7, 63, 0, 64, 65, 513),
            ),
            inputs,
        )
        for solver in ("march", "newton")
    )
    assert last_backend(SOLVER) == "newton"
    close(newton, march, 1e-9)


def test_a_cap_that_is_reached_makes_the_call_march(caplog):
    inputs = draw(2, 100, 40, 4, absent=OPTIONS)
    marched = feedback_scan(*inputs, backend="triton")
    found = feedback_scan(*inputs, backend="triton", solver="newton", max_iterations=1)
    assert last_backend(SOLVER) == "march"
    assert "this call marches instead" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(found, marched, strict=True))


@pytest.mark.parametrize("solver", ["march", "newton"])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_gates_far_beyond_the_exponents_range_stay_finite(sign, solver):
    inputs = draw(2, 100, 40, 4, absent=("drive",))
    inputs[2] = torch.full_like(inputs[2], sign * 1e4)
    inputs[0], inputs[-1] = inputs[0].abs(), inputs[-1].abs() + 1
    run = functools.partial(feedback_scan, backend="triton", solver=solver)
    assert all(x.isfinite().all() for x in results(run, inputs))


def test_repeated_calls_give_the_same_bits():
    inputs = draw(3, 500, 200, 16, absent=())
    run = functools.partial(feedback_scan, backend="triton")
    first, second = results(run, inputs), results(run, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_compiled_models_give_the_same_outputs_and_gradients():
    inputs = draw(2, 100, 64, 16, absent=())

    def run(*leaves):
        return feedback_scan(*leaves, backend="triton")

    compiled = torch.compile(run, fullgraph=True)
    for a, b in zip(results(compiled, inputs), results(run, inputs), strict=True):
        torch.testing.assert_close(a, b)
