"""eidetic_attention: C and torch against the loop, special cases against plain attention."""

import itertools

import pytest
import torch
from tests.kernels import contracts
from tests.kernels.memory import peak_bytes
from torch.nn.functional import scaled_dot_product_attention

from ssmzoo.testing.accuracy import assert_as_accurate
from ssmzoo_kernels import eidetic_attention, last_backend, use_backend
from ssmzoo_kernels.eidetic_attention import chunk_table, cpu, eager, plan
from ssmzoo_kernels.eidetic_attention.arguments import Call, Tensors
from ssmzoo_kernels.eidetic_attention.rows import Gathered, Strided


class TestEideticAttention(contracts.EideticAttention):
    """Every check of the contract."""


class TestLateEideticAttention(contracts.LateEideticAttention):
    """Every check of the contract, with late keys."""


WINDOW, MEMORY = 4, 3
ZERO = torch.zeros(6, 3, dtype=torch.int64)
LATE = {x: torch.zeros(2, 11, 2, 8) for x in ("late_k", "late_v")} | {"late_span": 2}

# lengths and tokens before, by sequence; None: rows of a batch
LAYOUTS = {
    "batch": (None, [0, 0]),
    "batch that goes on": (None, [4, 8]),
    "batch in the midst of chunks": (None, [3, 9]),
    "packed": ([5, 0, 9, 1, 4], [0, 0, 0, 0, 0]),
    "packed that goes on": ([5, 0, 9, 1, 4], [3, 2, 0, 7, 12]),
    "one token each": ([1, 1, 1], [0, 5, 8]),
    "a few tokens each": ([2, 2], [5, 8]),
    "decoding": ([1, 1], [9, 14]),
    "none": ([0, 0], [3, 0]),
    "no sequence": (None, []),
}


EAGER_FORMS = ("as it is", "small blocks", "products written out")


@pytest.fixture
def form(request, monkeypatch):
    """C, or torch with the plan of large calls, and of still larger ones, on small ones."""
    name = getattr(request, "param", "small blocks")
    if name in ("small blocks", "products written out"):
        monkeypatch.setattr(plan, "block_size", lambda window: 2)
        monkeypatch.setattr(plan, "QUERIES", 3)
        monkeypatch.setattr(plan, "JOINED", 0)
        monkeypatch.setattr(plan, "SHORT", 2)
    if name == "products written out":
        monkeypatch.setattr(eager, "_has_fused", lambda x: False)
        monkeypatch.setattr(eager, "SCORES", 9)
    backend = "cpu" if name == "in C" else "eager"
    with use_backend(backend):
        yield backend


EVERY_FORM = pytest.mark.parametrize("form", ["in C", *EAGER_FORMS], indirect=True)
EVERY_EAGER_FORM = pytest.mark.parametrize("form", EAGER_FORMS, indirect=True)


def draw(layout, *, late=False, mask=False, window=WINDOW, memory=MEMORY, dtype=torch.float64):
    """The arguments of a call, floating tensors with gradients."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    lengths, seen = LAYOUTS[layout]
    batch, length = (1, sum(lengths)) if lengths is not None else (len(seen), 11)
    sequences = len(seen)
    every = [length] * batch if lengths is None else lengths
    offsets = torch.tensor([0, *itertools.accumulate(every)])
    seen = torch.tensor(seen, dtype=torch.int64)
    call = {
        "q": random(batch, length, 4, 8),
        "k": random(batch, length, 2, 8),
        "v": random(batch, length, 2, 8),
        "window": window,
        "seen": seen,
        "past_k": random(sequences, window, 2, 8),
        "past_v": random(sequences, window, 2, 8),
    }
    if lengths is not None:
        call["cu_seqlens"] = offsets.int()
    if memory:
        chunks = chunk_table(offsets.diff(), seen, window)
        count = len(chunks.number)
        call["mem_k"], call["mem_v"] = random(count, memory, 2, 8), random(count, memory, 2, 8)
        call["mem_count"] = (chunks.number * window).clamp(max=memory)
        if mask:
            ends = (chunks.number * window)[:, None]
            call["mem_positions"] = (ends - 1 - torch.arange(memory)).clamp(min=0)
    if late:
        call |= {"late_k": random(batch, length, 2, 8), "late_v": random(batch, length, 2, 8)}
        call |= {"late_span": 3}
        call["late_past_k"] = random(sequences, window + 3, 2, 8)
        call["late_past_v"] = random(sequences, window + 3, 2, 8)
    return call


def run(call, backend, *, autocast=False):
    """Outputs and the gradients of everything that floats, by name."""
    tensors = {n: x for n, x in call.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = eidetic_attention(**call, backend=backend)
    assert last_backend("eidetic_attention") == backend
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    loss = (out * weights).sum()
    grads = torch.autograd.grad(loss, list(tensors.values()), materialize_grads=True)
    return {"out": out, **dict(zip(tensors, grads, strict=True))}


def assert_same(got, expected, budget):
    for name, value in expected.items():
        assert got[name].shape == value.shape
        if not value.any():  # a past that nobody reads
            assert not got[name].any(), name
            continue
        error = (got[name] - value).abs().max() / value.abs().max()
        assert error <= budget, (name, float(error))


def assert_equals_the_loop(call, backend):
    assert_same(run(call, backend), run(call, "reference"), 1e-12)


def test_positions_may_be_any_number(backend):
    """As a mark of rows that no query or every query sees."""
    most = torch.iinfo(torch.int64)
    call = draw("batch that goes on", memory=4)
    call["mem_positions"] = torch.tensor([most.min, most.max, 0, most.max - 1])
    call["mem_positions"] = call["mem_positions"].expand(call["mem_count"].shape[0], -1)
    assert_equals_the_loop(call, backend)


@pytest.mark.parametrize("by", ["reference", "eager"])
def test_scores_are_float32_under_autocast(by, monkeypatch):
    call = draw("batch that goes on", memory=4, dtype=torch.float32)
    plain = run(call, "reference")
    monkeypatch.setattr(eager, "_has_fused", lambda q: False)  # as on a GPU
    assert_same(run(call, by, autocast=True), plain, 1e-5)


@EVERY_FORM
@pytest.mark.parametrize("mask", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_backend_equals_the_loop_with_all_gradients(form, layout, mask):
    assert_equals_the_loop(draw(layout, mask=mask), form)


@EVERY_EAGER_FORM
@pytest.mark.parametrize("layout", LAYOUTS)
def test_late_keys_equal_the_loop_with_all_gradients(form, layout):
    assert_equals_the_loop(draw(layout, mask=True, late=True), form)


def test_late_keys_go_to_eager_wherever_the_choice_is_open():
    for chosen in ("auto", "cpu", "triton"):
        with use_backend(chosen):
            eidetic_attention(**draw("batch", late=True))
        assert last_backend("eidetic_attention") == "eager"


@EVERY_FORM
@pytest.mark.parametrize("layout", ["batch that goes on", "packed that goes on"])
@pytest.mark.parametrize(
    ("window", "memory"), [(1, 3), (5, 0), (4, 9), (16, 3), (64, 2), (None, 0)]
)
def test_windows_and_memories_of_any_size(form, layout, window, memory):
    call = draw(layout, memory=memory, window=window or 12)
    call["window"] = window
    assert_equals_the_loop(call, form)


@pytest.mark.parametrize(
    ("name", "backend"), [("window", "cpu"), ("window", "eager"), ("late_span", "eager")]
)
def test_the_longest_windows_and_spans_of_int64_read_all_tokens(name, backend):
    call = draw("batch", memory=0, late=name == "late_span")
    everything = run({**call, name: 11}, backend)
    assert_same(run({**call, name: 2**63 - 1}, backend), everything, 1e-12)


@EVERY_EAGER_FORM
@pytest.mark.parametrize("span", [1, 4, 9])
@pytest.mark.parametrize("layout", ["batch", "batch that goes on", "packed that goes on"])
def test_late_keys_reach_any_number_of_chunks_back(form, layout, span):
    call = draw(layout, late=True)
    for name in ("late_past_k", "late_past_v"):
        old = torch.randn(len(call["seen"]), WINDOW + span, 2, 8, dtype=torch.float64)
        call[name] = old.requires_grad_()
    call["late_span"] = span
    assert_equals_the_loop(call, form)


@EVERY_FORM
def test_float32_errs_as_its_rounding_does(form):
    call = draw("packed", dtype=torch.float32)
    exact = draw("packed")
    # scores of 8 products and sums over at most a dozen keys, forward and back
    assert_same(run(call, form), run(exact, "reference"), 64 * 2**-24)


@pytest.mark.parametrize("backend", ["cpu", "eager", "reference"])
@pytest.mark.parametrize("window", [None, 32])
def test_a_wide_window_without_a_memory_is_causal_attention(backend, window):
    call = draw("batch", memory=0)
    q, k, v = (call[name] for name in "qkv")
    expected = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    got = eidetic_attention(q, k, v, window=window, backend=backend)
    assert torch.allclose(got, expected.transpose(1, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["cpu", "eager", "reference"])
def test_a_window_is_the_number_of_tokens_that_a_query_sees(backend):
    call = draw("batch", memory=0)
    q, k, v = (call[name] for name in "qkv")
    place = torch.arange(11)
    sees = (place <= place[:, None]) & (place > place[:, None] - WINDOW)
    assert sees.sum(dim=1).max() == WINDOW
    expected = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=sees, enable_gqa=True
    )
    got = eidetic_attention(q, k, v, window=WINDOW, backend=backend)
    assert torch.allclose(got, expected.transpose(1, 2), rtol=1e-12, atol=1e-12)


def pieces(call, cuts):
    """Give a batch to the op in pieces, each with the past it needs; return the outputs."""
    found, window, late = [], call["window"], "late_k" in call
    span = call.get("late_span", 0)
    length = call["q"].shape[1]
    chunks = -(-length // window)
    memories = {
        name: call[name].unflatten(0, (-1, chunks))
        for name in ("mem_k", "mem_v", "mem_count", "mem_positions")
    }
    for begin, end in itertools.pairwise((0, *cuts, length)):
        here = slice(begin // window, (end - 1) // window + 1)
        piece = {name: x[:, here].flatten(0, 1) for name, x in memories.items()}
        for name in ("q", "k", "v", "late_k", "late_v")[: None if late else 3]:
            piece[name] = call[name][:, begin:end]
        for name, back in (("", window - 1), ("late_", window + span - 1))[: 1 + late]:
            before = slice(max(0, begin - back), begin)
            for x in "kv":
                piece[f"{name}past_{x}"] = call[f"{name}{x}"][:, before]
        seen = torch.full((len(call["q"]),), begin)
        found.append(eidetic_attention(**piece, window=window, late_span=span, seen=seen))
    return torch.cat(found, dim=1)


@torch.no_grad()
@EVERY_FORM
@pytest.mark.parametrize("cuts", [range(1, 11), (4, 8), (3,), (1, 2, 7, 10)], ids=str)
def test_pieces_with_their_past_equal_the_whole(form, cuts):
    call = draw("batch", mask=True, late=form == "eager")
    for name in ("past_k", "past_v", "late_past_k", "late_past_v", "seen"):
        call.pop(name, None)
    assert_same({"out": pieces(call, cuts)}, {"out": eidetic_attention(**call)}, 1e-12)


@torch.no_grad()
@EVERY_FORM
@pytest.mark.parametrize("layout", ["batch", "packed", "packed that goes on", "one token each"])
def test_nan_stays_in_its_sequence(form, layout):
    call = draw(layout, dtype=torch.float32)
    lengths, _ = LAYOUTS[layout]
    first = 11 if lengths is None else lengths[0]
    for name in ("k", "v"):
        call[name].detach().flatten(0, 1)[first - 1] = torch.nan
    out = eidetic_attention(**call).flatten(0, 1)
    assert out[first - 1].isnan().all()
    assert out[first:].isfinite().all()


# --- layouts of every size, in every precision ------------------------------------------------


def floating(call):
    """Split a call's arguments into tensors with gradients and the rest."""
    tensors = {n: x for n, x in call.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    return tensors, {n: x for n, x in call.items() if n not in tensors}


def large(width, dtype=torch.float32, tokens=300, window=130, memory=40, heads=2, groups=1):
    """A batch that has chunks of its own in every place: first, full, cut short."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    chunks = -(-tokens // window)
    count = torch.tensor([0, *[memory] * (chunks - 1)]).repeat(2)
    tokens_of = {
        name: random(2, tokens, n, width)
        for name, n in zip("qkv", (heads, groups, groups), strict=True)
    }
    memories = {name: random(2 * chunks, memory, groups, width) for name in ("mem_k", "mem_v")}
    return tokens_of | memories | {"mem_count": count, "window": window}


def torch_alone(q, k, v, mem_k, mem_v, *, mem_count, window):
    """``large``'s call as torch's own attention with every mask spelt out."""
    batch, length = q.shape[:2]
    place, chunks = torch.arange(length)[:, None], -(-length // window)
    behind = place - torch.arange(length)
    held = torch.arange(mem_k.shape[1]) < mem_count.view(batch, chunks)[0][:, None]
    own = place // window == torch.arange(chunks)
    sees = [(own[:, :, None] & held).flatten(1), (behind >= 0) & (behind < window)]
    keys, values = (
        torch.cat([memory.unflatten(0, (batch, chunks)).flatten(1, 2), x], dim=1)
        for memory, x in ((mem_k, k), (mem_v, v))
    )
    turned = (x.transpose(1, 2) for x in (q, keys, values))
    mask = torch.cat(sees, dim=1)
    return scaled_dot_product_attention(*turned, attn_mask=mask, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("width", [5, 64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_of_any_width_are_as_exact_as_torch(width, dtype, backend):
    assert_as_exact_as_torch(backend, width, dtype)


def assert_as_exact_as_torch(backend, width, dtype):
    """Torch is the judge: like it, the op keeps log sums, whose rounding all of a row shares."""
    tensors, rest = floating(large(width, dtype))

    def op(*x):
        return eidetic_attention(**dict(zip(tensors, x, strict=True)), **rest, backend=backend)

    def judge(*x):
        return torch_alone(**dict(zip(tensors, x, strict=True)), **rest)

    assert_as_accurate(op, judge, list(tensors.values()), dtype)


@EVERY_FORM
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_is_as_exact_as_the_loop_in_every_layout(form, layout, dtype):
    tensors, rest = floating(draw(layout, mask=True, late=form == "eager", dtype=dtype))

    def on(backend):
        return lambda *x: eidetic_attention(
            **dict(zip(tensors, x, strict=True)), **rest, backend=backend
        )

    assert_as_accurate(on(form), on("reference"), list(tensors.values()), dtype)


@EVERY_FORM
def test_scores_beyond_the_range_of_float16_stay_finite(form):
    """The loop's scores are float32; 64 products of 200 and 200 are no float16 number."""
    call = draw("batch", dtype=torch.float16)
    wide = {n: x.detach().repeat(1, 1, 1, 8) for n, x in call.items() if n[-1] in "qkv"}
    wide |= {n: (200 * wide[n]).requires_grad_() for n in ("q", "k", "mem_k")}
    wide |= {n: wide[n].requires_grad_() for n in ("v", "mem_v")}
    found = run({"window": WINDOW, "mem_count": call["mem_count"]} | wide, form)
    assert all(x.isfinite().all() for x in found.values())


def test_a_wrong_op_fails_the_accuracy_check():
    tensors, rest = floating(large(5))

    def on(changes):
        return lambda *x: eidetic_attention(
            **dict(zip(tensors, x, strict=True)), **(rest | changes), backend="eager"
        )

    for changes in ({"window": 131}, {"mem_count": rest["mem_count"].clamp(max=39)}):
        with pytest.raises(AssertionError, match="exceeds"):
            assert_as_accurate(on(changes), on({}), list(tensors.values()), torch.float32)


def test_tensors_whose_rows_lie_apart_and_a_gradient_of_one_number():
    wide = torch.randn(2, 11, 3, 2, 8, dtype=torch.float64)
    results = []
    for views in (wide.unbind(2), [x.contiguous() for x in wide.unbind(2)]):
        leaves = [x.detach().requires_grad_() for x in views]
        turned = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in leaves]
        for tensors in (leaves, turned):
            out = eidetic_attention(*tensors, window=WINDOW)
            results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)


# --- what is done at once ---------------------------------------------------------------------


def works(call):
    """The works that a call is cut into."""
    tensors = {n: call.get(n) for n in Tensors._fields}
    flat = {n: tensors[n].flatten(0, 1) for n in ("q", "k", "v")}
    batch, length = call["q"].shape[:2]
    offsets = call.get("cu_seqlens", torch.arange(batch + 1) * length).long()
    seen = call.get("seen", torch.zeros(len(offsets) - 1, dtype=torch.int64))
    count = call.get("mem_count")
    settings = Call(count, None, offsets, seen, call["window"], 0, 1.0)
    return list(plan.Plan(Tensors(**(tensors | flat)), settings).works())


def test_sums_whose_rows_lie_apart_give_the_same_gradients_in_c():
    q, k, v = (x.detach() for x in (draw("batch", memory=0)[name][0] for name in "qkv"))
    tensors = Tensors(q, k, v, *[None] * 8)
    offsets, seen = torch.tensor([0, len(q)]), torch.zeros(1, dtype=torch.int64)
    call = Call(None, None, offsets, seen, WINDOW, 0, 1.0)
    out, total = cpu.forward(tensors, call)
    expected = cpu.backward(q, out, total, tensors, call)
    got = cpu.backward(q, out, total.T.contiguous().T, tensors, call)
    for name in "qkv":
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


def test_batches_from_their_first_token_are_views():
    found = works(large(8))
    rows = [work.queries for work in found]
    rows += [keys for work in found for stream in work.streams for _, keys in stream.parts]
    assert all(isinstance(x, Strided) for x in rows)
    # chunk 0 and the short chunk 2 in 3 and 1 blocks, chunk 1 in 3, both sequences together
    assert [(x.queries.count, x.queries.width) for x in found] == [
        *[(2, 64), (2, 64), (2, 2)] * 2,
        (2, 40),
    ]


def test_long_sequences_are_taken_chunk_by_chunk_at_once():
    call = large(8, tokens=130 * 40)
    found = [work.queries for work in works(call)]
    assert {(x.pitch, x.count) for x in found} == {(130, 39), (5200, 2)}


def test_packed_sequences_are_gathered_and_no_two_blocks_share_a_token():
    call = draw("packed that goes on")
    seen = set()
    for work in works(call):
        assert isinstance(work.queries, Gathered)
        inside = work.queries.inside
        own = work.queries.places if inside is None else work.queries.places[inside]
        assert seen.isdisjoint(own.flatten().tolist())
        seen |= {*own.flatten().tolist()}
        for stream in work.streams:
            for table, rows in stream.parts:
                if table != "memory":
                    width = rows.places.shape[1]
                    for begin in range(0, width, rows.pitch):
                        part = slice(begin, begin + rows.pitch)
                        places = rows.places[:, part]
                        if rows.inside is not None:
                            places = places[rows.inside[:, part]]
                        assert places.unique().numel() == places.numel()
    assert seen == {*range(19)}


def test_decoding_reads_every_key_that_it_sees_and_no_other():
    call = draw("decoding")
    (work,) = works(call)
    read = {table: rows.width for stream in work.streams for table, rows in stream.parts}
    assert read == {"window": 1, "window past": WINDOW - 1, "memory": MEMORY}
    assert all(stream.mask is None for stream in work.streams)


def test_few_rows_are_read_side_by_side():
    for memory, streams in ((57, 1), (58, 2)):  # beside 199 of the window, in 2 sequences
        work = works(large(8, window=100, memory=memory))[-1]
        assert len(work.streams) == streams


# --- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_peak_memory_is_linear_in_the_tokens(packed, backend, monkeypatch):
    monkeypatch.setattr(plan, "QUERIES", 128)
    peaks = []
    for tokens in (512, 1024, 2048):
        call = large(16, tokens=tokens, window=32, memory=8)
        if packed:  # of unequal lengths: gathered
            one = {n: call[n].flatten(0, 1)[None].detach().requires_grad_() for n in "qkv"}
            call |= one | {"cu_seqlens": torch.tensor([0, tokens - 32, 2 * tokens])}
        tensors, _ = floating(call)

        def step(call=call, tensors=tensors):
            out = eidetic_attention(**call, backend=backend)
            torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out))

        peaks.append(peak_bytes(step))
    # twice the tokens, twice the growth, and what a work takes does not grow
    growth = [b - a for a, b in itertools.pairwise(peaks)]
    assert growth[1] <= 2.1 * growth[0], peaks
    inputs = sum(x.numel() * 4 for x in tensors.values())
    assert growth[1] <= 1.5 * inputs, (peaks, inputs)


def test_training_keeps_outputs_and_sums_beside_the_inputs():
    tensors, rest = floating(large(8))
    own = {x.untyped_storage().data_ptr() for x in tensors.values()}
    kept = {}

    def pack(x):
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = eidetic_attention(**tensors, **rest)
    assert sorted(x.numel() for x in kept.values()) == [out.numel() // 8, out.numel()]


# --- the rest ---------------------------------------------------------------------------------


def test_chunks_are_counted_from_each_sequences_first_token():
    chunks = chunk_table(torch.tensor([5, 0, 9]), torch.tensor([3, 2, 0]), 4)
    assert chunks.sequence.tolist() == [0, 0, 2, 2, 2]
    assert chunks.number.tolist() == [0, 1, 0, 1, 2]
    assert chunks.first.tolist() == [0, 1, 0, 4, 8]
    assert chunks.start.tolist() == [3, 0, 0, 0, 0]
    assert chunks.count.tolist() == [1, 4, 4, 4, 1]
    bounded = chunk_table(torch.tensor([5, 0, 9]), torch.tensor([3, 2, 0]), 4, most=8)
    assert all(torch.equal(x[:5], y) for x, y in zip(bounded, chunks, strict=True))
    assert bounded.count[5:].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"window": 0}, ValueError, "window must be None or at least 1, got 0"),
        ({"window": None}, ValueError, "need a window"),
        ({"window": 4.0}, TypeError, "window must be an integer, got 4.0"),
        ({"window": True}, TypeError, "window must be an integer, got True"),
        ({"late_span": "2"}, TypeError, "late_span must be an integer, got '2'"),
        ({"q": torch.zeros(2, 11, 3, 8)}, ValueError, "multiple of k's, got 3 and 2"),
        ({"v": torch.zeros(2, 11, 2, 7)}, ValueError, "v must have shape"),
        ({"past_v": None}, ValueError, "past_k and past_v must be given together"),
        ({"mem_count": None}, ValueError, "mem_k and mem_count must be given together"),
        ({"mem_count": torch.zeros(6)}, TypeError, "mem_count must be an int64 tensor"),
        ({"seen": torch.zeros(3, dtype=torch.int64)}, ValueError, "seen must have shape"),
        ({"late_span": 2}, ValueError, "late_span must be at least 1 with late_k"),
        (LATE | {"late_span": 0}, ValueError, "late_span must be at least 1 with late_k and 0"),
        (LATE | {"seen": torch.tensor([9, 9])}, ValueError, "late_past_k must hold the 5 tokens"),
        ({"backend": "triton"}, ValueError, "needs CUDA tensors, got cpu"),
        ({"backend": "flex"}, ValueError, "backend must be one of"),
        (LATE | {"backend": "cpu"}, ValueError, "takes no late_k"),
        (LATE | {"backend": "triton"}, ValueError, "takes no late_k"),
        ({"q": [1.0]}, TypeError, r"q must be a tensor \[B, L, H, d\], got list"),
        ({"q": torch.zeros(2, 11, 4)}, ValueError, r"q must have shape \[B, L, H, d\]"),
        ({"q": torch.zeros(2, 11, 0, 8)}, ValueError, "multiple of k's, got 0 and 2"),
        ({"q": torch.zeros(2, 11, 4, 8).int()}, TypeError, "q must be floating point"),
        (
            {"k": torch.zeros(2, 11, 2, 8, dtype=torch.float8_e5m2)},
            TypeError,
            "tensors must be float16, .* got torch.float64, torch.float8_e5m2",
        ),
        ({"mem_v": torch.zeros(6, 2, 2, 8)}, ValueError, r"mem_v must have shape .*got \[6, 2"),
        ({"mem_v": None}, ValueError, "mem_k and mem_v must be given together"),
        ({"mem_count": torch.full((6,), 4)}, ValueError, "from 0 to m = 3, got 4 to 4"),
        ({"mem_count": torch.full((6,), -1)}, ValueError, "from 0 to m = 3, got -1 to -1"),
        ({"mem_k": None, "mem_v": None}, ValueError, "mem_k and mem_count must be given"),
        ({"mem_positions": torch.zeros(6, 2).long()}, ValueError, "mem_positions must have shape"),
        ({"seen": torch.tensor([-1, 0])}, ValueError, "seen must not be negative, got -1"),
        ({"seen": torch.tensor([0, 0]).int()}, TypeError, "seen must be an int64 tensor"),
        ({"cu_seqlens": torch.tensor([0, 11])}, ValueError, "B = 1, got B = 2"),
        (
            {"past_k": None, "past_v": None, "seen": torch.tensor([2, 9])},
            ValueError,
            "past_k must hold the 3 tokens before this call that its queries see, got 0",
        ),
        (
            {"mem_k": None, "mem_v": None, "mem_count": None, "mem_positions": ZERO},
            ValueError,
            "mem_positions needs mem_k",
        ),
        (
            {x: torch.zeros(5, 3, 2, 8) for x in ("mem_k", "mem_v")} | {"mem_count": ZERO[:5, 0]},
            ValueError,
            "a memory for each of the 6 chunks, got 5",
        ),
        (
            {x: torch.zeros(2, 2, 2, 8) for x in ("late_past_k", "late_past_v")},
            ValueError,
            "late_past_k needs late_k",
        ),
    ],
)
def test_bad_input_is_one_clear_error(changes, kind, message):
    with pytest.raises(kind, match=message):
        eidetic_attention(**{**draw("batch"), **changes})


def test_kernels_take_heads_that_their_registers_hold():
    for width, dtype in ((129, torch.float32), (257, torch.bfloat16)):
        q = torch.zeros(1, 3, 2, width, dtype=dtype, device="meta")
        with pytest.raises(ValueError, match=f"at most {width - 1} columns in {dtype}, got"):
            eidetic_attention(q, q, q, window=2, backend="triton")


def test_heads_need_a_column():
    empty = torch.zeros(1, 3, 2, 0)
    with pytest.raises(ValueError, match="at least one column"):
        eidetic_attention(empty, empty, empty, window=2)


def test_a_graph_checks_the_numbers_of_its_indices():
    """They are not known where it is traced, and a kernel would read beyond what is there."""
    q, k, v = (torch.randn(1, 12, heads, 8) for heads in (4, 2, 2))

    def attend(memories, count):
        memory = torch.ones(memories, 3, 2, 8)
        counts = torch.full((memories,), count)
        return eidetic_attention(q, k, v, memory, memory, counts, window=2)

    graph = torch.compile(attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(6, 3), attend(6, 3))
    with pytest.raises(ValueError, match="a memory for each of the 6 chunks, got 2"):
        graph(2, 3)
    with pytest.raises(ValueError, match="from 0 to m = 3, got 4 to 4"):
        graph(6, 4)
