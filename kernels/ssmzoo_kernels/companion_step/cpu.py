"""One token of the companion recurrence in C: companion_step.c."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ssmzoo_kernels import native

_SOURCE = Path(__file__).with_name("companion_step.c")


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("u", "a", "b", "d", "positions", "rings", "y")),
        *((name, ctypes.c_int64) for name in ("batch", "width", "order")),
        *((name, ctypes.c_int64) for name in ("u_stride", "y_stride")),
    ]


@functools.cache
def load(dtype: torch.dtype) -> Callable[..., None]:
    """Build and load the library of a dtype; errors are those of native.library."""
    kernel = native.library(_SOURCE, dtype).companion_step
    kernel.argtypes = (ctypes.POINTER(_Step), ctypes.c_int)
    kernel.restype = None
    return kernel


def forward(
    u: Tensor,  # [B, D]
    ring: Tensor,  # [B, n + 1, D], written
    position: Tensor,  # [B]
    a: Tensor,  # [n, D]
    b: Tensor,  # [n, D]
    d: Tensor,  # [D]
) -> Tensor:
    """Return the outputs ``[B, D]`` in the ring's dtype; put ``w`` in the free place."""
    (batch, width), order = u.shape, a.shape[0]
    u, a, b, d = u.contiguous(), a.contiguous(), b.contiguous(), d.contiguous()
    position = position.contiguous()
    y = torch.empty((batch, width), dtype=ring.dtype, device="cpu")
    tensors = (u, a, b, d, position, ring, y)
    step = _Step(*native.addresses(tensors), batch, width, order, width, width)
    load(ring.dtype)(step, native.threads(ring.numel()))
    return y
