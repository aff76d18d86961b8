"""Linear maps in C: few_rows_linear.c, many_rows_linear.c."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ssmzoo_kernels import machine, native

HALVES = {torch.bfloat16: 1, torch.float16: 2}  # as numbers.h numbers them
FEW_BITS = {torch.int8: 3, torch.int16: 4}  # weights as they are stored; int16 has four of 4 bits
GROUP = 32  # inputs that share a scale where weights have four bits
_pointer, _number = ctypes.c_void_p, ctypes.c_int64


@functools.cache
def load(dtype: torch.dtype, rows: Literal["few", "many"] = "few") -> Callable[..., Any]:
    """Build and load the library of a dtype; errors are those of native.library."""
    name = f"{rows}_rows_linear"
    kernel = getattr(native.library(Path(__file__).with_name(f"{name}.c"), dtype), name)
    if rows == "many":
        strided = (_pointer, _number, _number)
        kernel.argtypes = (*strided, *strided, _pointer, *[_number] * 3, ctypes.c_int)
        return kernel
    matrix = (_pointer, _number, _pointer, _number)
    kernel.argtypes = (_pointer, *matrix, _pointer, _pointer, *[_number] * 3, ctypes.c_int)
    kernel.restype = None
    return kernel


@functools.cache
def outruns_torch() -> bool:
    """Tell whether our product of many rows has vectors twice as wide as torch's.

    MKL computes with AVX-512 on Intel's CPUs, on AMD's with AVX2.
    """
    return (
        torch.backends.mkl.is_available()
        and machine.vendor() == "AuthenticAMD"
        and not native.missing()
        and native.vectors() == "avx512f"
    )


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T`` of matrices ``[M, K]`` and ``[N, K]`` with any strides."""
    x, weight = x.resolve_neg(), weight.resolve_neg()
    if 1 not in weight.stride():
        weight = weight.contiguous()
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device="cpu")
    failed = load(x.dtype, "many")(
        *(x.data_ptr(), *x.stride()),
        *(weight.data_ptr(), *weight.stride()),
        *(y.data_ptr(), x.shape[0], x.shape[1], weight.shape[0]),
        native.threads(y.numel() * x.shape[1] // 16),
    )
    if failed:
        raise MemoryError("many_rows_linear: no memory for a panel of the weight")
    return y
