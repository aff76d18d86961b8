"""Longhorn's transition for the skeleton of ``ssmzoo_kernels.scan.eager``: any device, torch only.

States move by the residual, which keeps full precision where the decay ``1 - rate k^2`` cancels.
"""

import torch
from torch import Tensor

from ssmzoo_kernels.scan import eager as scan


def rates(keys: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``rate = 1 / (1 + exp(-dt) + |k|^2)`` and its logarithmic slope in dt, ``[T, D]``."""
    known = 1 + keys.square().sum(dim=-1, keepdim=True)
    # the second as 1 / (1 + exp(dt) known), because rate * exp(-dt) is 0 * inf on one side
    return 1 / (known + torch.exp(-dt)), 1 / (1 + torch.exp(dt) * known)


def factors(u: Tensor, k: Tensor, rate: Tensor, param: Tensor | None) -> tuple[Tensor, ...]:
    """Return value, key and what a unit of residual writes."""
    return u, k, rate * k


def step(state: Tensor, u: Tensor, k: Tensor, written: Tensor) -> Tensor:
    """Write the residual."""
    return state + written * (u - k * state)


def decay(u: Tensor, k: Tensor, written: Tensor) -> Tensor:
    """Return what remains of the state."""
    return 1 - written * k


def adjoint(
    grad: Tensor,
    before: Tensor,
    made: tuple[Tensor, ...],
    u: Tensor,
    k: Tensor,
    rate: Tensor,
    param: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """Return the gradients of values, of keys, and of rates, the last times the rate."""
    recalled = k * before
    error = u - recalled
    moved = rate * grad
    keyed = k * moved
    return (
        keyed.sum(dim=2),
        (moved * (error - recalled)).sum(dim=3),
        (keyed * error).sum(dim=2),
        None,
    )


def finish(grad_rate: Tensor, rate: Tensor, slope: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients that flow through the rate, of dt and of the keys' energy."""
    grad_energy = -(grad_rate * rate).sum(dim=1, keepdim=True)
    return grad_rate * slope, 2 * k * grad_energy


TRANSITION = scan.Transition(rates, factors, step, decay, adjoint, finish)
