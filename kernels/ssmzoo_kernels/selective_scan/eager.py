"""Mamba's transition for the skeleton of ``ssmzoo_kernels.scan.eager``: any device, torch only."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo_kernels.scan import eager as scan

TERMS = 15  # of the series, below |delta A| = 1/2


def rates(keys: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``delta = softplus(dt)`` and its slope, ``[T, D]``."""
    return F.softplus(dt), torch.where(dt > 20, 1.0, dt.sigmoid())


def euler_factors(u: Tensor, k: Tensor, delta: Tensor, A: Tensor) -> tuple[Tensor, ...]:
    """Return decays and what is added."""
    return torch.exp(delta * A), delta * u * k


def zoh_factors(u: Tensor, k: Tensor, delta: Tensor, A: Tensor) -> tuple[Tensor, ...]:
    """Return decays and what is added, ``expm1(delta A) / A`` of ``u k``, and that factor."""
    x = delta * A
    away = torch.expm1(x) / torch.where(A == 0, 1.0, A)
    weight = torch.where(x.abs() < torch.finfo(x.dtype).eps / 2, delta, away)
    return torch.exp(x), weight * u * k, weight


def step(state: Tensor, decay: Tensor, added: Tensor, *_: Tensor) -> Tensor:
    """Decay and add."""
    return torch.addcmul(added, decay, state)


def decay(decay: Tensor, *_: Tensor) -> Tensor:
    """Return what remains of the state."""
    return decay


def euler_adjoint(
    grad: Tensor,
    before: Tensor,
    made: tuple[Tensor, ...],
    u: Tensor,
    k: Tensor,
    delta: Tensor,
    A: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of inputs, input vectors, step sizes and rates."""
    kept = made[0] * grad * before
    written = (k * grad).sum(dim=2)
    grad_k = (delta * u * grad).sum(dim=3)
    grad_delta = u.squeeze(2) * written + (kept * A).sum(dim=2)
    return delta.squeeze(2) * written, grad_k, grad_delta, (kept * delta).sum(dim=(0, 1))


def zoh_adjoint(
    grad: Tensor,
    before: Tensor,
    made: tuple[Tensor, ...],
    u: Tensor,
    k: Tensor,
    delta: Tensor,
    A: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of inputs, input vectors, step sizes and rates.

    ``d weight / d A = (delta decay - weight) / A``, or where that cancels its series, ``delta^2 sum
    (i + 1) / (i + 2)! (delta A)^i``.
    """
    decay, _, weight = made
    x = delta * A
    near = x.abs() < 0.5
    small, bend = torch.where(near, x, 0.0), torch.zeros_like(x)
    for i in reversed(range(TERMS)):
        bend = bend * small + (i + 1) / math.factorial(i + 2)
    away = (delta * decay - weight) / torch.where(near, 1.0, A)
    bend = torch.where(near, delta * delta * bend, away)
    carried = decay * grad
    kept, moved = carried * before, weight * grad
    grad_k = (u * moved).sum(dim=3)
    grad_delta = u.squeeze(2) * (k * carried).sum(dim=2) + (kept * A).sum(dim=2)
    grad_A = (kept * delta + u * k * grad * bend).sum(dim=(0, 1))
    return (k * moved).sum(dim=2), grad_k, grad_delta, grad_A


def finish(grad_delta: Tensor, delta: Tensor, slope: Tensor, k: Tensor) -> tuple[Tensor, None]:
    """Return the gradient of dt; keys have no part in the step size."""
    return grad_delta * slope, None


TRANSITIONS = {
    "euler": scan.Transition(rates, euler_factors, step, decay, euler_adjoint, finish),
    "zoh": scan.Transition(rates, zoh_factors, step, decay, zoh_adjoint, finish),
}
