"""The only file that knows versions of transformers: 5.17 to 5.23 are supported."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Let a model compute its activations again in the backward pass, without reentrance."""
    # 5.23 has renamed it and warns about the old name
    renamed = getattr(model, "activation_checkpointing_enable", None)
    (renamed or model.gradient_checkpointing_enable)({"use_reentrant": False})
