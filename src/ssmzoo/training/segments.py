"""Long rows in segments: the state is carried from one to the next (backpropagation through time).

A row of ``seq_len`` tokens is read in ``count`` segments. With ``gradients="keep"`` one backward
pass goes through all of them and gives the unsplit row's gradients; with ``"cut"`` every segment
has its own, which holds one segment's activations at a time. With ``carry`` a row begins with the
state in which the row at the same place of the last step ended; no gradient goes back there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmzoo.data.rows import IGNORED, Rows
from ssmzoo.training.objectives import CausalLM

if TYPE_CHECKING:
    import torch

    from ssmzoo.modeling import StateCache
    from ssmzoo.recipe import SegmentsSection


class SegmentedLM(CausalLM):
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
        import torch

        rows, length = part.input_ids.shape
        targets = np.full_like(part.labels, IGNORED)
        targets[:, :-1] = part.labels[:, 1:]
        segments = []
        for columns in np.split(np.arange(length), self._segments.count):
            fresh = part.starts[:, columns]
            begins = fresh.copy()
            begins[:, 0] = True
            first = np.flatnonzero(begins)
            arrays = {
                "input_ids": part.input_ids[:, columns].reshape(1, -1),
                "targets": targets[:, columns].reshape(-1),
                "cu_seqlens": np.array([*first, begins.size], np.int32),
                "row": first // len(columns),
                "fresh": fresh.reshape(-1)[first],
                "last": np.searchsorted(first, np.arange(1, rows + 1) * len(columns)) - 1,
            }
            segments.append(
                {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in arrays.items()}
            )
        return [segments] if self._segments.gradients == "keep" else [[s] for s in segments]

    def loss_of(
        self,
        forward: Callable[..., Any],
        piece: list[dict[str, torch.Tensor]],
        part: int,
        targets: int,
    ) -> torch.Tensor:
        """Return a piece's share of the mean over its part's ``targets``."""
        from torch.nn.functional import cross_entropy

        total: Any = 0.0
        for segment in piece:
            state = self._state(part, segment)
            output = forward(
                {name: segment[name] for name in ("input_ids", "cu_seqlens")},
                past_key_values=state,
                use_cache=True,
            )
            self._carried[part] = output.past_key_values
            self._carried[part].batch_select_indices(segment["last"])
            logits = output.logits[0]
            wanted = segment["targets"].to(logits.device)
            total = total + cross_entropy(
                logits.float(), wanted, ignore_index=IGNORED, reduction="sum"
            )
        # a step that follows may begin where this one ends, but without its graph
        self._carried[part].detach()
        return total / targets

    def _state(self, part: int, segment: dict[str, torch.Tensor]) -> StateCache:
        """Return the state that each sequence of a segment begins with."""
        from ssmzoo.modeling import StateCache

        carried = self._carried.get(part)
        if carried is None:
            return StateCache(self._config)
        carried.batch_select_indices(segment["row"])
        carried.reset_rows(segment["fresh"])
        return carried

    def carried(self) -> dict[str, torch.Tensor]:
        """Return what the next step begins with, by name; nothing unless rows are carried on."""
        if not self._segments.carry:
            return {}
        return {
            f"{part}.{index}.{name}": state.detach().cpu()
            for part, cache in self._carried.items()
            for index, layer in enumerate(cache.layers)
            for name, state in layer.states.items()
        }

    def carry_on(self, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
        """Begin the next step with what :meth:`carried` returned."""
        from ssmzoo.modeling import StateCache

        for key, state in tensors.items():
            part, index, name = key.split(".", 2)
            cache = self._carried.setdefault(int(part), StateCache(self._config))
            cache.layers[int(index)].states[name] = state.to(device)


def share_of_carried(
    kept: list[dict[str, torch.Tensor]], rank: int, accumulate: int
) -> dict[str, torch.Tensor]:
    """Return what a process carries on, cut anew where micro-batches are of another size.

    Args:
        kept: What :meth:`SegmentedLM.carried` returned, by process.
        rank: The process.
        accumulate: Its micro-batches a step.
    """
    import torch

    states: dict[str, list[torch.Tensor]] = {}
    parts = sorted({int(key.split(".", 1)[0]) for key in kept[0]})
    for part in parts:  # a step's rows lie in this order
        for mine in kept:
            for key, state in mine.items():
                if key.startswith(f"{part}."):
                    states.setdefault(key.split(".", 1)[1], []).append(state)
    share = {}
    for name, rows in states.items():
        pieces = torch.cat(rows).tensor_split(len(kept) * accumulate)
        for part in range(accumulate):
            share[f"{part}.{name}"] = pieces[part * len(kept) + rank].clone()
    return share


__all__ = ["SegmentedLM", "share_of_carried"]
