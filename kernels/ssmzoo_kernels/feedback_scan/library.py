"""``feedback_scan`` as a ``torch.library`` op, so that autograd and ``torch.compile`` know it.

Here a batch is already flat: ``T = B * L`` tokens in a row, cut into ``S`` segments by ``offsets``.
A backend is a module with ``CHUNK``, ``forward``, ``newton`` and ``backward`` of the signatures
used below. The forward of a training step keeps the state at the start of every
``interval(N, CHUNK)`` tokens, and the backward recomputes the states in between, at most ``CHUNK``
at once. Newton's method keeps the same states, so that one backward serves both and no iteration is
ever differentiated.
"""

import functools
import importlib
import logging
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from ssmzoo_kernels.dispatch import record
from ssmzoo_kernels.feedback_scan.newton import NotConverged
from ssmzoo_kernels.library import custom_op
from ssmzoo_kernels.scan import accumulator, chunk_slots, interval, needs_library
from ssmzoo_kernels.validation import check_offsets, transformed

OP = "feedback_scan"
SOLVER = "feedback_scan solver"  # what ``last_backend`` knows the solver by

_log = logging.getLogger("ssmzoo")


def feedback_scan(
    u: Tensor,  # [T, D]
    lam: Tensor,  # [D, N]
    w: Tensor,  # [D, N]
    C: Tensor,  # [D, N]
    w_gamma: Tensor | None,  # [D, N]
    D: Tensor | None,  # [D]
    drive: Tensor | None,  # [T, D]
    initial_state: Tensor | None,  # [S, D, N]
    offsets: Tensor,  # [S + 1] int64
    *,
    backend: str,
    solver: str,
    tolerance: float,
    max_iterations: int | None,
    damping: float,
) -> tuple[Tensor, Tensor]:
    """Run the scan over flat segments; returns ``[T, D]`` and ``[S, D, N]``."""
    inputs = (u, lam, w, C, w_gamma, D, drive, initial_state)
    how = (backend, solver, tolerance, max_iterations, damping)
    # vmap's tensors do not tell whether what is in them needs a gradient
    wanted = transformed() or any(x is not None and x.requires_grad for x in inputs)
    grad = torch.is_grad_enabled() and wanted
    if not grad and is_plain(u):
        out, final_state, _ = _solve(*inputs, offsets, False, *how)
    else:
        out, final_state, _ = _forward(*inputs, offsets, grad, *how)
    return out, final_state


def is_plain(u: Tensor) -> bool:
    """Tell whether a call sees plain numbers: no tracer's, tensor subclass's or vmap's tensors."""
    return not needs_library(u) and not transformed()


@functools.cache
def _backend(name: str) -> ModuleType:
    return importlib.import_module(f"ssmzoo_kernels.{OP}.{name}")


def _solve(
    u: Tensor,
    lam: Tensor,
    w: Tensor,
    C: Tensor,
    w_gamma: Tensor | None,
    D: Tensor | None,
    drive: Tensor | None,
    initial_state: Tensor | None,
    offsets: Tensor,
    save: bool,
    backend: str,
    solver: str,
    tolerance: float,
    max_iterations: int | None,
    damping: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, final states and, with ``save``, the state before every interval."""
    record(OP, backend)
    inputs = (u, lam, w, C, w_gamma, D, drive, initial_state)
    module = _backend(backend)
    if solver == "newton":
        try:
            how = {"tolerance": tolerance, "max_iterations": max_iterations, "damping": damping}
            found = module.newton(*inputs, offsets, save, **how)
        except NotConverged as reason:
            _log.warning("%s: %s; this call marches instead", OP, reason)
        else:
            record(SOLVER, "newton")
            return found
    record(SOLVER, "march")
    return module.forward(*inputs, offsets, save)


@custom_op(f"ssmzoo::{OP}")
def _forward(
    u: Tensor,
    lam: Tensor,
    w: Tensor,
    C: Tensor,
    w_gamma: Tensor | None,
    D: Tensor | None,
    drive: Tensor | None,
    initial_state: Tensor | None,
    offsets: Tensor,
    save: bool,
    backend: str,
    solver: str,
    tolerance: float,
    max_iterations: int | None,
    damping: float,
) -> tuple[Tensor, Tensor, Tensor]:
    check_offsets(OP, offsets, u.shape[0])
    inputs = (u, lam, w, C, w_gamma, D, drive, initial_state)
    return _solve(*inputs, offsets, save, backend, solver, tolerance, max_iterations, damping)


@_forward.register_fake
def _(
    u, lam, w, C, w_gamma, D, drive, initial_state, offsets, save, backend, solver, tolerance,
    max_iterations, damping,
):  # fmt: skip
    (tokens, width), states, segments = u.shape, lam.shape[1], offsets.shape[0] - 1
    exact = accumulator(u)
    between = interval(states, _backend(backend).CHUNK)
    slots = chunk_slots(tokens, segments, between) if save else 0
    return (
        torch.empty_like(u, memory_format=torch.contiguous_format),
        u.new_empty(segments, width, states, dtype=exact),
        u.new_empty(slots, states, width, dtype=exact),
    )


@custom_op(f"ssmzoo::{OP}_backward")
def _backward(
    grad_out: Tensor | None,
    grad_final: Tensor | None,
    u: Tensor,
    lam: Tensor,
    w: Tensor,
    C: Tensor,
    w_gamma: Tensor | None,
    D: Tensor | None,
    drive: Tensor | None,
    initial_state: Tensor | None,
    offsets: Tensor,
    saved: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (u, lam, w, C, w_gamma, D, drive, initial_state)
    grads = _backend(backend).backward(grad_out, grad_final, *inputs, offsets, saved)
    fitting = [
        u.new_empty(0) if x is None else g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)
    ]
    return cast(tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], (*fitting,))


@_backward.register_fake
def _(
    grad_out, grad_final, u, lam, w, C, w_gamma, D, drive, initial_state, offsets, saved, backend
):  # fmt: skip
    inputs = (u, lam, w, C, w_gamma, D, drive, initial_state)
    return tuple(
        u.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in inputs
    )


def _setup_context(ctx, inputs, output):
    *tensors, _save, backend, _solver, _tolerance, _max_iterations, _damping = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[2])
    ctx.backend = backend


def _autograd(ctx, grad_out, grad_final, _grad_saved):
    *inputs, offsets, saved = ctx.saved_tensors
    grads = _backward(grad_out, grad_final, *inputs, offsets, saved, ctx.backend)
    found = (None if x is None else g for g, x in zip(grads, inputs, strict=True))
    return (*found, *[None] * 7)


_forward.register_autograd(_autograd, setup_context=_setup_context)


# --- vmap: what is mapped over becomes more channels, which know nothing of each other ----------

# where the channels of u, lam, w, C, w_gamma, D, drive and the initial state are
_CHANNELS = (1, 0, 0, 0, 0, 0, 1, 1)
_SAVED_CHANNELS = 2


def _wider(x: Tensor | None, mapped: int | None, channels: int, size: int) -> Tensor | None:
    """Return a tensor with a dimension that vmap maps over, if it has one, among its channels."""
    if x is None:
        return None
    if mapped is None:
        shape = (*x.shape[:channels], size, *x.shape[channels:])
        x = x.unsqueeze(channels).expand(shape)
    else:
        x = x.movedim(mapped, channels)
    return x.flatten(channels, channels + 1)


def _refuse_mapped(offsets: int | None) -> None:
    if offsets is not None:
        raise ValueError(
            f"{OP}: cu_seqlens must be the same for everything that vmap maps over, got a "
            "cu_seqlens for each; pack all of it into one row instead"
        )


@_forward.register_vmap
def _(info, in_dims, *arguments):
    size, (offsets, *options) = info.batch_size, arguments[8:]
    _refuse_mapped(in_dims[8])
    tensors = (
        _wider(x, mapped, channels, size)
        for x, mapped, channels in zip(arguments[:8], in_dims[:8], _CHANNELS, strict=True)
    )
    found = _forward(*tensors, offsets, *options)
    where = (_CHANNELS[0], _CHANNELS[7], _SAVED_CHANNELS)
    parts = (
        x.unflatten(channels, (size, x.shape[channels] // size))
        for x, channels in zip(found, where, strict=True)
    )
    return (*parts,), where


@_backward.register_vmap
def _(info, in_dims, *arguments):
    size, (*tensors, offsets, saved, backend) = info.batch_size, arguments
    _refuse_mapped(in_dims[10])
    where = (_CHANNELS[0], _CHANNELS[7], *_CHANNELS)
    wide = (
        _wider(x, mapped, channels, size)
        for x, mapped, channels in zip(tensors, in_dims[:10], where, strict=True)
    )
    saved = _wider(saved, in_dims[11], _SAVED_CHANNELS, size)
    grads = _backward(*wide, offsets, saved, backend)
    present = [x is not None for x in tensors[2:]]
    parts = (
        g.unflatten(channels, (size, g.shape[channels] // size)) if there else g
        for g, channels, there in zip(grads, _CHANNELS, present, strict=True)
    )
    dims = (c if there else None for c, there in zip(_CHANNELS, present, strict=True))
    return (*parts,), (*dims,)
