"""Launches of Triton kernels: one that was seen before costs less Python than Triton's own.

For every launch Triton binds all arguments by name, asks what each is like, and joins the answers
to a text under which it finds the compiled kernel. Here the kernel is found under a tuple; what
remains is the driver's call. The first launch of a kind is Triton's own, and so is every one where
Triton asks more than this module knows: on AMD's GPUs it asks how large a tensor's memory is.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_MOST = 4096
_prepared: dict[Any, tuple[Any, list[Any]]] = {}


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the device of its first argument, a tensor.

    Args:
        kernel: What ``triton.jit`` made, with its constants after all else.
        grid: How many programs, along up to three axes.
        arguments: All that is no constant, in the kernel's order: tensors, None, numbers.
        constants: The rest by name, and Triton's options. A kernel is kept for each set of them, so
            what differs from call to call must be an argument.
    """
    device = arguments[0].device
    key = (kernel.fn, device, *like(arguments), *constants, *constants.values())
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else _HERE:
        if key in _prepared:
            compiled, values = _prepared[key]
            compiled[(*grid, 1, 1)[:3]](*arguments, *values)
            return
        # Triton 3.10 will multiply and add in two steps where nothing is said, and 3.9 says so
        compiled = kernel[grid](*arguments, **constants, enable_fp_fusion=True)
    # the interpreter compiles nothing; a hook wants to see every launch
    if compiled is not None and not kernel.pre_run_hooks and torch.version.hip is None:
        if len(_prepared) >= _MOST:
            _prepared.clear()
        _prepared[key] = compiled, [constants[x] for x in kernel.arg_names[len(arguments) :]]


def launch_named(
    kernel: Any, grid: Sequence[int], values: Mapping[str, Any], **options: Any
) -> None:
    """Launch a kernel with those of some values that it names.

    Args:
        kernel: As for ``launch``; its constants are what has an annotation.
        grid: How many programs, along up to three axes.
        values: Arguments and constants by name, maybe others too.
        options: Triton's.
    """
    arguments, constants = _names(kernel.fn)
    named = {name: values[name] for name in constants}
    launch(kernel, grid, *[values[name] for name in arguments], **named, **options)


@functools.cache
def _names(function: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """Return the names of a kernel's arguments and of its constants."""
    parameters = inspect.signature(function).parameters.values()
    constant = [x.name for x in parameters if x.annotation is not x.empty]
    return [x.name for x in parameters if x.name not in constant], constant


def like(arguments: Sequence[Any]) -> list[Any]:
    """Return what Triton compiles a kernel for of its arguments, or what tells more."""
    found: list[Any] = []
    for x in arguments:
        if isinstance(x, Tensor):
            found += (x.dtype, not x.data_ptr() & 15)
        elif x.__class__ is int:
            width = (x >= -(2**31)) + (x >= 2**31) + (x >= 2**63)
            found += (int, (width, x == 1, not x & 15))
        else:
            found += (x.__class__, None)
    return found


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up; Triton's own takes microseconds, some in every launch."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


_HERE = contextlib.nullcontext()
