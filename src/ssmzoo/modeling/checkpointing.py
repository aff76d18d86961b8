"""Selective activation checkpointing: keep what is slow to compute again, and nothing else."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

WIDTH = 128  # products of narrower inputs, such as low-rank ones, are cheap
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)


def selective_checkpointing() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a block whose matrix products and attention are kept.

    Norms, convolutions, scans and gates are computed again in the backward pass. The gradients are
    those of full checkpointing; a graph goes backward once. For transformers' models as for ours::

        model.gradient_checkpointing_enable(
            {"use_reentrant": False, "context_fn": selective_checkpointing}
        )

    Returns:
        The contexts of the forward pass and of its repetition, as ``torch.utils.checkpoint`` asks.
    """
    return create_selective_checkpoint_contexts(_policy)


def _policy(_context: Any, op: Any, *inputs: Any, **_options: Any) -> CheckpointPolicy:
    wide = op in _PRODUCTS and inputs[-1].shape[0] >= WIDTH
    if wide or op in _ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
