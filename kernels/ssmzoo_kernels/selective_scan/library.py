"""``selective_scan`` as a ``torch.library`` op, so that autograd and ``torch.compile`` know it.

Here a batch is already flat: ``T = B * L`` tokens in a row, cut into ``S`` segments by ``offsets``.
A backend is a module with ``CHUNK``, ``forward`` and ``backward`` of the signatures used below. The
forward of a training step keeps the state at the start of every ``interval(N, CHUNK)`` tokens, and
the backward recomputes the states in between, at most ``CHUNK`` at once.
"""

import functools
import importlib
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from ssmzoo_kernels.dispatch import record
from ssmzoo_kernels.library import custom_op
from ssmzoo_kernels.scan import accumulator, chunk_slots, interval, needs_library
from ssmzoo_kernels.validation import check_offsets

OP = "selective_scan"


def selective_scan(
    u: Tensor,  # [T, D]
    dt: Tensor,  # [T, D]
    A: Tensor,  # [D, N]
    B: Tensor,  # [T, N]
    C: Tensor,  # [T, N]
    D: Tensor | None,  # [D]
    z: Tensor | None,  # [T, D]
    dt_bias: Tensor | None,  # [D]
    initial_state: Tensor | None,  # [S, D, N]
    offsets: Tensor,  # [S + 1] int64
    *,
    discretization: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Run the scan over flat segments; returns ``[T, D]`` and ``[S, D, N]``."""
    inputs = (u, dt, A, B, C, D, z, dt_bias, initial_state)
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if not grad and not needs_library(u):
        record(OP, backend)
        y, final_state, _ = _backend(backend).forward(*inputs, offsets, False, discretization)
    else:
        y, final_state, _ = _forward(*inputs, offsets, grad, discretization, backend)
    return y, final_state


@functools.cache
def _backend(name: str) -> ModuleType:
    return importlib.import_module(f"ssmzoo_kernels.{OP}.{name}")


@custom_op(f"ssmzoo::{OP}")
def _forward(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    offsets: Tensor,
    save: bool,
    discretization: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    record(OP, backend)
    inputs = (u, dt, A, B, C, D, z, dt_bias, initial_state)
    check_offsets(OP, offsets, u.shape[0])
    return _backend(backend).forward(*inputs, offsets, save, discretization)


@_forward.register_fake
def _(u, dt, A, B, C, D, z, dt_bias, initial_state, offsets, save, discretization, backend):
    tokens, width = u.shape
    states, segments = A.shape[1], offsets.shape[0] - 1
    exact = accumulator(u)
    between = interval(states, _backend(backend).CHUNK)
    slots = chunk_slots(tokens, segments, between) if save else 0
    return (
        torch.empty_like(u, memory_format=torch.contiguous_format),
        u.new_empty(segments, width, states, dtype=exact),
        u.new_empty(slots, states, width, dtype=exact),
    )


_Nine = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@custom_op(f"ssmzoo::{OP}_backward")
def _backward(
    grad_y: Tensor | None,
    grad_final: Tensor | None,
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    offsets: Tensor,
    saved: Tensor,
    discretization: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (u, dt, A, B, C, D, z, dt_bias, initial_state)
    grads = _backend(backend).backward(grad_y, grad_final, *inputs, offsets, saved, discretization)
    fitting = [
        u.new_empty(0) if x is None else g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)
    ]
    return cast(_Nine, (*fitting,))


@_backward.register_fake
def _(grad_y, grad_final, u, dt, A, B, C, D, z, dt_bias, initial_state, *_rest):
    inputs = (u, dt, A, B, C, D, z, dt_bias, initial_state)
    return tuple(
        u.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in inputs
    )


def _setup_context(ctx, inputs, output):
    *tensors, _save, discretization, backend = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[2])
    ctx.choices = (discretization, backend)


def _autograd(ctx, grad_y, grad_final, _grad_saved):
    *inputs, offsets, saved = ctx.saved_tensors
    grads = _backward(grad_y, grad_final, *inputs, offsets, saved, *ctx.choices)
    return (
        *(None if x is None else g for g, x in zip(grads, inputs, strict=True)),
        *[None] * 4,
    )


_forward.register_autograd(_autograd, setup_context=_setup_context)
