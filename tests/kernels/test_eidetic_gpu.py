"""The Triton kernels of eidetic_attention on a real GPU."""

import functools
import itertools

import pytest
import torch

from ssmzoo_kernels import eidetic_attention, last_backend
from ssmzoo_kernels.eidetic_attention import chunk_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def draw(
    lengths,
    seen,
    *,
    heads=4,
    groups=2,
    width=64,
    window=128,
    memory=24,
    positions=False,
    dtype=torch.float32,
):
    """The arguments of a packed call: floating tensors, and the rest."""
    sequences, tokens = len(seen), sum(lengths)

    def random(*shape, heads=groups):
        return torch.randn(*shape, heads, width, device=DEVICE).to(dtype)

    offsets = torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE)
    before = torch.tensor(seen, device=DEVICE)
    tensors = {"q": random(1, tokens, heads=heads), "k": random(1, tokens), "v": random(1, tokens)}
    rest = {"window": window, "seen": before, "cu_seqlens": offsets}
    if any(seen):
        past = max(seen) if window is None else window - 1
        tensors |= {"past_k": random(sequences, past), "past_v": random(sequences, past)}
    if memory:
        chunks = chunk_table(offsets.diff(), before, window)
        count = len(chunks.number)
        tensors |= {"mem_k": random(count, memory), "mem_v": random(count, memory)}
        rest["mem_count"] = (chunks.number * window).clamp(max=memory)
        if positions:
            back = 3 * torch.arange(memory, device=DEVICE)
            rest["mem_positions"] = ((chunks.number * window)[:, None] - 1 - back).clamp(min=0)
    return tensors, rest


def results(tensors, rest, backend, wide=None):
    """The output and all gradients under a fixed random loss."""
    leaves = {n: x.to(wide or x.dtype).detach().requires_grad_() for n, x in tensors.items()}
    out = eidetic_attention(**leaves, **rest, backend=backend)
    assert last_backend("eidetic_attention") == backend
    generator = torch.Generator(DEVICE).manual_seed(1)
    weights = torch.randn(out.shape, generator=generator, device=DEVICE)
    loss = (out.double() * weights).sum()
    grads = torch.autograd.grad(loss, [*leaves.values()], materialize_grads=True)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def judge(tensors, rest, backend="triton"):
    """Fail unless a backend is about as close to float64 as the reference is.

    Besides the reference's own error, a result may err by the roundings of a sum over all keys.
    """
    truth = results(tensors, rest, "reference", torch.float64)
    usual = results(tensors, rest, "reference")
    found = results(tensors, rest, backend)
    keys = rest["window"] or int(rest["cu_seqlens"].diff().max() + rest["seen"].max())
    for name, exact in truth.items():
        got = found[name]
        assert got.dtype == usual[name].dtype
        if not exact.any():  # a past that nobody reads
            assert not got.any(), name
            continue
        rounding = max(4.0, keys**0.5) * torch.finfo(got.dtype).eps * exact.abs().max()
        budget = 2 * (usual[name] - exact).abs().max() + rounding
        error = (got - exact).abs().max()
        assert error <= budget, f"{name}: off by {error:.2e}, budget {budget:.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "seen", "options"),
    [
        ([1000], [0], {}),
        ([300, 0, 1, 517], [0, 5, 0, 0], {"positions": True}),
        ([300, 129, 64, 7], [100, 0, 1000, 12], {"memory": 100}),
        ([700, 130], [3, 130], {"window": 200, "groups": 4}),
        ([260], [77], {"window": 1, "memory": 5}),
        ([300, 100], [0, 250], {"window": None, "memory": 0}),
    ],
    ids=str,
)
def test_all_layouts_equal_the_reference(lengths, seen, options, dtype):
    judge(*draw(lengths, seen, dtype=dtype, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 16, 96, 128, 256])
def test_heads_of_any_width_equal_the_reference(width, dtype):
    call = draw([300, 45], [0, 140], width=width, dtype=dtype)
    if dtype == torch.float32 and width > 128:
        with pytest.raises(ValueError, match="at most 128 columns"):
            results(*call, "triton")
    else:
        judge(*call)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 128])
def test_decoding_equals_the_reference(width, dtype):
    seen = [0, 1, 127, 128, 129, 1000, 511, 512]
    judge(*draw([1] * len(seen), seen, width=width, positions=True, dtype=dtype))


def test_float64_keeps_float64_sums():
    call = draw([300, 45], [77, 140], dtype=torch.float64)
    found, exact = (results(*call, backend) for backend in ("triton", "reference"))
    for name, value in exact.items():
        assert (found[name] - value).abs().max() <= 1e-12 * value.abs().max(), name


def test_a_cuda_tensor_goes_to_triton():
    tensors, rest = draw([300], [0])
    eidetic_attention(**tensors, **rest)
    assert last_backend("eidetic_attention") == "triton"


def test_torch_equals_the_reference_too():
    tensors, rest = draw([300, 129, 7], [100, 0, 12], positions=True)
    found, exact = (results(tensors, rest, x, torch.float64) for x in ("eager", "reference"))
    for name, value in exact.items():
        assert (found[name] - value).abs().max() <= 1e-12 * value.abs().max(), name


def test_repeated_calls_give_the_same_bits():
    call = draw([900, 300], [0, 100], dtype=torch.bfloat16)
    one, two = results(*call, "triton"), results(*call, "triton")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_calls_do_not_wait_for_the_gpu():
    call = draw([900, 300], [0, 100], dtype=torch.bfloat16)
    results(*call, "triton")  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(*call, "triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_long_sequences_need_memory_for_tensors_of_their_size_alone():
    """With 131072 tokens, one score a token and key would take 64 GiB."""
    tensors, rest = draw([1 << 17], [0], heads=1, groups=1, dtype=torch.bfloat16)
    results(tensors, rest, "triton")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results(tensors, rest, "triton")
    inputs = sum(x.numel() * x.element_size() for x in tensors.values())
    # leaves, output, its float64 copy and loss, their gradients, and those of the inputs
    assert torch.cuda.max_memory_allocated() - before <= 16 * inputs


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # torch's own, at import
def test_compiled_models_give_the_same_outputs_and_gradients():
    tensors, rest = draw([300, 45], [0, 140])
    leaves = [x.requires_grad_() for x in tensors.values()]

    def layer(*x, backend):
        named = dict(zip(tensors, x, strict=True))
        return torch.sin(eidetic_attention(**named, **rest, backend=backend))

    run = functools.partial(layer, backend="triton")
    found = []
    for function in (torch.compile(run, fullgraph=True), run):
        out = function(*leaves)
        found.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)
