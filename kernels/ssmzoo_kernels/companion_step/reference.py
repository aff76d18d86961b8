"""The companion recurrence, token by token on the tape; the judge of the other implementations.

The state is the list ``x_1 .. x_n`` of past values of ``w = u / a``, newest first.
"""

import torch
from torch import Tensor


def companion_step(
    u: Tensor,  # [B, D]
    ring: Tensor,  # [B, n + 1, D]
    position: Tensor,  # [B]
    a: Tensor,  # [D_a, n]
    b: Tensor,  # [D, n]
    d: Tensor,  # [D]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, ring and position after one token (equations: the public op)."""
    places = torch.arange(ring.shape[1], device=ring.device)
    newest_first = (position[:, None] + places[:-1]) % len(places)  # [B, n]
    state = ring.gather(1, newest_first.unsqueeze(2).expand(-1, -1, ring.shape[2]))
    y, x = step(u.to(ring.dtype), state, a, b, d)
    back = (places - position[:, None] + 1) % len(places)  # [B, n + 1]
    ring = x.gather(1, back.unsqueeze(2).expand(-1, -1, ring.shape[2]))
    return y.to(u.dtype), ring, position - 1


def step(u: Tensor, state: Tensor, a: Tensor, b: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``y = d u + b x`` and ``w = u - a x`` in front of the state."""
    a = a.to(state.dtype).repeat_interleave(state.shape[2] // a.shape[0], dim=0)
    y = d.to(state.dtype) * u + (b.to(state.dtype).T * state).sum(1)
    w = u - (a.T * state).sum(1)
    return y, torch.cat([w[:, None], state], dim=1)


def companion_state(u: Tensor, a: Tensor, initial_state: Tensor) -> Tensor:
    """Return the state after all tokens of ``u`` [B, L, D], ``[B, n, D]``."""
    nothing = u.new_zeros(1, 1)  # neither read-out nor direct gain
    state = initial_state
    for t in range(u.shape[1]):
        _, longer = step(u[:, t].to(state.dtype), state, a, nothing, nothing)
        state = longer[:, :-1]
    return state


def companion_response(state: Tensor, a: Tensor, b: Tensor, length: int) -> Tensor:
    """Return the next outputs without any input, ``[B, L, D]``."""
    nothing = state.new_zeros(state.shape[0], state.shape[2])
    outputs = []
    for _ in range(length):
        y, longer = step(nothing, state, a, b, nothing[:1])
        state = longer[:, :-1]
        outputs.append(y)
    return (
        torch.stack(outputs, dim=1) if outputs else state.new_zeros(state.shape[0], 0, b.shape[0])
    )
