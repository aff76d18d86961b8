"""The long convolution by torch's FFT with the moves to and from its layout in C: transpose.c."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ssmzoo_kernels import native
from ssmzoo_kernels.fft_conv import eager

_SOURCE = Path(__file__).with_name("transpose.c")


class _Job(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("source", "add", "scale", "to")),
        *((name, ctypes.c_int64) for name in ("batch", "rows", "columns")),
        *((name, ctypes.c_int64) for name in ("from_batch", "from_row", "to_batch", "to_row")),
        *((name, ctypes.c_int64) for name in ("add_batch", "add_row")),
    ]


@functools.cache
def _kernel(dtype: torch.dtype) -> Callable[..., None]:
    kernel = native.library(_SOURCE, dtype).transpose
    kernel.argtypes = (ctypes.POINTER(_Job), ctypes.c_int)
    kernel.restype = None
    return kernel


def move(to: Tensor, source: Tensor, add: Tensor | None = None, scale: Tensor | None = None):
    """Copy ``source [b, r, c]`` to ``to [b, c, r]``, plus ``scale[r] add[b, c, r]``."""
    same = all(x is None or (x.dtype is to.dtype and x.stride(-1) == 1) for x in (to, source, add))
    if not same or to.dtype not in (torch.float32, torch.float64):
        eager.move(to, source, add, scale)
        return
    if scale is not None:
        scale = scale.to(to.dtype).contiguous()
    job = _Job(
        *map(native.address, (source, add, scale, to)),
        *source.shape,
        *source.stride()[:2],
        *to.stride()[:2],
        *((0, 0) if add is None else add.stride()[:2]),
    )
    _kernel(to.dtype)(job, native.threads(source.numel()))


forward = functools.partial(eager.forward, move=move)
backward = functools.partial(eager.backward, move=move)
