"""Eidetic attention chunk by chunk with every mask spelt out: the formula as it stands.

A graph that is traced has no chunks to look at: there it is row by row, in tensors.
"""

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
    if torch.compiler.is_compiling():
        streams = [(k, v, past_k, past_v)]
        streams += [late] if late is not None else []
        memory = mem_k, mem_v, mem_count, mem_positions
        return _traced(q.to(exact), streams, memory, seen, window, late_span, scale).to(q.dtype)
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
        with torch.autocast(q.device.type, enabled=False):
            scores = torch.einsum("thd,shd->hts", flat_q[here], key) * scale
            scores = scores.masked_fill(~torch.cat(sees, dim=1), -torch.inf)
            out[here] = torch.einsum("hts,shd->thd", scores.softmax(dim=-1), value)
    return out.view(q.shape).to(q.dtype)


def _rows(new: Tensor, past: Tensor | None, sequence: int) -> Tensor:
    """Return a sequence's rows before this call and of it."""
    return new if past is None else torch.cat([past[sequence].to(new.dtype), new])


def _traced(
    q: Tensor,  # [B, L, H, d]
    streams: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]],
    memory: tuple[Tensor | None, ...],
    seen: Tensor,  # [B]
    window: int | None,
    late_span: int,
    scale: float,
) -> Tensor:
    """Return the outputs ``[B, L, H, d]`` of whole rows, none of them packed."""
    length = q.shape[1]
    position = seen[:, None] + torch.arange(length, device=q.device)  # [B, L]
    keys, values, sees = [], [], []  # [B, L, K, G, d] twice, [B, L, K]
    for late, (new_k, new_v, old_k, old_v) in enumerate(streams):
        for rows, new, old in ((keys, new_k, old_k), (values, new_v, old_v)):
            joined = new if old is None else torch.cat([old.to(new.dtype), new], dim=1)
            rows.append(joined.unsqueeze(1).expand(-1, length, -1, -1, -1))
        count = keys[-1].shape[2]
        j = position[:, None, -1:] + torch.arange(1 - count, 1, device=q.device)  # [B, 1, K]
        newest, reach = position[:, :, None], window
        if late:
            assert window is not None
            newest, reach = newest - window, late_span
        visible = (j >= 0) & (j <= newest)
        sees.append(visible if reach is None else visible & (j > newest - reach))
    mem_k, mem_v, mem_count, mem_positions = memory
    if mem_k is not None and mem_v is not None and mem_count is not None:
        assert window is not None
        opened, chunk = seen // window, position // window
        chunks = chunk[:, -1] - opened + 1  # of each row
        row = (chunks.cumsum(0) - chunks - opened)[:, None] + chunk  # [B, L]
        visible = torch.arange(mem_k.shape[1], device=q.device) < mem_count[row].unsqueeze(-1)
        if mem_positions is not None:
            visible = visible & (mem_positions[row] <= position[:, :, None] - window)
        keys, values, sees = [*keys, mem_k[row]], [*values, mem_v[row]], [*sees, visible]
    key, value = (torch.cat([x.to(q.dtype) for x in rows], dim=2) for rows in (keys, values))
    queries = q.unflatten(2, (key.shape[3], -1)).unsqueeze(2)  # [B, L, 1, G, H / G, d]
    scores = (queries * key.unsqueeze(4)).sum(-1) * scale  # [B, L, K, G, H / G]
    hidden = ~torch.cat(sees, dim=2)[..., None, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=2)
    return (weights.unsqueeze(-1) * value.unsqueeze(4)).sum(2).flatten(2, 3)
