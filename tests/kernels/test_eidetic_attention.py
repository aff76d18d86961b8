"""eidetic_attention: the torch backend against the loop, special cases against plain attention."""

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from ssmzoo_kernels import eidetic_attention, last_backend
from ssmzoo_kernels.eidetic_attention import chunk_table

WINDOW, MEMORY = 4, 3

# lengths and tokens before, by sequence; None: rows of a batch
LAYOUTS = {
    "batch": (None, [0, 0]),
    "batch that goes on": (None, [4, 8]),
    "batch in the midst of chunks": (None, [3, 9]),
    "packed": ([5, 0, 9, 1, 4], [0, 0, 0, 0, 0]),
    "packed that goes on": ([5, 0, 9, 1, 4], [3, 2, 0, 7, 12]),
    "one token each": ([1, 1, 1], [0, 5, 8]),
}


def draw(layout, *, late=False, mask=False, window=WINDOW, memory=MEMORY, dtype=torch.float64):
    """The arguments of a call, floating tensors with gradients."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    lengths, seen = LAYOUTS[layout]
    batch, length = (1, sum(lengths)) if lengths is not None else (len(seen), 11)
    sequences = len(seen)
    offsets = torch.tensor([0, *itertools.accumulate(lengths or [length] * batch)])
    seen = torch.tensor(seen)
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


def run(call, backend):
    """Outputs and the gradients of everything that floats, by name."""
    tensors = {n: x for n, x in call.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    out = eidetic_attention(**call, backend=backend)
    assert last_backend("eidetic_attention") == backend
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    grads = torch.autograd.grad((out * weights).sum(), list(tensors.values()), allow_unused=True)
    return {"out": out, **dict(zip(tensors, grads, strict=True))}


def assert_same(got, expected, budget):
    for name, value in expected.items():
        if value is None or not value.any():  # a past that nobody reads
            assert got[name] is None or not got[name].any(), name
            continue
        error = (got[name] - value).abs().max() / value.abs().max()
        assert error <= budget, (name, float(error))


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("mask", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_equals_the_loop_with_all_gradients(layout, mask, late):
    call = draw(layout, mask=mask, late=late)
    assert_same(run(call, "eager"), run(call, "reference"), 1e-12)


@pytest.mark.parametrize(("window", "memory"), [(1, 3), (5, 0), (4, 9), (16, 3), (64, 2)])
def test_windows_and_memories_of_any_size(window, memory):
    call = draw("packed that goes on", window=window, memory=memory)
    assert_same(run(call, "eager"), run(call, "reference"), 1e-12)


def test_float32_errs_as_its_rounding_does():
    call = draw("packed", late=True, dtype=torch.float32)
    exact = draw("packed", late=True)
    # scores of 8 products and sums over at most a dozen keys, forward and back
    assert_same(run(call, "eager"), run(exact, "reference"), 64 * 2**-24)


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("window", [None, 32])
def test_a_wide_window_without_a_memory_is_causal_attention(backend, window):
    call = draw("batch", memory=0)
    q, k, v = (call[name] for name in "qkv")
    expected = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    got = eidetic_attention(q, k, v, window=window, backend=backend)
    assert torch.allclose(got, expected.transpose(1, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["eager", "reference"])
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


def test_gradients_are_those_of_finite_differences():
    call = draw("packed that goes on", mask=True, late=True)
    names = [n for n, x in call.items() if isinstance(x, torch.Tensor) and x.requires_grad]

    def attend(*tensors):
        return eidetic_attention(**{**call, **dict(zip(names, tensors, strict=True))})

    assert torch.autograd.gradcheck(attend, [call[name] for name in names], fast_mode=True)


@torch.no_grad()
def test_a_call_that_goes_on_equals_the_whole():
    call = draw("batch", memory=0)
    q, k, v = (call[name] for name in "qkv")
    whole = eidetic_attention(q, k, v, window=WINDOW)
    for cut in (1, 4, 7):
        before = slice(max(0, cut - WINDOW), cut)
        rest = eidetic_attention(
            q[:, cut:],
            k[:, cut:],
            v[:, cut:],
            window=WINDOW,
            past_k=k[:, before],
            past_v=v[:, before],
            seen=torch.tensor([cut, cut]),
        )
        assert torch.allclose(rest, whole[:, cut:], rtol=1e-12, atol=1e-12)


def test_same_inputs_have_the_same_bits():
    call = draw("packed that goes on", late=True, dtype=torch.float32)
    one, two = run(call, "eager"), run(call, "eager")
    assert all(torch.equal(one[name], two[name]) for name in one if one[name] is not None)


def test_the_table_of_chunks_counts_from_each_sequences_first_token():
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
        ({"k": torch.zeros(2, 11, 3, 8)}, ValueError, "multiple of k's, got 4 and 3"),
        ({"v": torch.zeros(2, 11, 2, 7)}, ValueError, "v must have shape"),
        ({"past_v": None}, ValueError, "past_k and past_v must be given together"),
        ({"mem_count": None}, ValueError, "mem_k and mem_count must be given together"),
        ({"mem_count": torch.zeros(6)}, TypeError, "mem_count must be an int64 tensor"),
        ({"seen": torch.zeros(3, dtype=torch.int64)}, ValueError, "seen must have shape"),
        ({"late_span": 2}, ValueError, "late_span must be at least 1 with late_k"),
        ({"backend": "cpu"}, ValueError, "this op has no such implementation"),
    ],
)
def test_bad_input_is_one_clear_error(changes, kind, message):
    with pytest.raises(kind, match=message):
        eidetic_attention(**{**draw("batch"), **changes})
