"""What every registered op must keep on every backend, for the processes that have the backend."""

import contextlib

import torch
from tests.kernels.samples import (
    backends_of,
    calls,
    contiguous,
    expanded,
    far_apart,
    registered,
    turned,
)
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ssmzoo_kernels import declaration

KINDS = (  # what calls hold, and in which layouts
    ({}, (contiguous, turned, expanded)),
    ({"bare": True}, (contiguous,)),
    ({"packed": True}, (turned,)),
)


def layout(x):
    """Return what a compiled graph takes for granted about a tensor; strides that matter only."""
    strides = [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1 and x.numel()]
    lazy = (x.is_conj(), x.is_neg())
    return (*x.shape,), x.dtype, strides, x.storage_offset(), lazy


class Watch(TorchDispatchMode):
    """Compares what registered ops return with what their fakes promise, strides included.

    ``torch.library.opcheck`` compares strides of CUDA tensors only.
    """

    def __init__(self):
        super().__init__()
        self.seen = {}  # arguments by op and backend, of the first call of each signature

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "ssmzoo":
            return func(*args, **(kwargs or {}))
        names = [x.name for x in func._schema.arguments]
        backend = dict(zip(names, args, strict=True)).get("backend", "eager")
        kept = tree_map_only(torch.Tensor, torch.Tensor.detach, args)
        with FakeTensorMode() as mode:
            promised = func(*tree_map_only(torch.Tensor, mode.from_tensor, kept))
        found = func(*args)
        pairs = zip(tree_leaves(found), tree_leaves(promised), strict=True)
        for i, (real, fake) in enumerate(pairs):
            where = f"{func} on {backend}, result {i}"
            assert layout(real) == layout(fake), (where, layout(real), layout(fake))
        absent = tuple(x is None for x in args)
        self.seen.setdefault((func._schema.name, backend, absent), (func, kept))
        return found


@contextlib.contextmanager
def always_registered():
    """Send calls through torch.library that need no gradient, too."""
    original = declaration.needs_library
    declaration.needs_library = lambda x: True
    try:
        yield
    finally:
        declaration.needs_library = original


def run(call, backend, change):
    """Run a call forward and backward, its tensors and the gradients of its results laid out so."""
    tensors = {n: None if x is None else x.clone() for n, x in call.tensors.items()}
    for n in call.sloped:
        tensors[n].requires_grad_()
    given = {n: change(x) if n in call.sloped else x for n, x in tensors.items()}
    found = call.run(given, backend=backend)
    if call.sloped:
        loss = sum((y * change(torch.ones_like(y))).abs().sum() for y in found if y is not None)
        torch.autograd.grad(loss, [tensors[n] for n in call.sloped])


def wanted(backends):
    """Return every registered op with each of its backends among some."""
    return {
        (name, backend)
        for name, folder in registered().items()
        for backend in backends_of(folder)
        if backend in backends
    }


def assert_layouts_are_as_promised(backends, **sizes):
    """Run every sample in every layout on some backends; return the first calls of each kind."""
    with Watch() as watch, always_registered():
        for kind, layouts in KINDS:
            for call in calls(**kind, **sizes):
                for backend in {*backends_of(call.folder)} & {*backends}:
                    for change in layouts:
                        run(call, backend, change)
    missing = wanted(backends) - {key[:2] for key in watch.seen}
    assert not missing, f"no sample in samples.py reaches {missing}"
    return watch.seen


def assert_opcheck_passes(seen):
    """Run torch's own checks, schema, autograd, fakes and tracing, on each op's fullest call."""
    fullest = {}
    for (name, backend, _), call in sorted(seen.items(), key=lambda x: -sum(x[0][2])):
        fullest[name, backend] = call
    for (name, _), (op, args) in fullest.items():
        if f"{name}_backward" in registered():
            args = tree_map_only(torch.Tensor, _sloped, args)
        torch.library.opcheck(op, args)


def _sloped(x):
    return x.detach().requires_grad_(x.is_floating_point() or x.is_complex())


def assert_compiled_gradients_are_the_references(backend, **sizes):
    """Compile every op that has a backend into one graph with inductor, and compare gradients."""
    chosen = [call for call in calls(**sizes) if backend in backends_of(call.folder)]

    def together(tensors, backend):
        found = []
        for call, own in zip(chosen, tensors, strict=True):
            # what comes before an op reads the gradients, in kernels that inductor writes
            scaled = {n: own[n] * 1.25 if n in call.sloped else x for n, x in own.items()}
            found += [y for y in call.run(scaled, backend=backend) if y is not None]
        return found

    def results(function, backend):
        tensors = [
            {n: x.clone().requires_grad_() if n in c.sloped else x for n, x in c.tensors.items()}
            for c in chosen
        ]
        found = function(tensors, backend)
        draw = torch.Generator().manual_seed(1)
        losses = [
            (y.real * torch.randn(y.shape, generator=draw)).sum() for y in found if y.requires_grad
        ]
        pairs = [*zip(chosen, tensors, strict=True)]
        leaves = [own[n] for call, own in pairs for n in call.sloped]
        names = [f"the gradient of {n} of {call.op}" for call, _ in pairs for n in call.sloped]
        grads = torch.autograd.grad(sum(losses), leaves)
        named = [(f"result {i}", y.detach()) for i, y in enumerate(found)]
        return [*named, *zip(names, grads, strict=True)]

    compiled = results(torch.compile(together, fullgraph=True), backend)
    for (name, got), (_, expected) in zip(compiled, results(together, "reference"), strict=True):
        assert layout(got)[:2] == layout(expected)[:2], name
        error = (got - expected).abs().max() / expected.abs().max().clamp(min=1)
        assert error <= 1e-4, f"{name} is off by {error:.1e}"  # float32; a wrong stride is off by 1


def assert_far_rows_are_read_rightly(backend):
    """Compare results and gradients of rows that lie 2^30 numbers apart with those of near ones."""
    for call in calls(B=1, L=4, D=2, N=2):
        if backend not in backends_of(call.folder):
            continue
        kept = {n: x if x is None else x.clone() for n, x in call.tensors.items()}
        found = []
        for change in (contiguous, far_apart):
            leaves = {n: change(x) for n, x in kept.items()}
            for n in call.sloped:
                leaves[n].requires_grad_()
            out = [x for x in call.run(leaves, backend=backend) if x is not None]
            grads = ()
            if call.sloped:
                loss = sum(y.abs().square().sum() for y in out)
                grads = torch.autograd.grad(loss, [leaves[n] for n in call.sloped])
            found.append([*out, *grads])
        for got, expected in zip(*found, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, msg=call.op)
