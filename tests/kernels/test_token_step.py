"""token_step: each instruction against its equation in float64, and what a program promises."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.tokens import both, close, random, rounding, run, some_rows
from torch import Tensor

from ssmzoo_kernels import native, use_backend
from ssmzoo_kernels.dispatch import last_backend
from ssmzoo_kernels.few_rows_linear import _pack
from ssmzoo_kernels.token_step import Program, Value

of_16_bits = pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float64, torch.float64),
    ],
    ids=str,
)


@of_16_bits
@pytest.mark.parametrize("rows", [*range(1, 10), 63, 64, 67])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 5), (65, 130)])
def test_linear(
    dtype: torch.dtype, kind: torch.dtype, rows: int, inputs: int, outputs: int
) -> None:
    x = random(rows, inputs, dtype=dtype)
    weight, bias = random(outputs, inputs).to(kind), random(outputs).to(kind)
    y = run(lambda p, v: p.linear(v, weight, bias), x)
    close(y, F.linear(x.double(), weight.double(), bias.double()), inputs)
    y = run(lambda p, v: p.linear(v, weight), x)
    close(y, x.double() @ weight.double().T, inputs)


@of_16_bits
@some_rows
@pytest.mark.parametrize(("width", "step"), [(1, 1), (37, 1), (37, 2), (38, 3)])
def test_scaled(dtype: torch.dtype, kind: torch.dtype, rows: int, width: int, step: int) -> None:
    x = random(rows, width, dtype=dtype)
    exact = 0.75 * x.double()[:, ::step]
    weight = random(exact.shape[1]).to(kind)
    close(run(lambda p, v: p.map(v, factor=0.75, step=step), x), exact)
    y = run(lambda p, v: p.map(v, factor=0.75, weight=weight, step=step), x)
    close(y, exact * weight.double())


@some_rows
@pytest.mark.parametrize(("inputs", "outputs"), [(7, 5), (65, 130)])
def test_linear_of_int8(rows: int, inputs: int, outputs: int) -> None:
    x, bias, scale = random(rows, inputs), random(outputs), random(outputs, 1)
    q = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    y = run(lambda p, v: p.linear(v, q, bias, scale=scale), x)
    weight = q.double() * scale.double()
    exact = F.linear(x.double(), weight, bias.double())
    size = F.linear(x.double().abs(), weight.abs(), bias.double().abs())
    allowed = rounding(x, weight, inputs) + (inputs + 4) * torch.finfo(torch.float32).eps * size
    assert ((y - exact).abs() <= allowed).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_linear_of_int4(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, bias, scale = random(2, 320), random(1000), random(1000, 10)
    q = torch.randint(-8, 8, (1000, 320), dtype=torch.int8)
    packed, scales = _pack(q, scale, torch.zeros(1000, 10, dtype=torch.int8))  # type: ignore
    y = run(lambda p, v: p.linear(v, packed, bias, scale=scales), x)
    weight = (q.view(1000, 10, 32) * scale.double()[:, :, None]).view(1000, 320)
    exact = F.linear(x.double(), weight, bias.double())
    size = F.linear(x.double().abs(), weight.abs(), bias.double().abs())
    allowed = rounding(x, weight, 32) + 324 * torch.finfo(torch.float32).eps * size
    assert ((y - exact).abs() <= allowed).all()


def test_linear_writes_parts_of_a_value() -> None:
    x, first, second = random(3, 9), random(4, 9), random(7, 9)

    def write(program: Program, value: Value) -> Value:
        joined = program.value(11)
        low, high = joined.split(4, 7)
        program.linear(value, second, into=high)
        program.linear(value, first, into=low)
        return joined

    close(run(write, x), x.double() @ torch.cat([first, second]).double().T, 9)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_16_bits_is_read_as_it_is(kind: torch.dtype) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(kind)
    for size in (1, 1000):  # of single numbers, and of whole vectors
        weight = patterns[:, None] if size == 1 else patterns[: 65 * size].view(-1, size)
        pick = torch.eye(size)[:8] if size > 1 else torch.ones(1, 1)
        if size > 1:
            weight = torch.where(weight.isfinite(), weight, torch.zeros_like(weight))
        y = run(lambda p, v, w=weight: p.linear(v, w.contiguous()), pick)
        expected = weight.float()[:, : len(pick)].T
        assert y.view(torch.int32)[~expected.isnan()].equal(
            (expected + 0.0).view(torch.int32)[~expected.isnan()]
        )
        assert y.isnan().equal(expected.isnan())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_outputs_round_as_torch_rounds(kind: torch.dtype) -> None:
    exact = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(kind).float()
    exact = exact[exact.isfinite()]
    up = torch.nextafter(exact, torch.full_like(exact, math.inf)).to(kind).float()
    higher = exact.to(kind).view(torch.int16)
    higher = torch.where(exact < 0, higher - 1, higher + 1).view(kind).float()
    middle = exact / 2 + higher / 2  # ties
    huge = torch.tensor([65519.0, 65520.0, 1e5, 3.39e38, math.inf, -math.inf, math.nan])
    tiny = torch.tensor([2.0**-25, 2.0**-24, 1e-30, 1e-44, -0.0])
    near = torch.nextafter(middle, torch.zeros_like(middle))
    far = torch.nextafter(middle, torch.full_like(middle, math.inf))
    x = torch.cat([exact, up, middle[middle.isfinite()], near, far, huge, tiny])[None]
    program = Program(torch.float32)
    program.output(program.input(0, torch.float32, x.shape[1]), 1, kind)
    y = torch.empty_like(x, dtype=kind)
    program.run(1, (x, y))
    numbers = ~x.isnan()
    assert y[numbers].view(torch.int16).equal(x.to(kind)[numbers].view(torch.int16))
    assert y.isnan().equal(x.isnan())


@both
@some_rows
@pytest.mark.parametrize(("width", "group"), [(7, 7), (24, 8), (65, 65)])
@pytest.mark.parametrize("gating", [None, "silu before", "silu after", "sigmoid after"])
@pytest.mark.parametrize("shared", [False, True])
def test_rms_norm(
    dtype: torch.dtype, rows: int, width: int, group: int, gating: str | None, shared: bool
) -> None:
    x = random(rows, 2 * width, dtype=dtype)
    weight = random(group if shared else width, dtype=dtype)

    def write(program: Program, value: Value) -> Value:
        inner, gate = value.split(width, width)
        more = {"group": group, "added": 0.5, "gating": gating}
        return program.rms_norm(inner, weight, 1e-5, gate=gate if gating else None, **more)

    inner, gate = x.double().chunk(2, dim=1)
    silu, shut = gate * torch.sigmoid(gate), torch.sigmoid(gate)
    if gating == "silu before":
        inner = inner * silu
    grouped = inner.view(rows, -1, group)
    exact = grouped / (grouped.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    scale = weight.double().repeat(width // weight.numel()) + 0.5
    exact = exact.reshape(rows, width) * scale
    exact = exact * {"silu after": silu, "sigmoid after": shut}.get(gating or "", 1.0)
    close(run(write, x), exact, group)


def test_rms_norm_without_a_weight() -> None:
    x = random(2, 40)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    close(run(lambda p, v: p.rms_norm(v, None, 1e-6), x), exact, 40)


@of_16_bits
@some_rows
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("taps", "kept"), [(4, 4), (3, 5), (1, 1), (4, 3)])
def test_causal_conv1d(
    dtype: torch.dtype, kind: torch.dtype, rows: int, silu: bool, taps: int, kept: int
) -> None:
    width = 37
    x = random(rows, width).to(kind).to(dtype)
    weight, bias = random(width, 1, taps).to(kind), random(width).to(kind)
    state = random(rows, width, kept).to(kind)
    seen = torch.cat([state.double(), x.double()[..., None]], dim=-1)
    exact = (seen[..., -taps:] * weight.double()[:, 0]).sum(-1) + bias.double()
    exact = exact * torch.sigmoid(exact) if silu else exact
    y = run(lambda p, v: p.causal_conv1d(v, weight, bias, 2, kept, kind, silu=silu), x, [state])
    close(y, exact, taps)
    assert state.double().equal(seen[..., 1:])


@of_16_bits
@some_rows
@pytest.mark.parametrize(("taps", "kept"), [(4, 3), (3, 5), (1, 0)])
def test_causal_conv1d_with_channels_last(
    dtype: torch.dtype, kind: torch.dtype, rows: int, taps: int, kept: int
) -> None:
    width = 37
    x = random(rows, width).to(kind).to(dtype)
    weight, state = random(width, 1, taps).to(kind), random(rows, kept, width).to(kind)
    seen = torch.cat([state.double(), x.double()[:, None]], dim=1)
    exact = torch.einsum("mkd,dk->md", seen[:, -taps:], weight.double()[:, 0])

    def write(program: Program, value: Value) -> Value:
        layout = {"silu": False, "channels_last": True}
        return program.causal_conv1d(value, weight, None, 2, kept, kind, **layout)

    close(run(write, x, [state]), exact, taps)
    assert state.double().equal(seen[:, 1:])


def heavy_tail(x: Tensor) -> Tensor:
    return x.clamp(min=0) + 1 / (1 - x.clamp(max=0))


@both
@some_rows
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("itself", lambda x: x),
        ("gelu", F.gelu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("sigmoid", torch.sigmoid),
        ("tanh", torch.tanh),
        ("exp", torch.exp),
        ("softplus", F.softplus),
        ("squared_relu", lambda x: F.relu(x).square()),
        ("heavy_tail", heavy_tail),
    ],
)
def test_map(
    dtype: torch.dtype, rows: int, name: str, function: Callable[[Tensor], Tensor]
) -> None:
    x, bias = random(rows, 37, dtype=dtype), random(37, dtype=dtype)
    exact = function(4 * x.double() + bias.double()).clamp(min=-0.125)
    close(run(lambda p, v: p.map(v, name, factor=4.0, bias=bias, least=-0.125), x), exact)


@both
@some_rows
def test_add_and_gated(dtype: torch.dtype, rows: int) -> None:
    x = random(rows, 2 * 37, dtype=dtype)
    first, second = x.double().chunk(2, dim=1)
    close(run(lambda p, v: p.add(*v.chunk(2)), x), first + second)
    close(run(lambda p, v: p.gated(*v.chunk(2)), x), first * torch.sigmoid(first) * second)


@both
@some_rows
@pytest.mark.parametrize("width", [1, 5, 64])
def test_a_gate_and_a_dot_product_for_each_head(dtype: torch.dtype, rows: int, width: int) -> None:
    x = random(rows, 3 + 3 * width, dtype=dtype)
    gate, value = x.double().split([3, 3 * width], dim=1)
    heads = value.view(rows, 3, width)

    def gated(program: Program, value: Value) -> Value:
        return program.gated(*value.split(3, 3 * width), by="sigmoid")

    def dots(program: Program, value: Value) -> Value:
        value = value.split(3, 3 * width)[1]
        return program.dots(value, value, 3)

    close(run(gated, x), (torch.sigmoid(gate)[..., None] * heads).flatten(1))
    close(run(dots, x), heads.square().sum(-1), width)


@of_16_bits
@some_rows
def test_blend(dtype: torch.dtype, kind: torch.dtype, rows: int) -> None:
    x, weight = random(rows, 3 * 37, dtype=dtype), random(2, 37).to(kind)
    a, b, w = x.double().chunk(3, dim=1)
    y = run(lambda p, v: p.blend(*v.chunk(3)[:2], weight), x)
    close(y, (a[:, None] + weight.double() * (b - a)[:, None]).flatten(1))
    close(run(lambda p, v: p.blend(*v.chunk(3)), x), a + w * (b - a))


def test_delay_gives_what_was_and_keeps_what_is() -> None:
    x, state = random(2, 37), random(2, 1, 50)
    before = state.clone()
    y = run(lambda p, v: p.delay(v, 2, 50, 7), x, [state])
    assert y.equal(before[:, 0, 7:44])
    assert state[:, 0, 7:44].equal(x)
    rest = [*range(7), *range(44, 50)]
    assert state[:, 0, rest].equal(before[:, 0, rest])


@both
@some_rows
@pytest.mark.parametrize(("width", "group"), [(7, 7), (24, 8), (65, 65)])
def test_layer_norm(dtype: torch.dtype, rows: int, width: int, group: int) -> None:
    x = random(rows, width, dtype=dtype) + 3
    for weight in (None, random(width, dtype=dtype), random(group, dtype=dtype)):
        bias = None if weight is None else random(weight.numel(), dtype=dtype)
        exact = F.layer_norm(x.double().view(rows, -1, group), (group,), eps=1e-5).flatten(1)
        if weight is not None and bias is not None:
            wide = (y.double().repeat(width // y.numel()) for y in (weight, bias))
            exact = exact * next(wide) + next(wide)
        y = run(lambda p, v, w=weight, b=bias: p.layer_norm(v, w, b, 1e-5, group=group), x)
        close(y, exact, 8 * group)


def mixer(program: Program, value: Value) -> Value:
    """A mixer of every kind of instruction, large enough for two threads."""
    torch.manual_seed(0)
    inner = program.linear(value, random(512, 130), random(512))
    inner = program.rms_norm(inner, random(512), 1e-5, group=128)
    inner = program.causal_conv1d(inner, random(512, 1, 4), None, 2, 4, torch.float32, silu=True)
    B, C = program.linear(inner, random(48, 512)).split(24, 24)
    y = program.selective(inner, inner, B, C, inner, random(512, 24), None, None, 3)
    y = program.longhorn(program.map(y, "gelu_tanh"), y, B, C, None, None, None, 4)
    weights = [random(512, 24) for _ in range(3)]
    y = program.add(inner, program.feedback(y, None, *weights[:2], None, weights[2], None, None, 5))
    return program.linear(program.gated(y, inner), random(130, 512))


def states_of(rows: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [random(rows, 512, 4), *(random(rows, 512, 24) for _ in range(3))]


def test_a_batch_gives_the_bits_of_its_rows() -> None:
    x, states = random(8, 130), states_of(8)
    alone = [[state[i : i + 1].clone() for state in states] for i in range(8)]
    y = run(mixer, x, states)
    for i in range(8):
        assert run(mixer, x[i : i + 1].contiguous(), alone[i]).equal(y[i : i + 1])
        assert all(a.equal(b[i : i + 1]) for a, b in zip(alone[i], states, strict=True))


def test_two_threads_give_the_bits_of_one() -> None:
    assert native.ONE_THREADS_WORK < 512 * 130
    x, before = random(3, 130), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            states = states_of(3)
            found.append((run(mixer, x, states), *states))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(a.equal(b) for a, b in zip(found[0], other, strict=True))


def test_nan_and_infinity_keep_their_meaning() -> None:
    x = random(2, 130)
    x[0, 0] = math.nan
    y = run(mixer, x, states_of(2))
    assert y[0].isnan().all()
    assert y[1].isfinite().all()
    x = torch.tensor([[math.inf, 1.0]])
    assert run(lambda p, v: p.gated(*v.split(1, 1)), x).isinf().all()


def test_a_program_runs_where_nobody_needs_more_than_numbers() -> None:
    program, x = Program(torch.float32), torch.ones(1, 1, 4)
    assert not program.applies(x)
    with torch.no_grad():
        assert program.applies(x)
        assert not program.applies(x.to("meta"))
        assert not program.applies(torch.nn.Parameter(x, requires_grad=False))
        with use_backend("reference"):
            assert not program.applies(x)
        with use_backend("cpu"):
            assert program.applies(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert not program.applies(x)
        asked = []
        torch.func.vmap(lambda row: asked.append(program.applies(x)) or row)(torch.ones(2, 4))
        assert asked == [False]
    run(lambda p, v: p.gated(*v.split(2, 2)), x[0])
    assert last_backend("token_step") == "cpu"


def test_weights_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype must be float32 or float64, got torch\.bfloat16"):
        Program(torch.bfloat16)
    program = Program(torch.float32)
    x = program.input(0, torch.float32, 4)
    with pytest.raises(ValueError, match=r"few bits and a scale go together, got torch\.int8"):
        program.linear(x, torch.ones(2, 4, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"few bits and a scale go together, got torch\.float32"):
        program.linear(x, torch.ones(2, 4), scale=torch.ones(2))
    with pytest.raises(ValueError, match=r"must be torch\.float32 or of 16 bits, got torch\.int8"):
        program.rms_norm(x, torch.ones(4, dtype=torch.int8), 1e-5)
    with pytest.raises(ValueError, match="must be contiguous"):
        program.linear(x, torch.ones(4, 2).T)
    program = Program(torch.float64)
    x = program.input(0, torch.float64, 4)
    with pytest.raises(ValueError, match=r"must be torch\.float64, got torch\.int8"):
        program.linear(x, torch.ones(2, 4, dtype=torch.int8), scale=torch.ones(2))
