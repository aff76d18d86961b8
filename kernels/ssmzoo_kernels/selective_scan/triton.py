"""Mamba's transitions for the GPU skeleton of ``ssmzoo_kernels.scan.triton``.

``A`` is the skeleton's ``param``. Past a segment's end the step size is 0, so the state stays.
"""

# a kernel launch is no ordinary call: Triton's types do not describe it
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

import math

import triton
import triton.language as tl

from ssmzoo_kernels.scan import triton as scan

LN2 = tl.constexpr(math.log(2.0))
# of the polynomial that is log(1 + y) / y at the ten Chebyshev points of [0, 1]; 5e-9 off between
LOG1P = tl.constexpr(
    (
        *(1.0, -0.499998926, 0.333297105, -0.249516163, 0.196632743),
        *(-0.152696671, 0.105436238, -0.0563736128, 0.0195425273, -0.00317605702),
    )
)


@triton.jit
def step_size(dt):
    """Return ``softplus(dt)``, above 20 ``dt`` itself as in torch; 0 for minus infinity.

    Float32 takes ``log(1 + y)`` from a polynomial: a GPU's own logarithm near 1 is good to an
    absolute 2e-7 only, and a small step would lose its digits. Float64 adds to the logarithm what
    ``1 + y`` rounds away.
    """
    y = scan.exp_minus(tl.abs(dt))
    if dt.dtype == tl.float64:
        whole = 1.0 + y
        added = tl.log(whole) + (y - (whole - 1.0)) / whole
        delta = tl.where(dt > 20.0, dt, tl.maximum(dt, 0.0) + added)
    else:
        total = y * LOG1P[9] + LOG1P[8]
        for i in tl.static_range(7, -1, -1):
            total = total * y + LOG1P[i]
        delta = tl.maximum(dt, 0.0) + y * total  # above 20 no sum differs from dt
    return delta


@triton.jit
def slope(dt):
    """Return the derivative of ``softplus(dt)``."""
    y = scan.exp_minus(tl.abs(dt))
    return tl.where(dt > 20.0, 1.0, tl.where(dt < 0.0, y, 1.0) / (1.0 + y))


@triton.jit
def kept_by(delta, A):
    """Return ``exp(delta A)``; a compiler takes the rate's product with a constant out of loops."""
    return tl.exp2(delta[None, :] * (A * scan.LOG2E))


@triton.jit
def along(kept, A):
    """Return ``sum_n kept A`` from the product that ``kept_by`` has, so that one tile is kept."""
    return tl.sum(kept * (A * scan.LOG2E), axis=0) * LN2


@triton.constexpr_function
def coefficient(i):
    """Return that of ``x^i`` in the series of ``held``."""
    return 1.0 / math.factorial(i + 2)


@triton.jit
def held(delta, A):
    """Return ``w = expm1(delta A) / A``, whose limit at 0 is delta, and its derivative by A.

    Where the quotients would cancel, by the series of ``r(x) = (expm1(x) / x - 1) / x``: with
    ``x = delta A`` they are ``delta (1 + x r)`` and ``delta^2 (1 + x r - r)``.
    """
    TERMS: tl.constexpr = 14 if A.dtype == tl.float64 else 7
    x = delta[None, :] * (A * scan.LOG2E) * LN2
    r = x * 0.0 + coefficient(TERMS)
    for i in tl.static_range(TERMS - 1, -1, -1):
        r = r * x + coefficient(i)
    near = tl.abs(x) < 0.5
    mean = 1.0 + x * r
    power = kept_by(delta, A)
    inverse = 1.0 / tl.where(A == 0.0, 1.0, A)
    weight = tl.where(near, delta[None, :] * mean, (power - 1.0) * inverse)
    bend = (delta[None, :] * power - weight) * inverse
    return weight, tl.where(near, (delta * delta)[None, :] * (mean - r), bend)


@triton.jit
def decay(k, dt, A):
    """Return what remains of the state."""
    return kept_by(step_size(dt), A)


@triton.jit
def euler_step(state, u, k, dt, A):
    """Decay, and add the input times the step size."""
    delta = step_size(dt)
    return kept_by(delta, A) * state + (delta * u)[None, :] * k[:, None]


@triton.jit
def euler_adjoint(grad, state, u, k, dt, A):
    """Carry the gradient of the state after a token back to the state before it and the inputs."""
    delta = step_size(dt)
    before = kept_by(delta, A) * grad
    kept = before * state
    written = tl.sum(grad * k[:, None], axis=0)
    grad_dt = (u * written + along(kept, A)) * slope(dt)
    return before, delta * written, grad_dt, grad * (delta * u)[None, :], kept * delta[None, :]


@triton.jit
def zoh_step(state, u, k, dt, A):
    """Decay, and add the input as if it stood still for the whole step."""
    delta = step_size(dt)
    weight, _ = held(delta, A)
    return kept_by(delta, A) * state + weight * u[None, :] * k[:, None]


@triton.jit
def zoh_adjoint(grad, state, u, k, dt, A):
    """Carry the gradient of the state after a token back to the state before it and the inputs."""
    delta = step_size(dt)
    weight, bend = held(delta, A)
    written = grad * k[:, None]
    grad_param = written * u[None, :] * bend
    grad_u = tl.sum(written * weight, axis=0)
    grad_k = grad * weight * u[None, :]
    before = kept_by(delta, A) * grad
    kept = before * state
    moved = u * tl.sum(before * k[:, None], axis=0)
    grad_dt = (moved + along(kept, A)) * slope(dt)
    return before, grad_u, grad_dt, grad_k, grad_param + kept * delta[None, :]


TRANSITIONS = {
    "euler": scan.Transition(euler_step, decay, euler_adjoint),
    "zoh": scan.Transition(zoh_step, decay, zoh_adjoint, entries=8, tokens=1),
}
