"""linear_scan's Triton kernels against the reference in Triton's interpreter.

Not collected by name: ``test_triton_interpreted.py`` runs this file in a process of its own, where
``TRITON_INTERPRET=1`` holds before anything imports triton.
"""

import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.interpreter import repair

from ssmzoo.testing.accuracy import assert_as_accurate
from ssmzoo_kernels import last_backend, linear_scan
from ssmzoo_kernels.linear_scan import triton as linear_triton
from ssmzoo_kernels.scan import triton as skeleton

# numpy warns where a GPU goes to infinity, as the formulas mean it to
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")


repair()


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[1, 10**6], ids=["whole_segments", "spans"])
def fill(monkeypatch, request):
    """Sets how many warps segments are cut for: none, or into spans of 8 tokens."""
    monkeypatch.setattr(skeleton, "FILL", request.param)
    monkeypatch.setattr(skeleton, "CHUNK", 8)
    monkeypatch.setattr(linear_triton, "TOKENS", 4)


def on(backend, paired, **options):
    """The op; complex numbers come and go as pairs of reals."""

    def run(*inputs):
        if paired:
            inputs = [x if x is None else torch.view_as_complex(x) for x in inputs]
        found = linear_scan(*inputs, backend=backend, **options)
        return tuple(torch.view_as_real(x) for x in found) if paired else found

    return run


def draw(paired, batch, length, width, segments=None):
    shapes = ((batch, length, width), (batch, length, width), (segments or batch, width))
    a, b, state = (torch.randn(*x, 2) if paired else torch.randn(x) for x in shapes)
    return [a / (1.5 if paired else 1), b, state]


def judge(inputs, paired, dtype=torch.float32, **options):
    candidate, known = on("triton", paired, **options), on("reference", paired, **options)
    assert_as_accurate(candidate, known, inputs, dtype)
    assert last_backend("linear_scan") == "triton"


PAIRED = pytest.mark.parametrize("paired", [False, True], ids=["real", "complex"])


@PAIRED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_segments_equal_the_loop(fill, paired, dtype):
    bounds = torch.tensor([0, 0, 1, 9, 9, 19, 27, 27])
    judge(draw(paired, 1, 27, 3, 7), paired, dtype, cu_seqlens=bounds)


@PAIRED
@pytest.mark.parametrize("cut", [1, 10**6], ids=["whole_segments", "spans"])
def test_lengths_around_tokens_loaded_ahead_and_around_a_span_equal_the_loop(
    monkeypatch, paired, cut
):
    monkeypatch.setattr(skeleton, "FILL", cut)
    ahead = linear_triton.TOKENS // (2 if paired else 1)
    lengths = torch.tensor([0, 1, ahead - 1, ahead, ahead + 1, 63, 64, 65])
    bounds = lengths.cumsum(0)
    assert skeleton.span_of(int(bounds[-1]), 7, 2, skeleton.CHUNK) == (None if cut == 1 else 64)
    judge(draw(paired, 1, int(bounds[-1]), 37, 7), paired, cu_seqlens=bounds)


@PAIRED
def test_no_tokens_no_columns_and_no_state(fill, paired):
    judge(draw(paired, 2, 0, 3), paired)
    judge(draw(paired, 2, 3, 0), paired)
    judge([*draw(paired, 2, 11, 3)[:2], None], paired)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_cost_no_more_than_their_rounding(fill, dtype):
    judge(draw(False, 2, 11, 3), False, dtype)


def test_strided_and_lazily_conjugated_inputs_equal_the_loop(fill):
    a, b, state = (torch.view_as_complex(x) for x in draw(True, 2, 11, 3))
    wide = torch.stack([a, b], dim=2)
    given = (wide[:, :, 0].conj(), wide[:, :, 1], state.conj())
    assert given[0].is_conj()
    for got, expected in zip(
        linear_scan(*given, backend="triton"),
        linear_scan(*given, backend="reference"),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", [0, 1], ids=["states", "final_state"])
def test_a_loss_on_one_output_alone_gives_the_loops_gradients(fill, which):
    grads = {}
    for backend in ("triton", "reference"):
        torch.manual_seed(0)
        leaves = [x.double().requires_grad_() for x in draw(False, 2, 19, 3)]
        linear_scan(*leaves, backend=backend)[which].square().sum().backward()
        grads[backend] = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    for got, expected in zip(*grads.values(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@PAIRED
@pytest.mark.parametrize("cut", [1, 4], ids=["whole_segments", "spans"])
def test_products_that_overflow_and_underflow_change_no_state(monkeypatch, paired, cut):
    """Factors of size 50 and 1/50 in runs: products reach 50^40 either way, states never do."""
    monkeypatch.setattr(skeleton, "FILL", cut)
    monkeypatch.setattr(skeleton, "CHUNK", 8)
    assert skeleton.span_of(160, 1, 1, 8) == (None if cut == 1 else 40)  # a run
    a, _, state = (x.double() for x in draw(paired, 1, 160, 2))
    power = torch.tensor([1.0] * 40 + [-1.0] * 40).repeat(2)
    power = power.view((1, 160, 1, 1) if paired else (1, 160, 1))
    near = 1 + 1e-3 * torch.randn_like(power)  # equal factors would round equally, time after time
    a = (a / size(a, paired) * 50.0**power * near).float()
    inputs = [a, torch.zeros_like(a), (state * 1e-35).float()]
    exact = on("reference", paired)(*(x.double() for x in inputs))[0]
    loop, found = (on(x, paired)(*inputs)[0] for x in ("reference", "triton"))
    assert loop.isfinite().all()
    assert torch.finfo(torch.float32).max < 50.0**40
    errors = [(size(x - exact, paired) / size(exact, paired)).max() for x in (found, loop)]
    assert errors[0] <= 4 * errors[1], errors


def size(x, paired):
    return torch.hypot(*x.unbind(-1)).unsqueeze(-1) if paired else x.abs()


@triton.jit
def forgetful(x, number, d, D: tl.constexpr, live, PAIRS: tl.constexpr, ACC: tl.constexpr):
    return tl.zeros(d.shape, ACC), tl.zeros(d.shape, ACC)


def test_a_scan_that_forgets_the_carry_is_noticed(monkeypatch, fill):
    monkeypatch.setattr(linear_triton, "load_edge", forgetful)
    with pytest.raises(AssertionError, match="exceeds"):
        judge(draw(False, 1, 17, 3), False)


def test_this_process_interprets():
    assert not isinstance(linear_triton.linear_scan_fwd_kernel, triton.JITFunction)
