"""The chunked recurrences in torch, with their own backward: any device, no compiler.

The loop over time keeps nothing on the autograd tape; the backward marches again from a saved
state to the chunks after it, recomputes the states of a chunk, and works on the chunk at once, but
for the carry. Of many segments only so many run together that their states stay few.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.scan import Gradients, Inputs, chunk_slots, interval
from ssmzoo_kernels.segments import by_length

CHUNK = 16
ABREAST = 16  # segments that may always run together


class Transition(NamedTuple):
    """A family's recurrence.

    Below, ``u`` and ``rate`` are ``[G, C, 1, D]``, ``k`` is ``[G, C, N, 1]`` and ``param`` the
    family's own ``[N, D]`` or None, for C tokens of G segments.

    Attributes:
        rates: From all keys ``[T, N]`` and ``dt`` ``[T, D]``, its bias added: a rate and whatever
            ``finish`` wants again.
        factors: ``(u, k, rate, param)`` to the tensors that steps are made of, ``[G, C, ...]``.
        step: ``(state, *factors of one token)`` to the next state ``[G, N, D]``.
        decay: ``(*factors)`` to the factors on the states ``[G, C, N, D]``.
        adjoint: ``(grad, before, factors, u, k, rate, param)``, the gradients of the states after
            the tokens and the states before them, to the gradients of ``u``, ``k``, ``rate`` and
            ``param``: ``[G, C, D]``, ``[G, C, N]``, ``[G, C, D]``, ``[N, D]`` or None.
        finish: ``(grad_rate, rate, slope, k)`` to the gradients of ``dt`` and, through the rate, of
            ``k``, or None for that.
    """

    rates: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    factors: Callable[..., tuple[Tensor, ...]]
    step: Callable[..., Tensor]
    decay: Callable[..., Tensor]
    adjoint: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]
    finish: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def forward(
    transition: Transition, inputs: Inputs, offsets: Tensor, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a family's scan; returns outputs, final states and the state before every interval.

    ``out[t] = (sum_n S[t, n] q[t, n] + skip * u[t]) * silu(z[t])``; ``S`` follows the transition.
    """
    u, q, k, dt, dt_bias, skip, z, param, initial_state = inputs
    exact = accumulator(u)
    values, queries, keys = (x.to(exact) for x in (u, q, k))
    rate, _ = transition.rates(keys, _shifted(dt.to(exact), dt_bias))
    rule = None if param is None else param.to(exact).T
    (tokens, width), states, segments = u.shape, k.shape[1], offsets.shape[0] - 1
    read = values.new_empty(tokens, width)
    final_state = values.new_empty(segments, width, states)
    between = interval(states, CHUNK)
    room = chunk_slots(tokens, segments, between) if save else 0
    saved = values.new_zeros(room, states, width)
    for members, places in groups(offsets, states):
        state = values.new_zeros(len(members), states, width)
        if initial_state is not None:
            state = initial_state[members].to(exact).transpose(1, 2)
        for j, chunk in enumerate(places.split(CHUNK, dim=1)):
            if save and j * CHUNK % between == 0:
                saved[slots(offsets, members, j, between)] = state
            history, _ = _march(transition, state, *_tokens(values, keys, rate, chunk), rule)
            read[chunk] = (history[:, 1:] * queries[chunk].unsqueeze(-1)).sum(dim=2)
            state = history[:, -1]
        final_state[members] = state.transpose(1, 2)
    out = read if skip is None else read + skip.to(exact) * values
    if z is not None:
        gate = z.to(exact)
        out = out * gate * gate.sigmoid()
    return out.to(u.dtype), final_state, saved


def backward(
    transition: Transition,
    grad_out: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, D, N]
    inputs: Inputs,
    offsets: Tensor,
    saved: Tensor,  # [slots, N, D]
) -> Gradients:
    """Run a family's scan backwards from the states that ``forward`` saved."""
    u, q, k, dt, dt_bias, skip, z, param, initial_state = inputs
    exact = accumulator(u)
    values, queries, keys = (x.to(exact) for x in (u, q, k))
    rate, slope = transition.rates(keys, _shifted(dt.to(exact), dt_bias))
    rule = None if param is None else param.to(exact).T
    segments, width, states = offsets.shape[0] - 1, u.shape[1], k.shape[1]
    grad = torch.zeros_like(values) if grad_out is None else grad_out.to(exact)
    grad, grad_gate = _through_gate(grad, z)
    read, grad_u, grad_rate = (torch.empty_like(values) for _ in range(3))
    grad_q, grad_k = torch.empty_like(queries), torch.empty_like(keys)
    grad_rule = None if rule is None else torch.zeros_like(rule)
    grad_initial = values.new_empty(segments, width, states)
    between = interval(states, CHUNK)
    for members, places in groups(offsets, states):
        starts: list[Tensor] = []
        carry = values.new_zeros(len(members), states, width)
        if grad_final is not None:
            carry = grad_final[members].to(exact).transpose(1, 2)
        chunks = places.split(CHUNK, dim=1) if places.shape[1] else ()
        for j, chunk in reversed(list(enumerate(chunks))):
            if not starts:
                first = j - j % (between // CHUNK)
                starts = [saved[slots(offsets, members, first, between)]]
                for c in chunks[first:j]:
                    read_by = (*_tokens(values, keys, rate, c), rule)
                    starts.append(_march(transition, starts[-1], *read_by)[0][:, -1].clone())
            read_by = (*_tokens(values, keys, rate, chunk), rule)
            outer = (queries[chunk].unsqueeze(-1), grad[chunk].unsqueeze(2))
            carry, found = _march_back(transition, starts.pop(), carry, read_by, *outer)
            read[chunk], grad_q[chunk] = found.read, found.q
            grad_u[chunk], grad_k[chunk], grad_rate[chunk] = found.u, found.k, found.rate
            if grad_rule is not None and found.rule is not None:
                grad_rule += found.rule
        grad_initial[members] = carry.transpose(1, 2)

    grad_dt, grad_keys = transition.finish(grad_rate, rate, slope, keys)
    if grad_keys is not None:
        grad_k = grad_k + grad_keys
    grad_skip = None
    if skip is not None:
        weight = skip.to(exact)
        grad_skip = (grad * values).sum(dim=0)
        grad_u = grad_u + weight * grad
        read = read + weight * values
    grad_z = None if grad_gate is None else grad_gate * read
    return (
        grad_u,
        grad_q,
        grad_k,
        grad_dt,
        None if dt_bias is None else grad_dt.sum(dim=0),
        grad_skip,
        grad_z,
        None if grad_rule is None else grad_rule.T,
        None if initial_state is None else grad_initial,
    )


def groups(offsets: Tensor, states: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield segments of one length and their tokens, so few that their chunks' states stay small.

    Together they are no more than an activation, or what ``ABREAST`` segments need.
    """
    tokens = int(offsets[-1])
    for members, places in by_length(offsets):
        held = max(1, min(places.shape[1], max(CHUNK, interval(states, CHUNK) // CHUNK)))
        count = max(ABREAST, tokens // (held * states))
        yield from zip(members.split(count), places.split(count), strict=True)


def _through_gate(grad: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradient before ``silu(z)``, and z's over the output before the gate."""
    if z is None:
        return grad, None
    gate = z.to(grad.dtype)
    opened = gate.sigmoid()
    return grad * gate * opened, grad * opened * (1 + gate * (1 - opened))


def _shifted(dt: Tensor, dt_bias: Tensor | None) -> Tensor:
    return dt if dt_bias is None else dt + dt_bias.to(dt.dtype)


def _tokens(u: Tensor, k: Tensor, rate: Tensor, chunk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens of a chunk as a transition reads them."""
    return u[chunk].unsqueeze(2), k[chunk].unsqueeze(-1), rate[chunk].unsqueeze(2)


def _march(
    transition: Transition, state: Tensor, u: Tensor, k: Tensor, rate: Tensor, rule: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a chunk's states ``[G, C + 1, N, D]``, the one before it included, and its factors."""
    factors = transition.factors(u, k, rate, rule)
    history = state.new_empty(state.shape[0], factors[0].shape[1] + 1, *state.shape[1:])
    history[:, 0] = state
    for t, token in enumerate(zip(*(x.unbind(1) for x in factors), strict=True)):
        history[:, t + 1] = transition.step(history[:, t], *token)
    return history, factors


class _Found(NamedTuple):
    """A chunk's readout and gradients."""

    read: Tensor  # [G, C, D]
    u: Tensor  # [G, C, D]
    q: Tensor  # [G, C, N]
    k: Tensor  # [G, C, N]
    rate: Tensor  # [G, C, D]
    rule: Tensor | None  # [N, D]


def _march_back(
    transition: Transition,
    state: Tensor,  # [G, N, D], before the chunk
    carry: Tensor,  # [G, N, D], the gradient of the state after it
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    query: Tensor,  # [G, C, N, 1]
    grad: Tensor,  # [G, C, 1, D]
) -> tuple[Tensor, _Found]:
    """Return the gradient of the state before a chunk, and the chunk's other gradients."""
    history, factors = _march(transition, state, *inputs)
    before, after = history[:, :-1], history[:, 1:]
    incoming, decay = grad * query, transition.decay(*factors)  # [G, C, N, D]
    for t in reversed(range(decay.shape[1])):
        incoming[:, t] += carry
        carry = decay[:, t] * incoming[:, t]
    grad_u, grad_k, grad_rate, rule = transition.adjoint(incoming, before, factors, *inputs)
    read, grad_q = (after * query).sum(dim=2), (after * grad).sum(dim=3)
    return carry, _Found(read, grad_u, grad_q, grad_k, grad_rate, rule)


def slots(offsets: Tensor, members: Tensor, chunk: int, between: int) -> Tensor:
    """Return where segments keep the state before one of their chunks."""
    return offsets[members] // between + members + chunk * CHUNK // between
