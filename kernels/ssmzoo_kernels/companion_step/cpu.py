"""One token of the companion recurrence in C: companion_step.c."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ssmzoo_kernels import native

_SOURCE = Path(__file__).with_name("companion_step.c")


@functools.cache
def _kernel(dtype: torch.dtype) -> Callable[..., None]:
    kernel = native.library(_SOURCE, dtype).companion_step
    kernel.argtypes = (*[ctypes.c_void_p] * 7, *[ctypes.c_int64] * 4, ctypes.c_int)
    kernel.restype = None
    return kernel


def step_(
    u: Tensor,  # [B, D]
    ring: Tensor,  # [B, D, n], written
    position: Tensor,  # [B]
    a: Tensor,  # [D_a, n]
    b: Tensor,  # [D, n]
    d: Tensor,  # [D]
) -> Tensor:
    """Return the outputs ``[B, D]`` in the ring's dtype; put ``w`` where ``x_n`` was."""
    batch, width, order = ring.shape
    u, position, a, b, d = (x.contiguous() for x in (u, position, a, b, d))
    y = torch.empty((batch, width), dtype=ring.dtype, device="cpu")
    _kernel(ring.dtype)(
        u.data_ptr(),
        ring.data_ptr(),
        position.data_ptr(),
        a.data_ptr(),
        b.data_ptr(),
        d.data_ptr(),
        y.data_ptr(),
        batch,
        width,
        order,
        width // a.shape[0],
        native.threads(ring.numel()),
    )
    return y
