"""Mamba's scan in C: the transition in selective_scan.c, the skeleton in ``scan``."""

from pathlib import Path

import torch
from torch import Tensor

from ssmzoo_kernels.scan import cpu as scan

CHUNK = scan.CHUNK

_SOURCE = Path(__file__).with_name("selective_scan.c")
_DEFINES: dict[str, dict[str, int]] = {"euler": {}, "zoh": {"ZOH": 1}}


def load(dtype: torch.dtype, discretization: str) -> None:
    """Build and load what calls in a dtype need, or raise what native.library raises."""
    scan.load(_SOURCE, dtype, **_DEFINES[discretization])


def forward(
    u: Tensor,  # [T, D]
    dt: Tensor,  # [T, D]
    A: Tensor,  # [D, N]
    B: Tensor,  # [T, N]
    C: Tensor,  # [T, N]
    D: Tensor | None,  # [D]
    z: Tensor | None,  # [T, D]
    dt_bias: Tensor | None,  # [D]
    initial_state: Tensor | None,  # [S, D, N]
    offsets: Tensor,  # [S + 1] int64
    save: bool,
    discretization: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, final states and, with ``save``, the state before every interval."""
    inputs = (u, C, B, dt, dt_bias, D, z, A, initial_state)
    return scan.forward(_SOURCE, *inputs, offsets, save, **_DEFINES[discretization])


def backward(
    grad_y: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, D, N]
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    offsets: Tensor,
    saved: Tensor,  # [slots, N, D]
    discretization: str,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``forward``'s nine tensors, None where one was absent."""
    inputs = (u, C, B, dt, dt_bias, D, z, A, initial_state)
    defines = _DEFINES[discretization]
    g = scan.backward(_SOURCE, grad_y, grad_final, *inputs, offsets, saved, **defines)
    return g.u, g.dt, g.param, g.k, g.q, g.skip, g.z, g.dt_bias, g.initial_state
