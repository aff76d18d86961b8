"""One token of a layer in C: token_step.c."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from ssmzoo_kernels import native

_SOURCE = Path(__file__).with_name("token_step.c")


class Value(ctypes.Structure):
    """``Value`` of token_step.c."""

    _fields_ = [(name, ctypes.c_int64) for name in ("offset", "start", "stride")]


class Numbers(ctypes.Structure):
    """``Numbers`` of numbers.h."""

    _fields_ = [("at", ctypes.c_void_p), ("type", ctypes.c_int64)]


class Instruction(ctypes.Structure):
    """``Instruction`` of token_step.c."""

    _fields_ = [
        ("kind", ctypes.c_int64),
        ("size", ctypes.c_int64 * 14),
        ("inputs", Value * 6),
        ("out", Value),
        ("data", Numbers * 6),
        ("number", ctypes.c_double * 2),
    ]


class Program(ctypes.Structure):
    """``Program`` of token_step.c."""

    _fields_ = [
        ("list", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("given", ctypes.c_void_p),
    ]


@functools.cache
def load(dtype: torch.dtype) -> Callable[..., int]:
    """Build and load the library of a dtype; errors are those of native.library."""
    kernel = native.library(_SOURCE, dtype).token_step
    kernel.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
    return kernel
