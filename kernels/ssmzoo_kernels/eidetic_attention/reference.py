"""Eidetic attention chunk by chunk with every mask spelt out: the formula as it stands."""

import torch
from torch import Tensor

from ssmzoo_kernels.eidetic_attention.chunks import chunk_table
from ssmzoo_kernels.scan import zeros_on_tape


def eidetic_attention(
    q: Tensor,  # [B, L, H, d]
    k: Tensor,  # [B, L, G, d]
    v: Tensor,  # [B, L, G, d]
    mem_k: Tensor | None,  # [n, m, G, d]
    mem_v: Tensor | None,  # [n, m, G, d]
    mem_count: Tensor | None,  # [n]
    past_k: Tensor | None,  # [S, P, G, d]
    past_v: Tensor | None,  # [S, P, G, d]
    late: tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None,
    mem_positions: Tensor | None,  # [n, m]
    offsets: Tensor,  # [S + 1]
    seen: Tensor,  # [S]
    *,
    window: int | None,
    late_span: int,
    scale: float,
) -> Tensor:
    """Return the outputs ``[B, L, H, d]``."""
    exact = torch.promote_types(torch.float32, q.dtype)
    copies = q.shape[2] // k.shape[2]
    flat_q, flat_k, flat_v = (x.flatten(0, 1).to(exact) for x in (q, k, v))
    lengths = offsets.diff()
    span = window if window is not None else int((seen + lengths).max().clamp(min=1))
    more = (mem_k, mem_v, past_k, past_v, *(late or ()))
    out = zeros_on_tape(flat_q, flat_k, flat_v, *more)  # every row is written
    chunks = zip(*(x.tolist() for x in chunk_table(lengths, seen, span)), strict=True)
    for i, (s, _, first, _, count) in enumerate(chunks):
        own = slice(int(offsets[s]), int(offsets[s + 1]))
        here = slice(own.start + first, own.start + first + count)
        position = int(seen[s]) + torch.arange(count, device=q.device)[:, None] + first
        streams = [(flat_k[own], flat_v[own], past_k, past_v, position, span)]
        if late is not None:
            late_k, late_v = (x.flatten(0, 1)[own].to(exact) for x in late[:2])
            streams.append((late_k, late_v, late[2], late[3], position - span, late_span))
        keys, values, sees = [], [], []
        for new_k, new_v, old_k, old_v, newest, reach in streams:
            keys.append(_rows(new_k, old_k, s))
            values.append(_rows(new_v, old_v, s))
            j = torch.arange(-keys[-1].shape[0], 0, device=q.device) + int(seen[s] + lengths[s])
            sees.append((j >= 0) & (j <= newest) & (j > newest - reach))
        if mem_k is not None and mem_v is not None and mem_count is not None:
            held = torch.arange(mem_k.shape[1], device=q.device) < mem_count[i]
            visible = held.expand(count, -1)
            if mem_positions is not None:
                visible = visible & (mem_positions[i] <= position - span)
            keys.append(mem_k[i].to(exact))
            values.append(mem_v[i].to(exact))
            sees.append(visible)
        key, value = (torch.cat(x).repeat_interleave(copies, dim=1) for x in (keys, values))
        scores = torch.einsum("thd,shd->hts", flat_q[here], key) * scale
        scores = scores.masked_fill(~torch.cat(sees, dim=1), -torch.inf)
        out[here] = torch.einsum("hts,shd->thd", scores.softmax(dim=-1), value)
    return out.view(q.shape).to(q.dtype)


def _rows(new: Tensor, past: Tensor | None, sequence: int) -> Tensor:
    """Return a sequence's rows before this call and of it."""
    return new if past is None else torch.cat([past[sequence].to(new.dtype), new])
