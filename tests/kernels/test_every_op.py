"""What holds for every op on sequences: boundaries in any memory, checks under compilation."""

import itertools
import sys

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from tests.kernels.registered import (
    assert_compiled_gradients_are_the_references,
    assert_far_rows_are_read_rightly,
    assert_layouts_are_as_promised,
    assert_opcheck_passes,
)
from tests.kernels.samples import backends_of, calls
from tests.kernels.triton_processes import assert_interpreted

from ssmzoo_kernels import (
    causal_conv1d,
    diagonal_step,
    feedback_scan,
    innovation,
    linear_scan,
    longhorn_scan,
    rational_kernel,
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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name", ["eidetic_attention", "vandermonde", "vandermonde_state", "rational_kernel"]
)
def test_what_is_not_finite_keeps_to_its_row_in_ops_without_a_c_kernel(name, value):
    """An output is lost at least where the reference's is; no other row is, nor its gradient."""
    reached = False  # by a memory that no query sees, none is
    for call in (*calls(L=9, D=3), *calls(L=9, D=3, bare=True)):
        for spoilt in call.sloped if call.op == name else ():
            lost = {}
            for backend in ("reference", "eager"):
                leaves = {n: None if x is None else x.clone() for n, x in call.tensors.items()}
                x = leaves[spoilt]
                x[(0, *(size // 2 for size in x.shape[1:]))] = value
                for n in call.sloped:
                    leaves[n].requires_grad_()
                (out,) = call.run(leaves, backend=backend)
                grads = torch.autograd.grad(out.abs().sum(), [leaves[n] for n in call.sloped])
                lost[backend] = [~y.isfinite() for y in (out, *grads)]
            reached |= bool(lost["eager"][0].any())
            if name != "eidetic_attention":  # whose reference multiplies unseen values by 0
                assert (lost["eager"][0] >= lost["reference"][0]).all(), spoilt
            for found in lost["eager"]:
                if len(found) == len(x):
                    assert not found[1:].any(), spoilt
    assert reached


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


@pytest.mark.timeout(1200)
def test_registered_ops_pass_opcheck_and_return_the_strides_that_their_fakes_promise():
    assert_opcheck_passes(assert_layouts_are_as_promised(("eager", "cpu"), L=5))


def test_what_many_states_save_lies_as_the_fakes_promise():
    """Between saved states lie as many tokens as there are states, or a little more."""
    assert_layouts_are_as_promised(("eager", "cpu"), L=40, D=2, N=70)


@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:.*complex operators:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of torch's own
@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_gradients_compiled_by_inductor_are_the_references(backend):
    assert_compiled_gradients_are_the_references(backend, L=3, D=4, N=2)


@pytest.mark.timeout(1200)
def test_triton_ops_pass_opcheck_and_compile_with_inductor():
    pytest.importorskip("triton", reason="triton is not installed")
    assert_interpreted("interpreted_every_op.py")


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(("D", "N"), [(2, 3), (1, 1)])
@pytest.mark.parametrize("length", [0, 1, 2])
def test_few_or_no_tokens_have_gradients_to_every_input(length, D, N, bare):
    for call in calls(L=length, D=D, N=N, dtype=torch.float64, bare=bare):
        if not call.sloped:
            continue
        grads = {}
        for backend in ("reference", *backends_of(call.folder)):
            if backend == "triton":
                continue
            leaves = {
                n: x.clone().requires_grad_() if n in call.sloped else x
                for n, x in call.tensors.items()
            }
            found = call.run(leaves, backend=backend)
            loss = sum(y.abs().square().sum() for y in found if y is not None)
            grads[backend] = torch.autograd.grad(loss, [leaves[n] for n in call.sloped])
        for backend, own in grads.items():
            for name, got, expected in zip(call.sloped, own, grads["reference"], strict=True):
                torch.testing.assert_close(
                    got, expected, rtol=1e-9, atol=1e-11, msg=f"{call.op} {backend} {name}"
                )


@pytest.mark.parametrize("length", [0, 1])
def test_a_short_kernel_is_on_the_tape_of_every_backend(length):
    for backend in ("reference", "eager"):
        for name in ("a", "b"):
            leaves = {"a": torch.ones(1, 2), "b": torch.ones(1, 2)}
            leaves[name].requires_grad_()
            kernel = rational_kernel(**leaves, length=length, backend=backend)
            (grad,) = torch.autograd.grad(kernel.sum(), leaves[name])
            assert torch.equal(grad, torch.zeros(1, 2))


@pytest.mark.parametrize("backend", ["reference", "eager", "cpu"])
def test_nothing_of_a_packed_sequence_reaches_another_without_an_initial_state(backend):
    """Boundaries behind the first token, and in, behind and far from chunks of 64 tokens."""
    ends = torch.tensor([0, 1, 1, 66, 130, 140])
    for call in calls(B=1, L=140, D=3, N=2, dtype=torch.float64, bare=True, packed=True):
        if backend not in ("reference", *backends_of(call.folder)):
            continue
        given = {n: x for n, x in call.tensors.items() if x is not None}
        rows = [n for n, x in given.items() if x.dim() > 2 and x.shape[:2] == (1, 140)]
        assert rows, call.op
        for begin, end in itertools.pairwise(ends.tolist()):
            leaves = {n: x.clone().requires_grad_(n in call.sloped) for n, x in given.items()}
            out = call.run(leaves, backend=backend, cu_seqlens=ends)[0]
            alone = {n: x[:, begin:end] if n in rows else x for n, x in given.items()}
            expected = call.run(alone, backend=backend, cu_seqlens=torch.tensor([0, end - begin]))
            torch.testing.assert_close(
                out[:, begin:end].detach(), expected[0], rtol=1e-12, atol=1e-12, msg=call.op
            )
            if call.sloped and end > begin:
                loss = out[:, begin:end].square().sum()
                for name in {*rows} & {*call.sloped}:
                    (grad,) = torch.autograd.grad(loss, leaves[name], retain_graph=True)
                    grad[:, begin:end] = 0
                    assert not grad.any(), f"{call.op}: {name} of another sequence has a gradient"


@pytest.mark.skipif(sys.platform != "linux", reason="memory that only what is touched takes")
@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_rows_beyond_32_bits_are_read_rightly(backend):
    assert_far_rows_are_read_rightly(backend)
