"""token_step: the instructions of recurrences and attention against their equations in float64."""

from __future__ import annotations

import math

import pytest
import torch
from tests.kernels.tokens import both, close, random, run, soft, some_rows
from torch import Tensor

from ssmzoo_kernels import feedback_scan, longhorn_scan
from ssmzoo_kernels.token_step import Program, Value


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


@both
@some_rows
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (1, 1)])
@pytest.mark.parametrize(("keys", "values"), [(3, 5), (16, 64), (7, 130)])
@pytest.mark.parametrize("decays", [0, 1, None])
@pytest.mark.parametrize("erases", [False, True])
def test_linear_attention(
    dtype: torch.dtype,
    rows: int,
    heads: int,
    groups: int,
    keys: int,
    values: int,
    decays: int | None,
    erases: bool,
) -> None:
    decays = keys if decays is None else decays
    sizes = [groups * keys] * 2 + [heads * values, heads * decays] + [heads * keys] * 2
    x, state = random(rows, sum(sizes), dtype=dtype), random(rows, heads, keys, values, dtype=dtype)
    q, k, v, w, a, b = (
        y.view(rows, count, -1)
        for y, count in zip(x.double().split(sizes, dim=1), 2 * [groups] + 4 * [heads], strict=True)
    )
    q, k = (y.repeat_interleave(heads // groups, dim=1)[..., None] for y in (q, k))
    old = state.double()
    new = (w[..., None] if decays else 1) * old + k * v[:, :, None]
    if erases:
        new = new + b[..., None] * (a[..., None] * old).sum(2, keepdim=True)
    exact = 0.5 * (q * new).sum(2).flatten(1)

    def write(program: Program, value: Value) -> Value:
        q, k, v, w, a, b = value.split(*sizes)
        more = {"heads": heads, "groups": groups, "scale": 0.5}
        erase = (a, b) if erases else None
        return program.linear_attention(q, k, v, w if decays else None, 2, erase=erase, **more)

    # a dot product's terms are of the size of their largest, not of their sum
    close(run(write, x, [state]), exact, 2 * keys * (keys if erases else 1))
    close(state, new, keys)


@both
@some_rows
@pytest.mark.parametrize(("width", "modes"), [(5, 3), (33, 16)])
@pytest.mark.parametrize("feeds", [False, True])
def test_diagonal(dtype: torch.dtype, rows: int, width: int, modes: int, feeds: bool) -> None:
    u, state = random(rows, width, dtype=dtype), random(rows, width, modes, 2, dtype=dtype)
    decay, drive, probe, fed = (random(width, modes, 2, dtype=dtype) for _ in range(4))
    readout, D = random(2, width, modes, 2, dtype=dtype), random(2, width, dtype=dtype)

    def exact(x: Tensor) -> Tensor:
        return torch.view_as_complex(x.double())

    z = exact(decay) * exact(state) + (exact(drive) if feeds else 1) * u.double()[..., None]
    if feeds:
        w = (exact(probe) * exact(state)).real.sum(-1, keepdim=True)
        z = z - exact(fed) * w
    y = torch.einsum("cdn,bdn->bcd", exact(readout), z).real + D.double() * u.double()[:, None]
    more = {"drive": drive, "feedback": (probe, fed)} if feeds else {}
    found = run(lambda p, v: p.diagonal(v, decay, readout, D, 2, **more), u, [state])
    close(found, y.flatten(1), 2 * modes * (modes if feeds else 1))
    close(state, torch.view_as_real(z), modes)


@both
@some_rows
@pytest.mark.parametrize(("heads", "size", "modes"), [(3, 2, 5), (1, 8, 16)])
def test_products(dtype: torch.dtype, rows: int, heads: int, size: int, modes: int) -> None:
    x = random(rows, 3 * heads * size, dtype=dtype)
    state = random(rows, size, size, heads, modes, 2, dtype=dtype)
    decay, readout = (random(heads, modes, 2, dtype=dtype) for _ in range(2))
    D = random(heads, dtype=dtype)
    q, k, v = (y.view(rows, heads, size) for y in x.double().chunk(3, dim=1))
    a, c, z = (torch.view_as_complex(y.double()) for y in (decay, readout, state))
    kv = torch.einsum("bhi,bhj->bijh", k, v)
    z = a * z + kv[..., None]
    y = (c * z).real.sum(-1) + D.double() * kv
    exact = torch.einsum("bijh,bhi->bjh", y, q).flatten(1)

    def write(program: Program, value: Value) -> Value:
        return program.products(*value.chunk(3), decay, readout, D, 2)

    close(run(write, x, [state]), exact, 4 * size * modes)
    close(state, torch.view_as_real(z), 4)


@both
@some_rows
@pytest.mark.parametrize("modes", [1, 5, 32])
def test_poles(dtype: torch.dtype, rows: int, modes: int) -> None:
    x, state = random(rows, 2 * modes, dtype=dtype), random(rows, modes, 2, dtype=dtype)
    pole = random(modes, 2, dtype=dtype)
    a, z, drive = (torch.view_as_complex(y.double()) for y in (pole, state, x.view(rows, -1, 2)))
    exact = torch.view_as_real(a * z + drive)
    close(run(lambda p, v: p.poles(v, pole, 2), x, [state]), exact.flatten(1), 4)
    close(state, exact, 4)


@both
@some_rows
@pytest.mark.parametrize(("heads", "groups", "size", "count"), [(4, 2, 5, 2), (2, 1, 40, 20)])
def test_angles_and_turn(
    dtype: torch.dtype, rows: int, heads: int, groups: int, size: int, count: int
) -> None:
    sizes = [count, heads, groups * size]
    x, bias = random(rows, sum(sizes), dtype=dtype), random(heads, size, dtype=dtype)
    state = (6 * torch.rand(rows, heads * count)).to(dtype)
    speed, dt, inner = x.double().split(sizes, dim=1)
    angle = (
        state.double().view(rows, heads, count) + math.pi * speed.tanh()[:, None] * dt[..., None]
    )
    wide = inner.view(rows, groups, size).repeat_interleave(heads // groups, dim=1) + bias.double()
    pairs = torch.view_as_complex(wide[..., : 2 * count].unflatten(-1, (count, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    exact = torch.cat([turned, wide[..., 2 * count :]], dim=-1).flatten(1)

    def write(program: Program, value: Value) -> Value:
        speed, dt, inner = value.split(*sizes)
        return program.turn(inner, bias, program.angles(speed, dt, 2), groups)

    close(run(write, x, [state]), exact)
    close(state, torch.remainder(angle, 2 * math.pi).flatten(1))
