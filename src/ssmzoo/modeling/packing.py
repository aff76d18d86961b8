"""Padding and packing are one thing: where, in a flat row of tokens, each sequence begins and ends.

A padded batch is packed by treating the padding before and after each row's tokens as sequences of
their own whose results nobody reads. Padding between a row's tokens goes behind them first. Shapes
stay those of the batch, so compilation survives, and a family that packs exactly pads exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ssmzoo_kernels import beside
from ssmzoo_kernels.validation import Packing


@dataclass(frozen=True, eq=False)
class Sequences(Packing):
    """Where the sequences of a padded or packed batch lie in one flat row ``[1, B * L]``.

    They are found and checked once a call. Every op and every mixer takes it for ``cu_seqlens``.

    Attributes:
        offsets: Where sequences begin and end, ``[S + 1]`` int64; padding before or after a row's
            tokens is a sequence of its own.
        length: Tokens in the flat row, ``B * L``.
        rows: The numbers of the sequences that are no padding; None: all of them.
        row_length: L of the batch, which bounds the sequences' lengths; None: unknown.
        padded: Whether the batch is padded only: every row is one sequence and its padding.
        order: Which token of the batch stands at each place of the flat row, ``[B * L]``, where
            padding between a row's tokens went behind them; None: all stand where they were.
    """

    rows: Tensor | None = None
    row_length: int | None = None
    padded: bool = False
    order: Tensor | None = None
    _known: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        """Number of sequences, padding included."""
        return self.offsets.shape[0] - 1

    @property
    def sequences(self) -> int:
        """Number of sequences that are no padding."""
        return self.count if self.rows is None else self.rows.shape[0]

    def numbers(self) -> Tensor:
        """Return which sequence each of the row's tokens lies in, ``[length]``."""
        places = torch.arange(self.length, device=self.offsets.device)
        return torch.searchsorted(self.offsets[1:].contiguous(), places, right=True)

    def flat(self, x: Tensor) -> Tensor:
        """Return the batch ``[B, L, ...]`` as the flat row ``[1, B * L, ...]``."""
        row = x.reshape(-1, *x.shape[2:])
        return (row if self.order is None else row.index_select(0, self.order))[None]

    def batch(self, row: Tensor, rows: int) -> Tensor:
        """Return the flat row ``[1, B * L, ...]`` as the batch ``[B, L, ...]`` of so many rows."""
        if self.order is not None:
            places = torch.arange(self.length, device=self.order.device)
            row = row.index_select(1, torch.empty_like(places).scatter(0, self.order, places))
        return row.view(rows, -1, *row.shape[2:])

    def mask(self, rows: int) -> Tensor | None:
        """Return which tokens of the batch are not padding, ``[B, L]``; None: all of them."""
        real = self.real()
        return None if real is None else self.batch(real[None], rows)

    def real(self) -> Tensor | None:
        """Return which of the row's tokens are not padding, ``[length]``; None: all of them."""
        if self.rows is None:
            return None
        counts = torch.zeros(self.count, dtype=torch.bool, device=self.offsets.device)
        return counts.index_fill(0, self.rows, True)[self.numbers()]

    def reversal(self) -> Tensor:
        """Return where in the row each token's mirror image lies in its sequence, ``[length]``."""
        found = self._known.get("reversal")
        if found is None:
            numbers = self.numbers()
            ends = self.offsets[numbers] + self.offsets[numbers + 1] - 1
            found = ends - torch.arange(self.length, device=ends.device)
            if not torch.compiler.is_compiling():
                self._known["reversal"] = found
        return found

    def longest(self) -> int:
        """Return the length of the longest sequence, looked up once a call."""
        if "longest" not in self._known:
            self._known["longest"] = int(self.offsets.diff().max())
        return self._known["longest"]

    def kernel_length(self) -> int:
        """Return how many taps of a filter can meet an input: the longest sequence's length, or 1.

        In a graph, which cannot look it up, it is the row's.
        """
        return max(1, self.length if torch.compiler.is_compiling() else self.longest())

    def aligned(self, *, tight: bool = False) -> AlignedRows:
        """Return the sequences that are no padding as rows of a batch.

        They are as long as the longest sequence or, in a graph, which cannot look it up, as the
        whole row.

        Args:
            tight: Whether the longest is looked up for a padded batch, too, which otherwise stays
                as wide as it was given.
        """
        known_as = "tight" if tight else "aligned"
        found = self._known.get(known_as)
        if found is None:
            starts, lengths = self.offsets[:-1], self.offsets.diff()
            if self.rows is not None:
                starts, lengths = starts[self.rows], lengths[self.rows]
            compiling, width = torch.compiler.is_compiling(), self.row_length
            if width is None:
                width = self.length if compiling else self.longest()
            elif tight and not compiling:
                width = max(1, int(lengths.max()))
            found = AlignedRows(starts, lengths, width)
            if not compiling:  # a graph would have to carry it out of a checkpointed layer
                self._known[known_as] = found
        return found


@dataclass(frozen=True)
class AlignedRows:
    """The sequences of a flat row ``[1, T, D]`` as rows of a batch, each beginning at column 0.

    For mixers that take a batch of whole sequences, such as long convolutions. Columns behind a
    sequence's end hold zeros.
    """

    starts: Tensor  # [S]
    lengths: Tensor  # [S]
    width: int

    def gather(self, x: Tensor) -> Tensor:
        """Map ``[1, T, D]`` to ``[S, width, D]``."""
        if x.shape[1] == 0:
            return x.new_zeros(self.starts.shape[0], self.width, x.shape[2])
        columns = torch.arange(self.width, device=x.device)
        inside = columns < self.lengths[:, None]  # [S, width]
        places = (self.starts[:, None] + columns).clamp(max=x.shape[1] - 1)
        return torch.where(inside.unsqueeze(-1), x[0, places], 0)  # elsewhere x may be NaN

    def scatter(self, x: Tensor, tokens: int) -> Tensor:
        """Map ``[S, width, D]`` back to ``[1, tokens, D]``; zeros where no sequence lies."""
        columns = torch.arange(self.width, device=x.device)
        inside = columns < self.lengths[:, None]
        # one place more, where everything behind a sequence's end goes
        places = torch.where(inside, self.starts[:, None] + columns, tokens)
        flat = x.new_zeros(tokens + 1, x.shape[2])
        return flat.index_copy(0, places.flatten(), x.flatten(0, 1))[None, :tokens]


def right_aligned(x: Tensor, lengths: Tensor) -> Tensor:
    """Let the rows of ``[S, L, D]``, which have these lengths, end in the last column."""
    columns = torch.arange(x.shape[1], device=x.device) - (x.shape[1] - lengths)[:, None]
    moved = x.gather(1, columns.clamp(min=0)[..., None].expand_as(x))
    return torch.where((columns >= 0)[..., None], moved, 0)


def token_positions(x: Tensor, seen: Tensor | None, packing: Sequences | None) -> Tensor:
    """Return where tokens of ``[B, L, ...]`` stand in their sequences, ``[L]`` or ``[B, L]``.

    Args:
        x: The tokens.
        seen: How many tokens of each sequence came before; None: none.
        packing: Boundaries of packed sequences.
    """
    place = torch.arange(x.shape[1], device=x.device)
    if packing is None:
        return place if seen is None else place + seen[:, None]
    sequence = packing.numbers()
    return place - packing.offsets[sequence] + (0 if seen is None else seen[sequence])


def flip(x: Tensor, packing: Sequences | None) -> Tensor:
    """Reverse the order of tokens in ``[B, L, ...]``, of packed ones within each sequence."""
    return x.flip(1) if packing is None else x.index_select(1, beside(packing.reversal(), x))


def flip_steps(steps: Tensor, packing: Sequences | None) -> Tensor:
    """Reverse the order of tokens, as :func:`flip` does, for steps ``[B, L]`` between them.

    A step leads to its token from the one before. Backwards, the step after a token leads to it;
    the first step of each sequence, which comes from nowhere, is 1.
    """
    moved = flip(steps, packing).roll(1, dims=1)
    return torch.where(token_positions(steps, None, packing) == 0, 1, moved)


def find_packing(
    batch: int,
    length: int,
    past_length: int,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Sequences | None:
    """Find and check the sequences of a ``[B, L]`` batch; None if every row is one whole sequence.

    Args:
        batch: B.
        length: L.
        past_length: Tokens already in the cache; the mask may cover them too.
        attention_mask: 1 for tokens and 0 for padding, ``[B, L]`` or ``[B, past + L]``.
        position_ids: ``[B, L]``; where they do not go up by one, a new sequence begins.
        seq_idx: ``[B, L]``; where it changes, a new sequence begins.
        cu_seqlens: Boundaries in a single packed row, ``[S + 1]``; goes before the other two.

    Raises:
        ValueError: Shapes that do not fit, or boundaries that do not rise from 0 to L.
        TypeError: A mask or boundaries of another kind.
    """
    mask = None
    if attention_mask is not None:
        mask = _new_columns(attention_mask, batch, length, past_length)
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(f"cu_seqlens needs one packed row, got a batch of {batch}")
        if mask is not None and not torch.compiler.is_compiling() and not _all(mask):
            raise ValueError("attention_mask must be all ones where cu_seqlens is given")
        return Sequences.of(cu_seqlens, length, "model")
    order = None if mask is None else _tokens_first(mask)
    if mask is not None and order is not None:
        mask = mask.gather(1, order)
    starts = _starts(batch, length, mask, order, position_ids, seq_idx)
    if order is not None:
        order = (order + length * torch.arange(batch, device=order.device)[:, None]).flatten()
    if starts is not None:
        rows = None
        if mask is not None and not _all(mask):
            # several sequences and padding in one row: cut at both
            starts[:, 1:] |= mask[:, 1:] != mask[:, :-1]
            rows = mask.flatten()[starts.flatten()].nonzero().flatten()
        flat = starts.flatten().nonzero().flatten()
        ends = torch.cat([flat, flat.new_tensor([batch * length])])
        return Sequences(ends, batch * length, rows, length, order=order)
    if mask is None or (not torch.compiler.is_compiling() and _all(mask)):
        return None
    return _padded(mask, order)


def _new_columns(mask: Tensor, batch: int, length: int, past_length: int) -> Tensor:
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor [B, L], got {type(mask).__name__}")
    if mask.dim() != 2 or mask.shape[0] != batch:
        raise ValueError(
            f"attention_mask must have shape [B, L] = [{batch}, {length}], got {list(mask.shape)}"
        )
    columns = mask.shape[1]  # in a graph a symbol, which is in no tuple
    if columns != length and columns != past_length + length:
        raise ValueError(
            f"attention_mask must cover the {length} new tokens, or these and the {past_length} "
            f"before them, got {mask.shape[1]} columns"
        )
    return mask[:, mask.shape[1] - length :].bool()


def _all(mask: Tensor) -> bool:
    return bool(mask.all())


def _tokens_first(mask: Tensor) -> Tensor | None:
    """Return a mask's columns ``[B, L]``, tokens first; None: no padding lies between tokens.

    A graph, which cannot look at the mask, always gets columns.
    """
    if mask.shape[1] == 1:
        return None
    if not torch.compiler.is_compiling():
        begins = mask[:, 1:] & ~mask[:, :-1]
        if not bool((begins.sum(dim=1) + mask[:, 0] > 1).any()):
            return None
    count = mask.sum(dim=1, keepdim=True)
    place = torch.where(mask, mask.cumsum(1) - 1, count + (~mask).cumsum(1) - 1)
    columns = torch.arange(mask.shape[1], device=mask.device).expand_as(place)
    return torch.empty_like(place).scatter(1, place, columns)


def _starts(
    batch: int,
    length: int,
    mask: Tensor | None,
    order: Tensor | None,
    position_ids: Tensor | None,
    seq_idx: Tensor | None,
) -> Tensor | None:
    """Return where sequences begin, ``[B, L]``, or None if only where rows do."""
    given = seq_idx if seq_idx is not None else position_ids
    if given is None or length == 1:
        return None
    name = "seq_idx" if seq_idx is not None else "position_ids"
    if given.shape[-1] != length or given.numel() not in (length, batch * length):
        raise ValueError(
            f"{name} must have shape [B, L] = [{batch}, {length}], got {list(given.shape)}"
        )
    given = given.reshape(-1, length)
    if order is not None:
        given = given.expand(batch, -1).gather(1, order)
    steps = given.diff(dim=1)
    breaks = steps != (0 if seq_idx is not None else 1)
    if order is not None and seq_idx is None:  # positions may count the padding between tokens
        breaks &= steps != order.diff(dim=1)
    if mask is not None:  # positions of padding mean nothing
        breaks = breaks & mask[:, 1:] & mask[:, :-1]
    if not bool(breaks.any()):
        return None
    first = torch.ones(batch, 1, dtype=torch.bool, device=given.device)
    return torch.cat([first, breaks.expand(batch, -1)], dim=1)


def without_holes(mask: Tensor) -> Tensor:
    """Return a mask ``[B, L]`` that was read off tokens, with ones between the outermost ones.

    Padding lies outside all other tokens; the same token between them is content.
    """
    started = mask.cumsum(dim=1) > 0
    unfinished = mask.flip(1).cumsum(dim=1).flip(1) > 0
    return (started & unfinished).to(mask.dtype)


def _padded(mask: Tensor, order: Tensor | None) -> Sequences:
    batch, length = mask.shape
    count = mask.sum(dim=1)
    first = mask.int().argmax(dim=1)  # 0 for an empty row
    last = first + count
    ends = torch.stack([first, last, torch.full_like(first, length)], dim=1)  # [B, 3]
    ends = ends + torch.arange(batch, device=mask.device)[:, None] * length
    rows = torch.arange(batch, device=mask.device) * 3 + 1
    offsets = torch.cat([ends.new_zeros(1), ends.flatten()])
    return Sequences(offsets, batch * length, rows, length, padded=True, order=order)
