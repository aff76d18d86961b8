"""Longhorn's transition for the skeleton of ``ssmzoo_kernels.scan.eager``: any device, torch only.

States move by the residual, which keeps full precision where the decay ``1 - rate k^2`` cancels.
"""

import torch
from torch import Tensor

from ssmzoo_kernels.scan import eager as scan

CHUNK = scan.CHUNK


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


def forward(
    u: Tensor,  # [T, D]
    q: Tensor,  # [T, N]
    k: Tensor,  # [T, N]
    dt: Tensor,  # [T, D]
    dt_bias: Tensor | None,  # [D]
    D: Tensor | None,  # [D]
    z: Tensor | None,  # [T, D]
    initial_state: Tensor | None,  # [S, D, N]
    offsets: Tensor,  # [S + 1] int64
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, final states and, with ``save``, the state before every interval."""
    return scan.forward(TRANSITION, u, q, k, dt, dt_bias, D, z, None, initial_state, offsets, save)


def backward(
    grad_out: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, D, N]
    u: Tensor,
    q: Tensor,
    k: Tensor,
    dt: Tensor,
    dt_bias: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor | None,
    offsets: Tensor,
    saved: Tensor,  # [slots, N, D]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``forward``'s eight tensors, None where one was absent."""
    inputs = (u, q, k, dt, dt_bias, D, z, None, initial_state)
    grads = scan.backward(TRANSITION, grad_out, grad_final, *inputs, offsets, saved)
    return (*grads[:7], grads.initial_state)
