"""``eidetic_attention`` as a ``torch.library`` op, so that autograd and ``torch.compile`` know it.

Here a batch is already flat: ``T = B * L`` tokens in a row, cut into ``S`` sequences by
``offsets``. A backend is a module with ``forward`` and ``backward`` of the signatures used below.
Saved for the backward are the inputs, the output, and the logarithm of every query's sum.
"""

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from ssmzoo_kernels.dispatch import record
from ssmzoo_kernels.eidetic_attention.arguments import Call, Tensors
from ssmzoo_kernels.library import custom_op
from ssmzoo_kernels.scan import accumulator, needs_library

OP = "eidetic_attention"


def eidetic_attention(tensors: Tensors, call: Call, *, backend: str) -> Tensor:
    """Return the outputs ``[T, H, d]``."""
    if backend == "flex":  # torch's op, with gradients of its own
        return _backend(backend).eidetic_attention(tensors, call)
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if not grad and not needs_library(tensors.q):
        record(OP, backend)
        return _backend(backend).forward(tensors, call)[0]
    return _forward(*tensors, *call, backend)[0]


@functools.cache
def _backend(name: str) -> ModuleType:
    return importlib.import_module(f"ssmzoo_kernels.{OP}.{name}")


@custom_op(f"ssmzoo::{OP}")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mem_k: Tensor | None,
    mem_v: Tensor | None,
    past_k: Tensor | None,
    past_v: Tensor | None,
    late_k: Tensor | None,
    late_v: Tensor | None,
    late_past_k: Tensor | None,
    late_past_v: Tensor | None,
    mem_count: Tensor | None,
    mem_positions: Tensor | None,
    offsets: Tensor,
    seen: Tensor,
    window: int | None,
    late_span: int,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    record(OP, backend)
    tensors = Tensors(
        q, k, v, mem_k, mem_v, past_k, past_v, late_k, late_v, late_past_k, late_past_v
    )
    call = Call(mem_count, mem_positions, offsets, seen, window, late_span, scale)
    return _backend(backend).forward(tensors, call)


@_forward.register_fake
def _(q, *_rest):
    lse = q.new_empty(q.shape[:2], dtype=accumulator(q))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


@custom_op(f"ssmzoo::{OP}_backward")
def _backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mem_k: Tensor | None,
    mem_v: Tensor | None,
    past_k: Tensor | None,
    past_v: Tensor | None,
    late_k: Tensor | None,
    late_v: Tensor | None,
    late_past_k: Tensor | None,
    late_past_v: Tensor | None,
    mem_count: Tensor | None,
    mem_positions: Tensor | None,
    offsets: Tensor,
    seen: Tensor,
    window: int | None,
    late_span: int,
    scale: float,
    backend: str,
) -> list[Tensor]:
    tensors = Tensors(
        q, k, v, mem_k, mem_v, past_k, past_v, late_k, late_v, late_past_k, late_past_v
    )
    call = Call(mem_count, mem_positions, offsets, seen, window, late_span, scale)
    grads = _backend(backend).backward(grad_out, out, lse, tensors, call)
    return [q.new_empty(0) if g is None else g.to(q.dtype) for g in grads]


@_backward.register_fake
def _(grad_out, out, lse, *rest):
    return [
        out.new_empty(0)
        if x is None
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in rest[: len(Tensors._fields)]
    ]


def _setup_context(ctx, inputs, output):
    tensors = inputs[: len(Tensors._fields)]
    mem_count, mem_positions, offsets, seen, *ctx.options = inputs[len(Tensors._fields) :]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *tensors, mem_count, mem_positions, offsets, seen)


def _autograd(ctx, grad_out, _grad_lse):
    given = (None,) * (len(Tensors._fields) + 8)
    if grad_out is None:
        return given
    out, lse, *inputs = ctx.saved_tensors
    grads = _backward(grad_out, out, lse, *inputs, *ctx.options)
    wanted = [None if x is None else g for x, g in zip(inputs, grads, strict=False)]
    return (*wanted, *given[len(wanted) :])


_forward.register_autograd(_autograd, setup_context=_setup_context)
