"""Long rows in pieces: segments one after the other, or a piece on each of several processes.

The state is carried from one segment to the next (backpropagation through time). A row of
``seq_len`` tokens is read in ``count`` segments. With ``gradients="keep"`` one backward pass goes
through all of them and gives the unsplit row's gradients; with ``"cut"`` every segment has its own,
which holds one segment's activations at a time. With ``carry`` a row begins with the state in which
the row at the same place of the last step ended; no gradient goes back there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmzoo.data.rows import Rows
from ssmzoo.tasks.common import IGNORED, counted
from ssmzoo.training.objectives import CausalLM

if TYPE_CHECKING:
    import torch

    from ssmzoo.modeling import StateCache
    from ssmzoo.recipe import SegmentsSection


class PiecesLM(CausalLM):
    """Predict the next token in rows that are read in pieces, each with a cache."""

    def _read(
        self, forward: Callable[..., Any], piece: dict[str, torch.Tensor], cache: Any
    ) -> tuple[Any, torch.Tensor]:
        """Return a model's output for a piece, and the sum of the losses."""
        import torch

        from ssmzoo.modeling.compat import CACHE
        from ssmzoo.modeling.losses import loss_sum

        batch = {name: piece[name] for name in ("input_ids", "cu_seqlens")}
        more = {CACHE: cache, "use_cache": True}
        if self.options.get("skip_logits") and torch.is_grad_enabled():
            batch["shift_labels"] = piece["targets"][None]
            output = forward(batch, num_items_in_batch=1, **more)  # a sum, no mean
            return output, output.loss
        output = forward(batch, **more)
        return output, loss_sum(output.logits[0], piece["targets"])


class SegmentedLM(PiecesLM):
    """Predict the next token in rows that are read in segments.

    Args:
        model: A causal language model of the zoo.
        options: The recipe's section.
        packs: As :class:`CausalLM`.

    Raises:
        ValueError: A model without a state to carry.
    """

    def __init__(self, model: Any, options: SegmentsSection, *, packs: bool) -> None:
        from ssmzoo.modeling import SSMConfig

        super().__init__(model, packs=packs)
        if not isinstance(model.config, SSMConfig):
            raise ValueError(
                "train.segments needs a model of the zoo, whose state can be carried on, got "
                f"{type(model).__name__}"
            )
        self._config, self._segments = model.config, options
        self._carried: dict[int, StateCache] = {}

    def pieces(self, part: Rows) -> list[list[dict[str, torch.Tensor]]]:
        """Return the segments of some rows: all in one piece, or each in its own."""
        count = self._segments.count
        segments = [columns_of(part, *_span_of(part, i, count)) for i in range(count)]
        return [segments] if self._segments.gradients == "keep" else [[s] for s in segments]

    def loss_of(
        self,
        forward: Callable[..., Any],
        piece: list[dict[str, torch.Tensor]],
        part: int,
        targets: int,
    ) -> torch.Tensor:
        """Return a piece's share of the mean over its part's ``targets``."""
        from ssmzoo.modeling.compat import CACHE

        total: Any = 0.0
        for segment in piece:
            output, loss = self._read(forward, segment, self._state(part, segment))
            self._carried[part] = output[CACHE]
            self._carried[part].batch_select_indices(segment["leaving"])
            total = total + loss
        # a step that follows may begin where this one ends, but without its graph
        self._carried[part].detach()
        return total / max(1, targets)

    def _state(self, part: int, segment: dict[str, torch.Tensor]) -> StateCache:
        """Return the state that each sequence of a segment begins with."""
        from ssmzoo.modeling import StateCache

        carried = self._carried.get(part)
        if carried is None:
            return StateCache(self._config)
        carried.batch_select_indices(segment["entering"])
        carried.reset_rows(segment["fresh"])
        return carried

    def carried(self) -> dict[str, torch.Tensor]:
        """Return the states carried to the next step, by name; none unless rows are carried on."""
        if not self._segments.carry:
            return {}
        return {
            f"{part}.{index}.{name}": state.detach().cpu()
            for part, cache in self._carried.items()
            for index, layer in enumerate(cache.layers)
            for name, state in layer.states.items()
        }

    def carry_on(self, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
        """Begin the next step with the states that :meth:`carried` returned."""
        from ssmzoo.modeling import StateCache

        for key, state in tensors.items():
            part, index, name = key.split(".", 2)
            cache = self._carried.setdefault(int(part), StateCache(self._config))
            cache.layers[int(index)].states[name] = state.to(device)


class SequenceParallelLM(PiecesLM):
    """Predict the next token in rows that several processes read, a piece each.

    Args:
        model: A language model of the zoo, or one of transformers on our kernels.
        group: The processes that read a row together, in the order of its pieces.
        packs: As :class:`CausalLM`.

    Raises:
        ValueError: A model whose states cannot be passed from process to process.
    """

    def __init__(self, model: Any, group: Any, *, packs: bool) -> None:
        import torch.distributed as dist

        from ssmzoo.modeling import sequence_cache

        super().__init__(model, packs=packs)
        sequence_cache(model, group)  # fails where it cannot
        self._model, self._group = model, group
        self._place, self._count = dist.get_rank(group), dist.get_world_size(group)

    def targets(self, part: Rows) -> int:
        """Return how many tokens are predicted in this process's piece, where it may be none."""
        begin, width = self._columns(part)
        return int(counted(part.labels[:, begin + 1 : begin + width + 1]).sum())

    def pieces(self, part: Rows) -> list[dict[str, torch.Tensor]]:
        """Return this process's columns of some rows."""
        if not self.packed:  # documents see each other, as in a row that is not cut
            starts = np.zeros_like(part.starts)
            starts[:, 0] = True
            part = part._replace(starts=starts)
        return [columns_of(part, *self._columns(part))]

    def loss_of(
        self, forward: Callable[..., Any], piece: dict[str, torch.Tensor], part: int, targets: int
    ) -> torch.Tensor:
        """Return the mean over the piece's ``targets``, 0 where there are none."""
        return self._read(forward, piece, self._cache(piece))[1] / max(1, targets)

    def evaluate(self, forward: Callable[..., Any], part: Rows) -> torch.Tensor:
        """Return the sums of :meth:`measure` over this process's piece."""
        (piece,) = self.pieces(part)
        output, loss = self._read(forward, piece, self._cache(piece))
        logits = output.logits[0]
        targets = piece["targets"].to(logits.device)
        sums = self.zeros(logits.device)
        sums[0], sums[1] = loss, (logits.argmax(-1) == targets).sum()
        sums[2] = self.targets(part)
        return sums

    def _columns(self, part: Rows) -> tuple[int, int]:
        """Return the first column of this process's piece, and its width."""
        return _span_of(part, self._place, self._count)

    def _cache(self, piece: dict[str, torch.Tensor]) -> Any:
        """Return the cache that passes a piece's states on."""
        from ssmzoo.modeling import CutRows, sequence_cache

        device = self._model.device
        rows = CutRows(*(piece[name].to(device) for name in CutRows._fields))
        return sequence_cache(self._model, self._group, rows=rows)


def _span_of(part: Rows, place: int, count: int) -> tuple[int, int]:
    """Return the first column of a piece and its width; the last piece has the remainder too."""
    length = part.input_ids.shape[1]
    begin = place * (length // count)
    return begin, length - begin if place == count - 1 else length // count


def columns_of(part: Rows, begin: int, width: int) -> dict[str, torch.Tensor]:
    """Return some columns of rows, end to end: tokens, targets, boundaries, continued rows."""
    import torch

    from ssmzoo.modeling import packed_piece

    columns = slice(begin, begin + width)
    targets = np.full_like(part.labels, IGNORED)
    targets[:, :-1] = part.labels[:, 1:]
    cu_seqlens, rows = packed_piece(torch.from_numpy(part.starts), begin, begin + width)
    return {
        "input_ids": torch.from_numpy(part.input_ids[:, columns].reshape(1, -1)),
        "targets": torch.from_numpy(targets[:, columns].reshape(-1)),
        "cu_seqlens": cu_seqlens,
        **rows._asdict(),
    }


def share_of_carried(
    by_process: list[dict[str, torch.Tensor]], rank: int, accumulate: int
) -> dict[str, torch.Tensor]:
    """Return the states that a process carries on, cut anew where micro-batches changed in size.

    Args:
        by_process: The results of :meth:`SegmentedLM.carried`.
        rank: The process.
        accumulate: Its micro-batches a step.
    """
    import torch

    states: dict[str, list[torch.Tensor]] = {}
    parts = sorted({int(key.split(".", 1)[0]) for key in by_process[0]})
    for part in parts:  # a step's rows lie in this order
        for mine in by_process:
            for key, state in mine.items():
                if key.startswith(f"{part}."):
                    states.setdefault(key.split(".", 1)[1], []).append(state)
    share = {}
    for name, rows in states.items():
        pieces = torch.cat(rows).tensor_split(len(by_process) * accumulate)
        for part in range(accumulate):
            share[f"{part}.{name}"] = pieces[part * len(by_process) + rank].clone()
    return share


__all__ = ["SegmentedLM", "SequenceParallelLM", "share_of_carried"]
