"""COFFEE's scan in torch, with its own backward: any device, no compiler.

The loop over time keeps nothing on the autograd tape; the backward marches again from a saved
state to the chunks after it, recomputes the states of a chunk, and works on the chunk at once, but
for the carry. Of many segments only so many run together that their states stay few.
"""

import torch
from torch import Tensor

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.feedback_scan import newton as solver
from ssmzoo_kernels.scan import chunk_slots, interval
from ssmzoo_kernels.scan.eager import CHUNK, groups


def forward(
    u: Tensor,  # [T, D]
    lam: Tensor,  # [D, N]
    w: Tensor,  # [D, N]
    C: Tensor,  # [D, N]
    w_gamma: Tensor | None,  # [D, N]
    D: Tensor | None,  # [D]
    drive: Tensor | None,  # [T, D]
    initial_state: Tensor | None,  # [S, D, N]
    offsets: Tensor,  # [S + 1] int64
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, final states and, with ``save``, the state before every interval.

    Outputs ``[T, D]`` have u's dtype; final states ``[S, D, N]`` and the saved ones
    ``[chunk_slots(T, S, interval(N, CHUNK)), N, D]`` the accumulator's.
    """
    exact = accumulator(u)
    values = u.to(exact)
    rate, weight, readout = (x.to(exact).t() for x in (lam, w, C))  # [N, D]
    filtering = None if w_gamma is None else w_gamma.to(exact).t()
    driven = None if drive is None else drive.to(exact)
    (tokens, width), states, segments = u.shape, lam.shape[1], offsets.shape[0] - 1
    read = values.new_empty(tokens, width)
    final_state = values.new_empty(segments, width, states)
    between = interval(states, CHUNK)
    slots = chunk_slots(tokens, segments, between) if save else 0
    saved = values.new_zeros(slots, states, width)
    for members, places in groups(offsets, states):
        state = values.new_zeros(len(members), states, width)
        if initial_state is not None:
            state = initial_state[members].to(exact).transpose(1, 2)
        for j, chunk in enumerate(places.split(CHUNK, dim=1)):
            if save and j * CHUNK % between == 0:
                saved[_slots(offsets, members, j, between)] = state
            gates = _gates(weight, driven, chunk)
            history = _march(state, values[chunk], rate, weight, gates)
            reading = (history[:, 1:] * readout).sum(dim=2)
            if filtering is not None:
                reading *= (history[:, 1:] * filtering).sum(dim=2).sigmoid()
            read[chunk] = reading
            state = history[:, -1]
        final_state[members] = state.transpose(1, 2)
    out = read if D is None else read + D.to(exact) * values
    return out.to(u.dtype), final_state, saved


def newton(
    u: Tensor,
    lam: Tensor,
    w: Tensor,
    C: Tensor,
    w_gamma: Tensor | None,
    D: Tensor | None,
    drive: Tensor | None,
    initial_state: Tensor | None,
    offsets: Tensor,
    save: bool,
    *,
    tolerance: float,
    max_iterations: int | None,
    damping: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what ``forward`` does, by Newton's method.

    Raises:
        NotConverged: Some lane has not reached the tolerance after ``max_iterations`` steps.
    """
    inputs = (u, lam, w, C, w_gamma, D, drive, initial_state)
    how = {"tolerance": tolerance, "max_iterations": max_iterations, "damping": damping}
    return solver.forward(*inputs, offsets, save, CHUNK, **how)


def backward(
    grad_out: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, D, N]
    u: Tensor,
    lam: Tensor,
    w: Tensor,
    C: Tensor,
    w_gamma: Tensor | None,
    D: Tensor | None,
    drive: Tensor | None,
    initial_state: Tensor | None,
    offsets: Tensor,
    saved: Tensor,  # [slots, N, D]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``forward``'s eight tensors, None where one was absent."""
    exact = accumulator(u)
    values = u.to(exact)
    rate, weight, readout = (x.to(exact).t() for x in (lam, w, C))  # [N, D]
    filtering = None if w_gamma is None else w_gamma.to(exact).t()
    driven = None if drive is None else drive.to(exact)
    segments, (width, states) = offsets.shape[0] - 1, lam.shape
    grad = torch.zeros_like(values) if grad_out is None else grad_out.to(exact)
    grad_u = torch.empty_like(values)
    grad_drive = None if driven is None else torch.empty_like(driven)
    # in float64, because they sum over all tokens
    grad_lam, grad_w, grad_C, grad_gamma = values.new_zeros(4, width, states, dtype=torch.float64)
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
                starts = [saved[_slots(offsets, members, first, between)]]
                for c in chunks[first:j]:
                    gates = _gates(weight, driven, c)
                    last = _march(starts[-1], values[c], rate, weight, gates)[:, -1]
                    starts.append(last.clone())
            gates = _gates(weight, driven, chunk)
            history = _march(starts.pop(), values[chunk], rate, weight, gates)
            before, after = history[:, :-1], history[:, 1:]  # [G, C, N, D]
            grad_read = grad[chunk].unsqueeze(2)  # [G, C, 1, D]
            if filtering is None:
                incoming = grad_read * readout
            else:
                read = (after * readout).sum(dim=2, keepdim=True)
                opened = (after * filtering).sum(dim=2, keepdim=True).sigmoid()
                grad_filter = grad_read * read * opened * (1 - opened)
                grad_read = grad_read * opened
                grad_gamma += (grad_filter * after).sum(dim=(0, 1)).t()
                incoming = grad_read * readout + grad_filter * filtering
            grad_C += (grad_read * after).sum(dim=(0, 1)).t()
            gate = torch.sigmoid(weight * before) if gates is None else gates
            moved = rate * before + values[chunk].unsqueeze(2)
            slope = gate * (1 - gate) * moved
            decay = 1 + rate * gate
            if gates is None:
                decay += weight * slope
            for t in reversed(range(chunk.shape[1])):
                incoming[:, t] += carry
                carry = decay[:, t] * incoming[:, t]
            written, opening = incoming * gate, incoming * slope
            grad_u[chunk] = written.sum(dim=2)
            grad_lam += (written * before).sum(dim=(0, 1)).t()
            if driven is None:
                grad_w += (opening * before).sum(dim=(0, 1)).t()
            else:
                grad_w += (opening * driven[chunk].unsqueeze(2)).sum(dim=(0, 1)).t()
                grad_drive[chunk] = (opening * weight).sum(dim=2)  # type: ignore[index]
        grad_initial[members] = carry.transpose(1, 2)
    grad_skip = None
    if D is not None:
        grad_skip = (grad * values).sum(dim=0)
        grad_u += D.to(exact) * grad
    return (
        grad_u,
        *(x.to(exact, copy=True) for x in (grad_lam, grad_w, grad_C)),
        None if w_gamma is None else grad_gamma.to(exact, copy=True),
        grad_skip,
        grad_drive,
        grad_initial,
    )


def _gates(weight: Tensor, driven: Tensor | None, chunk: Tensor) -> Tensor | None:
    """Return the gates ``[G, C, N, D]`` of a chunk that ``drive`` opens, or None."""
    return None if driven is None else torch.sigmoid(weight * driven[chunk].unsqueeze(2))


def _march(state: Tensor, u: Tensor, rate: Tensor, weight: Tensor, gates: Tensor | None) -> Tensor:
    """Return the states ``[G, C + 1, N, D]`` before, between and after the tokens of a chunk."""
    history = state.new_empty(state.shape[0], u.shape[1] + 1, *state.shape[1:])
    history[:, 0] = state
    for t in range(u.shape[1]):
        state = history[:, t]
        gate = torch.sigmoid(weight * state) if gates is None else gates[:, t]
        history[:, t + 1] = state + gate * (rate * state + u[:, t, None])
    return history


def _slots(offsets: Tensor, members: Tensor, chunk: int, between: int) -> Tensor:
    return offsets[members] // between + members + chunk * CHUNK // between
