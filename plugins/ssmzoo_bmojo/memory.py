"""Which tokens each chunk remembers, as places in tables of rows; no hidden state is touched here.

A sequence is cut into chunks of ``window`` tokens, counted from its very first token. Chunk c reads
the ``min(m_e, c * window)`` most surprising positions before it and the ``min(m_f, c * window)``
outputs just before it. All is worked out in numbers of positions, so that one gather fetches keys
and values from where they lie: a memory carried on, the window before this call, or this call.

Dimensions: S sequences, T tokens of this call end to end, n chunks, w window.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ssmzoo_kernels import select_memory
from ssmzoo_kernels.eidetic_attention import Chunks, chunk_table


class Call(NamedTuple):
    """The sequences of one call."""

    offsets: Tensor  # [S + 1] where each begins and ends among the T tokens
    seen: Tensor  # [S] tokens before this call
    window: int
    tokens: int  # T

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence in this call, ``[S]``."""
        return self.offsets.diff()

    @property
    def now(self) -> Tensor:
        """Tokens of each sequence after this call, ``[S]``."""
        return self.seen + self.lengths

    def chunks(self, *, following: bool) -> Chunks:
        """Return the chunks with tokens in this call; ``following``: and that of the next token."""
        most = None
        if self.offsets.device.type != "cpu" or torch.compiler.is_compiling():
            # a chunk is cut short at most at both ends of a sequence
            sequences = self.seen.shape[0]
            most = (self.tokens + sequences * following) // self.window + 2 * sequences
        return chunk_table(self.lengths + int(following), self.seen, self.window, most)

    def last(self, chunks: Chunks) -> Tensor:
        """Return which of the chunks is the last of each sequence, ``[S]``."""
        sequences = torch.arange(self.seen.shape[0], device=self.seen.device)
        return torch.searchsorted(chunks.sequence, sequences, right=True) - 1

    def positions(self) -> Tensor:
        """Return the position in its sequence of every token, ``[T]``."""
        place = torch.arange(self.tokens, device=self.offsets.device)
        sequence = torch.searchsorted(self.offsets[1:].contiguous(), place, right=True)
        sequence = sequence.clamp(max=self.seen.shape[0] - 1)
        return place - self.offsets[sequence] + self.seen[sequence]

    def rows(self, sequence: Tensor, position: Tensor, past: int) -> tuple[Tensor, Tensor]:
        """Say where positions lie in a table of the ``S * past`` last ones and then the T new ones.

        Args:
            sequence: Of each wanted position.
            position: In its sequence; of any shape with ``sequence``.
            past: How many rows before this call the table has of each sequence, the newest last.

        Returns:
            The rows, and whether there are such positions before the call's end.
        """
        seen = self.seen[sequence]
        behind = past + position - seen
        old = sequence * past + behind
        new = self.seen.shape[0] * past + self.offsets[sequence] + position - seen
        known = (position >= 0) & (behind >= 0) & (position < self.now[sequence])
        return torch.where(known, torch.where(position < seen, old, new), 0), known


def newest(call: Call, old: Tensor | None, new: Tensor, count: int) -> Tensor:
    """Return the last ``count`` rows of each sequence, the newest last, zeros where there are none.

    Args:
        call: The sequences.
        old: Such rows before this call, ``[S, past, ...]``; None where there is no past.
        new: The rows of this call's tokens, ``[T, ...]``.
        count: How many to keep.
    """
    sequences = call.seen.shape[0]
    past = 0 if old is None else old.shape[1]
    table = new if old is None else torch.cat([old.flatten(0, 1), new])
    sequence = torch.arange(sequences, device=new.device)[:, None]
    position = call.now[:, None] - count + torch.arange(count, device=new.device)
    rows, known = call.rows(sequence, position, past)
    if table.shape[0] == 0:
        return new.new_zeros(sequences, count, *new.shape[1:])
    kept = table[rows]  # [S, count, ...]
    return kept * known.view(*known.shape, *(1 for _ in new.shape[1:])).to(kept.dtype)


class Eidetic(NamedTuple):
    """The eidetic memories of a call's chunks, the rows that count first and by position."""

    rows: Tensor  # [n, m_e] in the table [memories before | windows before | this call]
    positions: Tensor  # [n, m_e]
    scores: Tensor  # [n, m_e]


def choose_eidetic(
    call: Call,
    chunks: Chunks,
    grid: Tensor,  # [S, C, w]
    count: int,
    before: tuple[Tensor, Tensor] | None,  # [S, m_e] each
) -> Eidetic:
    """Merge each chunk into the memory after it: the largest scores, of equal ones the oldest.

    Args:
        call: The sequences.
        chunks: Their chunks.
        grid: Scores by chunk and place in it, from :func:`score_grid`.
        count: m_e.
        before: Scores and positions of the memory carried on, None where there is none.
    """
    sequences, most, window = grid.shape
    opened = call.seen // window
    first = torch.arange(sequences, device=grid.device)[:, None]
    slot = torch.arange(count, device=grid.device)
    if before is None:
        tables = window_rows = 0
        rows = call.seen.new_zeros(sequences, count)
        scores = grid.new_full((sequences, count), -torch.inf)
        positions = call.seen.new_zeros(sequences, count)
    else:
        tables, window_rows = sequences * count, window
        scores, positions = before
        held = (opened * window).clamp(max=count)
        scores = scores.masked_fill(slot >= held[:, None], -torch.inf)
        rows = first * count + slot
    found = []
    for j in range(most):
        found.append((rows, positions, scores))
        position = (opened[:, None] + j) * window + torch.arange(window, device=grid.device)
        row, _ = call.rows(first, position, window_rows)
        kept = select_memory(scores, positions, grid[:, j], position, count)
        rows = torch.cat([rows, tables + row], dim=1).gather(1, kept.indices)
        scores, positions = kept.scores, kept.positions
    # of a bounded number of chunks the last ones may hold nothing
    here = (chunks.number - opened[chunks.sequence]).clamp(max=most - 1)
    return Eidetic(
        *(torch.stack(x, dim=1)[chunks.sequence, here] for x in zip(*found, strict=True))
    )


def score_grid(call: Call, chunks: Chunks, scores: Tensor, pending: Tensor | None) -> Tensor:
    """Lay out scores by chunk and place in it, ``[S, C, w]``; minus infinity where no token is.

    Args:
        call: The sequences.
        chunks: Their chunks.
        scores: Of this call's tokens, ``[T]``.
        pending: Of the tokens that each sequence's open chunk had before, by place, ``[S, w]``.
    """
    window, opened = call.window, call.seen // call.window
    here = chunks.number - opened[chunks.sequence]
    if scores.device.type != "cpu" or torch.compiler.is_compiling():
        most = call.tokens // window + 2
    else:
        most = int(here.max()) + 1 if here.numel() else 0
    place = torch.arange(window, device=scores.device)
    position = (opened[:, None] + torch.arange(most, device=scores.device))[..., None] * window
    position = position + place  # [S, C, w]
    row = call.offsets[:-1, None, None] + position - call.seen[:, None, None]
    new = (position >= call.seen[:, None, None]) & (position < call.now[:, None, None])
    padded = torch.cat([scores, scores.new_tensor([-torch.inf])])
    grid = padded[torch.where(new, row, scores.shape[0])]
    if pending is not None and most:
        old = position[:, 0] < call.seen[:, None]
        grid[:, 0] = torch.where(old, pending, grid[:, 0])
    return grid


def open_scores(call: Call, grid: Tensor) -> Tensor:
    """Return the scores of the chunk that the next token falls into, by place, ``[S, w]``."""
    last = call.now // call.window - call.seen // call.window
    sequence = torch.arange(grid.shape[0], device=grid.device)
    scores = grid[sequence, last]
    return scores.masked_fill(scores.isneginf(), 0.0)


def fading_positions(chunks: Chunks, window: int, count: int) -> Tensor:
    """Return the ``count`` positions before each chunk, ``[n, m_f]``; none if negative."""
    position = chunks.number[:, None] * window - count
    return position + torch.arange(count, device=position.device)


def valid_first(
    keys: Tensor, values: Tensor, valid: Tensor, positions: Tensor, *, full: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bring the rows that exist to the front of each memory and count them.

    Args:
        keys: ``[n, m, G, d]``.
        values: ``[n, m, G, d]``.
        valid: Which rows exist, ``[n, m]``.
        positions: Of the rows, ``[n, m]``.
        full: Whether a memory has all of its rows or none, so that nothing need move.
    """
    count = valid.sum(dim=1)
    if not full:
        order = valid.int().argsort(dim=1, descending=True, stable=True)
        places = order[..., None, None]
        keys, values = (torch.take_along_dim(x, places, dim=1) for x in (keys, values))
        positions = positions.gather(1, order)
    return keys, values, count, positions
