"""Rational kernels as ``torch.library`` ops, so that autograd and ``torch.compile`` know them."""

import torch
from torch import Tensor

from ssmzoo_kernels.dispatch import record
from ssmzoo_kernels.library import custom_op
from ssmzoo_kernels.rational_kernel import eager
from ssmzoo_kernels.scan import needs_library

OP = "rational_kernel"


def rational_kernel(a: Tensor, b: Tensor, length: int, grid: int | None) -> Tensor:
    """Return ``[D, L]`` in the polynomials' dtype; ``grid`` None is the exact mode."""
    grad = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    if grad or needs_library(a):
        return (_exact(a, b, length) if grid is None else _truncated(a, b, length, grid))[0]
    record(OP, "eager")
    if grid is None:
        return eager.exact(eager.inverse_series(a, length), b, length)
    return eager.truncated(eager.inverse_on_grid(a, grid), b, length, grid)


def inverse_series(a: Tensor, length: int) -> Tensor:
    """Return the power series of ``1 / a``, ``[D_a, L]``."""
    if (torch.is_grad_enabled() and a.requires_grad) or needs_library(a):
        return _inverse(a, length)
    return eager.inverse_series(a, length)


@custom_op("ssmzoo::rational_kernel_truncated")
def _truncated(a: Tensor, b: Tensor, length: int, grid: int) -> tuple[Tensor, Tensor]:
    record(OP, "eager")
    inverse = eager.inverse_on_grid(a, grid)
    return eager.truncated(inverse, b, length, grid), torch.view_as_real(inverse)


@_truncated.register_fake
def _(a, b, length, grid):
    return b.new_empty(b.shape[0], length), a.new_empty(a.shape[0], grid // 2 + 1, 2)


@custom_op("ssmzoo::rational_kernel_truncated_backward")
def _truncated_backward(
    grad: Tensor, inverse: Tensor, b: Tensor, grid: int
) -> tuple[Tensor, Tensor]:
    values = torch.view_as_complex(inverse)
    return eager.truncated_backward(grad.contiguous(), values, b, grid)


@_truncated_backward.register_fake
def _(grad, inverse, b, grid):
    return b.new_empty(inverse.shape[0], b.shape[1]), b.new_empty(b.shape)


def _truncated_context(ctx, inputs, output):
    _, b, _, ctx.grid = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], b)


def _truncated_autograd(ctx, grad, _):
    return (*_truncated_backward(grad, *ctx.saved_tensors, ctx.grid), None, None)


_truncated.register_autograd(_truncated_autograd, setup_context=_truncated_context)


@custom_op("ssmzoo::rational_kernel_exact")
def _exact(a: Tensor, b: Tensor, length: int) -> tuple[Tensor, Tensor]:
    record(OP, "eager")
    inverse = eager.inverse_series(a, length)
    return eager.exact(inverse, b, length), inverse


@_exact.register_fake
def _(a, b, length):
    return b.new_empty(b.shape[0], length), a.new_empty(a.shape[0], length)


@custom_op("ssmzoo::rational_kernel_exact_backward")
def _exact_backward(
    grad: Tensor, kernel: Tensor, inverse: Tensor, order: int
) -> tuple[Tensor, Tensor]:
    return eager.exact_backward(grad.contiguous(), kernel, inverse, order)


@_exact_backward.register_fake
def _(grad, kernel, inverse, order):
    return inverse.new_empty(inverse.shape[0], order), kernel.new_empty(kernel.shape[0], order)


def _exact_context(ctx, inputs, output):
    kernel, inverse = output
    ctx.order = inputs[0].shape[1]
    ctx.mark_non_differentiable(inverse)
    ctx.save_for_backward(kernel, inverse)


def _exact_autograd(ctx, grad, _):
    return (*_exact_backward(grad, *ctx.saved_tensors, ctx.order), None)


_exact.register_autograd(_exact_autograd, setup_context=_exact_context)


@custom_op("ssmzoo::inverse_series")
def _inverse(a: Tensor, length: int) -> Tensor:
    return eager.inverse_series(a, length)


@_inverse.register_fake
def _(a, length):
    return a.new_empty(a.shape[0], length)


@custom_op("ssmzoo::inverse_series_backward")
def _inverse_backward(grad: Tensor, inverse: Tensor, order: int) -> Tensor:
    return eager.inverse_series_backward(grad, inverse, order)


@_inverse_backward.register_fake
def _(grad, inverse, order):
    return inverse.new_empty(inverse.shape[0], order)


def _inverse_context(ctx, inputs, output):
    ctx.order = inputs[0].shape[1]
    ctx.save_for_backward(output)


def _inverse_autograd(ctx, grad):
    return _inverse_backward(grad, *ctx.saved_tensors, ctx.order), None


_inverse.register_autograd(_inverse_autograd, setup_context=_inverse_context)
