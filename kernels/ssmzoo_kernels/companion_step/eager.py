"""One token of the companion recurrence in torch: any device, no compiler."""

import torch
from torch import Tensor


def step_(
    u: Tensor,  # [B, D]
    ring: Tensor,  # [B, D, n], written
    position: Tensor,  # [B]
    a: Tensor,  # [D_a, n]
    b: Tensor,  # [D, n]
    d: Tensor,  # [D]
) -> Tensor:
    """Return the outputs ``[B, D]`` in the ring's dtype; put ``w`` where ``x_n`` was."""
    batch, width, order = ring.shape
    places = torch.arange(order, device=ring.device)
    places = (places + position[:, None]) % max(order, 1)  # [B, n]
    state = ring.gather(2, places[:, None].expand(batch, width, order))
    y = torch.einsum("bdn,dn->bd", state, b) + d * u
    grouped = state.view(batch, a.shape[0], width // a.shape[0], order)
    w = u - torch.einsum("bgrn,gn->bgr", grouped, a).reshape(batch, width)
    if order:
        ring.scatter_(2, places[:, None, -1:].expand(batch, width, 1), w[..., None])
    return y
