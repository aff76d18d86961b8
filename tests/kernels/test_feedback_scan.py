"""feedback_scan: fast backends and both solvers against the loop, and the paper's golden checks."""

import functools
import logging

import pytest
import torch
from tests.kernels import contracts

from ssmzoo.testing.accuracy import outputs_and_grads
from ssmzoo.testing.ops import Case
from ssmzoo_kernels import feedback_scan, last_backend
from ssmzoo_kernels.declaration import declared
from ssmzoo_kernels.feedback_scan import newton, newton_solve, reference


class TestFeedbackScan(contracts.FeedbackScan):
    """Every check of the contract."""


class TestNewtonFeedbackScan(contracts.NewtonFeedbackScan):
    """Every check of the contract."""


NAMES = ("u", "lam", "w", "C", "w_gamma", "D", "drive", "initial_state")
SOLVERS = ("march", "newton")
TIGHT = {"tolerance": 1e-13}  # where Newton shall agree to float64


@pytest.fixture(params=SOLVERS)
def solver(request):
    return request.param


def draw(B=2, L=9, D=5, N=4, segments=None, dtype=torch.float64, seed=0, drive=False):
    generator = torch.Generator().manual_seed(seed)
    wide, small = (B, L, D), (D, N)
    shapes = (wide, small, small, small, small, (D,), wide, (segments or B, D, N))
    tensors = [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]
    tensors[1], tensors[2] = -tensors[1].sigmoid(), tensors[2] / 2
    tensors[6] = tensors[6] if drive else None
    return [None if x is None else x.to(dtype) for x in tensors]


def bounds(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def close(got, expected, tolerance):
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    error = (got.double() - expected.double()).abs().max()
    assert error <= tolerance * expected.double().abs().max(), f"error {error:.2e}"


# --- accuracy: outputs, final state, all gradients ------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_states_of_single_tokens_are_those_of_one_pass_bit_for_bit(name):
    """G5; in C a lone token's sum over states runs otherwise, so outputs differ by roundings."""
    op, case = contracts.FeedbackScan(), Case(name, "march")
    tensors = op.draw(B=3, L=12, D=21, N=19, dtype=torch.float32)
    whole, outputs = op.run(tensors, case), []
    for t in range(12):
        out, tensors["initial_state"] = op.run(op.pieces(tensors, t, t + 1), case)
        outputs.append(out)
    assert torch.equal(tensors["initial_state"], whole[1])
    if name == "reference":
        assert torch.equal(torch.cat(outputs, dim=1), whole[0])


@pytest.mark.parametrize(
    ("dtype", "per_unit"), [(torch.float32, 1.35e-8), (torch.float64, 1.42e-17)]
)
def test_the_gate_in_c_keeps_its_error_budget(dtype, per_unit):
    """From 0 and u = 1 the state becomes the gate: one rounding, and log2(e)'s for the exponent."""
    t = torch.linspace(-80, 80, 4001).to(dtype)[None, None]
    zero, one = torch.zeros(4001, 1, dtype=dtype), torch.ones(4001, 1, dtype=dtype)
    got = feedback_scan(torch.ones_like(t), zero, one, one, drive=t, backend="cpu")[0]
    exact, eps = torch.sigmoid(t.double()), torch.finfo(dtype).eps
    # what float64 itself errs by: one in 1 + exp, one in its inverse
    budget = eps + per_unit * t.double().abs() + 2 * torch.finfo(torch.float64).eps
    assert ((got - exact).abs() <= budget * exact).all()


# --- determinism ------------------------------------------------------------------------------


def test_sequences_side_by_side_give_the_same_bits_on_any_number_of_threads():
    """As lanes of a vector, where there are few channels; the contract has many."""
    inputs = draw(B=100, L=50, D=20, N=16)
    op = functools.partial(feedback_scan, backend="cpu")
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


# --- golden checks of the paper's specification ----------------------------------------------

ALL = ("reference", "eager", "cpu")


def vector():
    """The specification's vector: D = 1, n = 2."""
    u = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64).view(1, 4, 1)
    lam, w, C = torch.tensor([[[-0.5, -1.5]], [[1.5, -0.8]], [[1.0, -2.0]]], dtype=torch.float64)
    return [x.clone().requires_grad_() for x in (u, lam, w, C)]


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "how"), [(x, "march") for x in ALL] + [("eager", "newton"), ("cpu", "newton")]
)
def test_the_specifications_vector(name, how):
    """G2: printed to six digits."""
    op = functools.partial(feedback_scan, backend=name, solver=how, **TIGHT)
    leaves = vector()
    y, x = op(*leaves)
    grads = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    expected = (
        (y, (-0.5, 0.179066, -1.380540, -2.958480)),
        (x, (-0.101017, 1.428732)),
        (grads[0], (-1.435959, 2.132227, -0.520095, -0.675641)),
        (grads[1], (0.717192, 0.032697)),
        (grads[2], (-1.929481, 0.541510)),
        (grads[3], (-1.478629, 1.590663)),
    )
    for got, values in expected:
        torch.testing.assert_close(got.flatten(), numbers(*values), rtol=0, atol=6e-7)
    # the last token's Jacobian: the final state's gradient carried to the state before it
    early = op(leaves[0][:, :3], *leaves[1:])[1].detach().requires_grad_()
    last = op(leaves[0][:, 3:], *leaves[1:], initial_state=early)[1]
    (jacobian,) = torch.autograd.grad(last.sum(), early)
    torch.testing.assert_close(jacobian.flatten(), numbers(1.768046, -0.185148), rtol=0, atol=6e-7)
    w_gamma = numbers(0.3, -0.7).view(1, 2).requires_grad_()
    y = op(*leaves, w_gamma)[0]
    (grad,) = torch.autograd.grad(y.sum(), w_gamma)
    for got, values in (
        (y, (-0.225083, 0.094634, -0.540579, -0.778090)),
        (grad, (0.229563, -0.995456)),
    ):
        torch.testing.assert_close(got.flatten(), numbers(*values), rtol=0, atol=6e-7)


@pytest.mark.parametrize("shape", [(2, 37, 5, 1), (1, 1, 3, 3), (2, 130, 4, 5), (3, 150, 18, 5)])
def test_solvers_and_backends_agree(shape):
    """G5: with an initial state, L = 1, no multiple of a block, n = 1, n no power of two."""
    inputs = draw(*shape)
    for dtype, tolerance, options in ((torch.float32, 1e-5, {}), (torch.float64, 1e-12, TIGHT)):
        expected = outputs_and_grads(
            functools.partial(feedback_scan, backend="reference"), inputs, dtype
        )
        for name in ("eager", "cpu"):
            for how in SOLVERS:
                op = functools.partial(feedback_scan, backend=name, solver=how, **options)
                for key, got in outputs_and_grads(op, inputs, dtype).items():
                    close(got, expected[key], tolerance)
                assert last_backend("feedback_scan") == name
                assert last_backend("feedback_scan solver") == how


@pytest.mark.parametrize("name", ALL)
def test_limits_of_the_gate(name):
    """G9."""
    op = functools.partial(feedback_scan, backend=name)
    u, lam, w, C, *_, state = draw(L=30, N=1)
    zero, one = torch.zeros_like(lam), torch.ones_like(lam)
    x = state
    for t in range(30):
        x = (1 + lam / 2) * x + u[:, t, :, None] / 2
    close(op(u, lam, zero, C, initial_state=state)[1], x, 1e-12)
    assert not op(torch.zeros_like(u), lam, w, C)[1].any()
    level = torch.full_like(u, 0.7).repeat(1, 100, 1)
    close(op(level, -one / 2, w / 4, C)[1], (1.4 * one).expand(2, 5, 1), 1e-12)
    frozen, opened = (
        op(u[:, :1], lam, s * one, C, initial_state=1e4 * one.expand(2, 5, 1))[1]
        for s in (-1.0, 1.0)
    )
    assert torch.equal(frozen, torch.full_like(frozen, 1e4))
    close(opened, (1 + lam) * 1e4 + u[:, 0, :, None], 1e-12)
    half_sum = op(u, zero, zero, one)[0]
    close(half_sum, u.cumsum(1) / 2, 1e-12)


@pytest.mark.parametrize("name", ALL)
def test_symmetries(name):
    """G10: change of basis, sign, order of states, independent features."""
    op = functools.partial(feedback_scan, backend=name)
    u, lam, w, C, w_gamma, _, _, state = draw(L=30)
    y, final = op(u, lam, w, C, initial_state=state)
    # eq. (6) with a B is eq. (7) with w B and C B, for states over B
    basis = torch.rand(5, 4, dtype=torch.float64) + 0.5
    x, outputs = state, []
    for t in range(30):
        s = torch.sigmoid(w * x)
        x = x + s * (lam * x + basis * u[:, t, :, None])
        outputs.append((C * x).sum(-1))
    scaled = op(u, lam, w * basis, C * basis, initial_state=state / basis)
    close(scaled[0], torch.stack(outputs, 1), 1e-12)
    close(scaled[1] * basis, x, 1e-12)
    # and a factor a feature, on the inputs
    v = torch.rand(5, dtype=torch.float64) + 0.5
    scaled = op(u / v, lam, w * v[:, None], C * v[:, None], initial_state=state / v[:, None])
    close(scaled[0], y, 1e-12)
    close(scaled[1] * v[:, None], final, 1e-12)
    close(op(-u, lam, -w, C, initial_state=-state)[0], -y, 1e-12)
    order = torch.tensor([2, 0, 3, 1])
    permuted = op(u, *(x[..., order] for x in (lam, w, C)), initial_state=state[..., order])
    close(permuted[0], y, 1e-12)
    disturbed = u.clone()
    disturbed[:, :, 2] += 1
    moved = (op(disturbed, lam, w, C, w_gamma)[0] != op(u, lam, w, C, w_gamma)[0]).any(1)
    assert torch.equal(moved, (torch.arange(5) == 2).expand(2, 5))


@pytest.mark.parametrize("name", ALL)
def test_states_of_bounded_inputs_are_bounded(name):
    """G11: |x| <= U / (1 - |1 + lam|)."""
    generator = torch.Generator().manual_seed(1)
    u = (torch.rand(4, 400, 6, generator=generator) * 2 - 1).double() * 3
    lam = -torch.rand(6, 5, generator=generator).double() * 1.98 - 0.01
    w = torch.randn(6, 5, generator=generator).double() * 4
    bound = 3 / (1 - (1 + lam).abs())
    state = torch.zeros(4, 6, 5, dtype=torch.float64)
    for piece in u.split(20, dim=1):
        state = feedback_scan(piece, lam, w, w, initial_state=state, backend=name)[1]
        assert (state.abs() <= bound).all()


def test_the_linear_gate_is_vacuous():
    """G12: from 0 it never opens."""
    u, lam, w, C, *_ = draw(L=30)
    leaves = [x.requires_grad_() for x in (u, lam, w, C)]
    y, final = feedback_scan(*leaves, gate="linear")
    assert last_backend("feedback_scan") == "reference"
    assert not y.any()
    assert not final.any()
    grads = torch.autograd.grad((y - 1).square().sum(), leaves)
    assert not any(g.any() for g in grads)
    # and otherwise it is what it says
    state = torch.randn(2, 5, 4, dtype=torch.float64)
    x = state + (w * state) * (lam * state + u[:, 0, :, None])
    close(feedback_scan(u[:, :1], lam, w, C, initial_state=state, gate="linear")[1], x, 1e-14)


@pytest.mark.parametrize("name", ALL)
def test_without_feedback_it_is_linear_in_the_state(name):
    """G12: states of a sum of inputs are sums of states, given the drive."""
    u, lam, w, C, *_, drive, state = draw(L=30, drive=True)
    op = functools.partial(feedback_scan, lam=lam, w=w, C=C, drive=drive, backend=name)
    other = torch.randn_like(u)
    both = op(u + 3 * other, initial_state=4 * state)
    parts = op(u, initial_state=state), op(3 * other, initial_state=3 * state)
    for got, a, b in zip(both, *parts, strict=True):
        close(got, a + b, 1e-12)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_enormous_weights_give_finite_results(name, dtype):
    """G16: |w x| to 1e4; a state of bfloat16 inputs is float32."""
    u, lam, w, C, w_gamma, D, drive, state = draw(L=60, D=18, drive=True, dtype=torch.float32)
    w, lam = w * 1e4, lam.clone()
    lam[:, 0] = 0
    for gates in (None, drive * 3):
        for how in SOLVERS if name != "reference" else ("march",):
            leaves = [x.detach().clone().requires_grad_() for x in (u.to(dtype), lam, w, C)]
            start = state.clone().requires_grad_()
            y, final = feedback_scan(*leaves, w_gamma, D, gates, start, backend=name, solver=how)
            assert (y.dtype, final.dtype) == (dtype, torch.float32)
            assert y.isfinite().all()
            assert final.isfinite().all()
            assert (w * final).abs().max() > 1e4
            grads = torch.autograd.grad(y.double().sum() + final.sum(), [*leaves, start])
            assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [-5.0, 0.5])
def test_any_finite_rate_is_allowed(name, value):
    u, lam, w, C, *_ = draw(L=6)
    lam = torch.full_like(lam, value)
    got = feedback_scan(u, lam, w, C, backend=name)
    for a, b in zip(got, reference.feedback_scan(u, lam, w, C), strict=True):
        close(a, b, 1e-13)


# --- Newton's method --------------------------------------------------------------------------


def residual_of(states, u, lam, w, drive=None):
    """Return the relative residual of a trajectory from 0, ``[B, D, N]``."""
    before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], dim=1)
    gate = torch.sigmoid(w * (before if drive is None else drive[..., None]))
    image = before + gate * (lam * before + u[..., None])
    return ((states - image).abs() / states.abs().clamp(min=1)).amax(dim=1)


def test_newton_reports_what_it_did():
    u, lam, w, *_ = draw(B=2, L=50, D=3, N=4)
    found = newton_solve(u, lam, w, span=None, tolerance=1e-12)
    assert found.states.shape == (2, 50, 3, 4)
    assert found.iterations.shape == found.converged.shape == (1, 2, 3, 4)
    assert found.residuals.shape == (1, int(found.iterations.max()) + 1, 2, 3, 4)
    assert found.converged.all()
    assert torch.equal(residual_of(found.states, u, lam, w) <= 1e-12, found.converged[0])
    # a lane stops where it first is below the tolerance
    first = (found.residuals <= 1e-12).int().argmax(dim=1)
    assert torch.equal(first, found.iterations)
    in_spans = newton_solve(u, lam, w, span=16, tolerance=1e-12)
    assert in_spans.iterations.shape == (4, 2, 3, 4)
    close(in_spans.states, found.states, 1e-10)
    assert in_spans.iterations.max() <= found.iterations.max()


def test_newton_is_exact_from_the_front():
    """G8: after t steps the first t states are exact; as many steps as tokens always suffice."""
    u, lam, w, C, *_ = draw(B=1, L=12, D=6, N=8)
    u, w = 5 * u, 6 * w  # stiff: many steps are needed
    exact = torch.stack(
        [feedback_scan(u[:, : t + 1], lam, w, C, backend="reference")[1] for t in range(12)], 1
    )
    for steps in range(1, 13):
        found = newton_solve(
            u, lam, w, span=None, tolerance=1e-13, max_iterations=steps, guess="zeros"
        )
        close(found.states[:, :steps], exact[:, :steps], 1e-12)
    assert found.converged.all()
    assert found.iterations.max() >= 6


@pytest.mark.parametrize("length", [16, 256, 2048])
def test_contractive_lanes_take_three_steps_at_any_length(length, monkeypatch):
    """G8: 2 |w| U <= |lam|."""
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(1, length, 64, generator=generator) * 2 - 1
    lam = -torch.rand(64, 1, generator=generator) * 0.5 - 0.5
    w = (torch.rand(64, 1, generator=generator) * 2 - 1) * 0.4 * lam
    found = newton_solve(u, lam, w, span=None, guess="zeros")
    assert found.converged.all()
    assert found.iterations.max() == 3
    step = newton._Lanes.step

    def shifted(self, x):
        jacobian, residual = step(self, x)
        return jacobian.roll(-1, 0), residual

    # the Jacobian at x[k] in the place of the one at x[k-1], as the paper's e_k prints it
    monkeypatch.setattr(newton._Lanes, "step", shifted)
    assert newton_solve(u, lam, w, span=None, guess="zeros").iterations.max() > 3


def test_newtons_jacobian_is_autograds():
    """G8: the diagonal, and nothing beside it."""
    u, lam, w, C, *_, state = draw(B=1, L=1, D=3, N=2)

    def advance(x):
        return feedback_scan(u, lam, w, C, initial_state=x, backend="reference")[1]

    jacobian = torch.autograd.functional.jacobian(advance, state).view(6, 6)
    lanes = newton._Lanes(u, lam, w, None, state)
    found, _ = lanes.step(torch.zeros(1, 6, dtype=torch.float64))
    close(found[0], jacobian.diagonal(), 1e-14)
    assert not (jacobian - jacobian.diagonal().diag()).any()


def test_linear_recurrences_take_one_step():
    """G9, G12: w = 0, and gates that do not look at the state."""
    u, lam, w, _, _, _, drive, state = draw(L=200, drive=True)
    for weight, gates in ((0 * w, None), (w, drive)):
        found = newton_solve(
            u, lam, weight, gates, state, span=None, guess="zeros", tolerance=1e-12
        )
        assert found.converged.all()
        assert found.iterations.max() == 1


def test_the_guess_of_half_open_gates_is_right_where_they_are():
    u, lam, w, *_ = draw(L=50)
    assert newton_solve(u, lam, 0 * w, tolerance=1e-12).iterations.max() == 0


def test_damping_costs_steps_and_keeps_the_solution():
    u, lam, w, C, *_ = draw(L=40)
    plain, damped = (
        newton_solve(u, lam, w, tolerance=1e-12, damping=k, max_iterations=500) for k in (0.0, 0.2)
    )
    close(damped.states, plain.states, 1e-9)
    assert damped.converged.all()
    assert damped.iterations.sum() > 2 * plain.iterations.sum()
    y, expected = (
        feedback_scan(u, lam, w, C, solver="newton", damping=k, tolerance=1e-12)[0]
        for k in (0.2, 0.0)
    )
    assert last_backend("feedback_scan solver") == "newton"
    close(y, expected, 1e-9)


@pytest.mark.parametrize("name", ["eager", "cpu"])
def test_newtons_default_tolerance_follows_the_dtype(name):
    inputs = draw(B=2, L=100, D=6, N=3)
    marched = feedback_scan(*inputs, backend=name, solver="march")[0]
    close(feedback_scan(*inputs, backend=name, solver="newton")[0], marched, 1e-13)
    assert last_backend("feedback_scan solver") == "newton"


def test_a_call_that_reaches_the_cap_marches_and_says_so(backend, caplog):
    inputs = draw(B=2, L=200, D=6, N=3)
    inputs[0], inputs[2] = 5 * inputs[0], 5 * inputs[2]
    with caplog.at_level(logging.WARNING, "ssmzoo"):
        capped = functools.partial(
            feedback_scan, backend=backend, solver="newton", max_iterations=2
        )
        got = outputs_and_grads(capped, inputs, torch.float32)
    assert last_backend("feedback_scan solver") == "march"
    (line,) = [x.getMessage() for x in caplog.records]
    assert "left" in line
    assert "of 36 lanes above the tolerance 1e-06 after 2 iterations" in line
    assert line.endswith("this call marches instead")
    marched = functools.partial(feedback_scan, backend=backend, solver="march")
    for name, expected in outputs_and_grads(marched, inputs, torch.float32).items():
        assert torch.equal(got[name], expected), name
    caplog.clear()
    feedback_scan(*inputs, backend=backend, solver="newton")
    assert last_backend("feedback_scan solver") == "newton"
    assert not caplog.records


def test_stiff_lanes_converge_behind_the_front():
    """Iterates that blow up stop no lane: twice the tokens suffice."""
    generator = torch.Generator().manual_seed(3)
    u = torch.randn(2, 256, 8, generator=generator) * 3
    lam, w = -torch.rand(8, 4, generator=generator), torch.randn(8, 4, generator=generator) * 3
    found = newton_solve(u, lam, w, span=64)
    assert found.residuals.max() > 100
    assert found.iterations.max() > 30
    assert found.converged.all()


def test_converged_lanes_stay_while_others_work_on():
    u, lam, w, *_ = draw(B=1, L=64, D=2, N=1, dtype=torch.float32)
    w = w.clone()
    w[0], w[1] = 0.01, 30.0
    u = 5 * u
    together = newton_solve(u, lam, w, span=None)
    for i in range(2):
        alone = newton_solve(u[..., i : i + 1], lam[i : i + 1], w[i : i + 1], span=None)
        assert torch.equal(together.states[:, :, i], alone.states[:, :, 0])
        assert torch.equal(together.iterations[..., i, :], alone.iterations[..., 0, :])
    assert together.iterations[0, 0, 0, 0] < together.iterations[0, 0, 1, 0]


def test_the_backward_differentiates_no_iteration(backend, monkeypatch):
    leaves = [x if x is None else x.requires_grad_() for x in draw(L=100, D=6)]
    present = [x for x in leaves if x is not None]
    module, grads = declared()["feedback_scan"].kernels(backend).module, []
    for how in SOLVERS:
        y, _ = feedback_scan(*leaves, backend=backend, solver=how, **TIGHT)
        with monkeypatch.context() as patch:
            for name in ("newton", "forward"):
                patch.setattr(module, name, None)
            grads.append(torch.autograd.grad(y.sum(), present))
    for got, expected in zip(*grads, strict=True):
        close(got, expected, 1e-12)


# --- torch.library and torch.compile ----------------------------------------------------------


def test_auto_marches():
    feedback_scan(*draw(dtype=torch.float32))
    assert last_backend("feedback_scan") == "cpu"
    assert last_backend("feedback_scan solver") == "march"


# --- vmap -----------------------------------------------------------------------------------------


def looped(op, in_dims, tensors):
    """Return what vmap must: the results for each entry, stacked."""
    size = next(x.shape[d] for x, d in zip(tensors, in_dims, strict=True) if d is not None)
    parts = [
        op(*(x if d is None else x.select(d, i) for x, d in zip(tensors, in_dims, strict=True)))
        for i in range(size)
    ]
    return [torch.stack(part) for part in zip(*parts, strict=True)]


MAPPED = {  # what vmap maps over, and where
    "inputs": {"u": 0},
    "inputs and states": {"u": 2, "drive": 0, "initial_state": 1},
    "an ensemble": {"u": None} | dict.fromkeys(("lam", "w", "C", "w_gamma", "D"), 0),
    "all": dict.fromkeys(NAMES, 1) | {"lam": 2, "D": 0},
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", MAPPED)
def test_vmap_gives_what_a_loop_gives_with_gradients(backend, solver, kind, packed):
    shape = {"B": 1, "L": 12, "D": 5, "N": 3, "segments": 3 if packed else None}
    inputs = draw(**shape, drive="drive" in MAPPED[kind])
    options = {"cu_seqlens": bounds(5, 0, 7)} if packed else {}
    op = functools.partial(feedback_scan, backend=backend, solver=solver, **TIGHT, **options)
    in_dims, leaves = [], []
    for name, x in zip(NAMES, inputs, strict=True):
        where = None if x is None else MAPPED[kind].get(name)
        if where is not None:
            x = torch.stack([x, x.roll(1, -1), x / 2], dim=where)
        in_dims.append(where)
        leaves.append(x if x is None else x.requires_grad_())
    present = [x for x in leaves if x is not None]
    got = torch.vmap(op, tuple(in_dims))(*leaves)
    assert last_backend("feedback_scan") == backend
    assert last_backend("feedback_scan solver") == solver
    expected = looped(op, in_dims, leaves)
    for a, b in zip(got, expected, strict=True):
        close(a, b, 1e-12)
    grads = (torch.autograd.grad(y.square().sum() + x.sum(), present) for y, x in (got, expected))
    for a, b in zip(*grads, strict=True):
        close(a, b, 1e-12)
    with torch.no_grad():
        for a, b in zip(torch.vmap(op, tuple(in_dims))(*leaves), expected, strict=True):
            close(a, b, 1e-12)


def test_the_gradients_are_mapped_over_as_well(backend):
    """A Jacobian of all outputs at once: the backward op under vmap, the forward outside."""
    leaves = [x.requires_grad_() for x in draw(B=2, L=4, D=3, N=2, drive=True)]
    y, final = feedback_scan(*leaves, backend=backend)
    flat = torch.cat([y.flatten(), final.flatten()])
    rows = torch.eye(flat.numel(), dtype=flat.dtype)
    together = torch.autograd.grad(flat, leaves, rows, is_grads_batched=True, retain_graph=True)
    for i, row in enumerate(rows):
        alone = torch.autograd.grad(flat, leaves, row, retain_graph=True)
        for got, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(got[i], expected, rtol=1e-12, atol=1e-13)


def test_vmap_within_vmap_and_over_the_reference(backend):
    u, lam, w, C, *_ = draw(L=7)
    wide = torch.stack([torch.stack([u, -u]), torch.stack([2 * u, u / 3]), torch.stack([u, u])])
    for name in (backend, "reference"):
        op = functools.partial(feedback_scan, lam=lam, w=w, C=C, backend=name)
        got = torch.vmap(torch.vmap(op))(wide)
        expected = feedback_scan(wide.flatten(0, 2), lam, w, C, backend="reference")
        for a, b in zip(got, expected, strict=True):
            close(a.flatten(0, 2), b, 1e-12)


def test_boundaries_that_differ_are_refused_by_vmap():
    u, lam, w, C, *_, state = draw(B=1, L=6, segments=2)
    offsets = torch.stack([bounds(2, 4), bounds(3, 3)])
    op = torch.ops.ssmzoo.feedback_scan.default

    def run(cu_seqlens):
        options = (False, "march", 1e-6, None, 0.0, "cpu")
        return op(u[0], lam, w, C, None, None, None, state, cu_seqlens, *options)

    with pytest.raises(ValueError, match=r"cu_seqlens must be the same .*vmap"):
        torch.vmap(run)(offsets)


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "picard"}, "solver must be one of march, newton, auto, got 'picard'"),
        ({"gate": "linear", "solver": "newton"}, "the reference only marches, got solver=.newton"),
        ({"backend": "reference", "solver": "newton"}, "the reference only marches"),
        ({"tolerance": 0.0}, "tolerance must be positive and finite, got 0.0"),
        ({"tolerance": float("nan")}, "tolerance must be positive and finite, got nan"),
        ({"max_iterations": 0}, "max_iterations must be a whole number of at least 1 or None"),
        ({"max_iterations": 2.5}, "max_iterations must be a whole number .*got 2.5"),
        ({"damping": 1.0}, r"damping must be in \[0, 1\), got 1.0"),
        ({"damping": -0.1}, r"damping must be in \[0, 1\), got -0.1"),
    ],
)
def test_unknown_and_impossible_choices_are_refused(options, message):
    with pytest.raises(ValueError, match=f"feedback_scan.*{message}"):
        feedback_scan(*draw(), **options)


@pytest.mark.parametrize(
    ("name", "value"), [("tolerance", "1e-6"), ("damping", "1e-6"), ("damping", None)]
)
def test_options_that_are_no_numbers_are_refused(name, value):
    u, lam, w, C, *_ = draw()
    with pytest.raises(TypeError, match=f"feedback_scan: {name} must be a number, got {value!r}"):
        feedback_scan(u, lam, w, C, **{name: value})
    with pytest.raises(TypeError, match=f"newton_solve: {name} must be a number, got {value!r}"):
        newton_solve(u, lam, w, **{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"span": 0}, "span must be a whole number of at least 1 or None, got 0"),
        ({"span": 2.5}, "span must be a whole number of at least 1 or None, got 2.5"),
        ({"guess": "ones"}, "guess must be 'half' or 'zeros', got 'ones'"),
        ({"tolerance": -1.0}, "tolerance must be positive"),
        ({"initial_state": torch.zeros(1, 5, 4)}, r"initial_state must have shape \[B, D, N\]"),
        ({"drive": torch.zeros(2, 8, 5)}, r"drive must have shape \[B, L, D\]"),
        ({"w": torch.zeros(4, 5)}, r"w must have shape \[D, N\]"),
        ({"u": torch.zeros(2, 0, 5)}, "there must be a token and a state, got L = 0"),
    ],
)
def test_newton_solve_refuses_what_does_not_fit(options, message):
    u, lam, w, *_ = draw(dtype=torch.float32)
    with pytest.raises(ValueError, match=f"newton_solve: {message}"):
        newton_solve(**{"u": u, "lam": lam, "w": w} | options)


@pytest.mark.parametrize(
    ("name", "value"),
    [("cpu", "nan"), ("cpu", "inf"), ("cpu", "-inf"), ("eager", "nan"), ("reference", "inf")],
)
@pytest.mark.parametrize("spoiled", range(8))
def test_values_that_are_not_finite_are_named(name, value, spoiled):
    """Where the gate saturates, too: w and drive never reach the state."""
    inputs = [x.clone() for x in draw(dtype=torch.float32, drive=True)]
    axes = ("batch row", "token", "feature")
    axes = {1: axes[2:], 2: ("feature", "state"), 3: axes}[inputs[spoiled].dim()]
    axes = ("sequence", "feature", "state") if spoiled == 7 else axes
    last = [size - 1 for size in inputs[spoiled].shape]
    inputs[spoiled][tuple(last)] = float(value)
    place = ", ".join(f"{axis} {i}" for axis, i in zip(axes, last, strict=True))
    message = f"feedback_scan: {NAMES[spoiled]} must be finite, got {value} at {place}"
    with pytest.raises(ValueError, match=f"^{message}$"):
        feedback_scan(*inputs, backend=name)
    if spoiled == 2:  # without a drive 0 is what it is multiplied by first
        with pytest.raises(ValueError, match=f"^{message}$"):
            feedback_scan(*inputs[:4], backend=name)


@pytest.mark.parametrize("name", ["w", "drive"])
def test_an_infinite_gate_is_found_by_newton_too(name):
    inputs = dict(zip(NAMES, draw(drive=True), strict=True))
    inputs[name].view(-1)[3] = float("inf")
    with pytest.raises(ValueError, match=f"{name} must be finite, got inf"):
        feedback_scan(**inputs, solver="newton")


def test_states_that_overflow_from_finite_inputs_are_no_error(backend):
    u, lam, w, C, *_ = draw(L=300, dtype=torch.float32)
    y, final = feedback_scan(u, torch.full_like(lam, 3.0), w.abs(), C, backend=backend)
    assert not final.isfinite().all()
    assert y[:, :20].isfinite().all()


def test_a_nan_is_found_by_newton_too(caplog):
    inputs = draw()
    inputs[0][1, 3, 2] = float("nan")
    with (
        caplog.at_level(logging.WARNING, "ssmzoo"),
        pytest.raises(ValueError, match="u must be finite, got nan at batch row 1, token 3"),
    ):
        feedback_scan(*inputs, solver="newton")
