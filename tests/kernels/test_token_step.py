"""token_step: each instruction against its equation in float64, and what a program promises."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo_kernels import feedback_scan, longhorn_scan, native, use_backend
from ssmzoo_kernels.dispatch import last_backend
from ssmzoo_kernels.token_step import Program, Value

Write = Callable[[Program, Value], Value]
both = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
some_rows = pytest.mark.parametrize("rows", [1, 5])
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


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what float32 holds exactly, so that an oracle in float64 reads the same numbers."""
    return torch.randn(*shape).to(dtype)


def run(write: Write, x: Tensor, states: Sequence[Tensor] = (), width: int = 0) -> Tensor:
    """Run a program of one input and one output; states have the numbers 2 and up."""
    program = Program(torch.promote_types(x.dtype, torch.float32))
    y = write(program, program.input(0, x.dtype, x.shape[-1]))
    program.output(y, 1, x.dtype)
    out = x.new_empty(len(x), width or y.width)
    program.run(len(x), (x, out, *states))
    return out


def close(y: Tensor, exact: Tensor, terms: int = 1) -> None:
    """Compare with float64: so many roundings of the greatest number, and 16 of functions."""
    allowed = (terms + 16) * torch.finfo(y.dtype).eps * exact.abs().max()
    assert (y.double() - exact).abs().max() <= allowed


def soft(x: Tensor) -> Tensor:
    return torch.where(x > 20, x, torch.log1p(torch.exp(x)))


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
    close(run(lambda p, v: p.scaled(v, 0.75, step=step), x), exact)
    y = run(lambda p, v: p.scaled(v, 0.75, weight, step=step), x)
    close(y, exact * weight.double())


@both
@some_rows
@pytest.mark.parametrize(("inputs", "outputs"), [(7, 5), (65, 130)])
def test_linear_of_int8(dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> None:
    x, bias = random(rows, inputs, dtype=dtype), random(outputs, dtype=dtype)
    weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    scale = random(outputs, 1, dtype=dtype)
    y = run(lambda p, v: p.linear(v, weight, bias, scale=scale), x)
    close(y, F.linear(x.double(), weight.double() * scale.double(), bias.double()), inputs)


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


@both
@some_rows
def test_add_and_gelu(dtype: torch.dtype, rows: int) -> None:
    x = random(rows, 2 * 37, dtype=dtype)
    first, second = x.double().chunk(2, dim=1)
    close(run(lambda p, v: p.add(*v.split(37, 37)), x), first + second)
    x = x * 4
    close(run(lambda p, v: p.gelu(v, by_tanh=True), x), F.gelu(x.double(), approximate="tanh"))
    close(run(lambda p, v: p.gelu(v), x), F.gelu(x.double()))


@both
@some_rows
def test_gated(dtype: torch.dtype, rows: int) -> None:
    x = random(rows, 2 * 37, dtype=dtype)
    gate, value = x.double().chunk(2, dim=1)
    y = run(lambda p, v: p.gated(*v.split(37, 37)), x)
    close(y, gate * torch.sigmoid(gate) * value)


@both
@some_rows
@pytest.mark.parametrize(("width", "states"), [(5, 3), (33, 16), (16, 24)])
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("zoh", [False, True])
def test_selective(
    dtype: torch.dtype, rows: int, width: int, states: int, bare: bool, zoh: bool
) -> None:
    x = random(rows, 3 * width + 2 * states, dtype=dtype)
    A_log, D, bias = random(width, states, dtype=dtype), None, None
    if not bare:
        D, bias = random(width, dtype=dtype), random(width, dtype=dtype)
    state = random(rows, width, states, dtype=dtype)
    u, dt, B, C, z = x.double().split([width, width, states, states, width], dim=1)
    step = soft(dt if bias is None else dt + bias.double())[..., None]
    rate = A_log.double().exp()
    S = torch.exp(-step * rate) * state.double()
    drive = -torch.expm1(-step * rate) / rate if zoh else step
    S = S + drive * u[..., None] * B[:, None]
    exact = (S * C[:, None]).sum(-1)
    exact = exact if D is None else exact + D.double() * u
    exact = exact if bare else exact * z * torch.sigmoid(z)

    def write(program: Program, value: Value) -> Value:
        u, dt, B, C, z = value.split(width, width, states, states, width)
        gate = None if bare else z
        return program.selective(u, dt, B, C, gate, A_log, D, bias, 2, zoh=zoh)

    before = state.clone()
    close(run(write, x, [state]), exact, states)
    close(state, S, 4)

    def write_by_heads(program: Program, value: Value) -> Value:
        u, dt, B, C, z = value.split(width, width, states, states, width)
        y, cut = program.value(width), (width // 3, width - width // 3)
        parts = zip(u.split(*cut), dt.split(*cut), z.split(*cut), y.split(*cut), strict=True)
        for (u, dt, z, into), first in zip(parts, (0, cut[0]), strict=True):
            rows = slice(first, first + u.width)
            weights = (None if w is None else w[rows] for w in (A_log, D, bias))
            places = {"channels": width, "first": first, "into": into}
            gate = None if bare else z
            program.selective(u, dt, B, C, gate, *weights, 2, zoh=zoh, **places)
        return y

    close(run(write_by_heads, x, [before]), exact, states)
    close(before, S, 4)


@both
@some_rows
@pytest.mark.parametrize(("width", "states"), [(5, 3), (33, 16), (16, 24)])
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_longhorn(
    dtype: torch.dtype, rows: int, width: int, states: int, bare: bool, exact: bool
) -> None:
    sizes = [width, width, states, states, width]
    x = random(rows, sum(sizes), dtype=dtype)
    bias, D = (None, None) if bare else (random(width, dtype=dtype), random(width, dtype=dtype))
    state = random(rows, width, states, dtype=dtype)
    u, dt, k, q, z = x.double().split(sizes, dim=1)
    one_by_one = {"dt_bias": bias, "D": D, "initial_state": state}
    one_by_one = {n: None if t is None else t.double() for n, t in one_by_one.items()}
    y, S = longhorn_scan(
        *(t[:, None] for t in (u, q, k, dt)),
        z=None if bare else z[:, None],
        transition="exact" if exact else "diagonal",
        backend="reference",
        **one_by_one,
    )

    def write(program: Program, value: Value) -> Value:
        u, dt, k, q, z = value.split(*sizes)
        return program.longhorn(u, dt, k, q, None if bare else z, bias, D, 2, exact=exact)

    close(run(write, x, [state]), y[:, 0], 2 * states)
    close(state, S, 2 * states)


@both
@some_rows
@pytest.mark.parametrize(("width", "states"), [(5, 3), (33, 16), (16, 24)])
@pytest.mark.parametrize("kind", ["bare", "scaled", "driven", "linear"])
def test_feedback(dtype: torch.dtype, rows: int, width: int, states: int, kind: str) -> None:
    u = random(rows, 2 * width, dtype=dtype)
    lam, w, B, C, w_gamma = (random(width, states, dtype=dtype) for _ in range(5))
    D, state = random(width, dtype=dtype), random(rows, width, states, dtype=dtype)
    bare, driven, most = kind == "bare", kind == "driven", 0.0
    wide = [t.double() for t in (lam, w, B, C, w_gamma, D)]
    if bare:
        wide[4] = wide[5] = None
    else:
        most = 1.25
        wide[0] = -most * wide[0].sigmoid()
        wide[1] = torch.ones_like(wide[1]) if driven else wide[1] * wide[2]
        wide[3], wide[4] = wide[3] * wide[2], wide[4] * wide[2]
    x, drive = (t[:, None] for t in u.double().chunk(2, dim=1))
    y, S = feedback_scan(
        x,
        *(wide[i] for i in (0, 1, 3, 4, 5)),
        drive=drive if driven else None,
        initial_state=state.double(),
        gate="linear" if kind == "linear" else "sigmoid",
        backend="reference",
    )

    def write(program: Program, value: Value) -> Value:
        x, drive = value.split(width, width)
        return program.feedback(
            x,
            drive if driven else None,
            lam,
            None if driven else w,
            None if bare else B,
            C,
            None if bare else w_gamma,
            None if bare else D,
            2,
            sigmoid_to=most,
            linear=kind == "linear",
        )

    close(run(write, u, [state]), y[:, 0], 4 * states)
    close(state, S, 4 * states)


@both
@some_rows
@pytest.mark.parametrize(("heads", "groups", "width", "states"), [(4, 2, 5, 3), (2, 1, 16, 33)])
@pytest.mark.parametrize("limit", [(0.0, math.inf), (0.4, 0.6)])
def test_ssd(
    dtype: torch.dtype,
    rows: int,
    heads: int,
    groups: int,
    width: int,
    states: int,
    limit: tuple[float, float],
) -> None:
    sizes = [heads * width, heads, groups * states, groups * states]
    x = random(rows, sum(sizes), dtype=dtype)
    A_log, D, bias = (random(heads, dtype=dtype) for _ in range(3))
    state = random(rows, heads, width, states, dtype=dtype)
    u, dt, B, C = x.double().split(sizes, dim=1)
    u = u.view(rows, heads, width)
    B, C = (y.view(rows, groups, states).repeat_interleave(heads // groups, 1) for y in (B, C))
    step = soft(dt + bias.double()).clamp(*limit)
    S = torch.exp(-step * A_log.double().exp())[..., None, None] * state.double()
    S = S + (step[..., None] * u)[..., None] * B[:, :, None]
    exact = (S * C[:, :, None]).sum(-1) + D.double()[:, None] * u

    def write(program: Program, value: Value) -> Value:
        u, dt, B, C = value.split(*sizes)
        return program.ssd(u, dt, B, C, A_log, D, bias, groups, 2, limit)

    close(run(write, x, [state]), exact.flatten(1), states)
    close(state, S, 4)


@both
@some_rows
@pytest.mark.parametrize(
    ("heads", "groups", "keys", "values"), [(4, 2, 5, 3), (2, 2, 16, 70), (1, 1, 33, 64)]
)
@pytest.mark.parametrize("by_row", [False, True])
def test_delta_rule(
    dtype: torch.dtype, rows: int, heads: int, groups: int, keys: int, values: int, by_row: bool
) -> None:
    decays = heads * keys if by_row else heads
    sizes = [groups * keys, groups * keys, heads * values, decays, heads]
    x = random(rows, sum(sizes), dtype=dtype)
    A_log, bias = random(heads, dtype=dtype), random(decays, dtype=dtype)
    state = random(rows, heads, keys, values, dtype=dtype)
    q, k, v, dt, beta = x.double().split(sizes, dim=1)
    q, k = (y.view(rows, groups, keys).repeat_interleave(heads // groups, 1) for y in (q, k))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    v, beta = v.view(rows, heads, values), 2 * torch.sigmoid(beta)
    g = -A_log.double().exp()[:, None] * soft(dt + bias.double()).view(rows, heads, -1)
    S = g.exp()[..., None] * state.double()
    memory = (S * k[..., None]).sum(2)
    S = S + k[..., None] * (beta[..., None] * (v - memory))[:, :, None]
    exact = (S * q[..., None]).sum(2) / math.sqrt(keys)

    def write(program: Program, value: Value) -> Value:
        q, k, v, dt, beta = value.split(*sizes)
        return program.delta_rule(q, k, v, dt, beta, A_log, bias, groups, 2, beta_factor=2.0)

    close(run(write, x, [state]), exact.flatten(1), 4 * keys)
    close(state, S, 4 * keys)


@both
@some_rows
@pytest.mark.parametrize(("heads", "size"), [(1, 2), (3, 10), (2, 64)])
def test_rotate(dtype: torch.dtype, rows: int, heads: int, size: int) -> None:
    x, seen = random(rows, heads * size, dtype=dtype), torch.randint(0, 10_000, (rows,))
    rates = 500.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    turn = torch.exp(1j * seen[:, None, None] * rates)
    exact = torch.complex(*x.double().view(rows, heads, 2, -1).unbind(2)) * turn
    exact = torch.cat([exact.real, exact.imag], dim=-1).flatten(1)
    close(run(lambda p, v: p.rotate(v, size, 500.0, 2), x, [seen]), exact, 2)


@both
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 5), (1, 1, 16), (2, 1, 70)])
@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("memories", [(), (3,), (3, 9)], ids=str)
def test_attend(
    dtype: torch.dtype, heads: int, groups: int, size: int, hides: bool, memories: tuple[int, ...]
) -> None:
    window, rows = 6, 5
    seen = torch.tensor([0, 4, 5, 6, 25])  # before, in and behind the first chunk
    x = random(rows, (heads + 2 * groups) * size, dtype=dtype)
    counts = (window, *memories)
    tables = [random(rows, n, groups, size, dtype=dtype) for n in counts for _ in "kv"]
    places = torch.randint(0, 24, (rows, counts[1] if memories else 0))
    before = [table.clone() for table in tables]
    q, k, v = x.double().split([heads * size, groups * size, groups * size], dim=1)

    def write(program: Program, value: Value) -> Value:
        q, k, v = value.split(heads * size, groups * size, groups * size)
        program.keep(k, 4, window, 2)
        program.keep(v, 5, window, 2)
        numbers = [(n, 4 + 2 * i, 5 + 2 * i) for i, n in enumerate(counts)]
        hidden = 3 if hides and memories else None
        return program.attend(q, (heads, groups), numbers[0], numbers[1:], 2, 0.3, hidden)

    y = run(write, x, [seen, places, *tables])
    for row, position in enumerate(seen.tolist()):
        keys, values, visible = [], [], []
        for i, (n, key, value) in enumerate(zip(counts, before[::2], before[1::2], strict=True)):
            key, value = key[row].double(), value[row].double()
            if i == 0:
                key[position % n], value[position % n] = (t[row].view(groups, size) for t in (k, v))
                assert tables[0][row].double().equal(key)
                assert tables[1][row].double().equal(value)
            known = min(n, position // window * window if i else position + 1)
            sees = torch.arange(n) < known
            if i == 1 and hides:
                sees = sees & (places[row] <= position - window)
            keys.append(key), values.append(value), visible.append(sees)
        key, value = (torch.cat(t).repeat_interleave(heads // groups, 1) for t in (keys, values))
        scores = 0.3 * torch.einsum("hd,shd->hs", q[row].view(heads, size), key)
        weights = scores.masked_fill(~torch.cat(visible), -math.inf).softmax(-1)
        close(y[row], torch.einsum("hs,shd->hd", weights, value).flatten(), size + sum(counts))


@pytest.mark.parametrize("position", [-1, -7, -(2**62), 2**62])
def test_a_position_of_any_kind_is_a_place_of_its_ring(position: int) -> None:
    """As of a state from a file; what lies beside the ring stays."""
    x, seen = random(1, 5), torch.tensor([position])
    room, scores = torch.zeros(9, 3, 5), torch.zeros(9, 4)
    ring, outputs = room[4:5], torch.zeros(1, 2, 5)

    def write(program: Program, value: Value) -> Value:
        program.keep(value, 2, 3, 5)
        program.innovate(value, (2, 3), 5, torch.tensor([0.5]), (4, 4))
        return value

    run(write, x, [ring, outputs, scores[4:5], seen])
    assert room.any(-1).nonzero().tolist() == [[4, position % 3]]
    assert scores.nonzero().tolist() == [[4, position % 4]]


@both
@some_rows
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize(("width", "kept", "span"), [(5, 3, 3), (33, 4, 2), (16, 2, 0)])
def test_innovate(
    dtype: torch.dtype, rows: int, width: int, kept: int, span: int, relative: bool
) -> None:
    y, outputs = random(rows, width, dtype=dtype), random(rows, kept, width, dtype=dtype)
    scores, seen = torch.full((rows, 4), 7.0, dtype=dtype), torch.arange(rows) + 2
    weights = random(span, dtype=dtype) if span else None
    exact = scores.double()
    if weights is not None:
        guess = outputs.double().flip(1)[:, :span] * weights.double()[:, None]
        error = (y.double() - guess.sum(1)).square().sum(1)
        over = y.double().square().sum(1) + 1e-6 if relative else width
        exact[torch.arange(rows), seen % 4] = error / over
    expected = torch.cat([outputs[:, 1:], y[:, None]], dim=1)

    def write(program: Program, value: Value) -> Value:
        program.innovate(value, (kept, 2), 4, weights, (4, 3), relative=relative)
        return value

    run(write, y, [outputs, scores, seen])
    assert outputs.equal(expected)
    close(scores, exact, width + 2 * span)
    if span:
        y[-1, 0] = math.inf
        with pytest.raises(FloatingPointError, match="innovations must be finite"):
            run(write, y, [outputs, scores, seen])


def mixer(program: Program, value: Value) -> Value:
    """A mixer of every kind of instruction, large enough for two threads."""
    torch.manual_seed(0)
    inner = program.linear(value, random(512, 130), random(512))
    inner = program.rms_norm(inner, random(512), 1e-5, group=128)
    inner = program.causal_conv1d(inner, random(512, 1, 4), None, 2, 4, torch.float32, silu=True)
    B, C = program.linear(inner, random(48, 512)).split(24, 24)
    y = program.selective(inner, inner, B, C, inner, random(512, 24), None, None, 3)
    y = program.longhorn(program.gelu(y, by_tanh=True), y, B, C, None, None, None, 4)
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
