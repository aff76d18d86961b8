"""feedback_scan's Triton kernels against the reference in Triton's interpreter.

Not collected by name: ``test_triton_interpreted.py`` runs this file in a process of its own, where
``TRITON_INTERPRET=1`` holds before anything imports triton.
"""

import functools

import pytest
import torch
import triton
from tests.kernels.interpreter import repair

from ssmzoo.testing.accuracy import assert_as_accurate, outputs_and_grads
from ssmzoo_kernels import feedback_scan, last_backend
from ssmzoo_kernels.feedback_scan import SOLVER
from ssmzoo_kernels.feedback_scan import triton as feedback_triton
from ssmzoo_kernels.feedback_scan.inputs import Inputs, Stop
from ssmzoo_kernels.scan import interval

# numpy warns where a GPU goes to infinity, as the formulas mean it to
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|divide by zero):RuntimeWarning"
)
OPTIONS = ("w_gamma", "D", "drive", "initial_state")


repair()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(feedback_triton, "CHUNK", 8)
    yield
    torch.use_deterministic_algorithms(False)


def draw(batch, length, width, states, segments=None, absent=("drive",)):
    inputs = {
        "u": torch.randn(batch, length, width),
        "lam": -torch.rand(width, states),
        "w": torch.randn(width, states),
        "C": torch.randn(width, states),
        "w_gamma": torch.randn(width, states),
        "D": torch.randn(width),
        "drive": torch.randn(batch, length, width),
        "initial_state": torch.randn(segments or batch, width, states),
    }
    return [None if name in absent else x for name, x in inputs.items()]


def bounds(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def on(backend, **options):
    return functools.partial(feedback_scan, backend=backend, **options)


def judge(inputs, dtype=torch.float32, **options):
    assert_as_accurate(on("triton", **options), on("reference", **options), inputs, dtype)
    assert (last_backend("feedback_scan"), last_backend(SOLVER)) == ("triton", "march")


def judge_newton(inputs, tolerance=1e-12, budget=1e-10, **options):
    """Newton's states are as exact as its tolerance; its gradients belong to these states."""
    newton = on("triton", solver="newton", tolerance=tolerance, **options)
    found = outputs_and_grads(newton, inputs, torch.float64)
    assert (last_backend("feedback_scan"), last_backend(SOLVER)) == ("triton", "newton")
    for name, exact in outputs_and_grads(on("reference", **options), inputs, torch.float64).items():
        error = (found[name] - exact).abs().max()
        assert error <= budget * exact.abs().max(), f"{name}: {error:.1e}"


# --- the march --------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [("drive",), ("w_gamma",)], ids=str)
def test_tails_of_groups_and_of_chunks_are_as_exact_as_the_loop(monkeypatch, absent):
    monkeypatch.setattr(feedback_triton, "CHUNK", 64)
    lengths = {1, 65}
    for backward in (False, True):
        tokens = feedback_triton.tile(9, 2, 3, torch.float32, backward).tokens
        lengths |= {tokens - 1, tokens, tokens + 1}
    judge(
        draw(1, sum(lengths), 2, 3, len(lengths), absent=absent),
        cu_seqlens=bounds(*sorted(lengths)),
    )


def test_segments_that_share_a_scratch_are_as_exact_as_the_loop(monkeypatch):
    launched = []
    launch = feedback_triton.launch
    monkeypatch.setattr(feedback_triton, "FILL", 1)
    monkeypatch.setattr(
        feedback_triton, "launch", lambda *x, **y: launched.append(x[0]) or launch(*x, **y)
    )
    judge(draw(5, 3, 3, 2))
    assert launched.count(feedback_triton.feedback_bwd_kernel) == 2


def test_blocks_are_narrower_where_there_are_few_programs():
    wide, narrow = (feedback_triton.tile(n, 256, 4, torch.float32, False) for n in (64, 1))
    assert wide.block_d > narrow.block_d == 8


@pytest.mark.parametrize("solver", ["march", "newton"])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_gates_far_beyond_the_exponents_range_are_shut_or_open(sign, solver):
    u, lam, w, C, *_, state = draw(1, 9, 3, 2)
    w, state = torch.full_like(w, sign * 1e4), state.abs() + 1
    leaves = [x.requires_grad_() for x in (u.abs(), lam, w, C, state)]
    run = on("triton", solver=solver)
    out, final = run(*leaves[:4], initial_state=leaves[4])
    grads = torch.autograd.grad(out.sum() + final.sum(), leaves)
    assert all(x.isfinite().all() for x in (out, final, *grads))
    expected = state
    for t in range(9 if sign > 0 else 0):
        expected = expected + lam * expected + u.abs()[:, t, :, None]
    torch.testing.assert_close(final, expected, rtol=1e-5, atol=1e-5)


def test_nan_keeps_its_meaning_and_its_place():
    for n in (0, 6):
        inputs = draw(2, 9, 3, 2, absent=())
        inputs[n][0, 4, 1] = float("nan")
        offsets = bounds(9, 9)
        flat = [x.flatten(0, 1) if i in (0, 6) else x for i, x in enumerate(inputs)]
        out, final, _ = feedback_triton.forward(Inputs(*flat), offsets, False)
        assert out.isnan().nonzero().tolist() == [[t, 1] for t in range(4, 9)]
        assert final.isnan().nonzero().tolist() == [[0, 1, 0], [0, 1, 1]]


# --- Newton's method --------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [("drive",), OPTIONS, ("w_gamma", "D")], ids=str)
def test_newton_solves_packed_segments(absent):
    judge_newton(draw(1, 25, 5, 3, 6, absent), cu_seqlens=bounds(0, 1, 7, 8, 9, 0))


def test_newton_saves_the_states_that_the_adjoint_needs():
    assert interval(10, feedback_triton.CHUNK) == 16
    judge_newton(draw(1, 27, 3, 10, 3), cu_seqlens=bounds(0, 26, 1))


def test_newton_in_float32_reaches_its_tolerance():
    inputs = draw(2, 20, 3, 4)
    exact = on("reference")(*(None if x is None else x.double() for x in inputs))
    found = on("triton", solver="newton", tolerance=1e-6)(*inputs)
    assert last_backend(SOLVER) == "newton"
    for got, expected in zip(found, exact, strict=True):
        error = (got.double() - expected).abs().max()
        assert error <= 1e-5 * expected.abs().max()


def test_newton_needs_few_steps_where_the_recurrence_contracts():
    """In the contractive regime, 2 |w| |u| <= |lam|, three steps suffice at any length."""
    u, lam, w, C, *_ = draw(1, 40, 3, 4)
    u, lam, w = u.clamp(-1, 1), -0.5 - 0.5 * lam.abs(), w.clamp(-1, 1) * 0.25
    feedback_scan(u, lam, w, C, solver="newton", max_iterations=3, backend="triton")
    assert last_backend(SOLVER) == "newton"


def test_without_feedback_one_step_suffices():
    inputs = draw(1, 20, 3, 4, absent=())
    options = {"solver": "newton", "max_iterations": 1, "tolerance": 1e-5}
    feedback_scan(*inputs, **options, backend="triton")
    assert last_backend(SOLVER) == "newton"


def stiff():
    u, lam, w, C, *_ = draw(2, 33, 3, 2)
    return [5 * u, lam, 5 * w, C]


def test_stiff_lanes_converge_within_twice_the_tokens_of_a_tile():
    judge_newton(stiff())


def test_a_cap_that_is_reached_is_told_and_the_call_marches(caplog):
    inputs = stiff()
    flat = Inputs(inputs[0].flatten(0, 1), *inputs[1:], None, None, None, None)
    with pytest.raises(feedback_triton.NotConverged, match="after 1 iterations"):
        feedback_triton.newton(flat, bounds(33, 33), True, Stop(1e-6, 1, 0.0))
    marched = feedback_scan(*inputs, backend="triton")
    found = feedback_scan(*inputs, solver="newton", max_iterations=1, backend="triton")
    assert last_backend(SOLVER) == "march"
    assert "this call marches instead" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(found, marched, strict=True))


def test_damping_keeps_the_solution():
    judge_newton(draw(1, 9, 3, 2), damping=0.2, max_iterations=100)


def test_this_process_interprets():
    assert not isinstance(feedback_triton.feedback_fwd_kernel, triton.JITFunction)
