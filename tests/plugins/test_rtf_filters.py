"""RTF's filter mathematics: golden checks of the specification, against dense linear algebra."""

import pytest
import torch

from ssmzoo_kernels import companion_step, rational_kernel
from ssmzoo_rtf.filters import (
    deployed_numerator,
    ends_within,
    initial_coefficients,
    montel,
    numerator_of_response,
)
from ssmzoo_rtf.stability import poles, poles_outside, spectral_radius


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def stable(order, width=4, denominators=2, dtype=torch.float64):
    a = initial_coefficients("montel", denominators, order, generator=generator(1))
    b = initial_coefficients("xavier", width, order, generator=generator(2))
    return a.to(dtype), b.to(dtype)


def error(got, expected):
    assert got.shape == expected.shape
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


def companion(a, b):
    """A [n, n], B, C of one filter."""
    A = torch.diag(torch.ones(len(a) - 1, dtype=a.dtype), -1)
    A[0] = -a
    return A, torch.eye(len(a), dtype=a.dtype)[0], b


def impulse_response(a, b, d, length):
    ring = torch.zeros(1, b.shape[1] + 1, b.shape[0], dtype=b.dtype)
    a, b = (x.T.contiguous().T for x in (a, b))
    position, outputs = torch.zeros(1, dtype=torch.int64), []
    for t in range(length):
        u = torch.full((1, b.shape[0]), float(t == 0), dtype=b.dtype)
        y, ring, position = companion_step(u, ring, position, a, b, d, inplace=True)
        outputs.append(y[0])
    return torch.stack(outputs, 1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize(
    ("order", "grid"),
    [(1, 128), (2, 128), (64, 128), (127, 128), (64, 2048), (2047, 2048)],
)
def test_steps_with_the_deployed_numerator_give_the_trained_kernel(order, grid, dtype, tolerance):
    a, b = stable(order, dtype=dtype)
    kernel = rational_kernel(a, b, grid, mode="truncated", trunc_len=grid)
    true, wrapped = deployed_numerator(a, b, grid)
    assert true.dtype is dtype
    assert error(impulse_response(a, true, wrapped, grid), kernel) < tolerance
    h0 = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=dtype)
    kernel[:, 0] += h0
    assert error(impulse_response(a, true, h0 + wrapped, grid), kernel) < tolerance
    if order == grid - 1:  # the response has not ended there: undeployed, b is another filter's
        assert error(impulse_response(a, b, h0, grid)[:, 1:], kernel[:, 1:]) > 10 * tolerance


@pytest.mark.parametrize("order", [1, 2, 16, 128])
def test_the_deployed_numerator_is_the_transposed_solve_and_not_the_other(order):
    a, b = stable(order, width=1, denominators=1)
    # near the disc's edge, so that the tail matters
    a = a * (0.999 / a.abs().sum())
    true, _ = deployed_numerator(a, b, order + 2)
    A, _, C = companion(a[0], b[0])
    tail = torch.eye(order, dtype=a.dtype) - torch.linalg.matrix_power(A, order + 2 + order % 2)
    assert error(true[0], torch.linalg.solve(tail.T, C)) < 1e-12
    if order > 1:
        assert error(true[0], torch.linalg.solve(tail, C)) > 1e-4


def test_the_deployed_numerator_is_exact_with_poles_outside_the_disc():
    a = torch.tensor([[-1.9, 0.88]], dtype=torch.float64)  # 1.1 and 0.8
    b = torch.tensor([[0.3, -0.2]], dtype=torch.float64)
    true, _ = deployed_numerator(a, b, 64)
    A, _, C = companion(a[0], b[0])
    tail = torch.eye(2, dtype=a.dtype) - torch.linalg.matrix_power(A, 64)
    assert error(true[0], torch.linalg.solve(tail.T, C)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_response_has_ended_where_only_rounding_is_left(dtype):
    eps = torch.finfo(dtype).eps
    # one pole each: what is left after 64 taps is radius^64 of the whole
    shares = torch.tensor([0.01, 0.5, 100.0, 1e6]).double() * eps
    a = -((shares ** (1 / 64)).to(dtype)[:, None])
    b = torch.ones(4, 1, dtype=dtype)
    assert ends_within(a, b, 64).tolist() == [True, True, False, False]
    assert ends_within(a, 0 * b, 64).all()
    # one slow channel of a denominator keeps the others
    both = torch.stack([torch.zeros(4, 1), torch.ones(4, 1)], 1).to(dtype).flatten(0, 1)
    assert ends_within(a, both, 64).tolist() == [True, True, False, False]
    growing = torch.tensor([[-1e10]], dtype=dtype)
    assert not ends_within(growing, b[:1], 64).any()


@pytest.mark.parametrize("order", [0, 1, 5])
def test_a_numerator_comes_back_from_its_response(order):
    a, b = stable(order)
    response = rational_kernel(a, b, order + 1)[:, 1:]
    torch.testing.assert_close(numerator_of_response(a, response), b, rtol=0, atol=1e-14)


@pytest.mark.parametrize("order", [1, 2, 5, 16, 64, 256])
def test_turns_around_zero_count_the_poles_outside(order):
    a = initial_coefficients("xavier", 12 if order > 64 else 60, order, generator=generator())
    expected = (poles(a).abs() >= 1).sum(1)
    assert torch.equal(poles_outside(a), expected)
    if order >= 16:
        assert (expected > 0).any()
        assert (expected == 0).any() or order == 256


@pytest.mark.parametrize("radius", [0.5, 0.9, 1.1])
def test_other_circles_and_one_per_row(radius):
    a = initial_coefficients("xavier", 20, 12, generator=generator())
    sizes = poles(a).abs()
    assert torch.equal(poles_outside(a, radius), (sizes >= radius).sum(1))
    each = torch.linspace(0.3, 1.3, 20, dtype=torch.float64)
    assert torch.equal(poles_outside(a, each), (sizes >= each[:, None]).sum(1))


def test_poles_on_the_circle_are_not_inside():
    a = torch.zeros(2, 8)
    a[0, 7] = -1
    assert poles_outside(a).tolist() == [8, 0]
    assert poles_outside(torch.zeros(3, 0)).tolist() == [0, 0, 0]
    assert poles_outside(torch.tensor([[-(1 - 1e-5)], [-(1 + 1e-5)]])).tolist() == [0, 1]


def test_high_orders_on_small_circles_do_not_overflow():
    a = torch.zeros(1, 1500, dtype=torch.float64)
    a[0, -1] = 1e-100
    radius = 1e-100 ** (1 / 1500)  # of all poles
    assert poles_outside(a, 0.999 * radius).tolist() == [1500]
    assert poles_outside(a, 1.001 * radius).tolist() == [0]
    assert poles_outside(a, 1e-5 * radius).tolist() == [1500]  # r^-1500 is no number


@pytest.mark.parametrize("order", [0, 3, 200])
def test_the_spectral_radius_is_that_of_the_companion_matrix(order):
    a = initial_coefficients("xavier", 3, order, generator=generator())
    found = spectral_radius(a)
    expected = poles(a).abs().amax(1) if order else torch.zeros(3).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_denominators_and_radii_whose_poles_cannot_be_counted_are_named():
    a = torch.zeros(3, 2)
    a[2, 0] = float("nan")
    with pytest.raises(ValueError, match="denominator 2 must be finite, got nan"):
        poles_outside(a)
    with pytest.raises(ValueError, match="radius must be positive, got 0"):
        poles_outside(torch.zeros(1, 2), 0)


@pytest.mark.parametrize("scale", [0.0, 1e-8, 1.0, 1e6, 1e30])
@pytest.mark.parametrize("order", [1, 64, 2048])
@pytest.mark.parametrize("margin", [0.0, 1e-3])
def test_the_montel_constraint_keeps_every_pole_inside(margin, order, scale):
    raw = scale * torch.randn(8 if order < 100 else 1, order, generator=generator())
    raw.requires_grad_()
    slack = torch.zeros(len(raw)).requires_grad_()
    a = montel(raw, slack, margin)
    # as float32 adds them up, and as they are
    assert (a.abs().sum(1) < 1).all()
    assert (a.double().abs().sum(1) < 1).all()
    assert order > 128 or (poles(a).abs() < 1).all()
    assert not poles_outside(a.detach()).any()
    grads = torch.autograd.grad(a.square().sum(), (raw, slack))
    assert all(g.isfinite().all() for g in grads)


def test_the_montel_margin_bounds_the_denominator_from_below():
    raw = -torch.rand(4, 32, generator=generator()).double()  # all in phase: the worst case
    slack = torch.zeros(4).double()
    ones = torch.ones(4, 1).double()
    for margin in (1e-3, 0.1):
        at_one = (ones + montel(raw, slack, margin).sum(1, keepdim=True)).abs()
        assert (at_one >= margin / (1 + margin)).all()
    assert ((ones + montel(raw, slack, 0).sum(1, keepdim=True)).abs() < 1e-6).all()


def test_the_montel_constraint_has_the_paper_s_values_and_passes_gradcheck():
    raw, slack = torch.tensor([[3.0, -1.0]]).double(), torch.tensor([-2.0]).double()
    expected = torch.tensor([[3.0, -1.0]]).double() / (4 + 2 + 1e-6)
    assert torch.equal(montel(raw, slack, 0), expected)
    given = raw.requires_grad_(), slack.requires_grad_(), 1e-3
    assert torch.autograd.gradcheck(montel, given)


def test_initialisations_have_their_ranges():
    draw = {
        name: initial_coefficients(name, 50, 64, generator=generator())
        for name in ("zeros", "xavier", "montel", "copying")
    }
    assert not draw["zeros"].any()
    assert 0.12 < draw["xavier"].abs().max() <= 0.125
    assert 0.0150 < draw["montel"].abs().max() <= 1 / 64
    assert draw["montel"].min() < 0
    assert (draw["copying"] >= 0).all()
    torch.testing.assert_close(draw["copying"].sum(1), torch.full((50,), 0.999))
    assert not poles_outside(draw["montel"]).any()
    assert not poles_outside(draw["copying"]).any()
    again = initial_coefficients("xavier", 50, 64, generator=generator())
    assert torch.equal(again, draw["xavier"])
    assert initial_coefficients("copying", 3, 0).shape == (3, 0)
    with pytest.raises(LookupError, match="named 'xavierr'; there are zeros, xavier"):
        initial_coefficients("xavierr", 1, 1)
