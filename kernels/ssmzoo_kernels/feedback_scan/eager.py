"""COFFEE's scan in torch, with its own backward: any device, no compiler.

The loop over time keeps nothing on the autograd tape; the backward marches again from a saved
state to the chunks after it, recomputes the states of a chunk, and works on the chunk at once, but
for the carry. Of many segments only so many run together that their states stay few.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.feedback_scan import newton as solver
from ssmzoo_kernels.feedback_scan.inputs import Gradients, Inputs, Stop
from ssmzoo_kernels.precision import double
from ssmzoo_kernels.scan import chunk_slots, interval
from ssmzoo_kernels.scan.eager import CHUNK, groups, slots


class _Exact(NamedTuple):
    """The inputs in the accumulator's dtype."""

    values: Tensor  # [T, D]
    rate: Tensor  # [N, D]
    weight: Tensor  # [N, D]
    readout: Tensor  # [N, D]
    filtering: Tensor | None  # [N, D]
    skip: Tensor | None  # [D]
    driven: Tensor | None  # [T, D]

    @classmethod
    def of(cls, inputs: Inputs) -> "_Exact":
        """Convert them."""
        exact = accumulator(inputs.u)
        u, lam, w, C = (x.to(exact) for x in inputs[:4])
        w_gamma, skip, drive = (None if x is None else x.to(exact) for x in inputs[4:7])
        filtering = None if w_gamma is None else w_gamma.t()
        return cls(u, lam.t(), w.t(), C.t(), filtering, skip, drive)


def forward(inputs: Inputs, offsets: Tensor, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, final states and, with ``save``, the state before every interval.

    Outputs ``[T, D]`` have u's dtype; final states ``[S, D, N]`` and the saved ones
    ``[chunk_slots(T, S, interval(N, CHUNK)), N, D]`` the accumulator's.
    """
    x, initial = _Exact.of(inputs), inputs.initial_state
    (tokens, width), states, segments = inputs.u.shape, len(x.rate), offsets.shape[0] - 1
    read = x.values.new_empty(tokens, width)
    final_state = x.values.new_empty(segments, width, states)
    between = interval(states, CHUNK)
    room = chunk_slots(tokens, segments, between) if save else 0
    saved = x.values.new_zeros(room, states, width)
    for members, places in groups(offsets, states):
        state = x.values.new_zeros(len(members), states, width)
        if initial is not None:
            state = initial[members].to(state.dtype).transpose(1, 2)
        for j, chunk in enumerate(places.split(CHUNK, dim=1)):
            if save and j * CHUNK % between == 0:
                saved[slots(offsets, members, j, between)] = state
            history, _ = _march(x, state, chunk)
            reading = (history[:, 1:] * x.readout).sum(dim=2)
            if x.filtering is not None:
                reading *= (history[:, 1:] * x.filtering).sum(dim=2).sigmoid()
            read[chunk] = reading
            state = history[:, -1]
        final_state[members] = state.transpose(1, 2)
    out = read if x.skip is None else read + x.skip * x.values
    return out.to(inputs.u.dtype), final_state, saved


def newton(
    inputs: Inputs, offsets: Tensor, save: bool, stop: Stop
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``forward`` by Newton's method.

    Raises:
        NotConverged: Some lane has not reached the tolerance after ``max_iterations`` steps.
    """
    return solver.forward(inputs, offsets, save, CHUNK, stop)


def backward(
    grad_out: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, D, N]
    inputs: Inputs,
    offsets: Tensor,
    saved: Tensor,  # [slots, N, D]
) -> Gradients:
    """Return the gradients of the inputs."""
    x = _Exact.of(inputs)
    exact = x.values.dtype
    segments, (states, width) = offsets.shape[0] - 1, x.rate.shape
    grad = torch.zeros_like(x.values) if grad_out is None else grad_out.to(exact)
    grad_u = torch.empty_like(x.values)
    grad_drive = None if x.driven is None else torch.empty_like(x.driven)
    # of lam, w, C and w_gamma; in float64, because they sum over all tokens
    sums = double(x.values.new_zeros(4, states, width))
    grad_initial = x.values.new_empty(segments, width, states)
    between = interval(states, CHUNK)
    for members, places in groups(offsets, states):
        starts: list[Tensor] = []
        carry = x.values.new_zeros(len(members), states, width)
        if grad_final is not None:
            carry = grad_final[members].to(exact).transpose(1, 2)
        chunks = places.split(CHUNK, dim=1) if places.shape[1] else ()
        for j, chunk in reversed(list(enumerate(chunks))):
            if not starts:
                first = j - j % (between // CHUNK)
                starts = [saved[slots(offsets, members, first, between)]]
                for c in chunks[first:j]:
                    starts.append(_march(x, starts[-1], c)[0][:, -1].clone())
            carry, grad_u[chunk], opened = _march_back(x, starts.pop(), carry, chunk, grad, sums)
            if grad_drive is not None and opened is not None:
                grad_drive[chunk] = opened
        grad_initial[members] = carry.transpose(1, 2)
    grad_skip = None
    if x.skip is not None:
        grad_skip = (grad * x.values).sum(dim=0)
        grad_u += x.skip * grad
    grad_lam, grad_w, grad_C, grad_gamma = (s.t().to(grad_u, copy=True) for s in sums)
    grad_gamma = None if x.filtering is None else grad_gamma
    return grad_u, grad_lam, grad_w, grad_C, grad_gamma, grad_skip, grad_drive, grad_initial


def _march(x: _Exact, state: Tensor, chunk: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the states ``[G, C + 1, N, D]`` around the tokens of a chunk, and driven gates."""
    u, gates = x.values[chunk], None
    if x.driven is not None:
        gates = torch.sigmoid(x.weight * x.driven[chunk].unsqueeze(2))  # [G, C, N, D]
    history = state.new_empty(state.shape[0], u.shape[1] + 1, *state.shape[1:])
    history[:, 0] = state
    for t in range(u.shape[1]):
        state = history[:, t]
        gate = torch.sigmoid(x.weight * state) if gates is None else gates[:, t]
        history[:, t + 1] = state + gate * (x.rate * state + u[:, t, None])
    return history, gates


def _march_back(
    x: _Exact,
    state: Tensor,  # [G, N, D], before the chunk
    carry: Tensor,  # [G, N, D], the gradient of the state after it
    chunk: Tensor,  # [G, C]
    grad: Tensor,  # [T, D], of the outputs
    sums: Tensor,  # [4, N, D], to which the chunk's gradients of parameters are added
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of the state before a chunk, of its values and of the gates' inputs."""
    history, gates = _march(x, state, chunk)
    before, after = history[:, :-1], history[:, 1:]  # [G, C, N, D]
    grad_read = grad[chunk].unsqueeze(2)  # [G, C, 1, D]
    if x.filtering is None:
        incoming = grad_read * x.readout
    else:
        read = (after * x.readout).sum(dim=2, keepdim=True)
        opened = (after * x.filtering).sum(dim=2, keepdim=True).sigmoid()
        grad_filter = grad_read * read * opened * (1 - opened)
        grad_read = grad_read * opened
        sums[3] += (grad_filter * after).sum(dim=(0, 1)).to(sums)
        incoming = grad_read * x.readout + grad_filter * x.filtering
    sums[2] += (grad_read * after).sum(dim=(0, 1)).to(sums)
    gate = torch.sigmoid(x.weight * before) if gates is None else gates
    moved = x.rate * before + x.values[chunk].unsqueeze(2)
    slope = gate * (1 - gate) * moved
    decay = 1 + x.rate * gate
    if gates is None:
        decay += x.weight * slope
    for t in reversed(range(chunk.shape[1])):
        incoming[:, t] += carry
        carry = decay[:, t] * incoming[:, t]
    written, opening = incoming * gate, incoming * slope
    sums[0] += (written * before).sum(dim=(0, 1)).to(sums)
    driver = before if x.driven is None else x.driven[chunk].unsqueeze(2)
    sums[1] += (opening * driver).sum(dim=(0, 1)).to(sums)
    grad_drive = None if x.driven is None else (opening * x.weight).sum(dim=2)
    return carry, written.sum(dim=2), grad_drive
