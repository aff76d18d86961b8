"""``linear_scan`` as a ``torch.library`` op, so that autograd and ``torch.compile`` know it.

Here a batch is already flat: ``T = B * L`` tokens in a row, cut into ``S`` segments by ``offsets``.
A backend is a module with ``forward`` and ``backward`` of the signatures used below. Saved for the
backward are ``a`` and the states, which are the output; ``b`` is not.
"""

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from ssmzoo_kernels.dispatch import record
from ssmzoo_kernels.library import custom_op
from ssmzoo_kernels.scan import accumulator, needs_library
from ssmzoo_kernels.validation import check_offsets

OP = "linear_scan"


def linear_scan(
    a: Tensor,  # [T, D]
    b: Tensor,  # [T, D], a's dtype
    initial_state: Tensor | None,  # [S, D]
    offsets: Tensor,  # [S + 1] int64
    *,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Run the scan over flat segments; returns ``[T, D]`` and ``[S, D]``, both exact."""
    inputs = (a, b, initial_state)
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if not grad and not needs_library(a):
        record(OP, backend)
        return _backend(backend).forward(*inputs, offsets)
    return _forward(*inputs, offsets, backend)


@functools.cache
def _backend(name: str) -> ModuleType:
    return importlib.import_module(f"ssmzoo_kernels.{OP}.{name}")


@custom_op(f"ssmzoo::{OP}")
def _forward(
    a: Tensor, b: Tensor, initial_state: Tensor | None, offsets: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    record(OP, backend)
    check_offsets(OP, offsets, a.shape[0])
    return _backend(backend).forward(a, b, initial_state, offsets)


@_forward.register_fake
def _(a, b, initial_state, offsets, backend):
    exact = accumulator(a)
    return (
        a.new_empty(a.shape, dtype=exact),
        a.new_empty(offsets.shape[0] - 1, a.shape[1], dtype=exact),
    )


@custom_op(f"ssmzoo::{OP}_backward")
def _backward(
    grad_h: Tensor | None,
    grad_final: Tensor | None,
    a: Tensor,
    h: Tensor,
    initial_state: Tensor | None,
    offsets: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _backend(backend).backward(grad_h, grad_final, a, h, initial_state, offsets)
    grad_a, grad_b, grad_initial = grads
    if initial_state is None:
        return grad_a.to(a.dtype), grad_b.to(a.dtype), a.new_empty(0)
    return grad_a.to(a.dtype), grad_b.to(a.dtype), grad_initial.to(initial_state.dtype)


@_backward.register_fake
def _(grad_h, grad_final, a, h, initial_state, offsets, backend):
    whole = torch.empty_like(a, memory_format=torch.contiguous_format)
    if initial_state is None:
        return whole, torch.empty_like(whole), a.new_empty(0)
    initial = torch.empty_like(initial_state, memory_format=torch.contiguous_format)
    return whole, torch.empty_like(whole), initial


def _setup_context(ctx, inputs, output):
    a, _, initial_state, offsets, ctx.backend = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, output[0], initial_state, offsets)


def _autograd(ctx, grad_h, grad_final):
    a, h, initial_state, offsets = ctx.saved_tensors
    grads = _backward(grad_h, grad_final, a, h, initial_state, offsets, ctx.backend)
    return (*grads[:2], None if initial_state is None else grads[2], None, None)


_forward.register_autograd(_autograd, setup_context=_setup_context)
