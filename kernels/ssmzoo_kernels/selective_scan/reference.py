"""Mamba's recurrence as a loop over time; the judge of the other implementations."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo_kernels.scan import zeros_on_tape

Discretization = Literal["euler", "zoh"]


def selective_scan(
    u: Tensor,  # [B, L, D]
    dt: Tensor,  # [B, L, D]
    A: Tensor,  # [D, N]
    B: Tensor,  # [B, L, N]
    C: Tensor,  # [B, L, N]
    D: Tensor | None = None,  # [D]
    z: Tensor | None = None,  # [B, L, D]
    dt_bias: Tensor | None = None,  # [D]
    initial_state: Tensor | None = None,  # [B, D, N]
    *,
    discretization: Discretization = "euler",
) -> tuple[Tensor, Tensor]:
    """Run Mamba's recurrence (equations and shapes: the public op of the same name)."""
    dtype = u.dtype
    exact = torch.promote_types(torch.float32, dtype)
    u, dt, A, B, C = (x.to(exact) for x in (u, dt, A, B, C))
    if dt_bias is not None:
        dt = dt + dt_bias.to(exact)
    delta = F.softplus(dt)  # [B, L, D]

    state = u.new_zeros(u.shape[0], *A.shape)
    if initial_state is not None:
        state = initial_state.to(exact)
    outputs = []
    # unbind first: the backward of indexing x[:, t] inside the loop is quadratic in L
    for u_t, delta_t, B_t, C_t in zip(*(x.unbind(1) for x in (u, delta, B, C)), strict=True):
        u_t, delta_t, B_t, C_t = u_t[:, :, None], delta_t[:, :, None], B_t[:, None], C_t[:, None]
        weight = delta_t if discretization == "euler" else held(delta_t, A)
        state = torch.exp(delta_t * A) * state + weight * B_t * u_t  # [B, D, N]
        outputs.append((state * C_t).sum(dim=-1))
    y = torch.stack(outputs, dim=1) if outputs else zeros_on_tape(u, delta, A, B, C)
    if D is not None:
        y = y + D.to(exact) * u
    if z is not None:
        y = y * F.silu(z.to(exact))
    return y.to(dtype), state


def held(delta: Tensor, A: Tensor) -> Tensor:
    """Return ``expm1(delta A) / A``, where ``|delta A| < 1/2`` by its series; the limit is delta.

    There autograd's derivative of the quotient would cancel.
    """
    x = delta * A
    near = x.abs() < 0.5
    # what where() drops must still be finite, or its gradient is 0 * inf
    small = torch.where(near, x, 0.0)
    series = sum(small**k / math.factorial(k + 1) for k in range(15))
    return torch.where(near, delta * series, torch.expm1(x) / torch.where(near, 1.0, A))
