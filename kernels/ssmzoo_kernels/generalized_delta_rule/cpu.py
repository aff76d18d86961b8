"""The generalised delta rule in C: generalized_delta_rule.c."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssmzoo_kernels import native
from ssmzoo_kernels.declaration import accumulator

_SOURCE = Path(__file__).with_name("generalized_delta_rule.c")
_NAMES = ("r", "w", "k", "v", "a", "b", "initial")


class _Tensors(ctypes.Structure):
    """``Tensors`` of generalized_delta_rule.c."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in _NAMES)


class _Sizes(ctypes.Structure):
    """``Sizes`` of generalized_delta_rule.c."""

    _fields_ = (
        ("offsets", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("sequences", "heads", "keys", "values")),
    )


@functools.cache
def load(dtype: torch.dtype) -> ctypes.CDLL:
    """Build and load what calls in a dtype need, or raise what native.library raises."""
    library, tensors = native.library(_SOURCE, dtype), ctypes.POINTER(_Tensors)
    sizes, pointer = ctypes.POINTER(_Sizes), ctypes.c_void_p
    library.forward.argtypes = (sizes, tensors, pointer, pointer, ctypes.c_int)
    library.backward.argtypes = (sizes, tensors, pointer, pointer, tensors, ctypes.c_int)
    return library


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs ``[T, H, V]`` and the final states ``[S, H, K, V]``."""
    *inputs, offsets = arguments
    exact, v = accumulator(inputs[0]), inputs[3]
    given, sizes, threads = _prepared(inputs, offsets, exact)
    shape = (sizes.sequences, sizes.heads, sizes.keys, sizes.values)
    y = torch.empty(v.shape, dtype=exact, device="cpu")
    final = torch.empty(shape, dtype=exact, device="cpu")
    tensors = _Tensors(*native.addresses(given))
    load(exact).forward(sizes, tensors, y.data_ptr(), final.data_ptr(), threads)
    return y.to(v.dtype), final


def backward(
    grad_y: Tensor | None, grad_final: Tensor | None, *arguments: Any
) -> list[Tensor | None]:
    """Return the gradients of the inputs, None where one was absent."""
    *inputs, offsets = arguments
    exact = accumulator(inputs[0])
    given, sizes, threads = _prepared(inputs, offsets, exact)
    found = [x if x is None else torch.empty(x.shape, dtype=exact, device="cpu") for x in given]
    wanted = [native.whole(x, exact) for x in (grad_y, grad_final)]
    tensors, grads = (_Tensors(*native.addresses(x)) for x in (given, found))
    if load(exact).backward(sizes, tensors, *native.addresses(wanted), grads, threads):
        raise MemoryError("generalized_delta_rule: no memory for the states between tokens")
    return found


def _prepared(
    inputs: list[Tensor | None], offsets: Tensor, exact: torch.dtype
) -> tuple[list[Tensor | None], _Sizes, int]:
    """Return the inputs as C reads them, the sizes, and how many threads the work is for."""
    k, v = inputs[2], inputs[3]
    assert k is not None
    assert v is not None
    sizes = _Sizes(offsets.data_ptr(), offsets.shape[0] - 1, *k.shape[1:], v.shape[2])
    threads = native.threads(v.numel() * sizes.keys)
    return [native.whole(x, exact) for x in inputs], sizes, threads
