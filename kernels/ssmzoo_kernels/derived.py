"""The backend ``eager`` of an op that brings none: its reference, and autograd through it.

As slow as the reference, but an op of ``torch.library`` like any other: graphs hold it as one call,
and training keeps its inputs alone, because the backward runs the reference again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ssmzoo_kernels.declaration import Op


# torch's registered ops skip this, and a tape needs it
_PASSED_OVER = ("AutogradFunctionality", "ADInplaceOrView", "Conjugate", "Negative")


@contextlib.contextmanager
def _taped() -> Iterator[None]:
    """Let autograd record, also inside of a registered op."""
    with contextlib.ExitStack() as stack:
        for name in _PASSED_OVER:
            key = getattr(torch._C.DispatchKey, name)
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))  # pyright: ignore[reportAttributeAccessIssue]
        stack.enter_context(torch.enable_grad())
        yield


class FromReference:
    """Forward and backward of an op from its reference, for its declaration."""

    def __init__(self, op: Op) -> None:
        self.op = op

    @torch.no_grad()
    def forward(self, *arguments: Any) -> Any:
        """Return the outputs."""
        found = self._outputs(arguments)
        return found[0] if len(found) == 1 else found

    def backward(self, *arguments: Any) -> list[Tensor | None]:
        """Return the gradients of the inputs, None where one was absent."""
        op, count = self.op, len(self.op.outputs)
        grads, given = arguments[:count], arguments[count:]
        places = [[*op.inputs].index(name) for name in op.computed]
        leaves = {i: given[i].detach().requires_grad_() for i in places if given[i] is not None}
        with _taped():
            outputs = self._outputs([leaves.get(i, x) for i, x in enumerate(given)])
            pairs = zip(outputs, grads, strict=True)
            reached = [(y, g.to(y.dtype)) for y, g in pairs if g is not None and y.requires_grad]
            ends, slopes = zip(*reached, strict=True) if reached else ((), ())
            found = torch.autograd.grad(ends, [*leaves.values()], slopes, materialize_grads=True)
        by_place = dict(zip(leaves, found, strict=True))
        return [by_place.get(i) for i in places]

    def _outputs(self, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return the reference's outputs, on arguments and in shapes as kernels have them."""
        op = self.op
        tensors, rest = [*arguments[: len(op.inputs)]], [*arguments[len(op.inputs) :]]
        offsets: Any = rest.pop(0) if op.packing is not None else None
        if op.packing == "flat":
            lengths = offsets.diff().tolist()
            alike = len({*lengths}) < 2  # a batch, or what may pass for one
            shape = (len(lengths), max(lengths, default=0)) if alike else (1, sum(lengths))
            offsets = None if alike else offsets
            for i, argument in enumerate(op.inputs.values()):
                if argument.is_row and tensors[i] is not None:
                    tensors[i] = tensors[i].unflatten(0, shape)
        found = op.formula(tensors, op.complete(rest), offsets)
        found = (found,) if isinstance(found, Tensor) else found
        if op.packing != "flat":
            return (*found,)
        pairs = zip(found, op.outputs.values(), strict=True)
        return tuple(x.flatten(0, 1) if argument.is_row else x for x, argument in pairs)
