"""One token of the companion recurrence in torch: any device, no compiler."""

import torch
from torch import Tensor


def step(
    u: Tensor,  # [B, D]
    ring: Tensor,  # [B, n + 1, D]
    position: Tensor,  # [B]
    a: Tensor,  # [n, D]
    b: Tensor,  # [n, D]
    d: Tensor,  # [D]
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the next ring, which begins at position 0, on the tape."""
    state = ring.gather(1, _places(ring, position)[:, :-1])
    y, w = _outputs(u, state, a, b, d)
    return y, torch.cat([w[:, None], state], dim=1)


def forward(
    u: Tensor,
    ring: Tensor,  # written
    position: Tensor,
    a: Tensor,
    b: Tensor,
    d: Tensor,
) -> Tensor:
    """Return the outputs ``[B, D]`` in the ring's dtype; put ``w`` in the free place."""
    places = _places(ring, position)
    y, w = _outputs(u, ring.gather(1, places[:, :-1]), a, b, d)
    ring.scatter_(1, places[:, -1:], w[:, None])
    return y


def _places(ring: Tensor, position: Tensor) -> Tensor:
    """Return each row's places, the newest value's first, the free one last, ``[B, n + 1, D]``."""
    count = ring.shape[1]
    places = (torch.arange(count, device=ring.device) + position[:, None]) % count
    return places[..., None].expand(ring.shape)


def _outputs(u: Tensor, state: Tensor, a: Tensor, b: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``y`` and ``w``, both ``[B, D]``."""
    with torch.autocast(u.device.type, enabled=False):
        y = torch.einsum("bnd,nd->bd", state, b) + d * u
        return y.contiguous(), u - torch.einsum("bnd,nd->bd", state, a)
