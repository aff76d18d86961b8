"""rational_kernel: both modes by FFT against long division and the sampled ratio."""

import functools
import warnings

import pytest
import torch
from tests.kernels import contracts
from torch.utils._python_dispatch import TorchDispatchMode

from ssmzoo.testing.accuracy import assert_as_accurate
from ssmzoo_kernels import inverse_series, last_backend, rational_kernel
from ssmzoo_kernels.rational_kernel import eager


class TestRationalKernel(contracts.RationalKernel):
    """Every check of the contract."""


class TestInverseSeries(contracts.InverseSeries):
    """Every check of the contract."""


def draw(order, width=4, denominators=2, dtype=torch.float64, seed=0):
    """Stable denominators, ``sum |a| < 1``, and numerators of any size."""
    generator = torch.Generator().manual_seed(seed)
    a = 2 * torch.rand(denominators, order, generator=generator, dtype=torch.float64) - 1
    b = torch.randn(width, order, generator=generator, dtype=torch.float64)
    return [(0.9 * a / max(order, 1)).to(dtype), b.to(dtype)]


def truncated(a, b, length, grid=None, **options):
    grid = grid or length
    return rational_kernel(a, b, length, mode="truncated", trunc_len=grid, **options)


def from_poles(*poles):
    """The denominator with these real poles, ``[1, n]`` float64."""
    a = torch.ones(1, dtype=torch.float64)
    for pole in poles:
        a = torch.cat([a, a.new_zeros(1)]) - pole * torch.cat([a.new_zeros(1), a])
    return a[None, 1:]


def error(got, expected):
    """The largest error relative to the largest entry."""
    assert got.shape == expected.shape
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).abs().max() / expected.abs().max())


def judge(op, inputs, dtype, length):
    """Hold an op to the loop's own error, and to what rounding does to FFTs of this length."""
    known = functools.partial(op, backend="reference")
    logarithm = max(1, length).bit_length()
    assert_as_accurate(op, known, inputs, dtype, slack=2 + logarithm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", [1, 5, 64])
@pytest.mark.parametrize("length", [2, 3, 64, 300])
def test_exact_kernels_and_gradients_are_those_of_long_division(length, order, dtype):
    judge(functools.partial(rational_kernel, length=length), draw(order), dtype, length)
    rational_kernel(*draw(order), length)
    assert last_backend("rational_kernel") == "eager"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("order", "length", "grid"),
    [(1, 2, 2), (1, 128, 128), (2, 5, 8), (64, 128, 128), (127, 128, 128), (63, 9, 64)],
)
def test_truncated_kernels_and_gradients_are_those_of_the_sampled_ratio(order, length, grid, dtype):
    op = functools.partial(truncated, length=length, grid=grid)
    judge(op, draw(order), dtype, grid)


@pytest.mark.parametrize(("order", "length"), [(0, 9), (3, 0), (3, 1), (0, 0)])
def test_order_or_length_0_gives_zero_kernels_and_gradients(order, length):
    a, b = (x.requires_grad_() for x in draw(order))
    kernel = rational_kernel(a, b, length)
    assert torch.equal(kernel, torch.zeros(4, length, dtype=torch.float64))
    kernel.sum().backward()
    assert torch.equal(a.grad, torch.zeros_like(a))
    assert torch.equal(b.grad, torch.zeros_like(b))


@pytest.mark.parametrize("length", [0, 1])
def test_a_short_kernel_is_on_the_tape_of_every_backend(length):
    for backend in ("reference", "eager"):
        for name in ("a", "b"):
            leaves = {"a": torch.ones(1, 2), "b": torch.ones(1, 2)}
            leaves[name].requires_grad_()
            kernel = rational_kernel(**leaves, length=length, backend=backend)
            (grad,) = torch.autograd.grad(kernel.sum(), leaves[name])
            assert torch.equal(grad, torch.zeros(1, 2))


@pytest.mark.parametrize("radius", [0.9, 0.999, 0.9999, 1.003, 1.01])
def test_exact_kernels_of_slow_and_growing_poles_are_exact(radius):
    a = from_poles(radius, -0.7 * radius, 0.3)
    b = torch.randn(1, 3, dtype=torch.float64)
    expected = rational_kernel(a, b, 1024, backend="reference")
    assert error(rational_kernel(a, b, 1024), expected) < 1e-13
    rounded = [a.float(), b.float()]
    expected = rational_kernel(*[x.double() for x in rounded], 1024, backend="reference")
    assert error(rational_kernel(*rounded, 1024), expected) < 1e-5


def test_a_longer_kernel_begins_with_a_shorter_one():
    a, b = draw(17, dtype=torch.float32)
    whole = rational_kernel(a, b, 1000)
    for length in (1, 16, 17, 18, 255, 256, 257, 999):
        part = rational_kernel(a, b, length)
        assert (part - whole[:, :length]).abs().max() <= 1e-6 * whole.abs().max()
    series = inverse_series(a, 1000)
    for length in (0, 1, 2, 63, 64, 65):
        assert torch.equal(inverse_series(a, length), series[:, :length])


@pytest.mark.parametrize("grid", [128, 256])
def test_the_grid_wraps_the_tail_onto_the_first_taps(grid):
    a, b = from_poles(0.95, -0.9, 0.6), torch.randn(1, 3, dtype=torch.float64)
    series = rational_kernel(a, b, 20 * grid)  # 0.95^(20 * 128) is nothing
    assert error(truncated(a, b, grid), series.view(1, 20, grid).sum(1)) < 1e-14


def test_a_growing_grid_tends_to_the_exact_kernel():
    a, b = from_poles(0.99, 0.5), torch.randn(1, 2, dtype=torch.float64)
    exact = rational_kernel(a, b, 64)
    errors = [error(truncated(a, b, 64, grid), exact) for grid in (64, 256, 1024, 4096)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1
    assert errors[-1] < 1e-13


def test_tap_zero_is_the_wrapped_tap_on_a_grid_and_zero_in_the_series():
    a, b = draw(4, width=2)
    A = torch.zeros(2, 4, 4, dtype=torch.float64)
    A[:, 0], A[:, 1:, :-1] = -a, torch.eye(3, dtype=torch.float64)
    power = torch.linalg.matrix_power(A, 16)
    C = torch.linalg.solve((torch.eye(4, dtype=torch.float64) - power).mT, b)
    wrapped = torch.einsum(
        "di,dij,j->d", C, torch.linalg.matrix_power(A, 15), torch.eye(4)[0].double()
    )
    assert error(truncated(a, b, 16)[:, 0], wrapped) < 1e-12
    assert torch.equal(rational_kernel(a, b, 16)[:, 0], torch.zeros(2, dtype=torch.float64))


def test_without_coefficients_the_kernel_is_exactly_zero():
    for a, b in (draw(0), [torch.zeros(2, 8), torch.zeros(4, 8)]):
        assert not rational_kernel(a, b, 40).any()
        assert not truncated(a, b, 40).any()


def test_a_numerator_alone_is_a_finite_response():
    a, b = torch.zeros(1, 6), torch.randn(3, 6)
    for kernel in (rational_kernel(a, b, 40), truncated(a, b, 40)):
        expected = torch.nn.functional.pad(b, (1, 33))
        torch.testing.assert_close(kernel, expected, rtol=1e-6, atol=1e-6)
    delay = torch.eye(6)[4:5]
    assert rational_kernel(a, delay, 40).argmax() == 5


def test_first_order_and_double_poles_have_their_closed_forms():
    steps = torch.arange(1, 200, dtype=torch.float64)
    one = rational_kernel(from_poles(-0.9), torch.tensor([[2.0]]).double(), 200)[0, 1:]
    assert error(one, 2 * (-0.9) ** (steps - 1)) < 1e-14
    numerator = torch.tensor([[1.0, 0.0]]).double()
    double = rational_kernel(from_poles(0.9, 0.9), numerator, 200)[0, 1:]
    assert error(double, steps * 0.9 ** (steps - 1)) < 1e-13


@pytest.mark.parametrize("gap", [1e-1, 1e-3, 2e-4])
@pytest.mark.parametrize(("order", "grid"), [(4, 64), (64, 1024)])
def test_a_slow_pole_costs_the_truncated_kernel_no_digits(order, grid, gap):
    generator = torch.Generator().manual_seed(0)
    a = -torch.rand(2, order, generator=generator)  # in phase: near zero at frequency 0
    a = a * ((1 - gap) / a.abs().sum(1, keepdim=True))
    b, grad = torch.randn(4, order, generator=generator), torch.randn(4, grid, generator=generator)
    found = []
    for dtype in (torch.float64, torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in (a, b)]
        kernel = truncated(*leaves, grid)
        found.append((kernel, *torch.autograd.grad(kernel, leaves, grad.to(dtype))))
    for exact, got in zip(*found, strict=True):
        assert error(got, exact) < 1e-6


def test_poles_outside_the_disc_leave_the_truncated_kernel_finite():
    a, b = from_poles(1.2, 0.5), torch.ones(1, 2, dtype=torch.float64)
    kernel = truncated(a, b, 2048)
    assert kernel.isfinite().all()
    assert error(kernel, truncated(a, b, 2048, backend="reference")) < 1e-12
    assert rational_kernel(a, b, 100)[0, -1] > 1e6


def test_poles_on_the_grid_are_told_once_with_their_row():
    a = torch.zeros(3, 4)
    a[1, 3] = -1  # 1 - z^-4: zero at four points of every grid divisible by 4
    b = torch.ones(3, 4)
    with pytest.warns(RuntimeWarning, match="denominator 1 comes within") as told:
        truncated(a, b, 16)
    assert len(told) == 1
    assert truncated(a.mul(0.5), b, 16).isfinite().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rational_kernel(a, b, 16).isfinite().all()


def test_how_near_a_pole_may_come_follows_the_dtype():
    a = torch.zeros(1, 4, dtype=torch.float64)
    a[0, 3] = -1 + 1e-6
    b = torch.ones(1, 4, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="denominator 0 comes within"):
        truncated(a.float(), b.float(), 16)
    kernel = truncated(a, b, 16)  # a warning would be an error
    assert error(kernel, truncated(a, b, 16, backend="reference")) < 1e-8


def test_an_odd_grid_is_made_even_and_shorter_kernels_are_prefixes():
    a, b = draw(5)
    assert torch.equal(truncated(a, b, 30, 33), truncated(a, b, 34, 34)[:, :30])


def test_dtypes():
    a, b = draw(5, dtype=torch.bfloat16)
    for kernel in (rational_kernel(a, b, 9), truncated(a, b, 9)):
        assert kernel.dtype is torch.float32
    assert rational_kernel(a, b.double(), 9).dtype is torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = rational_kernel(a.float(), b.float(), 9)
    assert torch.equal(inside, rational_kernel(a.float(), b.float(), 9))


class Traffic(TorchDispatchMode):
    """Note the sizes of all FFTs, and count the numbers written."""

    def __init__(self):
        super().__init__()
        self.transforms, self.numbers = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor) and not func.is_view:
                self.numbers += x.numel()
        if "_fft_" in func.name():
            self.transforms.append((func.name(), tuple(args[0].shape[:-1]), tuple(result.shape)))
        return result


@pytest.mark.parametrize("mode", ["exact", "truncated"])
def test_the_work_does_not_depend_on_the_order(mode):
    length, seen = 1024, []
    for order in (2, 32, length // 4):
        a, b = draw(order)
        with Traffic() as traffic:
            if mode == "exact":
                inverse = eager.inverse_series(a, length)
                kernel = eager.exact(inverse, b, length)
                eager.exact_backward(torch.ones_like(kernel), kernel, inverse, order)
            else:
                inverse = eager.inverse_on_grid(a, length)
                kernel = eager.truncated(inverse, b, length, length)
                eager.truncated_backward(torch.ones_like(kernel), inverse, b, length)
        seen.append(traffic)
    for other in seen[1:]:
        assert other.transforms == seen[0].transforms
        assert other.numbers <= 1.1 * seen[0].numbers


def test_fast_sizes_are_even_smooth_and_the_smallest():
    def smooth(size):
        for factor in (2, 3, 5):
            while size % factor == 0:
                size //= factor
        return size == 1

    for least in (1, 2, 3, 17, 255, 256, 257, 1999, 10241):
        candidates = range(least + least % 2, 4 * least + 4, 2)
        assert eager.fast_size(least) == next(x for x in candidates if smooth(x))


def test_inverse_series_inverts_and_has_its_gradient():
    a, _ = draw(6)
    series = inverse_series(a, 50)
    product = torch.zeros(2, 50, dtype=torch.float64)
    for i, column in enumerate(torch.nn.functional.pad(a, (1, 0), value=1.0).T):
        product[:, i:] += column[:, None] * series[:, : 50 - i]
    expected = torch.zeros(2, 50, dtype=torch.float64)
    expected[:, 0] = 1
    torch.testing.assert_close(product, expected, rtol=0, atol=1e-14)
    for length in (1, 2, 4, 9):
        assert torch.autograd.gradcheck(
            functools.partial(inverse_series, length=length), a.requires_grad_()
        )


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"a": torch.ones(3, 3)}, ValueError, "the 3 rows of a must divide the 4 rows of b"),
        ({"length": -1}, ValueError, "length must be at least 0, got -1"),
        ({"length": 2.0}, TypeError, "length must be an int, got float"),
        ({"trunc_len": 8}, ValueError, "trunc_len belongs to mode='truncated'"),
        ({"mode": "truncated"}, ValueError, "needs trunc_len"),
        ({"mode": "truncated", "trunc_len": 0}, ValueError, "trunc_len must be at least 1"),
        ({"mode": "truncated", "trunc_len": 6}, ValueError, "length must be at most trunc_len = 6"),
        (
            {"mode": "truncated", "trunc_len": 2, "length": 1},
            ValueError,
            "trunc_len must exceed the order n = 3, got 2",
        ),
    ],
)
def test_wrong_arguments_are_named(changes, kind, message):
    arguments = {"a": torch.ones(2, 3), "b": torch.ones(4, 3), "length": 7} | changes
    with pytest.raises(kind, match=f"rational_kernel.*{message}"):
        rational_kernel(**arguments)
