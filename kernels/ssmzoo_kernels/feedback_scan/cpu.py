"""COFFEE's scan in C: feedback_scan.c."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ssmzoo_kernels import native
from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.feedback_scan.inputs import Gradients, Inputs, Stop
from ssmzoo_kernels.feedback_scan.newton import not_converged
from ssmzoo_kernels.scan import chunk_slots, interval

CHUNK = 32  # tokens whose states are recomputed at once

_SOURCE = Path(__file__).with_name("feedback_scan.c")
_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_TENSORS = ("u", "lam", "w", "C", "filter", "skip", "drive", "initial")


class _Inputs(ctypes.Structure):
    """``Inputs`` of feedback_scan.c."""

    _fields_ = (
        *((x, _POINTER) for x in _TENSORS),
        ("offsets", _POINTER),
        *((x, _INTEGER) for x in ("segments", "width", "states", "interval")),
        *((f"stride_{x}", _INTEGER) for x in ("u", "drive")),
    )


class _Gradients(ctypes.Structure):
    """``Gradients`` of feedback_scan.c."""

    _fields_ = (
        ("out", _POINTER),
        ("final", _POINTER),
        ("stride_out", _INTEGER),
        *((f"grad_{x}", _POINTER) for x in _TENSORS),
    )


class _Newton(ctypes.Structure):
    """``Newton`` of feedback_scan.c."""

    _fields_ = (
        ("tolerance", ctypes.c_double),
        ("damping", ctypes.c_double),
        ("most", _INTEGER),
    )


class _Failure(ctypes.Structure):
    """``Failure`` of feedback_scan.c."""

    _fields_ = (("lanes", _INTEGER), ("token", _INTEGER), ("residual", ctypes.c_double))


def forward(inputs: Inputs, offsets: Tensor, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, final states and, with ``save``, the state before every interval."""
    return _forward(inputs, offsets, save, None)


def newton(
    inputs: Inputs, offsets: Tensor, save: bool, stop: Stop
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``forward`` by Newton's method on ``CHUNK`` tokens at a time.

    Raises:
        NotConverged: Some lane has not reached the tolerance after ``max_iterations`` steps.
    """
    how = _Newton(stop.tolerance, stop.damping, stop.max_iterations or 0)
    return _forward(inputs, offsets, save, how)


def backward(
    grad_out: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, D, N]
    inputs: Inputs,
    offsets: Tensor,
    saved: Tensor,  # [slots, N, D]
) -> Gradients:
    """Return the gradients of the inputs."""
    exact = accumulator(inputs.u)
    tensors = _prepare(exact, inputs)
    if grad_out is not None:
        grad_out = native.rows(grad_out, exact)
    grad_final = native.whole(grad_final, exact)
    grads = [
        None if x is None else torch.empty(x.shape, dtype=exact, device="cpu") for x in tensors
    ]
    failed = load(exact).scan_backward(
        _inputs(tensors, offsets),
        _Gradients(
            native.address(grad_out),
            native.address(grad_final),
            0 if grad_out is None else grad_out.stride(0),
            *native.addresses(grads),
        ),
        saved.data_ptr(),
        native.threads(inputs.u.numel() * inputs.lam.shape[1]),
    )
    if failed:
        raise MemoryError("feedback_scan: no memory for a block of states")
    return (*grads,)


def _forward(
    inputs: Inputs, offsets: Tensor, save: bool, how: _Newton | None
) -> tuple[Tensor, Tensor, Tensor]:
    u, lam = inputs[:2]
    exact = accumulator(u)
    tensors = _prepare(exact, inputs)
    (tokens, width), states, segments = u.shape, lam.shape[1], offsets.shape[0] - 1
    out = torch.empty((tokens, width), dtype=exact, device="cpu")
    final_state = torch.empty((segments, width, states), dtype=exact, device="cpu")
    slots = chunk_slots(tokens, segments, interval(states, CHUNK)) if save else 0
    saved = torch.empty((slots, states, width), dtype=exact, device="cpu")
    failure = _Failure()
    failed = load(exact).scan_forward(
        _inputs(tensors, offsets),
        out.data_ptr(),
        final_state.data_ptr(),
        saved.data_ptr() if save else None,
        how,
        failure,
        native.threads(tokens * width * states),
    )
    if failed:
        raise MemoryError("feedback_scan: no memory for a block of states")
    if how and failure.lanes:
        raise not_converged(
            failure.lanes,
            final_state.numel(),
            how.tolerance,
            how.most or 2 * CHUNK,
            failure.token,
            failure.residual,
        )
    return out.to(u.dtype), final_state, saved


@functools.cache
def load(dtype: torch.dtype) -> ctypes.CDLL:
    """Build and load the library of a dtype; errors are those of native.library."""
    library = native.library(_SOURCE, dtype, CHUNK=CHUNK)
    inputs, gradients = ctypes.POINTER(_Inputs), ctypes.POINTER(_Gradients)
    how, failure = ctypes.POINTER(_Newton), ctypes.POINTER(_Failure)
    library.scan_forward.argtypes = (inputs, *[_POINTER] * 3, how, failure, ctypes.c_int)
    library.scan_backward.argtypes = (inputs, gradients, _POINTER, ctypes.c_int)
    return library


def _prepare(exact: torch.dtype, inputs: Inputs) -> Inputs:
    """Return the inputs in a dtype, copied only where needed; rows of u, drive may lie apart."""
    tensors: list[Tensor | None] = [*inputs]
    for i, (x, name) in enumerate(zip(inputs, Inputs._fields, strict=True)):
        if x is not None:
            if x.dtype is not exact:
                x = x.to(exact)
            by_rows = name in ("u", "drive")
            if x.stride(1) != 1 if by_rows else not x.is_contiguous():
                x = x.contiguous()
            tensors[i] = x
    return Inputs(*tensors)  # pyright: ignore[reportArgumentType]


def _inputs(x: Inputs, offsets: Tensor) -> _Inputs:
    return _Inputs(
        *native.addresses(x),
        offsets.data_ptr(),
        offsets.shape[0] - 1,
        *x.lam.shape,
        interval(x.lam.shape[1], CHUNK),
        x.u.stride(0),
        0 if x.drive is None else x.drive.stride(0),
    )
