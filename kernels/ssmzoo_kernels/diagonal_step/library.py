"""``diagonal_step`` as a ``torch.library`` op, so that ``torch.compile`` knows it. No backward."""

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from ssmzoo_kernels.dispatch import record
from ssmzoo_kernels.library import custom_op
from ssmzoo_kernels.scan import needs_library

OP = "diagonal_step"


def diagonal_step(
    u: Tensor,  # [B, H]
    state: Tensor,  # [B, H, N] complex
    decay: Tensor,  # [H, N] complex
    drive: Tensor | None,  # [H, N] complex
    readout: Tensor,  # [H, N] complex
    D: Tensor | None,  # [H]
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Step; returns ``[B, H]`` and ``[B, H, N]``."""
    if needs_library(u):
        return _step(u, state, decay, drive, readout, D, backend)
    record(OP, backend)
    return _backend(backend).forward(u, state, decay, drive, readout, D)


@functools.cache
def _backend(name: str) -> ModuleType:
    return importlib.import_module(f"ssmzoo_kernels.{OP}.{name}")


@custom_op(f"ssmzoo::{OP}")
def _step(
    u: Tensor,
    state: Tensor,
    decay: Tensor,
    drive: Tensor | None,
    readout: Tensor,
    D: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    record(OP, backend)
    return _backend(backend).forward(u, state, decay, drive, readout, D)


@_step.register_fake
def _(u, state, decay, drive, readout, D, backend):
    return (
        torch.empty_like(u, memory_format=torch.contiguous_format),
        torch.empty_like(state, memory_format=torch.contiguous_format),
    )
