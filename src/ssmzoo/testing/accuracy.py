"""How exact a fast op must be: as exact as the plain formula is in the same precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Op = Callable[..., Tensor | tuple[Tensor, ...]]


def assert_as_accurate(
    candidate: Op,
    reference: Op,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    slack: float = 2.0,
) -> None:
    """Fail unless ``candidate`` is about as close to float64 as ``reference`` is in ``dtype``.

    Every output and every gradient, under a fixed random loss on all outputs, may err by ``slack``
    times the reference's largest error plus one rounding of the largest entry. A NaN fails.

    Args:
        candidate: The op to judge; called with the inputs in order.
        reference: The formula it must compute.
        inputs: Floating-point tensors, rounded to ``dtype`` first, or None for absent ones.
        dtype: The precision to judge in.
        slack: How many times the reference's error is allowed.

    Raises:
        AssertionError: A result is missing, has another shape or dtype, or is less exact.
    """
    rounded = [None if x is None else x.detach().to(dtype) for x in inputs]
    exact = outputs_and_grads(reference, rounded, torch.float64)
    usual = outputs_and_grads(reference, rounded, dtype)
    found = outputs_and_grads(candidate, rounded, dtype)
    if len(found) != len(usual):
        raise AssertionError(f"{len(found)} results, the reference has {len(usual)}")
    for name, truth in exact.items():
        got, expected = found[name], usual[name]
        if got.shape != expected.shape or got.dtype != expected.dtype:
            raise AssertionError(
                f"{name}: {list(got.shape)} {got.dtype}, "
                f"the reference has {list(expected.shape)} {expected.dtype}"
            )
        if not truth.numel():
            continue
        rounding = torch.finfo(got.dtype).eps * truth.abs().max()
        allowed = slack * (_error(expected, truth) + rounding)
        error = _error(got, truth)
        if not error <= allowed:  # so that nan fails
            raise AssertionError(f"{name}: error {error:.2e} exceeds {allowed:.2e}")


def outputs_and_grads(
    op: Op, inputs: Sequence[Tensor | None], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return an op's outputs and its gradients under a fixed random loss on all outputs."""
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]
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
