"""What holds for every op on sequences: boundaries in any memory, checks under compilation."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

from ssmzoo_kernels import (
    causal_conv1d,
    diagonal_step,
    feedback_scan,
    innovation,
    linear_scan,
    longhorn_scan,
    selective_scan,
    use_backend,
)

L, D, N = 12, 5, 4
ENDS = [0, 3, 7, L]


def drawn():
    """Return, by name, every op and its arguments for one packed row."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    row, keys, rates = normal(1, L, D), normal(1, L, N), -normal(D, N).exp()
    return {
        "causal_conv1d": (causal_conv1d, {"x": row, "weight": normal(D, 4)}),
        "linear_scan": (linear_scan, {"a": row.sigmoid(), "b": normal(1, L, D)}),
        "longhorn_scan": (
            longhorn_scan,
            {"u": row, "q": keys, "k": normal(1, L, N), "dt": normal(1, L, D)},
        ),
        "selective_scan": (
            selective_scan,
            {"u": row, "dt": normal(1, L, D), "A": rates, "B": keys, "C": normal(1, L, N)},
        ),
        "feedback_scan": (
            feedback_scan,
            {"u": row, "lam": rates.clamp(min=-1), "w": normal(D, N), "C": normal(D, N)},
        ),
        "innovation": (innovation, {"y": row, "weights": [0.5, 0.25]}),
    }


OPS = list(drawn())
SLOPED = [name for name in OPS if name != "innovation"]  # which has no gradient


def outputs(name, **more):
    op, arguments = drawn()[name]
    found = op(**{**arguments, **more})
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", OPS)
def test_boundaries_may_lie_apart_in_memory(name, dtype):
    apart = torch.tensor([[end, 99] for end in ENDS], dtype=dtype)[:, 0]
    assert not apart.is_contiguous()
    together = outputs(name, cu_seqlens=torch.tensor(ENDS))
    for got, expected in zip(outputs(name, cu_seqlens=apart), together, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [name for name in OPS if name != "feedback_scan"])
def test_what_is_not_finite_stays_in_its_packed_sequence(name, backend, value):
    first, row = next(iter(drawn()[name][1].items()))
    row[0, 5] = value  # in the second of three
    packed = {first: row, "cu_seqlens": torch.tensor(ENDS)}
    known = outputs(name, **packed, backend="reference")
    for got, expected in zip(outputs(name, **packed, backend=backend), known, strict=True):
        assert torch.equal(got.isfinite(), expected.isfinite())
        assert not expected.isfinite().all()
        sequences = got if len(got) == len(ENDS) - 1 else got[0].tensor_split(ENDS[1:-1])
        assert sequences[0].isfinite().all()
        assert sequences[2].isfinite().all()


@pytest.mark.parametrize("ends", [[0, 7, 3, L], [0, 3, 7, 10], [0, 3, 7, 300_000]])
@pytest.mark.parametrize("name", OPS)
def test_wrong_boundaries_are_named_under_compilation_too(name, ends):
    compiled = torch.compile(lambda ends: outputs(name, cu_seqlens=ends), backend="aot_eager")
    right = torch.tensor(ENDS)
    for got, expected in zip(compiled(right), outputs(name, cu_seqlens=right), strict=True):
        torch.testing.assert_close(got, expected)
    with pytest.raises(ValueError, match=rf"{name}: cu_seqlens must rise from 0 to L = {L}"):
        compiled(torch.tensor(ends))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of torch's own
@pytest.mark.parametrize("name", SLOPED)
def test_only_the_reference_has_forward_mode_derivatives(name):
    first, at = next(iter(drawn()[name][1].items()))
    towards = torch.ones_like(at)

    def moved(by):
        return outputs(name, **{first: at + by * towards}, backend="reference")[0]

    with forward_ad.dual_level():
        dual = {first: forward_ad.make_dual(at, towards)}
        with pytest.raises(NotImplementedError, match=rf"{name}: .*backend=\"reference\""):
            outputs(name, **dual)
        with use_backend("reference"):
            tangent = forward_ad.unpack_dual(outputs(name, **dual)[0]).tangent
    step = 1e-6
    torch.testing.assert_close(
        tangent, (moved(step) - moved(-step)) / (2 * step), rtol=1e-6, atol=1e-7
    )


def test_a_default_device_is_not_where_kernels_write():
    scores, of_row = drawn()["innovation"]
    scan, of_scan = drawn()["feedback_scan"]
    u, state = torch.randn(2, D), torch.randn(2, D, N, dtype=torch.complex64)
    decay = 0.5 * torch.randn(D, N, dtype=torch.complex64)
    calls = {
        "innovation": lambda: scores(**of_row),
        "diagonal_step": lambda: diagonal_step(u, state, decay, decay, decay),
        "feedback_scan": lambda: scan(**of_scan),
    }
    for name, call in calls.items():
        expected = call()
        torch.set_default_device("meta")
        try:
            found = call()
        finally:
            torch.set_default_device(None)
        torch.testing.assert_close(found, expected, msg=name)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of torch's own
def test_what_a_transform_of_torch_made_is_not_kept_for_later_calls():
    y = torch.randn(2, 23, D)  # a batch and length of no other test
    with pytest.raises(NotImplementedError, match="innovation"):
        torch.func.jvp(lambda y: innovation(y, [0.5])[0], (y,), (y,))
    assert innovation(y, [0.5])[0].shape == (2, 23)
