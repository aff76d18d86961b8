"""The predictor's error in C: innovation.c."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ssmzoo_kernels import native

_SOURCE = Path(__file__).with_name("innovation.c")


class _Inputs(ctypes.Structure):
    """``Inputs`` of innovation.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("y", "history", "weights", "offsets")),
        *((name, ctypes.c_int64) for name in ("segments", "width", "span", "stride")),
        ("relative", ctypes.c_int),
    )


@functools.cache
def load(dtype: torch.dtype) -> Callable[..., int]:
    """Build and load the library of a dtype; errors are those of native.library."""
    kernel = native.library(_SOURCE, dtype).innovation
    kernel.argtypes = (ctypes.POINTER(_Inputs), ctypes.c_void_p, ctypes.c_int)
    return kernel


def forward(
    y: Tensor,  # [T, D]
    history: Tensor,  # [S, k, D]
    offsets: Tensor,  # [S + 1] int64
    weights: list[float],
    relative: bool,
) -> Tensor:
    """Return the scores ``[T]``."""
    exact = torch.promote_types(torch.float32, y.dtype)
    (tokens, width), span = y.shape, len(weights)
    rows, before = native.rows(y, exact), history.to(exact).contiguous()
    taps = torch.tensor(weights, dtype=exact, device="cpu")
    found = torch.empty(tokens, dtype=exact, device="cpu")
    sizes = (offsets.numel() - 1, width, span, rows.stride(0), relative)
    inputs = _Inputs(*native.addresses((rows, before, taps, offsets)), *sizes)
    if load(exact)(inputs, found.data_ptr(), native.threads(tokens * width * span)):
        raise MemoryError("innovation: no memory for the addresses of a history")
    return found
