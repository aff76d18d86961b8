"""``causal_conv1d`` as a ``torch.library`` op, so that autograd and ``torch.compile`` know it.

Here a batch is already flat: ``T = B * L`` tokens in a row, cut into ``S`` segments by ``offsets``.
A backend is a module with ``forward`` and ``backward`` of the signatures used below.
"""

import functools
import importlib
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from ssmzoo_kernels.dispatch import record
from ssmzoo_kernels.library import custom_op
from ssmzoo_kernels.scan import needs_library
from ssmzoo_kernels.validation import check_offsets

OP = "causal_conv1d"


def causal_conv1d(
    x: Tensor,  # [T, D]
    weight: Tensor,  # [D, K]
    bias: Tensor | None,  # [D]
    initial_state: Tensor | None,  # [S, K - 1, D]
    offsets: Tensor,  # [S + 1] int64
    *,
    activation: str | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Convolve flat segments; returns ``[T, D]`` and ``[S, K - 1, D]``."""
    inputs = (x, weight, bias, initial_state)
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    silu = activation == "silu"
    if not grad and not needs_library(x):
        record(OP, backend)
        return _backend(backend).forward(*inputs, offsets, silu)
    return _forward(*inputs, offsets, silu, backend)


@functools.cache
def _backend(name: str) -> ModuleType:
    return importlib.import_module(f"ssmzoo_kernels.{OP}.{name}")


@custom_op(f"ssmzoo::{OP}")
def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    offsets: Tensor,
    silu: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    record(OP, backend)
    check_offsets(OP, offsets, x.shape[0])
    return _backend(backend).forward(x, weight, bias, initial_state, offsets, silu)


@_forward.register_fake
def _(x, weight, bias, initial_state, offsets, silu, backend):
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty(offsets.shape[0] - 1, weight.shape[1] - 1, x.shape[1]),
    )


@custom_op(f"ssmzoo::{OP}_backward")
def _backward(
    grad_out: Tensor | None,
    grad_final: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    offsets: Tensor,
    silu: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = (x, weight, bias, initial_state)
    grads = _backend(backend).backward(grad_out, grad_final, *inputs, offsets, silu)
    fitting = [
        x.new_empty(0) if t is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)
    ]
    return cast(tuple[Tensor, Tensor, Tensor, Tensor], (*fitting,))


@_backward.register_fake
def _(grad_out, grad_final, x, weight, bias, initial_state, offsets, silu, backend):
    return tuple(
        x.new_empty(0) if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t in (x, weight, bias, initial_state)
    )


def _setup_context(ctx, inputs, output):
    *tensors, silu, backend = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.silu, ctx.backend = silu, backend


def _autograd(ctx, grad_out, grad_final):
    *inputs, offsets = ctx.saved_tensors
    grads = _backward(grad_out, grad_final, *inputs, offsets, ctx.silu, ctx.backend)
    return (
        *(None if t is None else g for g, t in zip(grads, inputs, strict=True)),
        None,
        None,
        None,
    )


_forward.register_autograd(_autograd, setup_context=_setup_context)
