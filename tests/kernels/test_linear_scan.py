"""linear_scan: every fast backend against the loop over time."""

import pytest
import torch
from tests.kernels import contracts

from ssmzoo_kernels import linear_scan


class TestLinearScan(contracts.LinearScan):
    """Every check of the contract."""


class TestComplexLinearScan(contracts.ComplexLinearScan):
    """Every check of the contract."""


PAIRED = pytest.mark.parametrize("paired", [False, True], ids=["real", "complex"])


def draw(B=2, L=9, D=5, segments=None, paired=False, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, L, D), (B, L, D), (segments or B, D))
    tail = (2,) if paired else ()
    a, b, state = (torch.randn(*x, *tail, generator=generator, dtype=torch.float64) for x in shapes)
    # some factors above 1, products that neither vanish nor explode
    return [x.to(dtype) for x in (a / (1.5 if paired else 1.0), b, state)]


def on(backend, paired=False, **options):
    """The op; complex numbers come and go as pairs of reals."""

    def run(*inputs):
        if paired:
            inputs = [x if x is None else torch.view_as_complex(x) for x in inputs]
        found = linear_scan(*inputs, backend=backend, **options)
        return tuple(torch.view_as_real(x) for x in found) if paired else found

    return run


def close(got, expected, tolerance):
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    error = (got - expected).abs().max()
    assert error <= tolerance * expected.abs().max(), f"error {error:.2e}"


# --- accuracy: states, final state, all gradients --------------------------------------------


def test_half_inputs_keep_a_float32_state(backend):
    """Small additions to a large state, which bfloat16 would drop."""
    a, b = torch.ones(1, 1000, 3).bfloat16(), torch.full((1, 1000, 3), 2.0**-9).bfloat16()
    h, final = linear_scan(a, b, torch.ones(1, 3), backend=backend)
    assert final.dtype == torch.float32
    assert torch.equal(final, torch.full((1, 3), 1 + 1000 * 2.0**-9))
    assert h.dtype == torch.bfloat16


# --- products that overflow and underflow -----------------------------------------------------


@PAIRED
@pytest.mark.parametrize("length", [128, 6000])
def test_products_that_overflow_and_underflow_change_no_state(backend, paired, length):
    """Factors of size 50 and 1/50 in runs: products reach 50^40 either way, states never do."""
    a, _, state = draw(B=1, L=length, D=2, paired=paired)
    power = torch.tensor([1.0] * 40 + [-1.0] * 40).repeat(length // 80 + 1)[:length]
    power = power.view(1, length, *[1] * (a.dim() - 2))
    near = 1 + 1e-3 * torch.randn_like(power)  # equal factors would round equally, time after time
    a = (a / size(a, paired) * 50.0**power * near).float()
    inputs = [a, torch.zeros_like(a), (state * 1e-35).float()]
    exact = on("reference", paired)(*(x.double() for x in inputs))[0]
    loop, found = (on(x, paired)(*inputs)[0] for x in ("reference", backend))
    assert loop.isfinite().all()
    assert torch.finfo(torch.float32).max < 50.0**40
    errors = [(size(x - exact, paired) / size(exact, paired)).max() for x in (found, loop)]
    assert errors[0] <= 4 * errors[1], errors


def size(x, paired):
    return torch.hypot(*x.unbind(-1)).unsqueeze(-1) if paired else x.abs()


@PAIRED
def test_products_of_a_chunk_beyond_all_exponents_change_no_state(backend, paired):
    """Factors of 2^100 on zero states, then a product of 2^-100 on large ones."""
    length = 6000
    a = torch.full((1, length, 2), 2.0**100)
    a[:, length // 2 :] = 2.0**-100
    b = torch.zeros_like(a)
    b[:, length // 2] = 1e30
    if paired:
        a, b = (torch.stack([x, torch.zeros_like(x)], dim=-1) for x in (a, b))
    inputs = [x.requires_grad_() for x in (a, b)]
    loop, found = (on(x, paired)(*inputs) for x in ("reference", backend))
    for got, expected in zip(found, loop, strict=True):
        assert expected.isfinite().all()
        close(got, expected, 1e-6)


@PAIRED
def test_gradients_cross_the_chunks_of_a_long_sequence(backend, paired):
    """Factors of size 1 forget nothing, so that the last state depends on every token."""
    a, b, state = draw(B=1, L=6000, D=2, paired=paired)
    inputs = [x.requires_grad_() for x in (a / size(a, paired), b, state)]
    finals = [on(x, paired)(*inputs)[1] for x in ("reference", backend)]
    ones = torch.ones_like(finals[0])
    loop, found = (torch.autograd.grad(final, inputs, ones) for final in finals)
    for got, expected in zip(found, loop, strict=True):
        close(got, expected, 1e-10)


# --- sequences: halves, packed rows, batches --------------------------------------------------


def test_training_keeps_factors_and_states_and_nothing_else(backend):
    inputs = [x.requires_grad_() for x in draw(L=400, dtype=torch.float32)]
    own = {x.untyped_storage().data_ptr() for x in inputs}
    kept = {}

    def pack(x):
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        h, _ = linear_scan(*inputs, backend=backend)
    assert [x.data_ptr() for x in kept.values()] == [h.data_ptr()]


# --- torch.library and torch.compile ----------------------------------------------------------


def test_registered_ops_of_bfloat16_pass_opcheck(backend):
    a, b = (torch.randn(20, 3, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    exact = torch.float32
    state, offsets = torch.randn(3, 3, dtype=exact, requires_grad=True), torch.tensor([0, 8, 8, 20])
    for start in (state, None):
        torch.library.opcheck(torch.ops.ssmzoo.linear_scan.default, (a, b, start, offsets, backend))
        h, grad_h, grad_final = (torch.randn(x, 3, dtype=exact) for x in (20, 20, 3))
        start = None if start is None else start.detach()
        torch.library.opcheck(
            torch.ops.ssmzoo.linear_scan_backward.default,
            (grad_h, grad_final, a.detach(), h, start, offsets, backend),
        )


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "other"), [("a", "b"), ("b", "b")])
def test_real_and_complex_tensors_do_not_mix(name, other):
    inputs = dict(zip(("a", "b", "initial_state"), draw(), strict=True))
    with pytest.raises(TypeError, match=f"linear_scan: {other} must be"):
        linear_scan(**inputs | {name: torch.ones(2, 9, 5).cfloat()})


# --- the Triton kernels -----------------------------------------------------------------------
