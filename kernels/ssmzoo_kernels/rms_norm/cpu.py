"""The norm in C: rms_norm.c."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ssmzoo_kernels import native
from ssmzoo_kernels.declaration import accumulator

_SOURCE = Path(__file__).with_name("rms_norm.c")
_MOST_SHARES, _LEAST_ROWS = 64, 16  # sums of the weight's gradient, and rows of each


class _Rows(ctypes.Structure):
    """``Rows`` of rms_norm.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight")),
        *((name, ctypes.c_int64) for name in ("count", "width", "stride")),
        *((name, ctypes.c_double) for name in ("eps", "offset")),
    )


@functools.cache
def load(dtype: torch.dtype) -> tuple[Callable[..., None], Callable[..., None]]:
    """Build and load the library of a dtype; errors are those of native.library."""
    library = native.library(_SOURCE, dtype)
    rows, address = ctypes.POINTER(_Rows), ctypes.c_void_p
    forward, backward = library.rms_norm, library.rms_norm_backward
    forward.argtypes = (rows, address, ctypes.c_int64, address, address, address, ctypes.c_int)
    backward.argtypes = (
        *(rows, address, ctypes.c_int64, address, ctypes.c_int64),
        *(address, address, address, address, ctypes.c_int64, ctypes.c_int64, ctypes.c_int),
    )
    forward.restype = backward.restype = None
    return forward, backward


def forward(
    x: Tensor,  # [B, D]
    weight: Tensor,  # [D]
    save: bool,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """Return y ``[B, D]`` in the weight's dtype, and the inverse roots ``[B]``."""
    return normalise(x, None, weight, eps, offset)[1:]


def normalise(
    x: Tensor,  # [B, D]
    added: Tensor | None,  # [B, D]
    weight: Tensor,  # [D]
    eps: float,
    offset: float,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return x + added ``[B, D]`` in float32 or float64 (None for None), its norm, the roots."""
    exact, (count, width) = accumulator(x), x.shape
    rows, factor = native.rows(x, exact), native.whole(weight, exact)
    more = None if added is None else native.rows(added, exact)
    total = None if added is None else torch.empty((count, width), dtype=exact, device="cpu")
    y = torch.empty((count, width), dtype=exact, device="cpu")
    inverse = torch.empty(count, dtype=exact, device="cpu")
    told = _Rows(*native.addresses((rows, factor)), count, width, rows.stride(0), eps, offset)
    load(exact)[0](
        *(told, native.address(more), 0 if more is None else more.stride(0)),
        *native.addresses((total, y, inverse)),
        native.threads(count * width),
    )
    return total, y.to(weight.dtype), inverse


def backward(
    grad_y: Tensor,  # [B, D]
    x: Tensor,  # [B, D]
    weight: Tensor,  # [D]
    inverse: Tensor,  # [B]
    eps: float,
    offset: float,
    grad_x: Tensor | None = None,  # [B, D]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x ``[B, D]``, plus ``grad_x``, and of the weight ``[D]``."""
    exact, (count, width) = inverse.dtype, x.shape
    rows, grad = native.rows(x, exact), native.rows(grad_y, exact)
    more = None if grad_x is None else native.rows(grad_x, exact)
    factor, inverse = native.whole(weight, exact), inverse.contiguous()
    grad_row = torch.empty((count, width), dtype=exact, device="cpu")
    # cut by the number of rows alone, so that results do not depend on the number of threads
    share = max(_LEAST_ROWS, -(-count // _MOST_SHARES))
    shares = -(-count // share)
    sums = torch.empty((shares, width), dtype=exact, device="cpu")
    grad_weight = torch.empty(width, dtype=exact, device="cpu")
    told = _Rows(*native.addresses((rows, factor)), count, width, rows.stride(0), eps, offset)
    load(exact)[1](
        *(told, grad.data_ptr(), grad.stride(0)),
        *(native.address(more), 0 if more is None else more.stride(0)),
        *native.addresses((inverse, grad_row, sums, grad_weight)),
        *(share, shares, native.threads(count * width)),
    )
    return grad_row, grad_weight
