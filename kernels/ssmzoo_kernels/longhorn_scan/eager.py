"""Longhorn's scan in torch, with its own backward: any device, no compiler.

The loop over time keeps nothing on the autograd tape; the backward marches again from a saved
state to the chunks after it, recomputes the states of a chunk, and works on the chunk at once, but
for the carry. Of many segments only so many run together that their states stay few.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ssmzoo_kernels.scan import accumulator, chunk_slots, interval
from ssmzoo_kernels.segments import by_length

CHUNK = 16
ABREAST = 16  # segments that may always run together


def forward(
    u: Tensor,  # [T, D]
    q: Tensor,  # [T, N]
    k: Tensor,  # [T, N]
    dt: Tensor,  # [T, D]
    dt_bias: Tensor | None,  # [D]
    D: Tensor | None,  # [D]
    z: Tensor | None,  # [T, D]
    initial_state: Tensor | None,  # [S, D, N]
    offsets: Tensor,  # [S + 1] int64
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, final states and, with ``save``, the state before every interval."""
    exact = accumulator(u)
    values, queries, keys = (x.to(exact) for x in (u, q, k))
    rate, _ = _rates(keys, dt.to(exact), dt_bias)
    (tokens, width), states, segments = u.shape, k.shape[1], offsets.shape[0] - 1
    read = values.new_empty(tokens, width)
    final_state = values.new_empty(segments, width, states)
    between = interval(states, CHUNK)
    slots = chunk_slots(tokens, segments, between) if save else 0
    saved = values.new_zeros(slots, states, width)
    for members, places in _groups(offsets, states):
        state = values.new_zeros(len(members), states, width)
        if initial_state is not None:
            state = initial_state[members].to(exact).transpose(1, 2)
        for j, chunk in enumerate(places.split(CHUNK, dim=1)):
            if save and j * CHUNK % between == 0:
                saved[_slots(offsets, members, j, between)] = state
            history = _march(state, values[chunk], keys[chunk], rate[chunk])
            read[chunk] = (history[:, 1:] * queries[chunk].unsqueeze(-1)).sum(dim=2)
            state = history[:, -1]
        final_state[members] = state.transpose(1, 2)
    out = read if D is None else read + D.to(exact) * values
    if z is not None:
        gate = z.to(exact)
        out = out * gate * gate.sigmoid()
    return out.to(u.dtype), final_state, saved


def backward(
    grad_out: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, D, N]
    u: Tensor,
    q: Tensor,
    k: Tensor,
    dt: Tensor,
    dt_bias: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor | None,
    offsets: Tensor,
    saved: Tensor,  # [slots, N, D]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``forward``'s eight tensors, None where one was absent."""
    exact = accumulator(u)
    values, queries, keys = (x.to(exact) for x in (u, q, k))
    rate, slope = _rates(keys, dt.to(exact), dt_bias)
    segments, width, states = offsets.shape[0] - 1, u.shape[1], k.shape[1]
    grad = torch.zeros_like(values) if grad_out is None else grad_out.to(exact)
    grad_gate = None
    if z is not None:
        gate = z.to(exact)
        opened = gate.sigmoid()
        grad_gate = grad * opened * (1 + gate * (1 - opened))  # times the output before the gate
        grad = grad * gate * opened

    read, grad_u = torch.empty_like(values), torch.empty_like(values)
    grad_q, grad_k = torch.empty_like(queries), torch.empty_like(keys)
    grad_rate = torch.empty_like(values)  # times rate
    grad_initial = values.new_empty(segments, width, states)
    between = interval(states, CHUNK)
    for members, places in _groups(offsets, states):
        starts: list[Tensor] = []
        carry = values.new_zeros(len(members), states, width)
        if grad_final is not None:
            carry = grad_final[members].to(exact).transpose(1, 2)
        chunks = places.split(CHUNK, dim=1) if places.shape[1] else ()
        for j, chunk in reversed(list(enumerate(chunks))):
            key, query = keys[chunk].unsqueeze(-1), queries[chunk].unsqueeze(-1)  # [G, C, N, 1]
            value, speed = values[chunk].unsqueeze(2), rate[chunk].unsqueeze(2)  # [G, C, 1, D]
            if not starts:
                first = j - j % (between // CHUNK)
                starts = [saved[_slots(offsets, members, first, between)]]
                for c in chunks[first:j]:
                    starts.append(_march(starts[-1], values[c], keys[c], rate[c])[:, -1].clone())
            history = _march(starts.pop(), values[chunk], keys[chunk], rate[chunk])
            before, after = history[:, :-1], history[:, 1:]
            incoming = grad[chunk].unsqueeze(2) * query  # [G, C, N, D]
            decay = 1 - speed * key * key
            for t in reversed(range(chunk.shape[1])):
                incoming[:, t] += carry
                carry = decay[:, t] * incoming[:, t]
            recalled = key * before
            error = value - recalled
            moved = speed * incoming
            read[chunk] = (after * query).sum(dim=2)
            grad_q[chunk] = (after * grad[chunk].unsqueeze(2)).sum(dim=3)
            grad_u[chunk] = (key * moved).sum(dim=2)
            grad_rate[chunk] = (key * moved * error).sum(dim=2)
            grad_k[chunk] = (moved * (error - recalled)).sum(dim=3)
        grad_initial[members] = carry.transpose(1, 2)

    grad_energy = -(grad_rate * rate).sum(dim=1, keepdim=True)
    grad_k = grad_k + 2 * keys * grad_energy
    grad_dt = grad_rate * slope
    grad_bias = grad_skip = grad_z = None
    if dt_bias is not None:
        grad_bias = grad_dt.sum(dim=0)
    if D is not None:
        skip = D.to(exact)
        grad_skip = (grad * values).sum(dim=0)
        grad_u = grad_u + skip * grad
        read = read + skip * values
    if grad_gate is not None:
        grad_z = grad_gate * read
    return grad_u, grad_q, grad_k, grad_dt, grad_bias, grad_skip, grad_z, grad_initial


def _rates(keys: Tensor, dt: Tensor, dt_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ``rate = 1 / (1 + exp(-dt) + |k|^2)`` and its logarithmic slope in dt, ``[T, D]``."""
    logits = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    known = 1 + keys.square().sum(dim=-1, keepdim=True)
    # the second as 1 / (1 + exp(dt) known), because rate * exp(-dt) is 0 * inf on one side
    return 1 / (known + torch.exp(-logits)), 1 / (1 + torch.exp(logits) * known)


def _march(state: Tensor, u: Tensor, k: Tensor, rate: Tensor) -> Tensor:
    """Return the states ``[G, C + 1, N, D]`` before, between and after the tokens of a chunk."""
    history = state.new_empty(state.shape[0], u.shape[1] + 1, *state.shape[1:])
    history[:, 0] = state
    for t, (u_t, k_t, rate_t) in enumerate(zip(*(x.unbind(1) for x in (u, k, rate)), strict=True)):
        key, state = k_t.unsqueeze(-1), history[:, t]
        history[:, t + 1] = state + rate_t[:, None] * key * (u_t[:, None] - key * state)
    return history


def _groups(offsets: Tensor, states: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield segments of one length and their tokens, so few that their chunks' states stay small.

    Together they are no more than an activation, or what ``ABREAST`` segments need.
    """
    tokens = int(offsets[-1])
    for members, places in by_length(offsets):
        held = max(1, min(places.shape[1], max(CHUNK, interval(states, CHUNK) // CHUNK)))
        count = max(ABREAST, tokens // (held * states))
        yield from zip(members.split(count), places.split(count), strict=True)


def _slots(offsets: Tensor, members: Tensor, chunk: int, between: int) -> Tensor:
    return offsets[members] // between + members + chunk * CHUNK // between
