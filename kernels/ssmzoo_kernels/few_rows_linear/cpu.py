"""The linear map of a few rows in C: few_rows_linear.c."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from ssmzoo_kernels import native

HALVES = {torch.bfloat16: 1, torch.float16: 2}  # as linear.h numbers them
INT8 = 3
_SOURCE = Path(__file__).with_name("few_rows_linear.c")


@functools.cache
def load(dtype: torch.dtype) -> Callable[..., None]:
    """Build and load what calls in a dtype need, or raise what native.library raises."""
    kernel = native.library(_SOURCE, dtype).few_rows_linear
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    matrix = (pointer, number, pointer, number)
    kernel.argtypes = (pointer, *matrix, pointer, pointer, *[number] * 3, ctypes.c_int)
    kernel.restype = None
    return kernel
