"""Longhorn's scan in C: the transition in longhorn_scan.c, the skeleton in ``scan``."""

from pathlib import Path

import torch
from torch import Tensor

from ssmzoo_kernels.scan import cpu as scan

CHUNK = scan.CHUNK

_SOURCE = Path(__file__).with_name("longhorn_scan.c")


def load(dtype: torch.dtype) -> None:
    """Build and load what calls in a dtype need, or raise what native.library raises."""
    scan.load(_SOURCE, dtype)


def forward(
    u: Tensor,  # [T, D]
    q: Tensor,  # [T, N]
    k: Tensor,  # [T, N]
    dt: Tensor,  # [T, D]
    dt_bias: Tensor | None,  # [D]
    D: Tensor | None,  # [D]
    z: Tensor | None,  # [T, D]
    initial_state: Tensor | None,  # [S, D, N]
    offsets: Tensor,  # [S + 1] int64
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, final states and, with ``save``, the state before every interval."""
    return scan.forward(_SOURCE, u, q, k, dt, dt_bias, D, z, None, initial_state, offsets, save)


def backward(
    grad_out: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, D, N]
    u: Tensor,
    q: Tensor,
    k: Tensor,
    dt: Tensor,
    dt_bias: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor | None,
    offsets: Tensor,
    saved: Tensor,  # [slots, N, D]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``forward``'s eight tensors, None where one was absent."""
    inputs = (u, q, k, dt, dt_bias, D, z, None, initial_state)
    grads = scan.backward(_SOURCE, grad_out, grad_final, *inputs, offsets, saved)
    return (*grads[:7], grads.initial_state)
