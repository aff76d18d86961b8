"""eidetic_attention's Triton kernels against the reference in Triton's interpreter.

Not collected by name: ``test_triton_interpreted.py`` runs this file in a process of its own, where
``TRITON_INTERPRET=1`` holds before anything imports triton.
"""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.interpreter import repair

from ssmzoo.testing.accuracy import assert_as_accurate
from ssmzoo_kernels import eidetic_attention, last_backend, use_backend
from ssmzoo_kernels.eidetic_attention import chunk_table
from ssmzoo_kernels.eidetic_attention import triton as attention_triton

# numpy warns where a GPU goes to infinity, as the formulas mean it to
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|divide by zero):RuntimeWarning"
)
WINDOW = 5


repair()
tile = attention_triton.tile


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles that cut chunks, memories and sequences, and divide none."""
    use_tiles(monkeypatch, 4, 2)


def use_tiles(monkeypatch, owned, met):
    shape = attention_triton.Tile(owned, met, 4, 1)
    monkeypatch.setattr(attention_triton, "tile", lambda *_: shape)


def draw(
    lengths,
    seen,
    *,
    packed=True,
    heads=1,
    groups=1,
    width=3,
    window=WINDOW,
    memory=3,
    positions=False,
    dtype=torch.float64,
):
    """The arguments of a call, floating tensors with gradients."""
    sequences, tokens = len(seen), sum(lengths)
    shape = (1, tokens) if packed else (sequences, lengths[0])

    def random(*shape, heads=groups):
        return torch.randn(*shape, heads, width).to(dtype).requires_grad_()

    offsets, seen = torch.tensor([0, *itertools.accumulate(lengths)]), torch.tensor(seen)
    call = {"q": random(*shape, heads=heads), "k": random(*shape), "v": random(*shape)}
    call |= {"window": window, "seen": seen}
    if packed:
        call["cu_seqlens"] = offsets.int()
    if seen.any():
        # more than is seen: the rows too many are not read
        past = int(seen.max()) if window is None else window + 1
        call |= {"past_k": random(sequences, past), "past_v": random(sequences, past)}
    if memory:
        chunks = chunk_table(offsets.diff(), seen, window)
        count = len(chunks.number) + 1  # the last belongs to no chunk
        call |= {"mem_k": random(count, memory), "mem_v": random(count, memory)}
        held = (chunks.number * window).clamp(max=memory)
        call["mem_count"] = torch.cat([held, torch.tensor([memory])])
        if positions:
            ends = torch.cat([chunks.number * window, torch.tensor([0])])[:, None]
            call["mem_positions"] = (ends - 1 - 2 * torch.arange(memory)).clamp(min=0)
    return call


def floating(call):
    """Split a call's arguments into tensors with gradients and the rest."""
    tensors = {n: x for n, x in call.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    return tensors, {n: x for n, x in call.items() if n not in tensors}


def run(call, backend):
    """The output and the gradients of everything that floats, by name."""
    tensors, _ = floating(call)
    out = eidetic_attention(**call, backend=backend)
    assert last_backend("eidetic_attention") == backend
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    grads = torch.autograd.grad((out * weights).sum(), [*tensors.values()], materialize_grads=True)
    return {"out": out, **dict(zip(tensors, grads, strict=True))}


def judge(call, budget=1e-12):
    got, expected = run(call, "triton"), run(call, "reference")
    for name, value in expected.items():
        assert got[name].shape == value.shape
        error, largest = (x.abs().max() if x.any() else 0.0 for x in (got[name] - value, value))
        assert error <= budget * largest, name


def judge_accuracy(call, dtype):
    """As exact as the torch backend, which as every attention keeps rounded log sums."""
    tensors, rest = floating(call)

    def on(backend):
        return lambda *x: eidetic_attention(
            **dict(zip(tensors, x, strict=True)), **rest, backend=backend
        )

    assert_as_accurate(on("triton"), on("eager"), [*tensors.values()], dtype)
    assert last_backend("eidetic_attention") == "triton"


# --- layouts ----------------------------------------------------------------------------------


def test_packed_sequences_that_go_on_equal_the_loop(small_tiles):
    """Everything at once: every seam, two heads a group, memory that hides."""
    judge(draw([6, 0, 9, 1], [3, 2, 0, 12], heads=4, groups=2, positions=True))


@pytest.mark.parametrize(
    ("lengths", "seen", "options"),
    [
        ([11], [0], {"heads": 2, "groups": 2}),
        ([6, 6], [7, 7], {}),
        ([4, 4], [5, 10], {"positions": True, "heads": 2}),
        ([1, 7, 0], [0, 4, 9], {"memory": 7}),
    ],
    ids=str,
)
def test_sequences_of_every_kind_equal_the_loop(small_tiles, lengths, seen, options):
    judge(draw(lengths, seen, packed=len({*lengths}) > 1, **options))


@pytest.mark.parametrize("seen", [[0, 0], [3, 0]], ids=["from the first token", "going on"])
def test_without_a_window_all_of_the_past_is_read(small_tiles, seen):
    judge(draw([6, 9], seen, window=None, memory=0))


@pytest.mark.parametrize(("window", "memory"), [(1, 2), (4, 0), (16, 3)])
def test_windows_of_any_size_equal_the_loop(small_tiles, window, memory):
    judge(draw([7], [6], window=window, memory=memory))


@pytest.mark.parametrize("seen", [[0, 4, 5, 17], [3, 3, 3, 3]], ids=str)
def test_a_token_of_every_sequence_takes_the_tile_for_decoding(monkeypatch, seen):
    asked = []
    monkeypatch.setattr(attention_triton, "tile", lambda *x: asked.append(x[2]) or tile(*x))
    judge(draw([1, 1, 1, 1], seen, packed=False))
    assert asked == ["decode", "query", "keys"]


# --- tiles and precisions ---------------------------------------------------------------------


def test_tiles_that_all_queries_see_are_read_without_a_mask(monkeypatch):
    """Blocks of 4 queries, tiles of 4 keys and a window of 16: masked and whole ones."""
    use_tiles(monkeypatch, 4, 4)
    masked, original = [], attention_triton.meet

    def meet(*arguments):
        masked.append(arguments[-3:-1])
        return original(*arguments)

    monkeypatch.setattr(attention_triton, "meet", meet)
    judge(draw([36], [0], window=16))
    assert {*masked} == {*itertools.product((False, True), repeat=2)}


@pytest.mark.parametrize(
    ("width", "dtype", "target"),
    [
        (96, torch.float32, "sm_80"),
        (5, torch.float32, "sm_80"),
        (65, torch.bfloat16, "sm_80"),
        (200, torch.bfloat16, "sm_80"),
        (200, torch.bfloat16, "sm_90"),
        (24, torch.float16, "hip"),
    ],
    ids=str,
)
def test_the_real_tiles_are_as_exact_as_torch(width, dtype, target, monkeypatch):
    """Chunks longer than a tile of queries, cut short, and packed with a call that goes on."""
    monkeypatch.setattr(attention_triton, "target_of", lambda device: target)
    window = tile(width, dtype, "forward", target).owned + 6
    lengths = [window + 20, window // 2]
    call = draw(lengths, [0, window - 9], width=width, window=window, memory=20, dtype=dtype)
    judge_accuracy(call, dtype)


def test_tails_of_the_real_tiles_equal_the_loop():
    """Sequences around one tile of float64's and around 64 tokens, in chunks of their length."""
    assert {tile(5, torch.float64, x, "sm_80")[:2] for x in ("forward", "query", "keys")} == {
        (32, 32)
    }
    lengths = [1, 31, 32, 33, 65]
    judge(draw(lengths, [0] * len(lengths), width=5, window=64, memory=33))


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "hip"])
def test_tails_of_the_widest_heads_tiles_are_as_exact_as_torch(target, monkeypatch):
    monkeypatch.setattr(attention_triton, "target_of", lambda device: target)
    owned, met, *_ = tile(200, torch.bfloat16, "keys", target)
    lengths = sorted({x + i for x in (owned, met) for i in (-1, 1)} | {1, 65})
    call = draw(
        lengths, [0] * len(lengths), width=200, window=64, memory=owned + 1, dtype=torch.bfloat16
    )
    judge_accuracy(call, torch.bfloat16)


def test_programs_are_shaped_for_the_gpu(monkeypatch):
    target_of = attention_triton.target_of.__wrapped__
    gpu = torch.device("cuda", 0)
    for capability, target in {(8, 0): "sm_80", (9, 0): "sm_90", (12, 0): "sm_80"}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, x=capability: x)
        assert target_of(gpu) == target
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert target_of(gpu) == "hip"


def test_float64_keeps_float64_sums_in_the_real_tiles():
    judge(draw([50, 9], [0, 61], width=5, window=40, memory=33))


# --- what must not happen ---------------------------------------------------------------------


@torch.no_grad()
def test_nan_stays_in_its_sequence(small_tiles):
    call = draw([5, 6, 3], [3, 7, 0])
    for name in ("k", "v"):
        call[name].detach()[0, 4] = torch.nan
    out = eidetic_attention(**call, backend="triton")[0]
    assert out[4].isnan().all()
    assert out[5:].isfinite().all()


@pytest.mark.parametrize(("width", "backend"), [(128, "triton"), (129, "cpu")])
def test_heads_too_wide_for_the_kernels_go_elsewhere(width, backend):
    q = torch.randn(1, 2, 1, width)
    with use_backend("triton"):
        eidetic_attention(q, q, q, window=2)
    assert last_backend("eidetic_attention") == backend


@triton.jit
def careless(a, b, ACC: tl.constexpr):
    return tl.dot(a, b, input_precision="ieee", out_dtype=ACC) * 0.9999


def test_products_that_are_slightly_wrong_are_noticed(monkeypatch, small_tiles):
    monkeypatch.setattr(attention_triton, "product", careless)
    with pytest.raises(AssertionError, match="exceeds"):
        judge_accuracy(draw([6], [0], dtype=torch.float32), torch.float32)


def test_this_process_interprets():
    kernel = attention_triton.eidetic_attention_fwd_kernel
    assert not isinstance(kernel, triton.JITFunction)
