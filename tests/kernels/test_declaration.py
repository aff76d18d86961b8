"""How gradients of a declared op reach its kernels: at once, or through ``torch.library``."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ssmzoo_kernels import (
    causal_conv1d,
    linear_scan,
    longhorn_scan,
    native,
    rms_norm,
    selective_scan,
)
from ssmzoo_kernels.dispatch import watch


def norm_inputs():
    return torch.randn(3, 8, requires_grad=True), torch.ones(8, requires_grad=True)


def test_gradients_of_gradients_are_refused_also_of_a_sum(backend):
    x, weight = norm_inputs()
    loss = rms_norm(x, weight, eps=1e-5, backend=backend).sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        slope.square().sum().backward()


def test_the_reference_has_gradients_of_gradients(backend):
    u, k, dt = (torch.randn(1, 5, n, dtype=torch.float64, requires_grad=True) for n in (2, 3, 2))
    loss = longhorn_scan(u, k, k, dt, backend="reference")[0].sum()
    (slope,) = torch.autograd.grad(loss, k, create_graph=True)
    assert torch.autograd.grad(slope.square().sum(), k)[0].any()


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_ops_of_a_step(backend):
    a, b = torch.rand(2, 1, 4, 3).unbind()
    with Seen() as seen:
        linear_scan(a.requires_grad_(), b, backend=backend)[0].sum().backward()
    assert {"ssmzoo.linear_scan.default", "ssmzoo.linear_scan_backward.default"} <= seen.names


def test_a_wrapped_weight_beside_plain_numbers_is_unwrapped(backend):
    """A kernel would read a wrapper's memory, of which there is none."""
    x, weight = norm_inputs()
    wrapped = TwoTensor(weight.detach(), weight.detach() * 2)
    with watch() as kernels:
        y = rms_norm(x, wrapped, eps=1e-5, backend=backend)
    plain = rms_norm(x, weight, eps=1e-5, backend=backend)
    assert kernels == [("rms_norm", backend)] * 2
    assert torch.equal(y.a, plain)
    assert torch.equal(y.b, 2 * plain)


@torch.no_grad()
def test_wrapped_tensors_are_unwrapped_without_gradients_wherever_they_stand(backend):
    x, weight = torch.randn(2, 5, 3), torch.randn(3, 4)
    (y, _), plain = (
        causal_conv1d(x, w, backend=backend) for w in (TwoTensor(weight, 2 * weight), weight)
    )
    assert torch.equal(y.a, plain[0])
    u, dt, A, B, C = (
        torch.rand(shape) for shape in ((2, 5, 3), (2, 5, 3), (3, 4), *[(2, 5, 4)] * 2)
    )
    (y, _), plain = (
        selective_scan(u, dt, -a, B, C, backend=backend) for a in (TwoTensor(A, 2 * A), A)
    )
    assert torch.equal(y.a, plain[0])
    assert not torch.equal(y.b, plain[0])


@torch.no_grad()
def test_a_negation_that_is_yet_to_come_is_seen(backend):
    x, weight = torch.randn(2, 5, 3), torch.randn(3, 4)
    lazy, known = (causal_conv1d(u, weight, backend=backend)[0] for u in (torch._neg_view(x), -x))
    torch.testing.assert_close(lazy, known)


def some_ops(x, backend):
    """Return what ops of one, two and many tensors give for ``[B, L, 3]``."""
    taps, A, C = torch.ones(3, 4), -torch.ones(3, 2), torch.ones(*x.shape[:2], 2)
    y, last = causal_conv1d(x, taps, backend=backend)
    z, state = selective_scan(y, x, A, C, C, backend=backend)
    return rms_norm(z, taps[:, 0], eps=1e-5, backend=backend), last, state


@pytest.mark.parametrize("graph", [False, True])
def test_functionalized_calls_read_memory_that_is_there(backend, graph):
    x = torch.randn(1, 6, 3)
    with torch.set_grad_enabled(graph):
        got = torch.func.functionalize(lambda x: some_ops(x, backend))(x)
    for one, other in zip(got, some_ops(x, backend), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_gives_what_a_loop_gives_with_gradients(backend):
    x = torch.randn(4, 2, 6, 3, requires_grad=True)
    got = torch.vmap(lambda x: some_ops(x, backend))(x)
    known = [
        torch.stack(parts) for parts in zip(*(some_ops(row, backend) for row in x), strict=True)
    ]
    weights = [torch.randn_like(y) for y in known]
    for one, other in zip(got, known, strict=True):
        assert torch.equal(one, other)
    slopes = [torch.autograd.grad(found, x, weights)[0] for found in (got, known)]
    torch.testing.assert_close(*slopes)


def test_a_last_state_is_not_the_first_ones_memory(backend):
    state, none = torch.randn(1, 3, 2), torch.zeros(1, 0, 3)
    rows = torch.zeros(1, 0, 2)
    for by in (backend, "reference"):
        _, last = longhorn_scan(none, rows, rows, none, initial_state=state, backend=by)
        assert torch.equal(last, state)
        assert last.data_ptr() != state.data_ptr()


def test_what_has_no_memory_is_not_taken_for_what_is_absent():
    with pytest.raises(TypeError, match="tensors that have memory, got a Tensor"):
        native.addresses([None, torch.empty(3, device="meta")])
    assert native.address(torch.empty(0)) == 0
    assert native.address(None) is None


def test_a_mode_leaves_nothing_behind(backend):
    a, b = torch.rand(2, 3, 11, 2).unbind()  # a batch that no other test has
    with FakeTensorMode(allow_non_fake_inputs=True):
        linear_scan(a, b, backend=backend)
    known = linear_scan(a, b, backend="reference")[0]
    torch.testing.assert_close(linear_scan(a, b, backend=backend)[0], known)
