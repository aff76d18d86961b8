"""RTF's filter mathematics: golden checks of the specification, against dense linear algebra."""

import copy

import pytest
import torch

from ssmzoo_kernels import companion_step, rational_kernel
from ssmzoo_rtf.filters import (
    deployed_numerator,
    ends_within,
    from_taps,
    initial_coefficients,
    montel,
    numerator_of_response,
)
from ssmzoo_rtf.realizations import from_dense, from_diagonal, from_rtf2, to_diagonal
from ssmzoo_rtf.stability import check_filters, poles, poles_outside, spectral_radius


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
    [(1, 128), (2, 128), (64, 128), (127, 128), (64, 2048), (1024, 2048), (2047, 2048)],
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


def test_bad_filters_are_named_with_their_radius():
    a, b = torch.zeros(3, 2), torch.ones(6, 2)
    check_filters(a, b, stable=True)
    a[1] = torch.tensor([-2.3, 1.2])  # 1.5 and 0.8
    check_filters(a, b)
    with pytest.raises(ValueError, match=r"denominator 1 .*1 outside, .* radius 1.5 \(1 of 3"):
        check_filters(a, b, stable=True)
    b[4, 1] = float("inf")
    with pytest.raises(ValueError, match="numerator 4 must be finite, got inf"):
        check_filters(a, b)
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
    with pytest.raises(ValueError, match="margin must be at least 0"):
        montel(raw, slack, -1)


def test_the_montel_constraint_has_the_paper_s_values_and_passes_gradcheck():
    raw, slack = torch.tensor([[3.0, -1.0]]).double(), torch.tensor([-2.0]).double()
    expected = torch.tensor([[3.0, -1.0]]).double() / (4 + 2 + 1e-6)
    assert torch.equal(montel(raw, slack, 0), expected)
    assert torch.autograd.gradcheck(montel, (raw.requires_grad_(), slack.requires_grad_()))
    module = torch.nn.ParameterDict({"a": raw, "s": slack})
    twin = copy.deepcopy(module)
    twin.load_state_dict({"a": 2 * raw.detach(), "s": slack.detach()}, assign=True)
    assert not torch.equal(montel(twin["a"], twin["s"]), montel(raw, slack))


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


def test_given_taps_are_the_response():
    taps = torch.randn(4, 9, generator=generator())
    a, b, h0 = from_taps(taps, num_denominators=2)
    assert a.shape == (2, 8)
    assert torch.equal(impulse_response(a, b, h0, 9), taps)
    with pytest.raises(ValueError, match=r"taps must have shape \[D, n \+ 1\]"):
        from_taps(torch.ones(3))


def spread(pairs, rows, seed=0):
    """Well-spread conjugate pairs with radius up to 0.99, one of each pair."""
    g = generator(seed)
    angles = torch.linspace(0.1, 3.0, pairs).double() + 0.02 * torch.rand(rows, pairs, generator=g)
    sizes = 0.9 + 0.09 * torch.rand(rows, pairs, generator=g).double()
    return torch.polar(sizes, angles)


@pytest.mark.parametrize("pairs", [1, 4, 32])
def test_well_spread_modes_are_written_as_coefficients_and_back(pairs):
    values = spread(pairs, 2)
    residues = torch.randn(4, pairs, generator=generator(), dtype=torch.complex128)
    a, b, h0 = from_diagonal(values, residues, conjugates=True, dtype=torch.float64)
    assert not h0.any()
    steps = torch.arange(599)
    powers = values.repeat_interleave(2, 0)[..., None] ** steps
    expected = 2 * (residues[..., None] * powers).sum(1).real
    assert error(rational_kernel(a, b, 600)[:, 1:], expected) < 1e-10
    assert error(impulse_response(a, b, h0, 600)[:, 1:], expected) < 1e-10
    found, weights = to_diagonal(a, b)
    powers = found.repeat_interleave(2, 0)[..., None] ** steps
    assert error((weights[..., None] * powers).sum(1).real, expected) < 1e-10
    both = [torch.cat([x, x.conj()], 1) for x in (values, residues)]
    again, _, _ = from_diagonal(*both, dtype=torch.float64)
    assert torch.equal(again, a)


def test_modes_without_their_conjugates_are_refused():
    with pytest.raises(ValueError, match="conjugate pairs, got taps with imaginary part"):
        from_diagonal(spread(3, 1), torch.ones(1, 3, dtype=torch.complex128))
    with pytest.raises(ValueError, match="residues must have shape"):
        from_diagonal(spread(3, 2), torch.ones(3, 3, dtype=torch.complex128))


@pytest.mark.parametrize(("dt", "pairs"), [(0.01, 15), (0.03, 31)])
def test_clustered_poles_are_refused_with_the_radius_they_would_get(dt, pairs):
    frequencies = torch.pi * torch.arange(1, pairs + 1).double()
    values = torch.exp(dt * torch.complex(torch.full((pairs,), -0.5).double(), frequencies))[None]
    with pytest.raises(
        ValueError, match=r"channel 0 .* float32 .* poles cluster, .* from 0\.9\d+ to"
    ):
        from_diagonal(values, torch.ones_like(values), conjugates=True)


def test_repeated_poles_have_no_diagonal_form():
    coefficients = torch.tensor([[-1.8, 0.81], [1.0, 0.0]], dtype=torch.float64)
    double = coefficients[:1], coefficients[1:]
    with pytest.raises(ValueError, match="channel 0 has no usable diagonal form"):
        to_diagonal(*double)
    with pytest.raises(ValueError, match="poles repeat or cluster"):
        to_diagonal(torch.zeros(1, 4), torch.ones(1, 4))


def dense(order, rows=2):
    g = generator()
    A = torch.randn(rows, order, order, generator=g).double()
    A *= 0.95 / torch.linalg.eigvals(A).abs().amax(1)[:, None, None]
    B, C = (torch.randn(rows, order, generator=g).double() for _ in range(2))
    return A, B, C


@pytest.mark.parametrize("order", [1, 4, 32, 128])
def test_a_dense_triple_keeps_its_response(order):
    A, B, C = dense(order)
    D = torch.tensor([0.5, -2.0]).double()
    a, b, h0 = from_dense(A, B, C, D, dtype=torch.float64)
    state, expected = B, [D]
    for _ in range(399):
        expected.append((C * state).sum(1))
        state = (A @ state[..., None])[..., 0]
    assert error(impulse_response(a, b, h0, 400), torch.stack(expected, 1)) < 1e-9


def test_a_change_of_basis_changes_no_coefficient():
    A, B, C = dense(12)
    T = torch.eye(12).double() + 0.2 * torch.randn(12, 12, generator=generator(3)).double()
    moved = (T @ A @ T.inverse(), B @ T.T, C @ T.inverse())
    known = from_dense(A, B, C, dtype=torch.float64)
    for got, expected in zip(from_dense(*moved, dtype=torch.float64), known, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


def test_dense_triples_of_wrong_shapes_are_named():
    A, B, C = dense(3)
    with pytest.raises(ValueError, match=r"A must have shape \[D, n, n\]"):
        from_dense(A[0], B, C)
    with pytest.raises(ValueError, match=r"C must have shape \[D, n\] = \[2, 3\], got \[2, 2\]"):
        from_dense(A, B, C[:, :2])


def test_an_invalid_state_space_is_refused_with_the_reason():
    A, B, C = dense(3)
    with pytest.raises(TypeError, match=r"A must be real, got torch\.complex128"):
        from_dense(A.to(torch.complex128), B, C)
    with pytest.raises(ValueError, match=r"shape \[D, n, n\] with n >= 1, got \[2, 0, 0\]"):
        from_dense(A[:, :0, :0], B[:, :0], C[:, :0])
    with pytest.raises(ValueError, match=r"direct gains must have shape \[D\] = \[2\], got \[3\]"):
        from_dense(A, B, C, torch.zeros(3))
    for name in ("A", "B", "C"):
        broken = {"A": A.clone(), "B": B.clone(), "C": C.clone()}
        broken[name][1, 2] = torch.nan
        with pytest.raises(ValueError, match=f"{name} must be finite, got nan in row 1"):
            from_dense(**broken)
    with pytest.raises(ValueError, match="direct gains must be finite, got inf in row 0"):
        from_dense(A, B, C, torch.tensor([torch.inf, 0.0]))
    A[1] *= 100
    with pytest.raises(ValueError, match=r"channel 1 must .* overflow within 256 .* radius 95"):
        from_dense(A, B, C)


def test_invalid_modes_and_coefficients_are_refused():
    values, residues = spread(3, 1), torch.ones(2, 3, dtype=torch.complex128)
    with pytest.raises(ValueError, match=r"eigenvalues must have shape \[D_a, n\].*got \[3\]"):
        from_diagonal(values[0], residues)
    with pytest.raises(ValueError, match=r"eigenvalues must be finite, got .*nan.* in row 0"):
        from_diagonal(values * torch.nan, residues, conjugates=True)
    with pytest.raises(ValueError, match=r"direct gains must have shape \[D\] = \[2\], got \[5\]"):
        from_diagonal(values, residues, torch.zeros(5), conjugates=True)
    with pytest.raises(ValueError, match="channel 0 must have a finite impulse response"):
        from_diagonal(values * 100, residues, conjugates=True)
    a, b = torch.zeros(2, 3), torch.zeros(3, 3)
    with pytest.raises(ValueError, match="the 2 rows of a must divide the 3 rows of b"):
        to_diagonal(a, b)
    with pytest.raises(ValueError, match="denominator 0 must be finite, got nan"):
        to_diagonal(a[:1] * torch.nan, b)
    with pytest.raises(ValueError, match=r"a and c must have shapes .* got \[2, 3\] and \[4, 2\]"):
        from_rtf2(a, torch.zeros(4, 2), torch.zeros(4))


def test_an_rtf2_filter_reads_its_state_after_the_update():
    a, c = stable(5)
    h0 = torch.randn(4, generator=generator()).double()
    same, b, d = from_rtf2(a, c, h0)
    assert same is a
    expected = torch.cat([rational_kernel(a, c, 41)[:, 1:]], 1)
    expected[:, 0] += h0
    assert error(impulse_response(a, b, d, 40), expected) < 1e-13
