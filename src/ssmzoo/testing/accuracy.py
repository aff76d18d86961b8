"""How exact a fast op must be: as exact as the plain formula is in the same precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Op = Callable[..., Tensor | tuple[Tensor, ...]]


def assert_as_accurate(
    candidate: Op,
    reference: Op,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype | None,
    slack: float = 2.0,
) -> None:
    """Fail unless ``candidate`` is about as close to the truth as ``reference`` is in ``dtype``.

    Every output and every gradient, under a fixed random loss on all outputs, may err by ``slack``
    budgets. A NaN fails. A budget is what the reference itself errs in ``dtype`` against float64,
    and one rounding of the largest entry. The reference is measured twice, at the inputs and at
    inputs that are off by one rounding each, and the larger error counts: one measurement of few
    numbers may be small by luck, and a result that is exact for inputs one rounding away is as
    good as the precision allows. So the budget follows what is added up, terms and sizes, and
    neither the order of sums nor the width of vectors is judged.

    In float64 the reference cannot be measured against itself. Rounding errors are proportional to
    the rounding unit, so its error in float32, times the ratio of the units, stands for it; and
    the truth, itself computed in float64, may be off by one budget more.

    Args:
        candidate: The op to judge; called with the inputs in order.
        reference: The formula it must compute.
        inputs: Floating-point tensors, rounded to ``dtype`` first, or None for absent ones.
        dtype: The precision to judge in; None leaves each tensor in its own.
        slack: How many budgets are allowed.

    Raises:
        AssertionError: A result is missing, has another shape or dtype, or is less exact; or there
            is no budget, because the reference is not finite.
    """
    given = [None if x is None else x.detach().to(dtype or x.dtype) for x in inputs]
    exact = outputs_and_grads(reference, given, torch.float64)
    wide = dtype is torch.float64
    measured = torch.float32 if wide else dtype
    rounded = [None if x is None else x.to(measured or x.dtype) for x in given]
    usual = outputs_and_grads(reference, rounded, measured)
    beside = outputs_and_grads(reference, _moved(rounded), measured)
    found = outputs_and_grads(candidate, given, dtype)  # last: what ran last is the candidate
    if len(found) != len(exact):
        raise AssertionError(f"{len(found)} results, the reference has {len(exact)}")
    for name, truth in exact.items():
        got, expected = found[name], truth if wide else usual[name]
        if got.shape != expected.shape or got.dtype != expected.dtype:
            raise AssertionError(
                f"{name}: {list(got.shape)} {got.dtype}, "
                f"the reference has {list(expected.shape)} {expected.dtype}"
            )
        if not truth.numel():
            continue
        budget = torch.maximum(_error(usual[name], truth), _error(beside[name], truth))
        if wide:
            budget = budget * (torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps)
        budget = budget + torch.finfo(got.dtype).eps * truth.abs().max()
        allowed = (slack + wide) * budget
        error = _error(got, truth)
        if not error <= allowed < math.inf:  # so that nan fails
            raise AssertionError(f"{name}: error {error:.2e} exceeds {allowed:.2e}")


def _moved(inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return floating-point tensors whose entries are one rounding up or down, at random."""
    generator = torch.Generator().manual_seed(0)

    def moved(x: Tensor) -> Tensor:
        up = torch.randint(0, 2, x.shape, generator=generator).to(x.device, x.dtype)
        return x * (1 + torch.finfo(x.dtype).eps * (2 * up - 1))

    return [None if x is None else moved(x) for x in inputs]


def outputs_and_grads(
    op: Op, inputs: Sequence[Tensor | None], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Return an op's outputs and its gradients under a fixed random loss on all outputs."""
    leaves = [
        None if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs
    ]
    results = op(*leaves)
    outputs = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator().manual_seed(0)
    loss = torch.zeros((), dtype=torch.float64, device=outputs[0].device)
    for y in outputs:
        weights = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        loss = loss + (y.double() * weights.to(y.device)).sum()
    present = {f"gradient of input {i}": x for i, x in enumerate(leaves) if x is not None}
    grads = torch.autograd.grad(loss, list(present.values()), materialize_grads=True)
    named = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return named | dict(zip(present, grads, strict=True))


def _error(got: Tensor, truth: Tensor) -> Tensor:
    return (got.double() - truth).abs().max()
