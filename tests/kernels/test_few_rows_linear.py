"""few_rows_linear, many_rows_linear: the same as F.linear; gradients have many rows alone."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.tokens import rounding
from torch.testing import assert_close

from ssmzoo_kernels import few_rows_linear, native
from ssmzoo_kernels.dispatch import _ran, last_backend, use_backend
from ssmzoo_kernels.few_rows_linear import MOST_ROWS

linear_maps = importlib.import_module("ssmzoo_kernels.few_rows_linear")


@pytest.fixture(autouse=True)
def nothing_ran():
    for name in ("few_rows_linear", "many_rows_linear"):
        _ran.pop(name, None)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("rows", [*range(1, 10), 23, MOST_ROWS])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 5), (65, 130)])
def test_it_is_as_exact_as_a_sum_in_the_same_precision(dtype, rows, inputs, outputs):
    x = torch.randn(rows, 1, inputs).to(dtype)
    weight = torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if rows % 2 else None
    with torch.no_grad():
        y = few_rows_linear(x, weight, bias)
    assert last_backend("few_rows_linear") == "cpu"
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # an inner product of n terms errs by at most n roundings of the sum of absolute values
    size = F.linear(x.double().abs(), weight.double().abs())
    sums = torch.promote_types(dtype, torch.float32)
    allowed = (inputs + 1) * torch.finfo(sums).eps * (size + exact.abs())
    if sums is not dtype:  # and the result is rounded once, to a number or to a subnormal one
        last = torch.finfo(dtype)
        allowed += last.eps / 2 * (exact.abs() + allowed) + last.smallest_normal * last.eps
    assert y.shape == (rows, 1, outputs)
    assert y.dtype == dtype
    assert ((y - exact).abs() <= allowed).all()


class Int8Tensor(torch.Tensor):
    """What torchao's is to us: int8 and a scale a row. Only our kernel can multiply with it."""

    @staticmethod
    def __new__(cls, q, scale, dtype, zero_point=None, act_quant_kwargs=None):
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=dtype)

    def __init__(self, q, scale, dtype, zero_point=None, act_quant_kwargs=None):
        self.qdata, self.scale = q, scale
        self.zero_point, self.act_quant_kwargs = zero_point, act_quant_kwargs

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        raise AssertionError(f"{operation} was called")


def int8(outputs, inputs, dtype, **more):
    q = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    scale = torch.rand(outputs, 1).add(0.1).to(dtype)
    return q.double() * scale.double(), Int8Tensor(q, scale, dtype, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 23, MOST_ROWS])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(1, 1), (7, 5), (65, 130), (768, 515), (2400, 6), (4103, 3)]
)
@torch.no_grad()
def test_int8_with_a_scale_a_row(dtype, rows, inputs, outputs):
    x, bias = torch.randn(rows, inputs).to(dtype), torch.randn(outputs).to(dtype)
    zero = torch.zeros(outputs, 1, dtype=torch.int8)
    x[:, 0] *= 100  # the largest of its 256 alone
    exact, weight = int8(outputs, inputs, dtype, zero_point=zero)
    y = few_rows_linear(x, weight, bias)
    assert last_backend("few_rows_linear") == "cpu"
    size = F.linear(x.double().abs(), exact.abs()) + bias.double().abs()
    rounded = rounding(x, exact, 256)
    exact = F.linear(x.double(), exact, bias.double())
    allowed = (inputs + 4) * torch.finfo(torch.float32).eps * size + rounded
    if dtype is not torch.float32:
        allowed += torch.finfo(dtype).eps / 2 * (exact.abs() + allowed)
    assert y.dtype == dtype
    assert ((y - exact).abs() <= allowed).all()
    for row, alone in zip(y, x.split(1), strict=True):
        assert few_rows_linear(alone, weight, bias)[0].equal(row)


class IntxUnpackedToInt8Tensor(Int8Tensor):
    """What torchao's of four bits is to us."""


def int4(outputs, inputs, dtype, groups, **more):
    q = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8)
    q[:, ::17], q[:, 5::17] = -8, 7
    scale = torch.rand(outputs, groups).add(0.1).to(dtype)
    exact = q.double().view(outputs, groups, -1) * scale.double().unsqueeze(2)
    more.setdefault("zero_point", torch.zeros(outputs, groups, dtype=torch.int8))
    return exact.view(outputs, inputs), IntxUnpackedToInt8Tensor(q, scale, dtype, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 23, MOST_ROWS])
@pytest.mark.parametrize(
    ("inputs", "outputs", "groups"),
    [(1, 1, 1), (48, 5, 1), (65, 130, 1), (96, 7, 3), (768, 64, 12), (2112, 9, 66)],
)
@torch.no_grad()
def test_int4_with_a_scale_a_group(dtype, rows, inputs, outputs, groups):
    x, bias = torch.randn(rows, inputs).to(dtype), torch.randn(outputs).to(dtype)
    exact, weight = int4(outputs, inputs, dtype, groups)
    y = few_rows_linear(x, weight, bias)
    assert last_backend("few_rows_linear") == "cpu"
    size = F.linear(x.double().abs(), exact.abs()) + bias.double().abs()
    rounded = rounding(x, exact, 32)
    exact = F.linear(x.double(), exact, bias.double())
    allowed = (inputs + 4) * torch.finfo(torch.float32).eps * size + rounded
    if dtype is not torch.float32:
        allowed += torch.finfo(dtype).eps / 2 * (exact.abs() + allowed)
    assert y.dtype == dtype
    assert ((y - exact).abs() <= allowed).all()
    for row, alone in zip(y, x.split(1), strict=True):
        assert few_rows_linear(alone, weight, bias)[0].equal(row)


@pytest.mark.parametrize("bits", [4, 8])
@torch.no_grad()
def test_few_bits_take_the_largest_sums_and_keep_what_is_no_number(bits):
    most = 2 ** (bits - 1)
    weight = (int4(65, 64, torch.float32, 2) if bits == 4 else int8(65, 64, torch.float32))[1]
    weight.scale.fill_(1)
    large = 32639.0  # is not rounded
    for q, x in ((most - 1, large), (-most, large), (most - 1, -large), (-most, -large)):
        weight.qdata.fill_(q)
        assert few_rows_linear(torch.full((1, 64), x), weight).eq(64 * q * x).all()
    x = torch.randn(5, 64)
    x[0, 3], x[1, 40], x[2, 5], x[3], x[4] = float("nan"), float("inf"), -float("inf"), 1e-42, 0
    y = few_rows_linear(x, weight)
    assert y[:3].isnan().all()
    assert y[3:].eq(0).all()


@pytest.mark.parametrize("bits", [4, 8])
@torch.no_grad()
def test_threads_share_few_bits_and_change_none(monkeypatch, bits):
    x, given = torch.randn(3, 2080), (1000, 2080, torch.float32)
    weight = (int4(*given, 65) if bits == 4 else int8(*given))[1]
    alone = few_rows_linear(x, weight)
    for threads in (2, 3, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert few_rows_linear(x, weight).equal(alone)


@torch.no_grad()
def test_four_bits_are_packed_anew_once_their_numbers_change():
    x = torch.randn(2, 64)
    _, weight = int4(9, 64, torch.float32, 2)
    before = few_rows_linear(x, weight)
    assert linear_maps.few_bits(weight) is linear_maps.few_bits(weight)
    weight.scale.mul_(2)
    assert few_rows_linear(x, weight).equal(2 * before)
    for times in (4, 8, 16):  # the first new one may lie where the old one lay
        weight.scale = 2 * weight.scale
        assert few_rows_linear(x, weight).equal(times * before)
    weight.qdata.zero_()
    assert not few_rows_linear(x, weight).any()


def test_other_weights_of_few_bits_are_left_to_their_own_code():
    x = torch.randn(2, 32)
    ones = torch.ones(9, 1, dtype=torch.int8)
    odd = int4(9, 32, torch.float32, 2)[1]  # groups of 16
    wide = int4(9, 32, torch.float32, 1)[1]
    wide.qdata[3, 4] = 8
    others = [odd, wide, int4(9, 32, torch.float32, 1, zero_point=ones)[1]]
    others += [int8(9, 32, torch.float64)[1], int4(9, 32, torch.float64, 1)[1]]
    for more in ({"zero_point": ones}, {"act_quant_kwargs": object()}):
        others.append(int8(9, 32, torch.float32, **more)[1])
    for weight in others:
        with torch.no_grad(), pytest.raises(AssertionError, match="was called"):
            few_rows_linear(x.to(weight.dtype), weight)
    assert last_backend("few_rows_linear") is None


def test_a_row_gives_the_bits_that_it_gives_among_others():
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.randn(15, 1, 65).to(dtype), torch.randn(130, 65).to(dtype)
        with torch.no_grad():
            together = few_rows_linear(x, weight)
            for row, y in zip(x, together, strict=True):
                assert few_rows_linear(row, weight).equal(y)


def test_strided_rows_give_what_contiguous_rows_give():
    x, weight = torch.randn(4, 1, 64)[..., ::2], torch.randn(9, 32)
    with torch.no_grad():
        assert few_rows_linear(x, weight).equal(few_rows_linear(x.contiguous(), weight))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    "case",
    [
        "gradients",
        "many rows",
        "no rows",
        "mixed",
        "strided weight",
        "sparse weight",
        "autocast",
        "negated",
    ],
)
def test_torch_runs_where_the_kernel_does_not_apply(case):
    x, weight = torch.randn(4, 1, 32), torch.randn(9, 32)
    if case == "many rows":
        x = torch.randn(MOST_ROWS + 1, 1, 32)
    elif case == "no rows":
        x = x[:0]
    elif case == "mixed":
        weight = weight.double()
        x = x.double().requires_grad_()
    elif case == "strided weight":
        weight = torch.randn(32, 9).T
    elif case == "sparse weight":
        weight = weight.to_sparse_csr()
    elif case == "negated":
        x = torch._neg_view(x)
    with (
        torch.set_grad_enabled(case in ("gradients", "mixed")),
        torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"),
    ):
        y = few_rows_linear(x, weight)
        expected = F.linear(x, weight)
    assert y.equal(expected)
    assert last_backend("few_rows_linear") is None


def test_nan_and_infinity_keep_their_meaning():
    x, weight = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0]]), torch.ones(1, 2)
    with torch.no_grad():
        y = few_rows_linear(x, weight)
    assert y[0].isnan()
    assert y[1].isinf()


def test_a_model_decodes_with_it_and_trains_without():
    from ssmzoo_longhorn import FAMILY

    model = FAMILY.causal_lm_class(FAMILY.config(**FAMILY.tiny))
    ids = torch.zeros(2, 1, dtype=torch.long)
    model(ids)
    assert last_backend("few_rows_linear") is None
    with torch.no_grad():
        model(ids)
    assert last_backend("few_rows_linear") == "cpu"


@pytest.fixture
def no_units(monkeypatch):
    """Make the CPU one that has no units for 16 bits."""
    monkeypatch.setattr(linear_maps, "_multiplies", lambda kind: False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("outputs", [3, linear_maps.TILE, 2 * linear_maps.TILE + 1])
@pytest.mark.parametrize("biased", [False, True])
@torch.no_grad()
def test_many_rows_of_16_bits_are_rounded_once(no_units, dtype, outputs, biased):
    x, weight = torch.randn(2, 9, 65).to(dtype), torch.randn(outputs, 65).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    y = linear_maps.many_rows_linear(x, weight, bias)
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert y.dtype is dtype
    # sums of 65 numbers in another order, and one rounding
    assert_close(y, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("outputs", [3, linear_maps.TILE + 1])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (torch.float32, 32),
        *(
            (dtype, bits)
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
            for bits in (8, 4)
        ),
    ],
    ids=str,
)
@torch.no_grad()
def test_many_rows_are_as_exact_as_sums_in_float32(no_units, dtype, bits, outputs, biased):
    x = torch.randn(2, 9, 130).to(dtype)[..., ::2]
    bias = torch.randn(outputs).to(dtype) if biased else None
    weight = torch.randn(outputs, 65).to(dtype)
    exact = weight.double()
    if bits == 8:
        exact, weight = int8(outputs, 65, dtype)
    elif bits == 4:
        exact, weight = int4(outputs, 65, dtype, 1)
    y = linear_maps.many_rows_linear(x, weight, bias)
    size = F.linear(x.double().abs(), exact.abs(), None if bias is None else bias.double().abs())
    exact = F.linear(x.double(), exact, None if bias is None else bias.double())
    # 65 products, their scale and the bias: a rounding each, and one to the result's dtype
    allowed = (65 + 2) * torch.finfo(torch.float32).eps * size
    if dtype is not torch.float32:
        allowed += torch.finfo(dtype).eps / 2 * (exact.abs() + allowed)
    assert y.shape == (2, 9, outputs)
    assert y.dtype is dtype
    assert ((y - exact).abs() <= allowed).all()


@pytest.mark.parametrize("groups", [1, 3])
@torch.no_grad()
def test_many_rows_of_four_bits_are_scaled_by_group(groups):
    x, (exact, weight) = torch.randn(9, 96), int4(300, 96, torch.float32, groups)
    y = linear_maps.many_rows_linear(x, weight)
    size = F.linear(x.double().abs(), exact.abs())
    allowed = (96 + 2) * torch.finfo(torch.float32).eps * size
    assert ((y - F.linear(x.double(), exact)).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@torch.no_grad()
def test_nan_and_infinity_of_many_rows_stay_in_their_row(no_units, dtype):
    x, weight = torch.randn(9, 33).to(dtype), torch.randn(5, 33).to(dtype)
    x[3, 32], x[7, 0] = float("nan"), float("inf")
    y = linear_maps.many_rows_linear(x, weight)
    assert y[3].isnan().all()
    assert y[7].equal((weight[:, 0] * float("inf")).to(dtype))
    assert y.isfinite().sum() == 7 * 5


@pytest.mark.parametrize(
    "case", ["units", "gradients", "float32", "float64", "autocast", "quantised", "no rows"]
)
def test_many_rows_go_to_torch_where_it_is_as_fast_or_must(monkeypatch, case):
    monkeypatch.setattr(linear_maps, "_multiplies", lambda kind: case == "units")
    monkeypatch.setattr(linear_maps.cpu, "outruns_torch", lambda: False)
    dtype = {"float64": torch.float64, "float32": torch.float32}.get(case, torch.bfloat16)
    x, weight = torch.randn(9, 32).to(dtype), torch.randn(9, 32).to(dtype)
    if case == "quantised":
        weight = int8(9, 32, dtype, act_quant_kwargs=object())[1]
    if case == "no rows":
        x = x[:0]
    called = []
    monkeypatch.setattr(F, "linear", lambda *given: called.append(given))
    with (
        torch.set_grad_enabled(case == "gradients"),
        torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"),
    ):
        linear_maps.many_rows_linear(x, weight)
    assert called == [(x, weight, None)]
    assert called[0][0] is x


def test_a_prompt_in_bfloat16_is_read_with_sums_in_float32(no_units, monkeypatch):
    from ssmzoo_longhorn import FAMILY

    monkeypatch.setattr(linear_maps.cpu, "outruns_torch", lambda: False)
    model = FAMILY.causal_lm_class(FAMILY.config(**FAMILY.tiny)).bfloat16().eval()
    ids, kinds, linear = torch.zeros(2, 40, dtype=torch.long), set(), F.linear

    def note(x, *rest):
        kinds.add(x.dtype)
        return linear(x, *rest)

    monkeypatch.setattr(F, "linear", note)
    with torch.no_grad():
        model(ids)
    assert kinds == {torch.float32}


@pytest.fixture
def slow_torch(monkeypatch):
    """Make the CPU one on which torch leaves half of the vectors unused."""
    monkeypatch.setattr(linear_maps.cpu, "outruns_torch", lambda: True)


SHAPES = [(9, 1, 1), (9, 7, 5), (13, 300, 64), (65, 513, 130), (200, 16, 67)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("layout", ["contiguous", "turned", "strided"])
def test_many_rows_are_as_exact_as_a_sum(slow_torch, dtype, rows, inputs, outputs, layout):
    if layout == "turned":
        x, weight = torch.randn(inputs, rows, dtype=dtype).T, torch.randn(inputs, outputs).T
    else:
        step = 2 if layout == "strided" else 1
        x = torch.randn(rows, step * inputs, dtype=dtype)[:, ::step]
        weight = torch.randn(outputs, step * inputs)[:, ::step]
    weight, bias = weight.to(dtype), torch.randn(outputs, dtype=dtype)
    y = linear_maps.many_rows_linear(x.unsqueeze(1), weight, bias)
    assert last_backend("many_rows_linear") == "cpu"
    assert y.shape == (rows, 1, outputs)
    exact = F.linear(x.double(), weight.double(), bias.double())
    # an inner product of n terms errs by at most n roundings of the sum of absolute values
    size = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    assert ((y[:, 0] - exact).abs() <= (inputs + 1) * torch.finfo(dtype).eps * size).all()


def test_many_rows_have_gradients_of_any_order(slow_torch):
    x, weight = torch.randn(3, 5, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    given = x.requires_grad_(), weight.requires_grad_(), torch.randn(6).double().requires_grad_()
    assert torch.autograd.gradcheck(linear_maps.many_rows_linear, given)
    assert torch.autograd.gradgradcheck(linear_maps.many_rows_linear, given)
    assert last_backend("many_rows_linear") == "cpu"
    # a gradient without memory of its own, and several at once
    sums = torch.autograd.grad(linear_maps.many_rows_linear(*given).sum(), given)
    assert_close(sums, torch.autograd.grad(F.linear(*given).sum(), given))
    y, several = linear_maps.many_rows_linear(*given), torch.randn(2, 3, 5, 6).double()
    assert_close(
        torch.autograd.grad(y, given, several, is_grads_batched=True),
        torch.autograd.grad(F.linear(*given), given, several, is_grads_batched=True),
    )


def test_a_weights_gradient_lies_as_the_weight(slow_torch):
    weight = torch.randn(6, 4, requires_grad=True)
    linear_maps.many_rows_linear(torch.randn(9, 4), weight).square().sum().backward()
    assert weight.grad.stride() == weight.stride()


def test_a_row_among_many_has_the_same_bits_whatever_the_others_and_the_threads(slow_torch):
    x, weight, threads = torch.randn(1500, 300), torch.randn(130, 300), torch.get_num_threads()
    y = linear_maps.many_rows_linear(x, weight)
    assert linear_maps.many_rows_linear(x[700:713], weight).equal(y[700:713])
    try:
        torch.set_num_threads(threads % 3 + 1)
        assert linear_maps.many_rows_linear(x, weight).equal(y)
    finally:
        torch.set_num_threads(threads)


def test_nan_reaches_its_row_and_its_output_alone(slow_torch):
    x, weight = torch.randn(9, 5), torch.randn(7, 5)
    x[2, 1], weight[4, 3] = float("nan"), float("inf")
    reached = ~linear_maps.many_rows_linear(x, weight).isfinite()
    expected = torch.zeros(9, 7, dtype=torch.bool)
    expected[2], expected[:, 4] = True, True
    assert reached.equal(expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    "case",
    ["few rows", "no outputs", "mixed", "quantised", "sparse", "autocast", "eager", "mapped"],
)
def test_many_rows_go_to_torch_where_the_kernel_must_not(slow_torch, monkeypatch, case):
    x = torch.randn(8 if case == "few rows" else 9, 32)
    weight = torch.randn(0 if case == "no outputs" else 9, 32)
    if case == "mixed":
        weight = weight.double()
    elif case == "quantised":
        weight = int8(9, 32, torch.float32)[1]
    elif case == "sparse":
        weight = weight.to_sparse_csr()
    called, multiply = [], linear_maps.many_rows_linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: called.append(x) or x)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"),
        use_backend("eager" if case == "eager" else "auto"),
    ):
        if case == "mapped":
            torch.func.vmap(lambda row: multiply(row, weight))(x.expand(2, 9, 32))
        else:
            multiply(x, weight)
    assert len(called) == 1
    assert last_backend("many_rows_linear") is None


def test_it_is_for_cpus_whose_vectors_mkl_leaves_unused(monkeypatch):
    wide = native.vectors() == "avx512f" and torch.backends.mkl.is_available()
    for vendor in ("AuthenticAMD", "GenuineIntel", ""):
        monkeypatch.setattr(linear_maps.cpu.machine, "vendor", lambda name=vendor: name)
        found = linear_maps.cpu.outruns_torch.__wrapped__()
        assert found == (wide and vendor == "AuthenticAMD")


def test_a_model_trains_with_it_where_there_is_much_to_do(slow_torch, monkeypatch):
    from ssmzoo.modeling import layers
    from ssmzoo_longhorn import FAMILY

    model = FAMILY.causal_lm_class(FAMILY.config(**FAMILY.tiny))
    ids = torch.zeros(2, 12, dtype=torch.long)
    model(ids)
    assert last_backend("many_rows_linear") is None
    monkeypatch.setattr(layers, "MUCH_WORK", 0)
    model(ids, labels=ids).loss.backward()
    own = [x.grad for x in model.parameters()]
    assert last_backend("many_rows_linear") == "cpu"
    model.zero_grad()
    monkeypatch.setattr(linear_maps.cpu, "outruns_torch", lambda: False)
    model(ids, labels=ids).loss.backward()
    for grad, parameter in zip(own, model.parameters(), strict=True):
        assert_close(grad, parameter.grad, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_a_bias_of_another_shape_or_place_is_left_to_torch():
    x, weight = torch.randn(2, 5), torch.randn(7, 5)
    one = torch.randn(1)
    assert_close(few_rows_linear(x, weight, one), F.linear(x, weight, one))
    for bias in (torch.randn(3), torch.randn(7, device="meta")):
        with pytest.raises(RuntimeError):
            few_rows_linear(x, weight, bias)
    with pytest.raises(RuntimeError):
        few_rows_linear(x, torch.randn(2, 7, 5))
    assert_close(few_rows_linear(x, weight[0]), F.linear(x, weight[0]))
    assert last_backend("few_rows_linear") is None
