"""The linear recurrence in torch, with its own backward: any device, no compiler.

A loop over time keeps nothing on the autograd tape. Where a step has too few numbers to be worth a
call, a sequence is cut into chunks that march side by side: once from zero to find what each adds
to a state, then, from the states that enter them, for good. Products of a chunk's ``a`` are kept as
``m 2^e``, so that none overflows or underflows.
"""

import math

import torch
from torch import Tensor

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.segments import Group, by_magnitude

LANES = 4096  # numbers a step that make a call worthwhile
FEWEST = 4  # chunks worth a second march


def forward(
    a: Tensor,  # [T, D]
    b: Tensor,  # [T, D]
    initial_state: Tensor | None,  # [S, D]
    offsets: Tensor,  # [S + 1] int64
) -> tuple[Tensor, Tensor]:
    """Return all states ``[T, D]`` and every segment's last."""
    exact = accumulator(a)
    a, b = a.to(exact), b.to(exact)
    h = torch.empty_like(b, memory_format=torch.contiguous_format)
    final_state = b.new_zeros(offsets.shape[0] - 1, b.shape[1])
    if initial_state is not None:
        final_state.copy_(initial_state)
    for group in by_magnitude(offsets):
        if group.places.shape[1]:
            factors = _filled(group, group.gather(a))
            states = _scan(factors, group.gather(b), final_state[group.members])
            group.scatter(states, h)
            final_state[group.members] = states[:, -1]
    return h, final_state


def backward(
    grad_h: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, D]
    a: Tensor,
    h: Tensor,
    initial_state: Tensor | None,
    offsets: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of a, b and the initial state, None where that was absent."""
    a = a.to(h.dtype).conj_physical()
    before = h.roll(1, dims=0)
    starts = offsets[:-1][offsets.diff() > 0]
    before[starts] = 0
    grad_initial = h.new_zeros(offsets.shape[0] - 1, h.shape[1])
    if grad_final is not None:
        grad_initial.copy_(grad_final)
    if initial_state is not None:
        before[starts] = initial_state[offsets.diff() > 0].to(h.dtype)
    grad = torch.zeros_like(h) if grad_h is None else grad_h.to(h.dtype)
    grad_b = torch.empty_like(h)
    for group in by_magnitude(offsets):
        length = group.places.shape[1]
        if not length:
            continue
        # from the last token to the first, what a token multiplies comes one step later
        last = offsets[group.members + 1, None] - 1
        places = last - torch.arange(length, device=last.device)
        if group.inside is not None:
            places = places.where(group.inside, 0)
        back = Group(group.members, places, group.inside)
        own = back.gather(a)
        factors = _filled(back, torch.cat([torch.ones_like(own[:, :1]), own[:, :-1]], dim=1))
        grads = _scan(factors, back.gather(grad), grad_initial[group.members])
        back.scatter(grads, grad_b)
        grad_initial[group.members] = a[offsets[group.members]] * grads[:, -1]
    grad_a = before.conj_physical() * grad_b
    return grad_a, grad_b, None if initial_state is None else grad_initial


def _filled(group: Group, factors: Tensor) -> Tensor:
    """Let states stay past a segment's end, so that the last column holds the last one."""
    if group.inside is None:
        return factors
    return factors.where(group.inside.unsqueeze(-1), 1.0)


def _scan(a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """Return the states ``[G, L, D]`` of sequences ``[G, L, D]`` that start from ``[G, D]``."""
    groups, length, width = a.shape
    chunks = chunks_of(length, groups * width)
    size = -(-length // chunks)
    chunks = -(-length // size)
    if chunks * size > length:
        missing = (groups, chunks * size - length, width)
        a = torch.cat([a, a.new_ones(missing)], dim=1)
        b = torch.cat([b, b.new_zeros(missing)], dim=1)
    a, b = (x.reshape(groups, chunks, size, width) for x in (a, b))
    entering = state.unsqueeze(1)  # [G, chunks, D]
    if chunks > 1:
        entering = _entering(a[:, :-1], b[:, :-1], state)
    h = torch.empty_like(b, memory_format=torch.contiguous_format)
    for a_t, b_t, h_t in zip(a.unbind(2), b.unbind(2), h.unbind(2), strict=True):
        torch.addcmul(b_t, a_t, entering, out=h_t)
        entering = h_t
    return h.flatten(1, 2)[:, :length]


def chunks_of(length: int, lanes: int) -> int:
    """Return into how many chunks to cut sequences with so many numbers a step."""
    chunks = min(LANES // max(1, lanes), math.isqrt(length // 2))
    return chunks if chunks >= FEWEST else 1


def _entering(a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """Return the states before chunks ``[G, n, Q, D]`` and after the last: ``[G, n + 1, D]``."""
    added = torch.zeros_like(b[:, :, 0])
    for a_t, b_t in zip(a.unbind(2), b.unbind(2), strict=True):
        added = torch.addcmul(b_t, a_t, added)
    factors = _product(a)
    states = [state]
    for added_j, *factors_j in zip(*(x.unbind(1) for x in (added, *factors)), strict=True):
        for factor in factors_j:
            state = factor * state
        state = state + added_j
        states.append(state)
    return torch.stack(states, dim=1)


def _product(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the product over axis 2 as three factors to multiply with in order.

    The first is the product itself where that has normal size; the others are then 1.
    """
    mantissa, exponent = _split(a)
    while mantissa.shape[2] > 1:
        if mantissa.shape[2] % 2:
            mantissa = torch.cat([mantissa, torch.ones_like(mantissa[:, :, :1])], dim=2)
            exponent = torch.cat([exponent, torch.zeros_like(exponent[:, :, :1])], dim=2)
        mantissa, carried = _split(mantissa[:, :, ::2] * mantissa[:, :, 1::2])
        exponent = exponent[:, :, ::2] + exponent[:, :, 1::2] + carried
    mantissa, exponent = mantissa[:, :, 0], exponent[:, :, 0]
    most = math.frexp(torch.finfo(a.dtype).max)[1] - 2
    powers = []
    for _ in range(3):
        part = exponent.clamp(-most, most)
        powers.append(torch.exp2(part.to(a.dtype.to_real())))
        exponent = exponent - part
    return mantissa * powers[0], powers[1].to(a.dtype), powers[2].to(a.dtype)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``m`` and ``e`` of ``x = m 2^e``; the larger part of m is in [1/2, 1), or x is 0."""
    if not x.is_complex():
        return torch.frexp(x)
    parts = torch.view_as_real(x)
    exponent = torch.frexp(parts.abs().amax(dim=-1))[1]
    most = math.frexp(torch.finfo(x.dtype).max)[1] - 2
    exponent = exponent.clamp(min=-most)
    return x * torch.exp2(-exponent.to(parts.dtype)), exponent
