"""A loop that carries tensors along a dimension, and that torch.export can trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = Sequence[Tensor]


def scan(
    step: Callable[[Tensors, Tensors], tuple[Tensors, Tensors]], carried: Tensors, inputs: Tensors
) -> tuple[list[Tensor], list[Tensor]]:
    """Go through ``inputs [N, ...]``: ``carried, outputs[i] = step(carried, inputs[i])``.

    In a graph of ``torch.export`` with N dynamic it is torch's scan, elsewhere a Python loop.

    Args:
        step: Each tensor that it carries on is as the one before in shape and dtype.
        carried: The tensors before the first step.
        inputs: At least one; all have one N, at least 1.

    Returns:
        The tensors that the last step carries on, and all outputs, ``[N, ...]``.
    """
    count = inputs[0].shape[0]
    if isinstance(count, torch.SymInt) and torch.compiler.is_exporting():
        from torch._higher_order_ops.scan import scan as scan_of_torch

        def traced(before: Tensors, given: Tensors) -> tuple[list[Tensor], list[Tensor]]:
            after, made = step(before, given)
            # its tensors have one layout, and share no memory with those before
            return [x.contiguous().clone() for x in after], [x.contiguous().clone() for x in made]

        # two that share memory would be one input of the graph
        first = [x.clone(memory_format=torch.contiguous_format) for x in carried]
        return scan_of_torch(traced, first, [x.contiguous() for x in inputs])
    outputs: list[Tensors] = []
    for given in zip(*(x.unbind(0) for x in inputs), strict=True):
        carried, made = step(carried, given)
        outputs.append(made)
    return [*carried], [torch.stack(x) for x in zip(*outputs, strict=True)]
