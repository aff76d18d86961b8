"""Triton kernels against their references in Triton's interpreter: a row of a table a case.

Not collected by name: ``test_triton_interpreted.py`` runs this file in a process of its own, where
``TRITON_INTERPRET=1`` holds before anything imports triton.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from tests.kernels import contracts
from tests.kernels.interpreter import repair
from triton.runtime import interpreter

from ssmzoo.testing import OpContract
from ssmzoo.testing.ops import Case
from ssmzoo_kernels import add_rms_norm, companion_step, innovation, linear_scan, rms_norm
from ssmzoo_kernels.causal_conv1d import triton as conv_triton
from ssmzoo_kernels.feedback_scan import triton as feedback_triton
from ssmzoo_kernels.gated_linear_attention import triton as matrix_triton
from ssmzoo_kernels.innovation import triton as innovation_triton
from ssmzoo_kernels.linear_scan import triton as linear_triton
from ssmzoo_kernels.longhorn_scan import triton as longhorn_triton
from ssmzoo_kernels.rms_norm import triton as norm_triton
from ssmzoo_kernels.scan import interval
from ssmzoo_kernels.scan import triton as skeleton
from ssmzoo_kernels.selective_scan import triton as selective_triton

# numpy warns where a GPU goes to infinity, as the formulas mean it to
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

repair()


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


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
        if spans:
            within(addresses, mask)
        return load(self, addresses, mask, *rest)

    def checked_store(self, addresses, value, mask, *rest):
        if spans:
            within(addresses, mask)
        return store(self, addresses, value, mask, *rest)

    monkeypatch.setattr(skeleton, "launch", watched)
    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)


# --- the table --------------------------------------------------------------------------------


class Row(NamedTuple):
    """A call that is held to the reference's error, outputs and gradients."""

    contract: type[OpContract]
    form: str
    sizes: dict[str, Any]  # "packed": the lengths of packed sequences
    patches: tuple[tuple[Any, str, Any], ...] = ()
    dtype: torch.dtype = torch.float32
    absent: tuple[str, ...] = ()

    def __str__(self):
        sizes = ",".join(f"{k}{v}" for k, v in self.sizes.items())
        patches = ",".join(f"{name}{value}" for _, name, value in self.patches)
        kind = str(self.dtype).removeprefix("torch.")
        parts = (self.contract.__name__, self.form, sizes, kind, patches, ",".join(self.absent))
        return "-".join(x for x in parts if x)


def judge(row):
    contract = row.contract()
    tensors = contract.draw(**row.sizes) | dict.fromkeys(row.absent)
    options = {}
    if "packed" in row.sizes:
        options["cu_seqlens"] = torch.tensor([0, *row.sizes["packed"]]).cumsum(0)
    contract.judge(tensors, Case("triton", row.form), row.dtype, **options)


F64, BF16, F16 = torch.float64, torch.bfloat16, torch.float16
CHUNK = (skeleton, "CHUNK", 8)
WHOLE, SPANS = (CHUNK, (skeleton, "FILL", 1)), (CHUNK, (skeleton, "FILL", 10**6))
LONG = ((skeleton, "FILL", 10**6),)  # spans of chunks as they are
# lengths around a small chunk, and around the tokens that are loaded ahead
AROUND = (0, 1, 3, 0, 4, 5, 7, 8, 9, 17, 0)
OPTIONAL = ("dt_bias", "D", "z", "initial_state")
FEW = {"B": 1, "D": 3, "N": 2}


def scans(contract, form):
    """Return the rows that both scans on the skeleton have."""
    several = {"packed": (0, 26, 1), "D": 5, "N": 10}  # chunks between saved states
    return [
        *(Row(contract, form, several, fill) for fill in (WHOLE, SPANS)),
        *(Row(contract, form, {"B": 2, "L": 3, "D": 37, "N": n}) for n in (1, 16, 40)),
        *(Row(contract, form, FEW | {"L": 5}, absent=x) for x in (OPTIONAL, ("z",), ("D",))),
        *steps(contract, form),
    ]


def steps(contract, form):
    """Return the rows of a scan's step, in every precision."""
    return [
        Row(contract, form, {"B": 1, "L": 7, "D": 5, "N": 3}, dtype=BF16),
        Row(contract, form, FEW | {"L": 20}, SPANS, F64),
    ]


# in these rows nothing outside of tensors is read or written, either
WATCHED = [
    *(
        Row(contract, form, {"packed": AROUND, "D": 5, "N": 3}, fill)
        for contract, form in (
            (contracts.LonghornScan, ""),
            (contracts.SelectiveScan, "zoh"),  # the loads and stores of "euler"
        )
        for fill in (WHOLE, SPANS)
    ),
    Row(contracts.LonghornScan, "", {"packed": (65, 2), "D": 3, "N": 2}),  # chunks as they are
]
ROWS = [
    *scans(contracts.LonghornScan, ""),
    Row(contracts.LonghornScan, "", {"packed": (64, 65), "D": 5, "N": 3}, LONG),
    Row(
        contracts.LonghornScan,
        "",
        {"B": 1, "L": 35, "D": 4, "N": 2},
        (CHUNK, (skeleton, "FILL", 3)),  # spans of two chunks
    ),
    *scans(contracts.SelectiveScan, "euler"),
    *steps(contracts.SelectiveScan, "zoh"),
]

CONV = ((conv_triton, "CHUNK", 8),)
ROWS += [
    *(
        Row(contracts.CausalConv1d, "silu", {"packed": (1, 0, 7, 8, 9, 0), "D": 5, "K": k}, CONV)
        for k in (1, 2, 4)
    ),
    Row(contracts.CausalConv1d, "plain", {"packed": (1, 0, 7, 8, 9, 0), "D": 5}, CONV),
    Row(contracts.CausalConv1d, "silu", {"packed": (1, 65), "D": 3}),
    *(
        Row(contracts.CausalConv1d, "silu", {"L": 9, "D": 133}, CONV, dtype)
        for dtype in (BF16, F64)
    ),
    Row(contracts.CausalConv1d, "plain", {"L": 5}, absent=("bias", "initial_state")),
]

AHEAD = (linear_triton, "TOKENS", 4)
for contract in (contracts.LinearScan, contracts.ComplexLinearScan):
    ends = (linear_triton.TOKENS // (2 if contract.complex else 1) + 1, 65)
    ROWS += [
        *(
            Row(contract, "", {"packed": (0, 1, 8, 0, 10, 8, 0), "D": 3}, (*fill, AHEAD), dtype)
            for fill in (WHOLE, SPANS)
            for dtype in (torch.float32, F64)
        ),
        *(Row(contract, "", {"packed": ends, "D": 3}, fill[1:]) for fill in (WHOLE, SPANS)),
        Row(contract, "", {"L": 3, "D": 37}, absent=("initial_state",)),
    ]
ROWS += [
    Row(contracts.LinearScan, "", {"L": 11, "D": 3}, fill, dtype)
    for fill, dtype in ((WHOLE, F16), (SPANS, BF16))
]

MARCH = ((feedback_triton, "CHUNK", 8),)
PACKED = {"packed": (0, 1, 7, 8, 9, 0), "D": 5, "N": 3}
ROWS += [
    *(
        Row(contracts.FeedbackScan, "march", PACKED, MARCH, absent=absent)
        for absent in (
            ("drive",),
            ("w_gamma", "D"),
            ("w_gamma", "D", "drive", "initial_state"),
        )
    ),
    *(
        Row(
            contracts.FeedbackScan,
            "march",
            {"packed": (0, 26, 1), "D": 3, "N": 10},
            MARCH,
            absent=absent,
        )
        for absent in (("drive",), ("w_gamma",))
    ),
    *(
        Row(contracts.FeedbackScan, "march", {"L": 5, "D": width, "N": n}, MARCH, absent=("drive",))
        for width, n in ((33, 1), (3, 16), (2, 40))
    ),
    *(
        Row(contracts.FeedbackScan, "march", {"L": 9, "D": 3, "N": 2}, MARCH, dtype, ("drive",))
        for dtype in (BF16, F64)
    ),
]

SMALL = {"B": 1, "G": 1, "H": 2, "K": 3, "V": 18}
for contract, decays in (
    (contracts.GatedLinearAttention, 1),
    (contracts.RowwiseGatedLinearAttention, 3),
):
    ROWS += [
        row
        for rule in ("additive", "delta")
        for row in (
            Row(contract, rule, SMALL | {"E": decays, "packed": (0, 1, 16, 18, 0, 5)}),
            Row(contract, rule, SMALL | {"E": decays, "L": 35}),
            Row(contract, rule, SMALL | {"E": decays, "L": 19}, dtype=BF16),
            Row(contract, rule, SMALL | {"E": decays, "L": 19}, dtype=F64),
        )
    ]
ROWS += [
    # several chunks between saved states, of so many rows that several programs share a gradient
    Row(contracts.GatedLinearAttention, "delta", {**SMALL, "L": 90, "K": 70, "H": 1, "V": 4}),
    Row(
        contracts.RowwiseGatedLinearAttention,
        "delta",
        {**SMALL, "L": 50, "K": 40, "E": 40, "H": 1, "V": 4},
    ),
    Row(contracts.GatedLinearAttention, "delta", {**SMALL, "L": 19}, dtype=F16),
    Row(contracts.GatedLinearAttention, "delta", {**SMALL, "L": 18, "G": 2, "H": 4}),
    *(
        Row(
            contracts.GatedLinearAttention,
            rule,
            {**SMALL, "L": 18},
            absent=("log_decay", "beta", "initial_state"),
        )
        for rule in ("additive", "delta")
    ),
]

MOST = (innovation_triton, "CHUNK", 8)
ROWS += [
    *(
        Row(contracts.Innovation, form, {"packed": (0, 9, 1, 3, 17, 0), "D": 5}, (MOST,), dtype)
        for form, dtype in (
            ("absolute", torch.float32),
            ("relative", torch.float32),
            ("relative", BF16),
            ("absolute", F64),
        )
    ),
    *(
        Row(
            contracts.Innovation,
            form,
            {"B": 1, "L": 7, "D": 37},
            ((innovation_triton, "WIDEST", 16),),
        )
        for form in ("absolute", "relative")
    ),
    Row(contracts.Innovation, "absolute", {"packed": (1, 65), "D": 3}),
]

STEP = contracts.CompanionStep
ROWS += [
    *(Row(STEP, "", {"B": n + 1, "D": 4, "n": n}) for n in (1, 2, 7, 16, 37)),  # each position
    *(
        Row(STEP, "", {"B": 2, "D": width, "n": n}, dtype=dtype)
        for n, width in ((300, 5), (520, 2), (5, 130))
        for dtype in (torch.float32, F64)
    ),
]

NARROW = (norm_triton, "WIDEST", 16)
SHARES = (
    (norm_triton, "MOST_SHARES", 2),
    (norm_triton, "LEAST_ROWS", 4),
    (norm_triton, "TILE", 64),
)
ROWS += [
    *(
        Row(contract, "offset", {"B": 17, "D": width}, (NARROW,), dtype)
        for contract in (contracts.RMSNorm, contracts.AddRMSNorm)
        for width in (3, 16, 37)
        for dtype in (torch.float32, BF16, F64)
    ),
    *(
        Row(contracts.RMSNorm, "offset", {"B": count, "D": 20}, SHARES)
        for count in (2, 15, 16, 17, 40)
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_kernels_equal_the_reference(row, monkeypatch):
    for patch in row.patches:
        monkeypatch.setattr(*patch)
    judge(row)


@pytest.mark.parametrize("row", WATCHED, ids=str)
def test_kernels_equal_the_reference_and_stay_in_their_tensors(
    row, monkeypatch, no_load_leaves_its_tensor
):
    for patch in row.patches:
        monkeypatch.setattr(*patch)
    judge(row)


def test_the_table_cuts_segments_as_it_says(monkeypatch):
    assert skeleton.CHUNK == 64
    assert skeleton.TOKENS == 4
    assert interval(10, 8) == 16
    for fill, tokens, segments, span in ((10**6, 129, 2, 64), (1, 129, 2, None)):
        monkeypatch.setattr(skeleton, "FILL", fill)
        assert skeleton.span_of(tokens, segments, 1, 64) == span
    monkeypatch.setattr(skeleton, "FILL", 3)
    assert skeleton.span_of(35, 1, 1, 8) == 16


# --- the scans --------------------------------------------------------------------------------


def test_blocks_that_take_turns_at_a_partial_sum_equal_the_reference(monkeypatch):
    monkeypatch.setattr(skeleton, "parts_of", lambda blocks, width, states: 2)
    judge(Row(contracts.LonghornScan, "", {"B": 1, "L": 5, "D": 90, "N": 3}))


def assert_close_to_float64(contract, form, tensors):
    found, exact = (
        contract.results(tensors, Case("triton", form)),
        contract.results({n: x.double() for n, x in tensors.items()}, Case("reference", form)),
    )
    for name, truth in exact.items():
        error = (found[name].double() - truth).abs().max() / truth.abs().max()
        assert error <= 1e-5, f"{name}: {error:.1e}"


def test_extreme_logits_and_keys_stay_finite_and_accurate(monkeypatch):
    for patch in SPANS:
        monkeypatch.setattr(*patch)
    contract = contracts.LonghornScan()
    tensors = contract.draw(B=1, L=20, D=4, N=3, dtype=torch.float32)
    tensors["dt"][0, 2:6] = torch.tensor([-300.0, 300.0, -30.0, 30.0])[:, None]
    tensors["k"][0, 7, 1] = 1000.0
    tensors["k"][0, 8] = 0.0
    assert_close_to_float64(contract, "", tensors)


@pytest.mark.parametrize("form", ["euler", "zoh"])
def test_extreme_step_sizes_and_rates_stay_finite_and_accurate(monkeypatch, form):
    for patch in SPANS:
        monkeypatch.setattr(*patch)
    contract = contracts.SelectiveScan()
    tensors = contract.draw(B=1, L=20, D=4, N=3, dtype=torch.float32)
    tensors["dt"][0, 2:7] = torch.tensor([-300.0, 19.9, -30.0, 20.1, 300.0])[:, None]
    # where the hold goes by its series, too
    tensors["A"][0], tensors["A"][1, 0] = torch.tensor([-1e-9, -1e-3, -0.02]), -1e3
    assert_close_to_float64(contract, form, tensors)


@pytest.mark.parametrize(
    ("contract", "form", "shut"),
    [
        (contracts.LonghornScan, "", {"k": 0.0}),
        (contracts.SelectiveScan, "euler", {"dt": -1e4}),
        (contracts.SelectiveScan, "zoh", {"dt": -1e4}),
    ],
)
def test_what_writes_nothing_leaves_the_state_bit_identical(contract, form, shut):
    tensors = contract().draw(B=1, L=3, D=4, N=3, dtype=torch.float32)
    for name, value in shut.items():
        tensors[name].fill_(value)
    final = contract().run(tensors, Case("triton", form))[1]
    assert torch.equal(final, tensors["initial_state"])


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


@pytest.mark.parametrize("paired", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("cut", [1, 4], ids=["whole_segments", "spans"])
def test_products_that_overflow_and_underflow_change_no_state(monkeypatch, paired, cut):
    """Factors of size 50 and 1/50 in runs: products reach 50^24 either way, states never do."""
    monkeypatch.setattr(skeleton, "FILL", cut)
    monkeypatch.setattr(skeleton, "CHUNK", 8)
    assert skeleton.span_of(96, 1, 1, 8) == (None if cut == 1 else 24)  # a run
    kind = torch.complex128 if paired else torch.float64
    a, state = torch.randn(1, 96, 2, dtype=kind), torch.randn(1, 2, dtype=kind)
    power = torch.tensor([1.0] * 24 + [-1.0] * 24).repeat(2).view(1, 96, 1)
    near = 1 + 1e-3 * torch.randn_like(power)  # equal factors would round equally, time after time
    narrow = torch.complex64 if paired else torch.float32
    a = (a / a.abs() * 50.0**power * near).to(narrow)
    inputs = [a, torch.zeros_like(a), (state * 1e-35).to(narrow)]
    exact = linear_scan(*(x.to(kind) for x in inputs), backend="reference")[0]
    loop, found = (linear_scan(*inputs, backend=x)[0] for x in ("reference", "triton"))
    assert loop.isfinite().all()
    assert torch.finfo(torch.float32).max < 50.0**24
    errors = [((x - exact).abs() / exact.abs()).max() for x in (found, loop)]
    assert errors[0] <= 4 * errors[1], errors


# --- the others -------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["additive", "delta"])
def test_longer_chunks_of_bfloat16_equal_the_loop(monkeypatch, rule):
    seen = []
    tile = matrix_triton.tile
    monkeypatch.setattr(matrix_triton, "tile", lambda *x: seen.append(tile(*x)) or seen[-1])
    monkeypatch.setitem(contracts.GatedLinearAttention.forms, rule, {"rule": rule, "chunk": 64})
    judge(Row(contracts.GatedLinearAttention, rule, {**SMALL, "L": 70}, dtype=BF16))
    assert {x.tokens for x in seen} == {32}


@pytest.mark.parametrize("rule", ["additive", "delta"])
@pytest.mark.parametrize(
    ("contract", "decays"),
    [(contracts.GatedLinearAttention, 1), (contracts.RowwiseGatedLinearAttention, 3)],
)
def test_one_token_of_every_sequence_equals_the_loop(contract, decays, rule):
    sizes = {**SMALL, "B": 3, "L": 1, "E": decays}
    tensors = contract().draw(**sizes, dtype=torch.float32)
    with torch.no_grad():
        found, expected = (contract().run(tensors, Case(x, rule)) for x in ("triton", "reference"))
    for got, known in zip(found, expected, strict=True):
        torch.testing.assert_close(got, known)


@pytest.mark.parametrize("span", [1, 2, 9])
def test_innovations_of_any_span_equal_the_reference(span):
    y, history = torch.randn(1, 12, 4), torch.randn(1, span, 4)
    found, exact = (
        innovation(y, [1 / span] * span, history, backend=x) for x in ("triton", "reference")
    )
    torch.testing.assert_close(found[0], exact[0])
    assert torch.equal(found[1], exact[1])


def test_positions_of_a_ring_count_modulo_its_places():
    u, ring, d = torch.randn(4, 3), torch.randn(4, 6, 3), torch.randn(3)
    a, b = torch.randn(3, 5), torch.randn(3, 5)
    given = (u, ring, torch.tensor([-1, -6, 6, 13]), a, b, d)
    found, exact = (companion_step(*given, backend=x) for x in ("triton", "reference"))
    for got, known in zip(found, exact, strict=True):
        torch.testing.assert_close(got, known)


def test_sums_are_normalised_as_they_are_rounded():
    residual, x, weight = torch.randn(17, 37), torch.randn(17, 37).bfloat16(), torch.randn(37)
    total, y = add_rms_norm(residual, x, weight, eps=1e-5, backend="triton")
    assert torch.equal(total, residual + x)
    assert torch.equal(y, rms_norm(total, weight, eps=1e-5, backend="triton").to(y.dtype))


class TestNonfinite(contracts.RMSNorm):
    """What NaN and infinity reach."""

    backends = ("triton",)
    exempt = {
        name: "small sizes are above, and torch's own checks in interpreted_every_op.py"
        for name in contracts.RMSNorm.checks()
        if name != "test_nonfinite_values_reach_what_they_reach_in_the_reference"
    }


class TestNonfiniteSums(contracts.AddRMSNorm):
    """What NaN and infinity reach."""

    backends, exempt = ("triton",), TestNonfinite.exempt


# --- planted faults, and the interpreter ------------------------------------------------------


@triton.jit
def doubtful(state, u, k, dt, param):
    return longhorn_triton.step(state, u, k, dt, param) * 0.9999


@triton.jit
def forgetful(x, number, d, D: tl.constexpr, live, PAIRS: tl.constexpr, ACC: tl.constexpr):
    return tl.zeros(d.shape, ACC), tl.zeros(d.shape, ACC)


@triton.jit
def everlasting(logs, C: tl.constexpr):
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.where(row >= column, 1.0, 0.0)


right = feedback_triton.step


@triton.jit
def leaky(state, u_t, gate_input, lam, folded, live):
    return tl.fma(right(state, u_t, gate_input, lam, folded, live), 0.9999, 0.0)


NARROW_SCAN = FEW | {"L": 17}
FAULTS = {
    "a step slightly wrong": (
        (longhorn_triton, "TRANSITION", longhorn_triton.TRANSITION._replace(step=doubtful)),
        Row(contracts.LonghornScan, "", NARROW_SCAN),
    ),
    "the other discretization": (
        (
            selective_triton,
            "TRANSITIONS",
            dict.fromkeys(("euler", "zoh"), selective_triton.TRANSITIONS["euler"]),
        ),
        Row(contracts.SelectiveScan, "zoh", NARROW_SCAN),
    ),
    "a forgotten carry": (
        (linear_triton, "load_edge", forgetful),
        Row(contracts.LinearScan, "", {"B": 1, "L": 17, "D": 3}, SPANS),
    ),
    "pairs that forget nothing": (
        (matrix_triton, "between", everlasting),
        Row(contracts.GatedLinearAttention, "additive", {**SMALL, "L": 17}),
    ),
    "a march slightly wrong": (
        (feedback_triton, "step", leaky),
        Row(contracts.FeedbackScan, "march", NARROW_SCAN, absent=("drive",)),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(monkeypatch, fault):
    planted, row = FAULTS[fault]
    for patch in (*row.patches, planted):
        monkeypatch.setattr(*patch)
    with pytest.raises(AssertionError, match="exceeds"):
        judge(row)


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
    a, b = torch.randn(2, 16, 4)
    x, y = torch.randn(2, 16, 16).bfloat16()
    scanned, product = torch.empty(16, 4), torch.empty(16, 16)
    repairs_kernel[(1,)](a, b, scanned, x, y, product, ROWS=16, COLUMNS=4)
    state = torch.zeros(4)
    for t in range(16):
        state = a[t] * state + b[t]
        torch.testing.assert_close(scanned[t], state, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(product, x.float() @ y.float(), rtol=1e-5, atol=1e-5)


def test_this_process_interprets():
    assert not isinstance(skeleton.scan_fwd_kernel, triton.JITFunction)
