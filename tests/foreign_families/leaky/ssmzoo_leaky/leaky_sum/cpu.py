"""The leaky sum in C: leaky_sum.c, which the zoo compiles when it first runs."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ssmzoo_kernels import native
from ssmzoo_kernels.declaration import accumulator

_SOURCE = Path(__file__).with_name("leaky_sum.c")


class _Sizes(ctypes.Structure):
    """``Sizes`` of leaky_sum.c."""

    _fields_ = (
        ("offsets", ctypes.c_void_p),
        ("sequences", ctypes.c_int64),
        ("width", ctypes.c_int64),
    )


@functools.cache
def load(dtype: torch.dtype) -> ctypes.CDLL:
    """Build and load what calls in a dtype need, or raise what native.library raises."""
    library, pointer = native.library(_SOURCE, dtype), ctypes.c_void_p
    sizes = ctypes.POINTER(_Sizes)
    library.forward.argtypes = (sizes, *[pointer] * 5, ctypes.c_int)
    library.backward.argtypes = (sizes, *[pointer] * 8, ctypes.c_int)
    return library


def forward(
    x: Tensor,  # [T, D]
    decay: Tensor,  # [D]
    initial_state: Tensor | None,  # [S, D]
    offsets: Tensor,  # [S + 1]
) -> tuple[Tensor, Tensor]:
    """Return the sums and each sequence's last."""
    exact = accumulator(x)
    given = [native.whole(t, exact) for t in (x, decay, initial_state)]
    sizes = _Sizes(offsets.data_ptr(), offsets.shape[0] - 1, x.shape[1])
    h = torch.empty(x.shape, dtype=exact, device="cpu")
    final = torch.empty((sizes.sequences, sizes.width), dtype=exact, device="cpu")
    tensors = native.addresses([*given, h, final])
    load(exact).forward(sizes, *tensors, native.threads(x.numel()))
    return h.to(x.dtype), final


def backward(
    grad_h: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, D]
    x: Tensor,
    decay: Tensor,
    initial_state: Tensor | None,
    offsets: Tensor,
) -> list[Tensor | None]:
    """Return the gradients of the inputs, None where one was absent."""
    exact = accumulator(x)
    rows = (grad_h, grad_final, x, decay, initial_state)
    given = [native.whole(t, exact) for t in rows]
    sizes = _Sizes(offsets.data_ptr(), offsets.shape[0] - 1, x.shape[1])
    grads = [t if t is None else torch.empty(t.shape, dtype=exact, device="cpu") for t in given[2:]]
    load(exact).backward(sizes, *native.addresses([*given, *grads]), native.threads(x.numel()))
    return grads
