"""Compute which tokens each chunk remembers, as row indices into tables of keys and values.

A sequence is cut into chunks of ``window`` tokens, counted from its very first token. Chunk c reads
the ``min(m_e, c * window)`` most surprising positions before it and the ``min(m_f, c * window)``
outputs just before it. Only indices are computed here; one gather then fetches keys and values from
the window before this call, from this call, or from the cached memory.

What surprises: only scores differ between layers. Everything else is computed by the first layer
and shared with the others.

Dimensions: S sequences, T tokens of this call end to end, n chunks with tokens in this call, F
chunks that get a memory in this call, C most chunks of a sequence, w window, m_f fading and m_e
eidetic tokens.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo.modeling import rotary_turns, scan
from ssmzoo_kernels import select_memory
from ssmzoo_kernels.eidetic_attention import Chunks, chunk_table

_P = ParamSpec("_P")
_R = TypeVar("_R")

Turns = tuple[Tensor, Tensor]  # cosines and sines of rotary angles, [..., 1, d / 2]


def _once(
    method: Callable[Concatenate["Call", _P], _R],
) -> Callable[Concatenate["Call", _P], _R]:
    """Let a call remember a method's results, by its arguments."""

    @functools.wraps(method)
    def remembered(self: "Call", *args: _P.args, **kwargs: _P.kwargs) -> _R:
        key = (method.__name__, *args, *kwargs.items())
        if key not in self.known:
            self.known[key] = method(self, *args, **kwargs)
        return self.known[key]

    return remembered


class Call:
    """The sequences of one call, the chunks they fall into, and where their rows lie.

    A table has ``past`` rows of each sequence from before the call, the newest last, and then the T
    rows of the call.

    Args:
        offsets: Where each sequence begins and ends among the T tokens, ``[S + 1]`` int64.
        seen: Its tokens before this call, ``[S]`` int64.
        window: w.
        tokens: T.
        equal: Whether the sequences are the rows of a batch, all of one length.
        following: Whether the memory of the chunk of a next token is wanted, too.
    """

    def __init__(
        self,
        offsets: Tensor,
        seen: Tensor,
        window: int,
        tokens: int,
        *,
        equal: bool,
        following: bool,
    ) -> None:
        self.offsets, self.seen, self.window, self.tokens = offsets, seen, window, tokens
        self.equal = equal
        self.sequences = seen.shape[0]
        self.known: dict[Any, Any] = {}
        # on GPUs and in graphs looking would synchronise: shapes are bounds there
        self.looks = offsets.device.type == "cpu" and not torch.compiler.is_compiling()
        self.lengths = offsets.diff()  # [S]
        self.now = seen + self.lengths  # [S] tokens after this call
        self.opened = seen // window  # [S] the chunk that is open as the call begins
        last = (self.now + (following - 1)).div(window, rounding_mode="floor")
        self.made = (last - self.opened).clamp(min=0)  # [S] chunks after it that get a memory

    # --- tokens ---

    @_once
    def positions(self) -> Tensor:
        """Return the position in its sequence of every token, ``[T]``."""
        place = torch.arange(self.tokens, device=self.offsets.device)
        sequence = torch.searchsorted(self.offsets[1:].contiguous(), place, right=True)
        sequence = sequence.clamp(max=self.sequences - 1)
        return place - self.offsets[sequence] + self.seen[sequence]

    @_once
    def turns(self, size: int, theta: float, dtype: torch.dtype) -> Turns:
        """Return cosine and sine of the tokens' rotary angles, ``[T, 1, d / 2]``."""
        return rotary_turns(
            self.positions(), size, torch.promote_types(torch.float32, dtype), theta
        )

    def rows(self, sequence: Tensor, position: Tensor, past: int) -> tuple[Tensor, Tensor]:
        """Return the rows of positions in a table, and which of them are absent.

        Args:
            sequence: Of each wanted position.
            position: In its sequence; of any shape with ``sequence``.
            past: How many rows of each sequence the table has from before the call.
        """
        behind = past + position - self.seen[sequence]
        old = sequence * past + behind
        new = self.sequences * past + self.offsets[sequence] + behind - past
        absent = (position < 0) | (behind < 0) | (position >= self.now[sequence])
        return torch.where(behind < past, old, new).masked_fill(absent, 0), absent

    @_once
    def newest(self, count: int, past: int) -> tuple[Tensor, Tensor]:
        """Return the rows of the last ``count`` tokens, the newest last, and which are absent.

        Both are ``[S, count]``.
        """
        sequence = torch.arange(self.sequences, device=self.seen.device)[:, None]
        position = self.now[:, None] + torch.arange(-count, 0, device=self.seen.device)
        return self.rows(sequence, position, past)

    @_once
    def slots(self, *, after: bool) -> Tensor:
        """Return the rows of rings in the order of positions, the newest last, ``[S, w]``.

        Or, ``after`` the call, the rows in that order of each ring's slots.
        """
        place = torch.arange(self.window, device=self.seen.device)
        begin = -self.now if after else self.seen
        return (place + begin[:, None]) % self.window + self.window * torch.arange(
            self.sequences, device=self.seen.device
        ).unsqueeze(1)

    # --- chunks ---

    @_once
    def chunks(self) -> Chunks:
        """Return the chunks that have tokens in this call."""
        # a chunk is cut short at most at both ends of a sequence
        most = None if self.looks else self._most(2)
        return chunk_table(self.lengths, self.seen, self.window, most)

    def _whole(self) -> int:
        """Return a bound on the whole chunks that a sequence has in this call."""
        return (self.tokens // self.sequences if self.equal else self.tokens) // self.window

    def _most(self, more: int) -> int:
        """Return a bound on the whole chunks of all sequences, and so many more of each."""
        if self.equal:
            return self.sequences * (self._whole() + more)
        return self.tokens // self.window + more * self.sequences

    @_once
    def depth(self) -> int:
        """Return a bound on C, the chunks that a sequence reads or leaves a memory of."""
        if self.looks:
            return max(self.made.tolist(), default=0) + 1
        return self._whole() + 2

    @_once
    def reads(self) -> tuple[Tensor, Tensor]:
        """Return each chunk's sequence, and how many chunks after the open one it is, ``[n]``."""
        chunks = self.chunks()
        ahead = chunks.number - self.opened[chunks.sequence]
        # those that a bound has too many are taken for a sequence's last one
        return chunks.sequence, ahead.minimum(self.made[chunks.sequence])

    @_once
    def leaves(self) -> tuple[Tensor, Tensor]:
        """Return the same of the chunks that next tokens fall into, ``[S]``."""
        return torch.arange(self.sequences, device=self.seen.device), self.made

    def remembered(self, count: int) -> Tensor:
        """Return how many of at most ``count`` rows each chunk remembers, ``[n]``."""
        return (self.chunks().number * self.window).clamp(max=count)

    @_once
    def positions_in_chunks(self) -> Tensor:
        """Return the positions of each sequence's chunks from the open one on, ``[S, C, w]``."""
        begin = self.opened[:, None] + torch.arange(self.depth(), device=self.seen.device)
        place = torch.arange(self.window, device=self.seen.device)
        return begin.unsqueeze(-1) * self.window + place

    # --- scores ---

    @_once
    def score_places(self) -> Tensor:
        """Return where scores by chunk and place in it lie, ``[S, C, w]``; T + S w: nowhere.

        In a table of the scores of open chunks before the call, ``[S w]``, and of the T new ones.
        """
        sequence = torch.arange(self.sequences, device=self.seen.device)
        position, seen = self.positions_in_chunks(), self.seen[:, None, None]
        old = sequence[:, None, None] * self.window + position % self.window
        new = self.sequences * self.window + self.offsets[:-1, None, None] + position - seen
        nowhere = position >= self.now[:, None, None]
        row = torch.where(position < seen, old, new)
        return row.masked_fill(nowhere, self.sequences * self.window + self.tokens)

    @_once
    def empty_before(self, count: int) -> Tensor:
        """Return which rows of the memories carried on are empty, ``[S, m_e]``."""
        slot = torch.arange(count, device=self.seen.device)
        return slot >= (self.opened * self.window)[:, None]

    @_once
    def empty_after(self, count: int) -> Tensor:
        """Return which rows of the memories that next tokens will read are empty."""
        slot = torch.arange(count, device=self.seen.device)
        return slot >= ((self.opened + self.made) * self.window)[:, None]

    # --- fading memories ---

    @_once
    def fading(self, count: int, past: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, positions and absence of the outputs that new memories hold, ``[F, m_f]``.

        The first ones are present; positions of the others are 0.
        """
        sequence, number = self._fresh()
        begin = (number * self.window)[:, None]
        slot = torch.arange(count, device=self.seen.device)
        position = (begin - count).clamp(min=0) + slot
        rows, absent = self.rows(sequence[:, None], position, past)
        absent |= position >= begin
        return rows, position.masked_fill(absent, 0), absent

    @_once
    def fading_turns(
        self, count: int, past: int, size: int, theta: float, dtype: torch.dtype
    ) -> Turns:
        """Return cosine and sine of these positions' rotary angles, ``[F, m_f, 1, d / 2]``."""
        exact = torch.promote_types(torch.float32, dtype)
        return rotary_turns(self.fading(count, past)[1], size, exact, theta)

    @_once
    def fading_places(self, *, following: bool) -> Tensor:
        """Return where the fading memories of :meth:`reads` or :meth:`leaves` lie.

        In a table of the S memories carried on, and of the F new ones.
        """
        sequence, ahead = self.leaves() if following else self.reads()
        new = self.sequences + self.made.cumsum(0)[sequence] - self.made[sequence] + ahead - 1
        return torch.where(ahead > 0, new, sequence)

    def _fresh(self) -> tuple[Tensor, Tensor]:
        """Return sequence and number of every chunk that gets a memory, ``[F]``."""
        ends = self.made.cumsum(0)
        count = int(self.made.sum()) if self.looks else self._most(1)
        place = torch.arange(count, device=self.seen.device)
        sequence = torch.searchsorted(ends, place, right=True).clamp(max=self.sequences - 1)
        before = ends[sequence] - self.made[sequence]
        return sequence, self.opened[sequence] + 1 + place - before

    # --- both ---

    @_once
    def counts(self, eidetic: int, fading: int) -> Tensor:
        """Return how many rows of both kinds each chunk remembers, ``[n]``."""
        return self.remembered(eidetic) + self.remembered(fading)

    @_once
    def order(self, eidetic: int, fading: int) -> Tensor | None:
        """Return the order of eidetic and fading rows in which those that exist come first.

        ``[n, m]``; None where a chunk has all of its rows or none, so that nothing need move.
        """
        if max(eidetic, fading) <= self.window or not (eidetic and fading):
            return None
        first = self.remembered(eidetic)[:, None]
        slot = torch.arange(eidetic + fading, device=self.seen.device)
        moved = torch.where(slot < first, slot, slot - first + eidetic)
        return torch.where(moved < eidetic + fading, moved, slot - fading)


class Eidetic(NamedTuple):
    """Memories of every sequence's chunks from the open one on, by position, empty rows last."""

    rows: Tensor  # [S, C, m_e] in a table of the memories and windows before, and this call
    positions: Tensor  # [S, C, m_e]
    scores: Tensor  # [S, C, m_e]


def joined(old: Tensor | None, new: Tensor, first: Tensor | None = None) -> Tensor:
    """Return a table of the rows kept of each sequence and those of the call.

    Args:
        old: Rows from before the call, ``[S, past, ...]``; None if there was nothing.
        new: The call's, ``[T, ...]``.
        first: Other rows, ``[S, m, ...]``, that stand before them.
    """
    before = [x.flatten(0, 1) for x in (first, old) if x is not None]
    return torch.cat([*before, new]) if before else new


def taken(table: Tensor, rows: Tensor) -> Tensor:
    """Return rows of a table, ``[*rows.shape, ...]``."""
    # some times as fast as indexing, and its backward is deterministic, too
    return F.embedding(rows, table.flatten(1)).view(*rows.shape, *table.shape[1:])


def blanked(x: Tensor, absent: Tensor) -> Tensor:
    """Return rows ``[*absent.shape, ...]`` with zeros for those that are absent."""
    return x.masked_fill(absent.view(*absent.shape, *(1,) * (x.dim() - absent.dim())), 0.0)


def by_sequence(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Return rows ``[T, ...]`` of a batch of such a shape as ``[B, L, ...]``."""
    if torch.compiler.is_exporting():  # its graphs would bind L to strides that depend on it
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(*shape, *rows.shape[1:])


def newest(call: Call, old: Tensor | None, new: Tensor, count: int) -> Tensor:
    """Return the last ``count`` rows of each sequence, the newest last, zeros where there are none.

    Args:
        call: The sequences.
        old: The last rows before this call, ``[S, past, ...]``; None where there is no past.
        new: The rows of this call's tokens, ``[T, ...]``.
        count: How many to keep.
    """
    if call.equal:  # slices, of which a step copies its window once
        length = call.tokens // max(1, call.sequences)
        exporting = torch.compiler.is_exporting()  # its graphs may leave the length open
        new = by_sequence(new, (call.sequences, length))
        kept = count if exporting else max(0, count - length)
        if old is None:
            old = new.new_zeros(call.sequences, kept, *new.shape[2:])
        elif old.shape[1] < kept:
            absent = old.new_zeros(call.sequences, kept - old.shape[1], *old.shape[2:])
            old = torch.cat([absent, old], dim=1)
        old = old[:, old.shape[1] - kept :]
        if exporting:
            return torch.cat([old, new], dim=1)[:, length:].contiguous()
        return torch.cat([old, new[:, -count:]], dim=1)
    rows, absent = call.newest(count, 0 if old is None else old.shape[1])
    return blanked(taken(joined(old, new), rows), absent)


def unrolled(call: Call, ring: Tensor) -> Tensor:
    """Return the rows of rings ``[S, w, ...]``, the newest last."""
    return taken(ring.flatten(0, 1), call.slots(after=False))


def rolled_on(call: Call, ring: Tensor | None, past: Tensor | None, new: Tensor) -> Tensor:
    """Return rings ``[S, w, ...]`` with this call's rows: position p lies in slot ``p % w``.

    Args:
        call: The sequences.
        ring: The rings before; None if they are not known as such.
        past: Their rows, the newest last; None where there is no past.
        new: The rows of this call's tokens, ``[T, ...]``.
    """
    if (
        ring is not None
        and call.equal
        and call.tokens == call.sequences
        and ring.dtype == new.dtype
    ):
        slot = (call.seen % call.window).view(-1, *(1,) * new.dim()).expand(-1, 1, *new.shape[1:])
        return ring.scatter(1, slot, new.unsqueeze(1))
    rows = newest(call, past, new, call.window)
    return taken(rows.flatten(0, 1), call.slots(after=True))


def score_table(pending: Tensor | None, scores: Tensor, call: Call) -> Tensor:
    """Return the table that :meth:`Call.score_places` looks into.

    Args:
        pending: Of the tokens that each sequence's open chunk had before, by place, ``[S, w]``.
        scores: Of the call's tokens, ``[T]``.
        call: The sequences.
    """
    if pending is None:
        pending = scores.new_zeros(call.sequences, call.window)
    return torch.cat([pending.flatten(), scores, scores.new_full((1,), -torch.inf)])


def open_scores(call: Call, grid: Tensor) -> Tensor:
    """Return the scores of the chunks that next tokens fall into, by place, ``[S, w]``."""
    scores = grid[call.leaves()]
    return scores.masked_fill(scores.isneginf(), 0.0)


def choose_eidetic(
    call: Call,
    grid: Tensor,  # [S, C, w]
    count: int,
    before: tuple[Tensor, Tensor] | None,  # [S, m_e] each
    past: int,
) -> Eidetic:
    """Merge each chunk into the memory after it: the largest scores, of equal ones the oldest.

    Args:
        call: The sequences.
        grid: Scores by chunk and place in it, minus infinity where no token is.
        count: m_e.
        before: Scores and positions of the memory carried on, None where there is none.
        past: How many rows before this call the table of keys has of each sequence.
    """
    sequences = call.sequences
    if before is None:
        positions = call.seen.new_zeros(sequences, count)
        scores = grid.new_full((sequences, count), -torch.inf)
        rows = positions
    else:
        scores, positions = before[0].detach(), before[1]
        scores = scores.masked_fill(call.empty_before(count), -torch.inf)
        rows = torch.arange(sequences * count, device=grid.device).view(sequences, count)
    # an exported graph has at least two steps, and merges the last chunk, which nobody reads, too
    first, more = [rows, positions, scores], call.depth() - (not torch.compiler.is_exporting())
    if more == 0:
        return Eidetic(*(x.unsqueeze(1) for x in first))
    sequence = torch.arange(sequences, device=grid.device)[:, None, None]
    places = call.positions_in_chunks()
    new = call.rows(sequence, places, past)[0] + (0 if before is None else sequences * count)

    def merge(held: Sequence[Tensor], chunk: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        (rows, positions, scores), (new, position, score) = held, chunk
        kept = select_memory(scores, positions, score, position, count)
        rows = torch.cat([rows, new], dim=1).gather(1, kept.indices)
        after = [rows, kept.positions, kept.scores]
        return after, after

    # no gradient flows here, also where a program runs that was traced without gradients
    each = [x.transpose(0, 1)[:more] for x in (new, places, grid.detach())]
    _, found = scan(merge, first, each)
    pairs = zip(first, found, strict=True)
    return Eidetic(*(torch.cat([x[None], y]).transpose(0, 1) for x, y in pairs))
