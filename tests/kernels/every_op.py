"""All ops in one graph, for the processes that have a backend."""

import torch
from tests.kernels.contracts import CONTRACTS

from ssmzoo.testing.ops import Case

# inductor writes nothing for complex numbers
DISTINCT = [contract for contract in CONTRACTS if not contract.complex]
CALLS = [(contract(), form) for contract in DISTINCT for form in contract.forms]


def assert_compiled_gradients_are_the_references(backend):
    """Compile every op that has a backend into one graph with inductor, and compare gradients.

    What inductor writes around the ops is the same for every backend: gcc compiles it once where
    one process comes after another.
    """
    chosen = [(op, form) for op, form in CALLS if backend in op.declaration.offers]
    drawn = [op.draw(L=3, D=2, N=2, dtype=torch.float32) for op, _ in chosen]
    sloped = [op.sloped(tensors) for (op, _), tensors in zip(chosen, drawn, strict=True)]

    def together(tensors, backend):
        found = []
        for (op, form), own, names in zip(chosen, tensors, sloped, strict=True):
            # what comes before an op reads the gradients, in kernels that inductor writes
            scaled = {n: x * 1.25 if n in names else x for n, x in own.items()}
            found += op.run(scaled, Case(backend, form))
        return found

    def results(function, backend):
        tensors = [
            {n: x.clone().requires_grad_() if n in names else x for n, x in own.items()}
            for own, names in zip(drawn, sloped, strict=True)
        ]
        found = function(tensors, backend)
        draw = torch.Generator().manual_seed(1)
        losses = [
            (y.real * torch.randn(y.shape, generator=draw)).sum() for y in found if y.requires_grad
        ]
        leaves = [own[n] for own, names in zip(tensors, sloped, strict=True) for n in names]
        names = [
            f"the gradient of {n} of {op.declaration.name}"
            for (op, _), own in zip(chosen, sloped, strict=True)
            for n in own
        ]
        grads = torch.autograd.grad(sum(losses), leaves)
        named = [(f"result {i}", y.detach()) for i, y in enumerate(found)]
        return [*named, *zip(names, grads, strict=True)]

    compiled = results(torch.compile(together, fullgraph=True), backend)
    for (name, got), (_, expected) in zip(compiled, results(together, "reference"), strict=True):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype), name
        error = (got - expected).abs().max() / expected.abs().max().clamp(min=1)
        assert error <= 1e-4, f"{name} is off by {error:.1e}"  # float32; a wrong stride is off by 1
