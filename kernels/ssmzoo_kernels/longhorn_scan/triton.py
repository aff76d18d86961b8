"""Longhorn's transition for the GPU skeleton of ``ssmzoo_kernels.scan.triton``.

States move by the residual, ``S += eps k (u - k S)``, which keeps full precision where
``1 - eps k^2`` cancels; the product of decays only scales what a span carries and takes that form.
"""

# a kernel launch is no ordinary call: Triton's types do not describe it
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from ssmzoo_kernels.scan import triton as scan


@triton.jit
def step_size(k, dt):
    """Return ``1 / (exp(-dt) + 1 + |k|^2)``; an overflowing exponential gives the limit, 0."""
    return 1.0 / (1.0 + scan.exp_minus(dt) + tl.sum(k * k, axis=0))


@triton.jit
def step(state, u, k, dt, param):
    """Regress the value on the key: one implicit gradient step per state entry."""
    rate = step_size(k, dt)[None, :] * k[:, None]
    return state + rate * (u[None, :] - k[:, None] * state)


@triton.jit
def decay(k, dt, param):
    """Return what remains of the state, ``1 - eps k^2``."""
    return 1.0 - step_size(k, dt)[None, :] * (k * k)[:, None]


@triton.jit
def adjoint(grad, state, u, k, dt, param):
    """Carry the gradient of the state after a token back to the state before it and the inputs."""
    eps = step_size(k, dt)
    key = k[:, None]
    keyed = key * grad
    grad_u = eps * tl.sum(keyed, axis=0)
    before = grad - (eps[None, :] * key) * keyed
    error = u[None, :] - key * state
    grad_eps = tl.sum(keyed * error, axis=0)
    # eps * exp(-dt), finite on both ends
    closed = 1.0 / (1.0 + scan.exp(dt) * (1.0 + tl.sum(k * k, axis=0)))
    grad_dt = grad_eps * eps * closed
    grad_energy = grad_eps * eps * eps
    # u - 2 k S, from the error: as many tiles as this keeps alive, so many registers
    grad_k = eps[None, :] * grad * (2.0 * error - u[None, :]) - 2.0 * key * grad_energy[None, :]
    return before, grad_u, grad_dt, grad_k, grad  # the last is nobody's: there is no param


TRANSITION = scan.Transition(step, decay, adjoint)
