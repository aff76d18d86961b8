"""``vandermonde`` and its transpose as ``torch.library`` ops, for autograd and ``torch.compile``.

Saved for the backward: what came in; the exponentials are computed again.
"""

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from ssmzoo_kernels.dispatch import record
from ssmzoo_kernels.library import custom_op
from ssmzoo_kernels.scan import needs_library
from ssmzoo_kernels.vandermonde.tables import Lags

OP = "vandermonde"
STATE = "vandermonde_state"


@functools.cache
def _backend(name: str) -> ModuleType:
    return importlib.import_module(f"ssmzoo_kernels.{OP}.{name}")


def vandermonde(
    weight: Tensor,  # [B, H, N] complex
    exponent: Tensor,  # [H, N] complex128
    length: int,
    first: int,
    last: int,
    reversed: Tensor | None,  # [H, N] bool
    backend: str,
) -> Tensor:
    """Return ``[B, H, length]``."""
    arguments = (weight, exponent, length, first, last, reversed, backend)
    if _taped(weight, exponent) or needs_library(weight):
        return _synthesize(*arguments)
    return _run_synthesize(*arguments)


def vandermonde_state(
    u: Tensor,  # [B, H, L]
    exponent: Tensor,  # [H, N] complex128
    first: int,
    reversed: Tensor | None,  # [H, N] bool
    backend: str,
) -> Tensor:
    """Return ``[B, H, N]``."""
    arguments = (u, exponent, first, reversed, backend)
    if _taped(u, exponent) or needs_library(u):
        return _analyze(*arguments)
    return _run_analyze(*arguments)


def _taped(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _lags(length: int, first: int, last: int, reversed: Tensor | None) -> Lags:
    return Lags(length, first, last, False if reversed is None else reversed)


def _state_lags(length: int, first: int, reversed: Tensor | None) -> Lags:
    # what is read backwards was counted from the start, everything else from the end
    return Lags(length, first, 0, True if reversed is None else ~reversed)


def _run_synthesize(weight, exponent, length, first, last, reversed, backend):
    record(OP, backend)
    lags = _lags(length, first, last, reversed)
    with torch.autocast(weight.device.type, enabled=False):
        return _backend(backend).synthesize(weight, exponent, lags)


def _run_analyze(u, exponent, first, reversed, backend):
    record(STATE, backend)
    lags = _state_lags(u.shape[2], first, reversed)
    with torch.autocast(u.device.type, enabled=False):
        return _backend(backend).analyze(u, exponent, lags, False)[0]


@custom_op(f"ssmzoo::{OP}")
def _synthesize(
    weight: Tensor,
    exponent: Tensor,
    length: int,
    first: int,
    last: int,
    reversed: Tensor | None,
    backend: str,
) -> Tensor:
    return _run_synthesize(weight, exponent, length, first, last, reversed, backend)


@_synthesize.register_fake
def _(weight, exponent, length, first, last, reversed, backend):
    return weight.new_empty(*weight.shape[:2], length, dtype=weight.dtype.to_real())


@custom_op(f"ssmzoo::{OP}_backward")
def _synthesize_backward(
    grad: Tensor,
    weight: Tensor,
    exponent: Tensor,
    first: int,
    last: int,
    reversed: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    lags = _lags(grad.shape[2], first, last, reversed)
    with torch.autocast(grad.device.type, enabled=False):
        sums, moments = _backend(backend).analyze(grad, exponent, lags, True)
        return sums.conj_physical(), (weight * moments).conj_physical().sum(0).to(exponent.dtype)


@_synthesize_backward.register_fake
def _(grad, weight, exponent, first, last, reversed, backend):
    return weight.new_empty(weight.shape), exponent.new_empty(exponent.shape)


def _synthesize_context(ctx, inputs, output):
    weight, exponent, _, ctx.first, ctx.last, reversed, ctx.backend = inputs
    ctx.save_for_backward(weight, exponent, reversed)


def _synthesize_autograd(ctx, grad):
    weight, exponent, reversed = ctx.saved_tensors
    grads = _synthesize_backward(grad, weight, exponent, ctx.first, ctx.last, reversed, ctx.backend)
    return (*grads, None, None, None, None, None)


_synthesize.register_autograd(_synthesize_autograd, setup_context=_synthesize_context)


@custom_op(f"ssmzoo::{STATE}")
def _analyze(
    u: Tensor, exponent: Tensor, first: int, reversed: Tensor | None, backend: str
) -> Tensor:
    return _run_analyze(u, exponent, first, reversed, backend)


@_analyze.register_fake
def _(u, exponent, first, reversed, backend):
    return u.new_empty(u.shape[0], *exponent.shape, dtype=u.dtype.to_complex())


@custom_op(f"ssmzoo::{STATE}_backward")
def _analyze_backward(
    grad: Tensor, u: Tensor, exponent: Tensor, first: int, reversed: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    lags = _state_lags(u.shape[2], first, reversed)
    with torch.autocast(grad.device.type, enabled=False):
        run = _backend(backend)
        moments = run.analyze(u, exponent, lags, True)[1]
        grad_u = run.synthesize(grad.conj_physical(), exponent, lags)
        return grad_u, (grad * moments.conj_physical()).sum(0).to(exponent.dtype)


@_analyze_backward.register_fake
def _(grad, u, exponent, first, reversed, backend):
    return u.new_empty(u.shape), exponent.new_empty(exponent.shape)


def _analyze_context(ctx, inputs, output):
    u, exponent, ctx.first, reversed, ctx.backend = inputs
    ctx.save_for_backward(u, exponent, reversed)


def _analyze_autograd(ctx, grad):
    u, exponent, reversed = ctx.saved_tensors
    grads = _analyze_backward(grad, u, exponent, ctx.first, reversed, ctx.backend)
    return (*grads, None, None, None)


_analyze.register_autograd(_analyze_autograd, setup_context=_analyze_context)
