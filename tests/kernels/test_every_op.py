"""What holds for all ops at once."""

import pytest
import torch
from tests.kernels.contracts import CONTRACTS, DISTINCT

import ssmzoo_kernels
from ssmzoo.testing.ops import Case
from ssmzoo_kernels import innovation
from ssmzoo_kernels.declaration import declared


def test_every_declared_op_has_a_contract():
    known = {contract.declaration.name for contract in CONTRACTS}
    assert known == {name for name in declared() if hasattr(ssmzoo_kernels, name)}


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # of torch's own
def test_tensors_of_torch_func_transforms_are_not_cached():
    y = torch.randn(2, 23, 5)  # a batch and length of no other test
    with pytest.raises(NotImplementedError, match="innovation"):
        torch.func.jvp(lambda y: innovation(y, [0.5])[0], (y,), (y,))
    assert innovation(y, [0.5])[0].shape == (2, 23)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*complex operators:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit")  # of torch's own
def test_gradients_compiled_by_inductor_are_the_references():
    """All ops in one graph: what inductor writes around them is the same for every backend.

    That results and gradients of each lie as promised is the contract's.
    """
    calls = [(contract(), form) for contract in DISTINCT for form in contract.forms]
    chosen = [(op, form) for op, form in calls if "cpu" in op.declaration.offers]
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

    compiled = results(torch.compile(together, fullgraph=True), "cpu")
    for (name, got), (_, expected) in zip(compiled, results(together, "reference"), strict=True):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype), name
        error = (got - expected).abs().max() / expected.abs().max().clamp(min=1)
        assert error <= 1e-4, f"{name} is off by {error:.1e}"  # float32; a wrong stride is off by 1
