"""COFFEE's recurrence as a loop over time; the judge of the other implementations."""

from typing import Literal

import torch
from torch import Tensor

from ssmzoo_kernels.scan import zeros_on_tape

Gate = Literal["sigmoid", "linear"]


def feedback_scan(
    u: Tensor,  # [B, L, D]
    lam: Tensor,  # [D, N]
    w: Tensor,  # [D, N]
    C: Tensor,  # [D, N]
    w_gamma: Tensor | None = None,  # [D, N]
    D: Tensor | None = None,  # [D]
    drive: Tensor | None = None,  # [B, L, D]
    initial_state: Tensor | None = None,  # [B, D, N]
    *,
    gate: Gate = "sigmoid",
) -> tuple[Tensor, Tensor]:
    """Run COFFEE's recurrence (equations and shapes: the public op of the same name)."""
    dtype = u.dtype
    exact = torch.promote_types(torch.float32, dtype)
    u, lam, w, C = (x.to(exact) for x in (u, lam, w, C))
    state = u.new_zeros(u.shape[0], *lam.shape)
    if initial_state is not None:
        state = initial_state.to(exact)
    length = u.shape[1]
    # unbind first: the backward of indexing x[:, t] inside the loop is quadratic in L
    driven = [None] * length if drive is None else drive.to(exact).unsqueeze(-1).unbind(1)
    outputs = []
    for u_t, drive_t in zip(u.unsqueeze(-1).unbind(1), driven, strict=True):
        opened = w * (state if drive_t is None else drive_t)  # [B, D, N]
        if gate == "sigmoid":
            opened = opened.sigmoid()
        state = state + opened * (lam * state + u_t)
        read = (C * state).sum(dim=-1)
        if w_gamma is not None:
            read = (w_gamma.to(exact) * state).sum(dim=-1).sigmoid() * read
        outputs.append(read)
    out = torch.stack(outputs, dim=1) if outputs else zeros_on_tape(u, lam, w, C, w_gamma, drive)
    if D is not None:
        out = out + D.to(exact) * u
    return out.to(dtype), state
