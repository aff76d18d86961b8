"""Padding and packing are one thing: where, in a flat row of tokens, each sequence begins and ends.

A padded batch is packed by treating the padding before and after each row's tokens as sequences of
their own whose results nobody reads. Shapes stay those of the batch, so compilation survives, and a
family that packs exactly pads exactly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ssmzoo_kernels.validation import check_boundaries


@dataclass(frozen=True)
class Segments:
    """The sequences inside a flat row of ``B * L`` tokens."""

    cu_seqlens: Tensor  # [S + 1]
    rows: Tensor | None = None  # the segments that are no padding; None: all of them
    row_length: int | None = None  # L of the batch
    packed: bool = True  # False: one sequence for every row of the batch

    @property
    def count(self) -> int:
        """Number of segments, padding included."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def sequences(self) -> int:
        """Number of sequences: segments without padding."""
        return self.count if self.rows is None else self.rows.shape[0]

    def numbers(self, tokens: int) -> Tensor:
        """Return which segment each of the row's tokens lies in, ``[tokens]``."""
        places = torch.arange(tokens, device=self.cu_seqlens.device)
        return torch.searchsorted(self.cu_seqlens[1:].contiguous(), places, right=True)

    def real(self, tokens: int) -> Tensor | None:
        """Return which of the row's tokens are not padding, ``[tokens]``; None: all of them."""
        if self.rows is None:
            return None
        counts = torch.zeros(self.count, dtype=torch.bool, device=self.cu_seqlens.device)
        return counts.index_fill(0, self.rows, True)[self.numbers(tokens)]


@dataclass(frozen=True)
class AlignedRows:
    """The sequences of a flat row ``[1, T, D]`` as rows of a batch, each beginning at column 0.

    For mixers that take a batch of whole sequences, such as long convolutions. Columns behind a
    sequence's end hold zeros.
    """

    starts: Tensor  # [S]
    lengths: Tensor  # [S]
    width: int

    @classmethod
    def of(
        cls, cu_seqlens: Tensor, rows: Tensor | None = None, row_length: int | None = None
    ) -> AlignedRows:
        """Find where the sequences lie.

        Args:
            cu_seqlens: Boundaries, ``[S + 1]``.
            rows: Which of the segments count, all if None.
            row_length: A bound on their lengths; without one the longest is looked up.
        """
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        if rows is not None:
            starts, lengths = starts[rows], lengths[rows]
        width = int(lengths.max()) if row_length is None else row_length
        return cls(starts, lengths, width)

    def gather(self, x: Tensor) -> Tensor:
        """Map ``[1, T, D]`` to ``[S, width, D]``."""
        if x.shape[1] == 0:
            return x.new_zeros(self.starts.shape[0], self.width, x.shape[2])
        columns = torch.arange(self.width, device=x.device)
        inside = columns < self.lengths[:, None]  # [S, width]
        places = (self.starts[:, None] + columns).clamp(max=x.shape[1] - 1)
        return torch.where(inside.unsqueeze(-1), x[0, places], 0)  # what lies outside may be NaN

    def scatter(self, x: Tensor, tokens: int) -> Tensor:
        """Map ``[S, width, D]`` back to ``[1, tokens, D]``; zeros where no sequence lies."""
        columns = torch.arange(self.width, device=x.device)
        inside = columns < self.lengths[:, None]
        # one place more, where everything behind a sequence's end goes
        places = torch.where(inside, self.starts[:, None] + columns, tokens)
        flat = x.new_zeros(tokens + 1, x.shape[2])
        return flat.index_copy(0, places.flatten(), x.flatten(0, 1))[None, :tokens]


def find_segments(
    batch: int,
    length: int,
    past_length: int,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Segments | None:
    """Return the segments of a ``[B, L]`` batch, or None if every row is one whole sequence.

    Args:
        batch: B.
        length: L.
        past_length: Tokens already in the cache; the mask may cover them too.
        attention_mask: 1 for tokens and 0 for padding, ``[B, L]`` or ``[B, past + L]``.
        position_ids: ``[B, L]``; where they do not go up by one, a new sequence begins.
        seq_idx: ``[B, L]``; where it changes, a new sequence begins.
        cu_seqlens: Boundaries in a single packed row, ``[S + 1]``; goes before the other two.

    Raises:
        ValueError: Shapes that do not fit, or padding in the midst of a row's tokens.
    """
    mask = None
    if attention_mask is not None:
        mask = _new_columns(attention_mask, batch, length, past_length)
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(f"cu_seqlens needs one packed row, got a batch of {batch}")
        if mask is not None and not torch.compiler.is_compiling() and not _all(mask):
            raise ValueError("attention_mask must be all ones where cu_seqlens is given")
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
            kind = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
            raise TypeError(f"cu_seqlens must be an int32 or int64 tensor [S + 1], got {kind}")
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
            raise ValueError(f"cu_seqlens must have shape [S + 1], got {list(cu_seqlens.shape)}")
        if not torch.compiler.is_compiling():
            check_boundaries("model", cu_seqlens, length)
        # a compiled graph cannot look up the longest: none is longer than the row
        return Segments(cu_seqlens, row_length=length if torch.compiler.is_compiling() else None)
    starts = _starts(batch, length, mask, position_ids, seq_idx)
    if starts is not None:
        rows = None
        if mask is not None and not _all(mask):
            # several sequences and padding in one row: cut at both
            starts[:, 1:] |= mask[:, 1:] != mask[:, :-1]
            rows = mask.flatten()[starts.flatten()].nonzero().flatten()
        flat = starts.flatten().nonzero().flatten()
        ends = torch.cat([flat, flat.new_tensor([batch * length])])
        return Segments(ends, rows, length)
    if mask is None or (not torch.compiler.is_compiling() and _all(mask)):
        return None
    return _padded(mask)


def _new_columns(mask: Tensor, batch: int, length: int, past_length: int) -> Tensor:
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor [B, L], got {type(mask).__name__}")
    if mask.dim() != 2 or mask.shape[0] != batch:
        raise ValueError(
            f"attention_mask must have shape [B, L] = [{batch}, {length}], got {list(mask.shape)}"
        )
    if mask.shape[1] not in (length, past_length + length):
        raise ValueError(
            f"attention_mask must cover the {length} new tokens, or these and the {past_length} "
            f"before them, got {mask.shape[1]} columns"
        )
    return mask[:, mask.shape[1] - length :].bool()


def _all(mask: Tensor) -> bool:
    return bool(mask.all())


def _starts(
    batch: int,
    length: int,
    mask: Tensor | None,
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
    step = 0 if seq_idx is not None else 1
    breaks = given[:, 1:] - given[:, :-1] != step
    if mask is not None:  # positions of padding mean nothing
        breaks = breaks & mask[:, 1:] & mask[:, :-1]
    if not bool(breaks.any()):
        return None
    first = torch.ones(batch, 1, dtype=torch.bool, device=given.device)
    return torch.cat([first, breaks.expand(batch, -1)], dim=1)


def _padded(mask: Tensor) -> Segments:
    batch, length = mask.shape
    count = mask.sum(dim=1)
    first = mask.int().argmax(dim=1)  # 0 for an empty row
    last = first + count
    if not torch.compiler.is_compiling():
        columns = torch.arange(length, device=mask.device)
        whole = (columns >= first[:, None]) & (columns < last[:, None])
        if bool((whole != mask).any()):
            row = int((whole != mask).any(dim=1).int().argmax())
            raise ValueError(
                "attention_mask must have its ones in one piece (padding before or after them), "
                f"row {row} has zeros between ones; with tokens of PEFT's prompt tuning in front, "
                "pad on the right"
            )
    ends = torch.stack([first, last, torch.full_like(first, length)], dim=1)  # [B, 3]
    ends = ends + torch.arange(batch, device=mask.device)[:, None] * length
    rows = torch.arange(batch, device=mask.device) * 3 + 1
    return Segments(torch.cat([ends.new_zeros(1), ends.flatten()]), rows, length, packed=False)


def check_indices(name: str, indices: Tensor, size: int, ignored: int | None = None) -> None:
    """Refuse indices outside a table, on a CPU; on a GPU the look would stall the queue.

    There torch itself aborts.

    Args:
        name: The argument's, for the message.
        indices: Integers of any shape.
        size: Of the table.
        ignored: One that is allowed all the same.

    Raises:
        ValueError: One is negative, or not below ``size``.
    """
    if indices.device.type != "cpu" or torch.compiler.is_compiling() or not indices.numel():
        return
    low, high = (int(x) for x in indices.aminmax())
    if low >= 0 and high < size:
        return
    wrong = (indices < 0) | (indices >= size)
    if ignored is not None:
        wrong &= indices != ignored
    if wrong.any():
        also = "" if ignored is None else f", or {ignored}"
        raise ValueError(
            f"{name} must be in [0, {size - 1}]{also}, got {int(indices[wrong].flatten()[0])}"
        )


@contextlib.contextmanager
def named_indices(name: str, indices: Tensor, size: int, ignored: int) -> Iterator[None]:
    """Let an ``IndexError`` of the block name these indices where they are why; torch's does not.

    Args as of :func:`check_indices`.
    """
    try:
        yield
    except IndexError:
        check_indices(name, indices, size, ignored)
        raise


def given_inputs(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, input_values: Tensor | None = None
) -> Tensor:
    """Return the one that was given, ``[B, L, ...]``.

    Raises:
        ValueError: None or several were given, or it has fewer than two dimensions.
    """
    names = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "input_values": input_values}
    given = {name: tensor for name, tensor in names.items() if tensor is not None}
    if len(given) != 1:
        raise ValueError(
            "give exactly one of input_ids and inputs_embeds, or input_values alone, "
            f"got {', '.join(given) or 'none'}"
        )
    ((name, tensor),) = given.items()
    if tensor.dim() < 2:
        raise ValueError(f"{name} must have shape [B, L], got {list(tensor.shape)}")
    return tensor
