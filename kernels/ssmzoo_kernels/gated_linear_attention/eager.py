"""Gated linear attention in torch, by chunks, with its own backward: any device, no compiler.

A chunk of tokens is a few matrix products and, for the delta rule, a triangular solve; chunks
follow one another, the states of all sequences and heads side by side. Nothing but states between
chunks is kept: the backward marches again from a saved state and works on a chunk at once.
``README.md`` has the equations; the names here are its letters.

Where a decay is a number a row of the state, a chunk is 16 tokens, whatever was asked for: its
products of decays are then ``[16, 16, K]``.

Dimensions: N sequences at once, C tokens of a chunk.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.scan import chunk_slots, interval
from ssmzoo_kernels.segments import Group, by_magnitude

ROWWISE = 16  # tokens of a chunk where decays are a number a row
Row = Tensor | None


class Inputs(NamedTuple):
    """The op's arguments, flat."""

    q: Tensor  # [T, G, K]
    k: Tensor  # [T, G, K]
    v: Tensor  # [T, H, V]
    log_decay: Row  # [T, H, 1] or [T, H, K]
    beta: Row  # [T, H]
    initial_state: Row  # [S, H, K, V]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Row,
    beta: Row,
    initial_state: Row,
    offsets: Tensor,  # [S + 1]
    save: bool,
    rule: str,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, final states and, with ``save``, the state before every interval."""
    inputs = Inputs(q, k, v, log_decay, beta, initial_state)
    size = _tokens_at_once(inputs, chunk)
    with torch.autocast(v.device.type, enabled=False):
        if not save and len(v) == len(offsets) - 1 and bool((offsets.diff() == 1).all()):
            return _step(inputs, rule, scale)
        found = _march(inputs, offsets, save, rule, scale, chunk, size)
        if not all(bool(x.isfinite().all()) for x in found[:2]):
            # products with the zeros above a diagonal take what is not finite to earlier tokens of
            # its chunk; a chunk of one token has no diagonal
            found = _march(inputs, offsets, save, rule, scale, chunk, 1)
    return found


def _step(inputs: Inputs, rule: str, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Decay, write and read once: every sequence has one token."""
    q, k, v, log_decay, beta, initial_state = inputs
    exact, heads = accumulator(q), v.shape[1]
    q, k = (x.to(exact).repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))
    key, written = k.unsqueeze(3), v.to(exact).unsqueeze(2)
    state = written.new_zeros(*k.shape, v.shape[2])
    if initial_state is not None:
        state = initial_state.to(exact)
    if log_decay is not None:
        state = log_decay.to(exact).exp().unsqueeze(3) * state
    if rule == "delta":
        written = written - key.mT @ state
    if beta is not None:
        written = beta.to(exact)[:, :, None, None] * written
    state = state + key * written
    read = scale * (q.unsqueeze(2) @ state).squeeze(2)
    return read.to(v.dtype), state, state.new_empty(0, *state.shape[1:])


def _march(
    inputs: Inputs,
    offsets: Tensor,
    save: bool,
    rule: str,
    scale: float,
    chunk: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    v, between = inputs.v, interval(inputs.q.shape[2], chunk)
    exact = accumulator(inputs.q)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    shape = (v.shape[1], inputs.q.shape[2], v.shape[2])
    final = v.new_zeros(offsets.shape[0] - 1, *shape, dtype=exact)
    if inputs.initial_state is not None:
        final.copy_(inputs.initial_state)
    slots = chunk_slots(v.shape[0], offsets.shape[0] - 1, between) if save else 0
    saved = final.new_zeros(slots, *shape)
    for group in _abreast(offsets, inputs):
        state = final[group.members]
        for first, piece in _pieces(group, size):
            if save and first % between == 0:
                lives, slot = _slots(offsets, group.members, first, between)
                saved[slot] = state[lives]
            tokens = Tokens.of(inputs, piece, exact, rule)
            read, state = tokens.forward(state)
            piece.scatter((scale * read).transpose(1, 2).flatten(2), out.flatten(1))
        final[group.members] = state
    return out, final, saved


def backward(
    grad_out: Row,  # [T, H, V]
    grad_final: Row,  # [S, H, K, V]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Row,
    beta: Row,
    initial_state: Row,
    offsets: Tensor,
    saved: Tensor,  # [slots, H, K, V]
    rule: str,
    scale: float,
    chunk: int,
) -> tuple[Row, ...]:
    """Return the gradients of the inputs, from the states that the forward saved."""
    inputs = Inputs(q, k, v, log_decay, beta, initial_state)
    with torch.autocast(v.device.type, enabled=False):
        *grads, grad_initial = _march_back(
            grad_out, grad_final, inputs, offsets, saved, rule, scale, chunk
        )
    return (*grads, None if initial_state is None else grad_initial)


def _march_back(
    grad_out: Row,
    grad_final: Row,
    inputs: Inputs,
    offsets: Tensor,
    saved: Tensor,
    rule: str,
    scale: float,
    chunk: int,
) -> list[Row]:
    size, between = _tokens_at_once(inputs, chunk), interval(inputs.q.shape[2], chunk)
    exact = saved.dtype
    grads = [None if x is None else x.new_empty(x.shape, dtype=exact) for x in inputs[:5]]
    grad_initial = saved.new_zeros(offsets.shape[0] - 1, *saved.shape[1:])
    if grad_final is not None:
        grad_initial.copy_(grad_final)
    for group in _abreast(offsets, inputs):
        carry, starts = grad_initial[group.members], []
        pieces = [*_pieces(group, size)]
        for number, (first, piece) in reversed([*enumerate(pieces)]):
            if not starts:
                begin = first - first % between
                lives, slot = _slots(offsets, group.members, begin, between)
                state = torch.zeros_like(carry)  # of sequences that ended before
                state[lives] = saved[slot]
                starts = [state]
                for _, early in pieces[begin // size : number]:
                    tokens = Tokens.of(inputs, early, exact, rule)
                    starts.append(tokens.forward(starts[-1], reads=False)[1])
            tokens = Tokens.of(inputs, piece, exact, rule)
            grad = torch.zeros_like(tokens.v)
            if grad_out is not None:
                rows = piece.gather(grad_out.to(exact).flatten(1))
                grad = scale * rows.view(*rows.shape[:2], *inputs.v.shape[1:]).transpose(1, 2)
            carry, found = tokens.backward(starts.pop(), carry, grad)
            for part, row in zip(found, grads, strict=True):
                if row is not None:
                    own = part.transpose(1, 2)
                    if row.shape[1] < own.shape[2]:  # several heads read the same keys
                        own = own.unflatten(2, (row.shape[1], -1)).sum(dim=3)
                    piece.scatter(own.flatten(2), row.flatten(1))
        grad_initial[group.members] = carry
    return [*grads, grad_initial]


class Tokens(NamedTuple):
    """A chunk of tokens and the values that depend on them alone."""

    q: Tensor  # [N, H, C, K]
    k: Tensor  # [N, H, C, K]
    v: Tensor  # [N, H, C, V]
    beta: Tensor  # [N, H, C, 1]
    kept: Tensor  # [N, H, C, E], p: what is left behind a token of the state before the chunk
    between: Tensor  # [N, H, C, C, E], P: what is left behind token i of what j < i wrote
    delta: bool

    @classmethod
    def of(cls, inputs: Inputs, piece: Group, exact: torch.dtype, rule: str) -> "Tokens":
        """Gather a chunk; tokens behind a sequence's end write nothing and decay nothing."""
        heads = inputs.v.shape[1]

        def rows(x: Tensor) -> Tensor:
            found = piece.gather(x.to(exact).flatten(1))
            found = found.view(*found.shape[:2], *x.shape[1:])
            return found.repeat_interleave(heads // x.shape[1], dim=2).transpose(1, 2)

        q, k, v = (rows(x) for x in inputs[:3])
        beta = v.new_ones(*v.shape[:3], 1)
        if inputs.beta is not None:
            beta = rows(inputs.beta.unsqueeze(-1))
        decay = torch.ones_like(beta)
        if inputs.log_decay is not None:
            decay = rows(inputs.log_decay).exp()
        below = _below(v.shape[2], v.device).unsqueeze(-1)
        # each column is a product of its own: differences of sums of logarithms would cancel
        between = torch.where(below, decay.unsqueeze(3), 1.0).cumprod(dim=2)
        between = between.masked_fill(below.transpose(0, 1), 0.0)
        return cls(q, k, v, beta, decay.cumprod(dim=2), between, rule == "delta")

    @property
    def left(self) -> Tensor:
        """Return ``r``: what is left behind the chunk of what a token wrote, ``[N, H, C, E]``."""
        return self.between[:, :, -1]

    @property
    def rowwise(self) -> bool:
        """Tell whether each row of a state decays by a number of its own."""
        return self.between.shape[-1] > 1

    def weights(self, x: Tensor) -> Tensor:
        """Return how much of what token j wrote is read with row i of ``x``: ``[N, H, C, C]``."""
        if self.rowwise:
            written = self.between * self.k.unsqueeze(2)
            return (written @ x.unsqueeze(-1)).squeeze(-1)
        return (x @ self.k.mT * self.between.squeeze(-1)).tril()

    def errors(self, state: Tensor, known: Tensor) -> Tensor:
        """Return ``E``, the errors (or values) before beta and the key."""
        if not self.delta:
            return self.v
        asked = self.v - (self.kept * self.k) @ state
        return solve_triangular(known * self.beta.mT, asked, upper=False, unitriangular=True)

    def after(self, state: Tensor, written: Tensor) -> Tensor:
        """Return the state behind the chunk."""
        return self.kept[:, :, -1].unsqueeze(-1) * state + (self.left * self.k).mT @ written

    def forward(self, state: Tensor, reads: bool = True) -> tuple[Tensor, Tensor]:
        """Return the outputs ``[N, H, C, V]`` and the state after the chunk."""
        known = self.weights(self.k).tril(-1) if self.delta else self.v
        written = self.beta * self.errors(state, known)
        read = written
        if reads:
            read = (self.kept * self.q) @ state + self.weights(self.q) @ written
        return read, self.after(state, written)

    def backward(self, state: Tensor, carry: Tensor, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the gradient of the state before the chunk, and those of the tokens' tensors.

        Args:
            state: Before the chunk.
            carry: The gradient of the state behind it.
            grad: The gradient of the outputs.
        """
        q, k, beta, kept, left = self.q, self.k, self.beta, self.kept, self.left
        weights = self.weights(q)
        known = self.weights(k).tril(-1) if self.delta else torch.zeros_like(weights)
        errors = self.errors(state, known)
        written = beta * errors
        grad_errors = weights.mT @ grad + (left * k) @ carry
        if self.delta:
            matrix = known.mT * beta.mT
            grad_errors = solve_triangular(matrix, grad_errors, upper=True, unitriangular=True)
        grad_v = beta * grad_errors
        before = kept[:, :, -1].unsqueeze(-1) * carry + (kept * q).mT @ grad

        # by what is read with q from the state before the chunk, with k from it, and left behind
        grad_read, grad_left = grad @ state.mT, written @ carry.mT
        grad_asked = torch.zeros_like(grad_read)
        grad_weights, grad_known = (grad @ written.mT).tril(), torch.zeros_like(weights)
        if self.delta:
            before = before - (kept * k).mT @ grad_v
            grad_asked = -grad_v @ state.mT
            grad_known = (-grad_v @ written.mT).tril(-1)
        if self.rowwise:
            reached = self.between * k.unsqueeze(2)  # [N, H, C, C, K]
            back = grad_weights.unsqueeze(-1) * q.unsqueeze(3)
            back = back + grad_known.unsqueeze(-1) * k.unsqueeze(3)
            grad_q = (grad_weights.unsqueeze(3) @ reached).squeeze(3)
            grad_k = (grad_known.unsqueeze(3) @ reached).squeeze(3)
            grad_k = grad_k + (back * self.between).sum(dim=2)
            pairs = back * reached
        else:
            own, other = (x * self.between.squeeze(-1) for x in (grad_weights, grad_known))
            grad_q = own @ k
            grad_k = own.mT @ q + other.mT @ k + other @ k
            pairs = (grad_weights * weights + grad_known * known).unsqueeze(-1)
        grad_q = grad_q + kept * grad_read
        grad_k = grad_k + kept * grad_asked + left * grad_left

        # a decay counts for all that is written before its token and read at it or later
        read = kept * (q * grad_read + k * grad_asked)
        handed = left * k * grad_left
        through = kept[:, :, -1] * (state * carry).sum(dim=-1)
        if not self.rowwise:
            read, handed = (x.sum(dim=-1, keepdim=True) for x in (read, handed))
            through = through.sum(dim=-1, keepdim=True)
        below = _below(q.shape[2], q.device).unsqueeze(-1)
        crossing = pairs.cumsum(dim=3).where(below, 0.0).sum(dim=2) + handed.cumsum(dim=2)
        grad_decay = read.flip(2).cumsum(dim=2).flip(2) + through.unsqueeze(2)
        grad_decay[:, :, 1:] += crossing[:, :, :-1]
        grad_beta = (errors * grad_errors).sum(dim=-1, keepdim=True)
        return before, [grad_q, grad_k, grad_v, grad_decay, grad_beta]


def _tokens_at_once(inputs: Inputs, chunk: int) -> int:
    rowwise = inputs.log_decay is not None and inputs.log_decay.shape[2] > 1
    return min(chunk, ROWWISE) if rowwise else chunk


def _below(size: int, device: torch.device) -> Tensor:
    """Return a mask of the entries below a diagonal."""
    return torch.ones(size, size, dtype=torch.bool, device=device).tril(-1)


def _abreast(offsets: Tensor, inputs: Inputs) -> Iterator[Group]:
    """Yield sequences of about one length, so few that their chunks' products stay small."""
    rowwise = _tokens_at_once(inputs, ROWWISE + 1) == ROWWISE
    count = max(1, inputs.v.shape[0] // ROWWISE**2) if rowwise else offsets.shape[0]
    for group in by_magnitude(offsets):
        for begin in range(0, len(group.members), count):
            own = slice(begin, begin + count)
            inside = None if group.inside is None else group.inside[own]
            yield Group(group.members[own], group.places[own], inside)


def _pieces(group: Group, size: int) -> Iterator[tuple[int, Group]]:
    """Yield the chunks of sequences, each behind its first token's number."""
    for first in range(0, group.places.shape[1], size):
        own = slice(first, first + size)
        inside = None if group.inside is None else group.inside[:, own]
        yield first, Group(group.members, group.places[:, own], inside)


def _slots(offsets: Tensor, members: Tensor, first: int, between: int) -> tuple[Tensor, Tensor]:
    """Return which sequences have a token of a number, and where the state before it is saved."""
    lives = offsets[members + 1] - offsets[members] > first
    living = members[lives]
    return lives, offsets[living] // between + living + first // between
