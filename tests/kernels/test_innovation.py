"""innovation and select_memory: every backend against the loop, and streaming against sorting."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.kernels import contracts

from ssmzoo.testing.accuracy import assert_as_accurate, outputs_and_grads
from ssmzoo_kernels import innovation, last_backend, select_memory


class TestInnovation(contracts.Innovation):
    """Every check of the contract."""


HALVES = (0.4, 0.3, 0.2, 0.1)


def draw(B=2, L=9, D=5, k=4, segments=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, L, D), (segments or B, k, D))
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes]


def bounds(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def close(got, expected, tolerance):
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    error = (got.double() - expected.double()).abs().max()
    assert error <= tolerance * expected.double().abs().max(), f"error {error:.2e}"


def judge(inputs, weights, backend, dtype=torch.float32, **options):
    """Hold a backend against the loop; the history must be equal bit for bit."""

    def run(name):
        return lambda y, history: innovation(y, weights, history, backend=name, **options)

    def scores(name):
        return lambda y, history: run(name)(y, history)[0].requires_grad_()

    assert_as_accurate(scores(backend), scores("reference"), inputs, dtype)
    exact, truth = (
        outputs_and_grads(scores(x), inputs, torch.float64) for x in (backend, "reference")
    )
    if truth["output 0"].numel():
        close(exact["output 0"], truth["output 0"], 1e-13)
    rounded = [x.to(dtype) for x in inputs]
    got, known = (run(name)(*rounded)[1] for name in (backend, "reference"))
    assert got.dtype == dtype
    assert torch.equal(got, known)


# --- the predictor's error --------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 16, 63, 1030])
@pytest.mark.parametrize("span", [1, 2, 9])
def test_any_width_and_span_is_as_exact_as_the_loop(backend, width, span):
    judge(draw(L=12, D=width, k=span), [1 / span] * span, backend)


def test_scores_are_those_of_a_causal_convolution(backend):
    y, _ = draw(L=30, D=7)
    taps = torch.tensor(HALVES[::-1], dtype=y.dtype).expand(7, 1, 4)
    guess = F.conv1d(F.pad(y.transpose(1, 2), (4, 0)), taps, groups=7)[..., :30].transpose(1, 2)
    close(innovation(y, HALVES, backend=backend)[0], (y - guess).square().mean(-1), 1e-13)
    relative = (y - guess).square().sum(-1) / (y.square().sum(-1) + 1e-6)
    close(innovation(y, HALVES, relative=True, backend=backend)[0], relative, 1e-13)


def test_innovation_is_zero_for_constants_and_largest_at_a_spike(backend):
    y = torch.ones(1, 40, 6, dtype=torch.float64)
    y[0, 20] = 5
    scores, _ = innovation(y, [0.25] * 4, backend=backend)
    assert torch.equal(scores[0, :4], torch.tensor([16, 9, 4, 1], dtype=y.dtype) / 16)
    assert (scores[0, 4:20] == 0).all()
    assert (scores[0, 25:] == 0).all()
    assert scores.argmax() == 20


def test_no_gradient_flows(backend):
    y, history = (x.requires_grad_() for x in draw())
    scores, end = innovation(y, HALVES, history, backend=backend)
    assert not scores.requires_grad
    assert not end.requires_grad


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(1, 3, 0), HALVES), ValueError, "y must have at least one channel"),
        ((torch.ones(1, 3, 4), []), ValueError, "weights must have at least one entry, got none"),
        ((torch.ones(1, 3, 4), None), TypeError, "weights must be a sequence of numbers, got None"),
        ((torch.ones(1, 3, 4), [1, "a"]), TypeError, "weights must be a sequence of numbers"),
        ((torch.ones(1, 3, 4), [math.nan]), ValueError, r"weights must be finite, got \[nan\]"),
    ],
)
def test_wrong_input_is_named(arguments, error, message):
    with pytest.raises(error, match=f"innovation: {message}"):
        innovation(*arguments)


def test_relative_is_true_or_false():
    y, _ = draw(B=1)
    with pytest.raises(TypeError, match="relative must be True or False, got 'no'"):
        innovation(y, HALVES, relative="no")


# --- what is remembered -----------------------------------------------------------------------


def tied_scores(rows=5, length=37, values=4):
    """Few different values, so that most are tied."""
    return torch.randint(values, (rows, length)).float()


def largest(scores, count):
    """The first `count` by score and then by age, one row at a time in plain Python."""
    found = []
    for row in scores.tolist():
        best = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
        found.append(sorted(best))
    return torch.tensor(found)


def merged(scores, count, chunk):
    """Merge chunk after chunk into a memory that starts empty."""
    rows, length = scores.shape
    kept = torch.empty(rows, 0), torch.empty(rows, 0, dtype=torch.int64)
    position = torch.arange(length).expand(rows, -1)
    for at in range(0, length, chunk):
        piece = slice(at, at + chunk)
        found = select_memory(*kept, scores[:, piece], position[:, piece], count)
        kept = found.scores, found.positions
    return found


def streamed(scores, count):
    """A new token enters on a strictly larger score; the youngest of the smallest leaves."""
    found = []
    for row in scores.tolist():
        memory = {}
        for position, score in enumerate(row):
            if len(memory) < count:
                memory[position] = score
            elif memory and score > min(memory.values()):
                smallest = min(memory.values())
                del memory[max(p for p, s in memory.items() if s == smallest)]
                memory[position] = score
        found.append(sorted(memory))
    return torch.tensor(found)


@pytest.mark.parametrize("count", [1, 3, 8, 20, 37])
@pytest.mark.parametrize("chunk", [1, 4, 5, 37])
def test_streaming_merging_and_sorting_keep_the_same_tokens(count, chunk):
    scores = tied_scores()
    found = merged(scores, count, chunk)
    expected = largest(scores, count)
    assert torch.equal(found.positions, expected)
    assert torch.equal(streamed(scores, count), expected)
    assert torch.equal(found.scores, scores.gather(1, expected))
    assert found.count.tolist() == [count] * 5


def test_evicting_the_oldest_of_tied_scores_would_be_wrong():
    """The trap that the test above would fall into with a wrong rule."""
    scores = tied_scores()

    def oldest_leaves(row, count):
        memory = {}
        for position, score in enumerate(row):
            if len(memory) < count:
                memory[position] = score
            elif score > min(memory.values()):
                del memory[min(memory, key=lambda p: (memory[p], p))]
                memory[position] = score
        return sorted(memory)

    assert [oldest_leaves(row, 20) for row in scores.tolist()] != largest(scores, 20).tolist()


def test_the_order_of_the_arguments_does_not_decide_ties():
    scores, position = tied_scores(), torch.arange(37).expand(5, -1)
    turned = torch.randperm(37)
    found = select_memory(
        scores[:, turned[:9]], position[:, turned[:9]],
        scores[:, turned[9:]], position[:, turned[9:]], 8,
    )  # fmt: skip
    assert torch.equal(found.positions, largest(scores, 8))
    assert torch.equal(turned[found.indices], found.positions)


def test_places_that_hold_nothing_come_last_and_do_not_count():
    none = -torch.inf
    scores = torch.tensor([[2.0, none, none], [none, none, none]])
    positions = torch.tensor([[7, 0, 0], [0, 0, 0]])
    new, at = torch.tensor([[none, 3.0], [none, none]]), torch.tensor([[1, 9], [4, 5]])
    found = select_memory(scores, positions, new, at, 3)
    assert found.count.tolist() == [2, 0]
    assert found.positions[0, :2].tolist() == [7, 9]
    assert found.indices[0, :2].tolist() == [0, 4]
    assert found.scores[0].tolist() == [2, 3, none]
    assert found.scores[1].isneginf().all()


def test_a_memory_larger_than_the_sequence_holds_all_tokens():
    scores, position = tied_scores(length=6), torch.arange(6).expand(5, -1)
    found = select_memory(scores[:, :2], position[:, :2], scores[:, 2:], position[:, 2:], 20)
    assert torch.equal(found.positions, position)
    assert torch.equal(found.indices, position)
    assert torch.equal(found.scores, scores)
    assert found.count.tolist() == [6] * 5
    nothing = select_memory(scores, position, scores[:, :0], position[:, :0], 0)
    assert nothing.positions.shape == (5, 0)


def test_the_selection_has_no_gradient():
    scores, position = tied_scores().requires_grad_(), torch.arange(37).expand(5, -1)
    found = select_memory(scores[:, :9], position[:, :9], scores[:, 9:], position[:, 9:], 8)
    assert not found.scores.requires_grad


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"scores": [1.0]}, TypeError, r"scores must be a tensor \[R, m\], got list"),
        ({"scores": torch.ones(3)}, ValueError, r"scores must have shape \[R, m\], got \[3\]"),
        ({"scores": torch.ones(2, 3).int()}, TypeError, "scores must be floating point"),
        (
            {"positions": torch.ones(2, 4).long()},
            ValueError,
            r"positions must have scores' shape \[2, 3\], got \[2, 4\]",
        ),
        (
            {"new_positions": torch.ones(2, 3).long()},
            ValueError,
            r"new_positions must have new_scores' shape \[2, 4\], got \[2, 3\]",
        ),
        ({"positions": torch.ones(2, 3)}, TypeError, "positions must be an int64 tensor"),
        ({"new_positions": None}, TypeError, "new_positions must be an int64 .*got NoneType"),
        (
            {"positions": torch.ones(2, 3, device="meta").long()},
            ValueError,
            "positions must be on cpu, got meta",
        ),
        (
            {"new_scores": torch.ones(1, 4)},
            ValueError,
            r"new_scores must have shape \[R, n\] = \[2, 4\], got \[1, 4\]",
        ),
        (
            {"new_scores": torch.full((2, 4), math.nan)},
            ValueError,
            "scores and new_scores must not be nan",
        ),
        ({"count": -1}, ValueError, "count must be 0 or more, got -1"),
        ({"count": 2.5}, TypeError, "count must be an integer, got 2.5"),
    ],
)
def test_wrong_memories_are_named(change, kind, message):
    arguments = {
        **{"scores": torch.ones(2, 3), "positions": torch.ones(2, 3).long()},
        **{"new_scores": torch.ones(2, 4), "new_positions": torch.ones(2, 4).long(), "count": 2},
    }
    with pytest.raises(kind, match=f"select_memory: .*{message}"):
        select_memory(**(arguments | change))


def test_an_infinite_score_is_kept():
    scores, position = torch.tensor([[1.0, torch.inf, 3.0, 2.0]]), torch.arange(4)[None]
    found = select_memory(scores[:, :2], position[:, :2], scores[:, 2:], position[:, 2:], 2)
    assert found.positions.tolist() == [[1, 2]]


# --- Triton -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("relative", [False, True])
def test_the_kernel_on_a_gpu_equals_the_reference(dtype, relative):
    lengths = (1, 7, 0, 63, 64, 65, 300)
    y, history = (x.cuda() for x in draw(B=1, L=sum(lengths), D=1100, segments=7, dtype=dtype))
    options = {"cu_seqlens": bounds(*lengths).cuda(), "relative": relative}
    exact, _ = innovation(y.double(), HALVES, history.double(), backend="reference", **options)
    scores, end = innovation(y, HALVES, history, **options)
    assert last_backend("innovation") == "triton"
    assert (scores.double() - exact).abs().max() <= 1e-6 * exact.abs().max()
    assert torch.equal(end, innovation(y, HALVES, history, backend="reference", **options)[1])
