"""The contract of ops: a stranger's op keeps it; a planted fault fails the check that names it."""

import itertools

import pytest
import torch

import ssmzoo_kernels
from ssmzoo.testing import OpContract
from ssmzoo_kernels import declaration, dispatch, last_backend
from ssmzoo_kernels.declaration import Choice, Op


def reference(x, decay, initial_state=None, *, cu_seqlens=None):
    """Sum a sequence and forget: ``h[t] = decay h[t-1] + x[t]``."""
    if cu_seqlens is not None:
        parts = [
            reference(x[:, a:b], decay, None if initial_state is None else initial_state[s, None])
            for s, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist()))
        ]
        outputs, states = zip(*parts, strict=True)
        return torch.cat(outputs, dim=1), torch.cat(states)
    exact = torch.promote_types(torch.float32, x.dtype)
    state = (0 * x[:, :1].sum(1) if initial_state is None else initial_state).to(exact)
    outputs = []
    for x_t in x.to(exact).unbind(1):
        state = decay.to(exact) * state + x_t
        outputs.append(state)
    out = torch.stack(outputs, dim=1) if outputs else 0 * x * decay
    return out.to(x.dtype), state


class Kernels:
    """The same with a backward of its own, on flat rows ``[T, D]``."""

    @staticmethod
    def states(x, decay, initial_state, offsets):
        exact = torch.promote_types(torch.float32, x.dtype)
        x, decay = x.to(exact), decay.to(exact)
        before, after, finals = [], [], []
        for s, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
            state = x.new_zeros(x.shape[1])
            if initial_state is not None:
                state = initial_state[s].to(exact)
            for t in range(begin, end):
                before.append(state)
                state = decay * state + x[t]
                after.append(state)
            finals.append(state)
        rows = [torch.stack(found) if found else torch.zeros_like(x) for found in (before, after)]
        return *rows, torch.stack(finals) if finals else x.new_zeros(0, x.shape[1])

    @classmethod
    def forward(cls, x, decay, initial_state, offsets):
        _, after, finals = cls.states(x, decay, initial_state, offsets)
        return after.to(x.dtype), finals.clone()

    @classmethod
    def backward(cls, grad_y, grad_final, x, decay, initial_state, offsets):
        before, _, finals = cls.states(x, decay, initial_state, offsets)
        wide, rate = torch.zeros_like(before), decay.to(finals.dtype)
        if grad_y is not None:
            wide = wide + grad_y.to(finals.dtype)
        adjoints, starts = torch.zeros_like(before), torch.zeros_like(finals)
        for s, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
            carried = starts[s] if grad_final is None else grad_final[s]
            for t in reversed(range(begin, end)):
                adjoints[t] = carried + wide[t]
                carried = rate * adjoints[t]
            starts[s] = carried
        return adjoints, (adjoints * before).sum(0), starts


LEAKY_SUM = Op(
    "test_leaky_sum",
    inputs={"x": "B L D", "decay": "D", "initial_state": "S D?"},
    outputs={"y": "B L D", "final_state": "S D as exact"},
    kernels=lambda _: Kernels,
    reference=reference,
    packing="flat",
    offers=("reference", "eager"),
)


def leaky_sum(x, decay, initial_state=None, *, cu_seqlens=None, backend="auto"):
    return LEAKY_SUM(x, decay, initial_state, cu_seqlens=cu_seqlens, backend=backend)


class LeakySum(OpContract):
    op, declaration = staticmethod(leaky_sum), LEAKY_SUM
    sizes = {"B": 2, "L": 40, "D": 3}
    values = {"decay": torch.sigmoid}
    many = {"D": 5}


class TestLeakySum(LeakySum):
    """Every check."""


def no_kernels(name):
    raise AssertionError(f"an op without kernels was asked for {name}")


def formula_alone(name, *, packing="flat"):
    """Declare the sum with nothing but its formula, from which eager is derived."""
    return Op(
        name,
        inputs={"x": "B L D", "decay": "D", "initial_state": "S D?"},
        outputs={"y": "B L D", "final_state": "S D as exact"},
        kernels=no_kernels,
        reference=reference,
        packing=packing,
        offers=("reference",),
    )


def public(op):
    def call(*, cu_seqlens=None, backend="auto", **given):
        tensors = [given.pop(name, None) for name in op.inputs]
        return op(*tensors, cu_seqlens=cu_seqlens, backend=backend, **given)

    return staticmethod(call)


class TestFormulaAlone(LeakySum):
    """Every check of an op whose eager is derived."""

    declaration = formula_alone("leaky_sum_flat")
    op = public(declaration)


class TestFormulaOfRows(LeakySum):
    declaration = formula_alone("leaky_sum_rows", packing="rows")
    op = public(declaration)


def turned(x, angle, shift=None, *, way, kind):
    """Turn complex numbers, and shift them; the choice of one value is not told to kernels."""
    assert kind == "this"
    angle = angle.to(x.dtype.to_real())
    y = x * torch.polar(torch.ones_like(angle), angle if way == "left" else -angle)
    y = y if shift is None else y + shift
    return y, y.real.sum(dim=-1)


TURN = Op(
    "turn",
    inputs={"x": "B D complex", "angle": "B D", "shift": "D?"},
    outputs={"y": "B D as x", "sums": "B as real"},
    kernels=no_kernels,
    reference=turned,
    options={"way": Choice("left", "right"), "kind": Choice("this")},
    offers=("reference",),
)


class TestFormulaOfComplexNumbers(OpContract):
    declaration = TURN
    op = public(declaration)
    forms = {way: {"way": way, "kind": "this"} for way in ("left", "right")}
    sizes = {"B": 4, "D": 6}
    shapes = ({"B": 1, "D": 1}, {"B": 3, "D": 17})
    many = {"B": 30, "D": 200}
    ragged = {"B": 5, "D": 7}
    dtypes = (torch.float64,)


def test_a_formula_alone_runs_under_auto_and_keeps_only_its_inputs():
    sums = TestFormulaAlone.declaration
    x, decay = torch.randn(2, 9, 3, requires_grad=True), torch.full((3,), 0.5)
    for backend, ran in (("auto", "eager"), ("reference", "reference")):
        y, _ = sums(x, decay, None, backend=backend)
        assert last_backend(sums.name) == ran
        (slope,) = torch.autograd.grad(y.square().sum(), x)
        assert slope.isfinite().all()
    with pytest.raises(ValueError, match="backend must be one of auto, reference, eager"):
        sums(x, decay, None, backend="cpu")


def declare(name, module=__name__, **more):
    def kernels(_):
        return Kernels

    kernels.__module__ = module
    shapes = {"inputs": {"x": "B L D"}, "outputs": {"y": "B L D"}}
    return Op(name, **shapes, kernels=kernels, reference=reference, **more)


def test_a_name_of_another_packages_op_is_refused_and_leaves_it_as_it_was():
    with pytest.raises(ValueError, match=r"linear_scan: stranger.ops .* of ssmzoo_kernels"):
        declare("linear_scan", "stranger.ops")
    y, _ = ssmzoo_kernels.linear_scan(torch.ones(1, 3, 2), torch.ones(1, 3, 2))
    assert y[0, :, 0].tolist() == [1, 2, 3]
    assert declare("declared_again").name == declare("declared_again").name


@pytest.mark.parametrize("more", [{"saved": "B L"}, {"keeps": ("x",)}, {"writes": "x"}], ids=str)
def test_an_op_whose_kernels_keep_more_needs_an_eager_of_its_own(more):
    with pytest.raises(ValueError, match="offers must have 'eager'"):
        declare("keeps_more", offers=("reference", "cpu"), **more)


def test_each_declared_c_kernel_is_loaded_where_its_declaration_says():
    ours = (op for op in declaration.declared().values() if "ssmzoo_kernels" in op.declarer)
    with_c = [op for op in ours if "cpu" in op.offers]
    assert len(with_c) > 9
    for op in with_c:
        assert callable(dispatch.c_kernels[op.name]().load), op.name


def strided(right):
    def backward(*arguments):
        grad_x, *rest = right(*arguments)
        return grad_x.T.contiguous().T, *rest

    return backward


def half_state(right):
    def forward(x, *rest):
        y, final = right(x, *rest)
        return y, final.to(x.dtype)

    return forward


def deaf_past_64(right):
    """Chunks after the first do not look where a sequence begins."""

    def states(x, decay, initial_state, offsets):
        kept = offsets[(offsets <= 64) | (offsets == len(x))]
        before, after, finals = right(x, decay, None, kept)
        return before, after, finals[[*range(len(kept) - 1), *[-1] * (len(offsets) - len(kept))]]

    return staticmethod(states)


def wrong_start(right):
    def backward(*arguments):
        *rest, grad_initial = right(*arguments)
        return *rest, 1.001 * grad_initial

    return backward


def random_bits(right):
    def forward(*arguments):
        y, final = right(*arguments)
        return y * (1 + 1e-6 * torch.rand(())), final

    return forward


FAULTS = {
    "the stride of a gradient": ("backward", strided, "have_the_promised_strides", "result 0"),
    "a state that is not float32": (
        "forward",
        half_state,
        "state_is_float32",
        "state: torch.bfloat16",
    ),
    "a leak at a boundary past 64": (
        "states",
        deaf_past_64,
        "packed_rows_do_not_leak",
        "tokens 66 to 130",
    ),
    "a wrong gradient of the initial state": (
        "backward",
        wrong_start,
        "initial_state_has_the_reference_gradient",
        "gradient of initial_state",
    ),
    "other bits each time": ("forward", random_bits, "is_deterministic", "output 0"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_the_check_that_names_it(fault, monkeypatch):
    place, plant, name, word = FAULTS[fault]
    (check,) = (x for x in LeakySum.checks() if x.endswith(name))
    monkeypatch.setattr(Kernels, place, plant(getattr(Kernels, place)))
    if fault == "the stride of a gradient":  # which the registration mends otherwise
        monkeypatch.setattr(declaration, "contiguous", lambda x: x)
    failed = []
    for case in LeakySum.cases(check):
        try:
            getattr(LeakySum(), check)(case)
        except AssertionError as error:
            failed.append(str(error))
    assert failed
    assert all(word in text for text in failed)


def test_an_exemption_names_a_check_and_a_reason():
    with pytest.raises(LookupError, match="test_nothing"):
        type("Wrong", (LeakySum,), {"exempt": {"test_nothing": "for no reason"}})
    with pytest.raises(ValueError, match="test_opcheck"):
        type("Wrong", (LeakySum,), {"exempt": {"test_opcheck": ""}})
    kept = type("Right", (LeakySum,), {"exempt": {"test_opcheck": "it is checked elsewhere"}})
    assert {*LeakySum.checks()} - {*kept.checks()} == {"test_opcheck"}
