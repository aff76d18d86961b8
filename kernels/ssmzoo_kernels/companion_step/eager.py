"""One token of the companion recurrence in torch: any device, no compiler."""

import torch
from torch import Tensor


def step(
    u: Tensor,  # [B, D]
    ring: Tensor,  # [B, D, n]
    position: Tensor,  # [B]
    a: Tensor,  # [D_a, n]
    b: Tensor,  # [D, n]
    d: Tensor,  # [D]
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the next state, newest first, on the tape."""
    state = ring.gather(2, _places(ring, position)[:, None].expand(ring.shape))
    y, w = _outputs(u, state, a, b, d)
    return y, torch.cat([w[..., None], state], dim=-1)[..., : ring.shape[2]]


def step_(
    u: Tensor,
    ring: Tensor,  # written
    position: Tensor,
    a: Tensor,
    b: Tensor,
    d: Tensor,
) -> Tensor:
    """Return the outputs ``[B, D]`` in the ring's dtype; put ``w`` where ``x_n`` was."""
    places = _places(ring, position)
    y, w = _outputs(u, ring.gather(2, places[:, None].expand(ring.shape)), a, b, d)
    if ring.shape[2]:
        ring.scatter_(2, places[:, None, -1:].expand(*ring.shape[:2], 1), w[..., None])
    return y


def _places(ring: Tensor, position: Tensor) -> Tensor:
    """Return where each row's values lie, newest first, ``[B, n]``."""
    order = ring.shape[2]
    return (torch.arange(order, device=ring.device) + position[:, None]) % max(order, 1)


def _outputs(u: Tensor, state: Tensor, a: Tensor, b: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``y`` and ``w``, both ``[B, D]``."""
    batch, width, order = state.shape
    y = torch.einsum("bdn,dn->bd", state, b) + d * u
    grouped = state.view(batch, a.shape[0], width // a.shape[0], order)
    w = u - torch.einsum("bgrn,gn->bgr", grouped, a).reshape(batch, width)
    return y.contiguous(), w
