"""The linear recurrence in C: linear_scan.c."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ssmzoo_kernels import native
from ssmzoo_kernels.declaration import accumulator

_SOURCE = Path(__file__).with_name("linear_scan.c")


class _Inputs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "start", "offsets")),
        *((name, ctypes.c_int64) for name in ("segments", "width", "stride_a", "stride_b")),
    ]


class _Backward(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("h", "initial", "grad_a", "grad_b")]


@functools.cache
def load(dtype: torch.dtype) -> ctypes.CDLL:
    """Build and load the library of a dtype; errors are those of native.library."""
    library = native.library(_SOURCE, dtype.to_real(), PAIRS=int(dtype.is_complex))
    inputs, pointer = ctypes.POINTER(_Inputs), ctypes.c_void_p
    library.linear_scan_forward.argtypes = (inputs, pointer, pointer, ctypes.c_int)
    library.linear_scan_backward.argtypes = (
        inputs,
        ctypes.POINTER(_Backward),
        pointer,
        ctypes.c_int,
    )
    return library


def forward(
    a: Tensor,  # [T, D]
    b: Tensor,  # [T, D]
    initial_state: Tensor | None,  # [S, D]
    offsets: Tensor,  # [S + 1] int64
) -> tuple[Tensor, Tensor]:
    """Return all states ``[T, D]`` and every segment's last."""
    exact = accumulator(a)
    a, b, initial = _rows(a, exact), _rows(b, exact), _whole(initial_state, exact)
    h = torch.empty(a.shape, dtype=exact, device="cpu")
    final_state = torch.empty((offsets.shape[0] - 1, a.shape[1]), dtype=exact, device="cpu")
    failed = load(exact).linear_scan_forward(
        _inputs(a, b, initial, offsets),
        h.data_ptr(),
        final_state.data_ptr(),
        native.threads(a.numel()),
    )
    if failed:
        raise MemoryError("linear_scan: no memory for the states before the spans")
    return h, final_state


def backward(
    grad_h: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, D]
    a: Tensor,
    h: Tensor,
    initial_state: Tensor | None,
    offsets: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a, b and the initial state."""
    exact = h.dtype
    a, h, initial = _rows(a, exact), h.contiguous(), _whole(initial_state, exact)
    grad_h = None if grad_h is None else _rows(grad_h, exact)
    grad_final = _whole(grad_final, exact)
    grad_a, grad_b = (torch.empty(a.shape, dtype=exact, device="cpu") for _ in range(2))
    grad_initial = torch.empty((offsets.shape[0] - 1, a.shape[1]), dtype=exact, device="cpu")
    failed = load(exact).linear_scan_backward(
        _inputs(a, grad_h, grad_final, offsets),
        _Backward(*native.addresses((h, initial, grad_a, grad_b))),
        grad_initial.data_ptr(),
        native.threads(a.numel()),
    )
    if failed:
        raise MemoryError("linear_scan: no memory for the states before the spans")
    return grad_a, grad_b, grad_initial


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    # a lazily conjugated or negated tensor's memory holds something else
    return native.rows(x.resolve_conj().resolve_neg(), dtype)


def _whole(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return native.whole(x if x is None else x.resolve_conj().resolve_neg(), dtype)


def _inputs(a: Tensor, b: Tensor | None, start: Tensor | None, offsets: Tensor) -> _Inputs:
    numbers = 2 if a.is_complex() else 1
    return _Inputs(
        *native.addresses((a, b, start, offsets)),
        offsets.shape[0] - 1,
        numbers * a.shape[1],
        numbers * a.stride(0),
        0 if b is None else numbers * b.stride(0),
    )
