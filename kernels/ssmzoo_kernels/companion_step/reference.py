"""The companion recurrence, token by token on the tape; the judge of the other implementations.

The state is the list ``x_1 .. x_n`` of past values of ``w = u / a``, newest first.
"""

import torch
from torch import Tensor


def companion_step(
    u: Tensor,  # [B, D]
    ring: Tensor,  # [B, D, n]
    position: Tensor,  # [B]
    a: Tensor,  # [D_a, n]
    b: Tensor,  # [D, n]
    d: Tensor,  # [D]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, ring and position after one token (equations: the public op)."""
    order = ring.shape[2]
    outputs, rings = [], []
    for row, first in enumerate(position.tolist()):
        y, x = step(u[row : row + 1].to(ring.dtype), ring[row : row + 1].roll(-first, -1), a, b, d)
        outputs.append(y)
        rings.append(x.roll((first - 1) % order if order else 0, -1))
    moved = (position - 1) % order if order else position
    return torch.cat(outputs).to(u.dtype), torch.cat(rings), moved


def step(u: Tensor, state: Tensor, a: Tensor, b: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``y = d u + b x`` and the state after ``w = u - a x`` has entered it."""
    a = a.to(state.dtype).repeat_interleave(state.shape[1] // a.shape[0], dim=0)
    y = d.to(state.dtype) * u + (b.to(state.dtype) * state).sum(-1)
    w = u - (a * state).sum(-1)
    return y, torch.cat([w[..., None], state], dim=-1)[..., : state.shape[-1]]


def companion_state(u: Tensor, a: Tensor, initial_state: Tensor) -> Tensor:
    """Return the state after all tokens of ``u`` [B, L, D], ``[B, D, n]``."""
    nothing = u.new_zeros(())
    state = initial_state
    for t in range(u.shape[1]):
        _, state = step(u[:, t].to(state.dtype), state, a, nothing, nothing)
    return state


def companion_response(state: Tensor, a: Tensor, b: Tensor, length: int) -> Tensor:
    """Return the next outputs without any input, ``[B, L, D]``."""
    nothing = state.new_zeros(())
    outputs = []
    for _ in range(length):
        y, state = step(state.new_zeros(state.shape[:2]), state, a, b, nothing)
        outputs.append(y)
    return (
        torch.stack(outputs, dim=1) if outputs else state.new_zeros(state.shape[0], 0, b.shape[0])
    )
