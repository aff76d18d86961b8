"""``fft_conv`` as a ``torch.library`` op, so that autograd and ``torch.compile`` know it.

Saved for the backward: the inputs and the kernels, never their spectra.
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

OP = "fft_conv"


def fft_conv(
    u: Tensor,  # [B, L, D]
    kernel: Tensor,  # [D, K]
    D: Tensor | None,  # [D]
    initial_state: Tensor | None,  # [B, K - 1, D]
    future_kernel: Tensor | None,  # [D, F]
    cu_seqlens: Tensor | None,  # [S + 1]
    workspace: int,
    backend: str,
) -> Tensor:
    """Convolve; returns ``[B, L, D]``."""
    inputs = (u, kernel, D, initial_state, future_kernel)
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    if not grad and not needs_library(u):
        record(OP, backend)
        return _backend(backend).forward(*inputs, cu_seqlens, workspace)
    return _forward(*inputs, cu_seqlens, workspace, backend)


@functools.cache
def _backend(name: str) -> ModuleType:
    return importlib.import_module(f"ssmzoo_kernels.{OP}.{name}")


@custom_op(f"ssmzoo::{OP}")
def _forward(
    u: Tensor,
    kernel: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    future_kernel: Tensor | None,
    cu_seqlens: Tensor | None,
    workspace: int,
    backend: str,
) -> Tensor:
    record(OP, backend)
    inputs = (u, kernel, D, initial_state, future_kernel)
    return _backend(backend).forward(*inputs, cu_seqlens, workspace)


@_forward.register_fake
def _(u, kernel, D, initial_state, future_kernel, cu_seqlens, workspace, backend):
    return torch.empty_like(u, memory_format=torch.contiguous_format)


@custom_op(f"ssmzoo::{OP}_backward")
def _backward(
    grad_y: Tensor,
    u: Tensor,
    kernel: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    future_kernel: Tensor | None,
    cu_seqlens: Tensor | None,
    workspace: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (u, kernel, D, initial_state, future_kernel)
    grads = _backend(backend).backward(grad_y, *inputs, cu_seqlens, workspace)
    fitting = [
        u.new_empty(0) if g is None or t is None else g.to(t.dtype)
        for g, t in zip(grads, inputs, strict=True)
    ]
    return cast(tuple[Tensor, Tensor, Tensor, Tensor, Tensor], (*fitting,))


@_backward.register_fake
def _(grad_y, u, kernel, D, initial_state, future_kernel, cu_seqlens, workspace, backend):
    return tuple(
        u.new_empty(0) if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t in (u, kernel, D, initial_state, future_kernel)
    )


def _setup_context(ctx, inputs, output):
    *tensors, ctx.workspace, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx, grad_y):
    *inputs, cu_seqlens = ctx.saved_tensors
    grads = _backward(grad_y, *inputs, cu_seqlens, ctx.workspace, ctx.backend)
    found = (None if t is None else g for g, t in zip(grads, inputs, strict=True))
    return (*found, None, None, None)


_forward.register_autograd(_autograd, setup_context=_setup_context)
