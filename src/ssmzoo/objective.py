"""What a run learns: rows to a model's arguments, what its loss averages over, what is measured.

The loop knows an objective by five methods: ``batch``, ``targets``, ``zeros``, ``measure`` and
``metrics``. The loss is the model's own, a mean over the batch's targets.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

from ssmzoo.rows import Rows

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger("ssmzoo")


class CausalLM:
    """Predict the next token.

    Args:
        model: Rows are packed into one, their seams marked by ``cu_seqlens``, if it takes that.
        packs: Whether the rows hold several documents at all.
    """

    def __init__(self, model: nn.Module, *, packs: bool) -> None:
        takes_boundaries = "cu_seqlens" in inspect.signature(model.forward).parameters
        self.packed = packs and takes_boundaries
        if packs and not takes_boundaries:
            logger.warning(
                "%s takes no cu_seqlens: documents that share a row see each other",
                type(model).__name__,
            )

    def batch(self, rows: Rows) -> dict[str, torch.Tensor]:
        """Return a model's arguments: packed into one row [1, n * L], or rows [n, L]."""
        import numpy as np
        import torch

        arrays = {"input_ids": rows.input_ids, "labels": rows.labels}
        if self.packed:
            arrays = {name: array.reshape(1, -1) for name, array in arrays.items()}
            ends = [*np.flatnonzero(rows.starts), rows.starts.size]
            arrays["cu_seqlens"] = np.array(ends, np.int32)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def targets(self, rows: Rows) -> int:
        """Return what the loss of these rows is a mean over.

        Raises:
            ValueError: Nothing at all, where there is no mean.
        """
        if not rows.targets:
            raise ValueError(
                "a batch must have tokens to predict; documents of one token have none"
            )
        return rows.targets

    def zeros(self, device: torch.device) -> torch.Tensor:
        """Return the sums of no batch."""
        import torch

        return torch.zeros(3, dtype=torch.float64, device=device)

    def measure(self, output: Any, batch: dict[str, torch.Tensor], rows: Rows) -> torch.Tensor:
        """Return what a validation adds up over batches and processes: loss, hits, targets."""
        logits: torch.Tensor = output.logits
        labels = batch["labels"][:, 1:].to(logits.device)
        right = (logits[:, :-1].argmax(-1) == labels).sum()
        sums = self.zeros(logits.device)
        sums[0] = output.loss.double() * rows.targets
        sums[1], sums[2] = right, rows.targets
        return sums

    def metrics(self, sums: torch.Tensor) -> dict[str, float | int]:
        """Return what a validation reports."""
        loss, right, targets = sums.tolist()
        return {
            "validation_loss": loss / targets,
            "validation_accuracy": right / targets,
            "validation_targets": int(targets),
        }
