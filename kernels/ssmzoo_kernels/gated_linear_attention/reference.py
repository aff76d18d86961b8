"""Gated linear attention as a loop over time; the judge of the other implementations."""

from typing import Literal

import torch
from torch import Tensor

from ssmzoo_kernels.scan import zeros_on_tape

Rule = Literal["additive", "delta"]


def gated_linear_attention(
    q: Tensor,  # [B, L, G, K]
    k: Tensor,  # [B, L, G, K]
    v: Tensor,  # [B, L, H, V]
    log_decay: Tensor | None = None,  # [B, L, H, 1] or [B, L, H, K]
    beta: Tensor | None = None,  # [B, L, H]
    initial_state: Tensor | None = None,  # [B, H, K, V]
    *,
    rule: Rule,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token (equations and shapes: the public op of the same name)."""
    del chunk  # there are none
    dtype = v.dtype
    exact = torch.promote_types(torch.float32, q.dtype)
    q, k, v = (x.to(exact) for x in (q, k, v))
    (batch, length, heads, width), keys = v.shape, k.shape[3]
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    decay = None if log_decay is None else log_decay.to(exact).exp()
    strength = None if beta is None else beta.to(exact)

    state = v.new_zeros(batch, heads, keys, width)
    if initial_state is not None:
        state = initial_state.to(exact)
    outputs = []
    # unbind first: the backward of indexing x[:, t] inside the loop is quadratic in L
    rows = [[None] * length if x is None else x.unbind(1) for x in (q, k, v, decay, strength)]
    for q_t, k_t, v_t, decay_t, beta_t in zip(*rows, strict=True):
        assert q_t is not None
        assert k_t is not None
        assert v_t is not None
        if decay_t is not None:
            state = decay_t.unsqueeze(-1) * state
        written = v_t
        if rule == "delta":
            written = v_t - (k_t.unsqueeze(-1) * state).sum(dim=-2)
        if beta_t is not None:
            written = beta_t.unsqueeze(-1) * written
        state = state + k_t.unsqueeze(-1) * written.unsqueeze(-2)
        outputs.append(scale * (q_t.unsqueeze(-1) * state).sum(dim=-2))
    out = torch.stack(outputs, dim=1) if outputs else zeros_on_tape(v, q, k, decay, strength)
    return out.to(dtype), state
