"""Longhorn's scan in C: the transition in longhorn_scan.c, the skeleton in scan/scan.h."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ssmzoo_kernels import native
from ssmzoo_kernels.scan import accumulator, chunk_slots

CHUNK = 16

_SOURCE = Path(__file__).with_name("longhorn_scan.c")
_TENSORS = ("u", "q", "k", "dt", "bias", "skip", "z", "initial", "offsets")
_SIZES = ("segments", "width", "states")
_STRIDES = ("stride_u", "stride_q", "stride_k", "stride_dt", "stride_z")
_GRADIENTS = ("u", "q", "k", "dt", "bias", "skip", "z", "initial")


class _Inputs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _TENSORS),
        *((name, ctypes.c_int64) for name in (*_SIZES, *_STRIDES)),
    ]


class _Gradients(ctypes.Structure):
    _fields_ = [
        ("out", ctypes.c_void_p),
        ("final", ctypes.c_void_p),
        ("stride_out", ctypes.c_int64),
        *((f"grad_{name}", ctypes.c_void_p) for name in _GRADIENTS),
    ]


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    library = native.library(_SOURCE, dtype, CHUNK=CHUNK)
    pointer = ctypes.c_void_p
    library.scan_forward.argtypes = (ctypes.POINTER(_Inputs), *[pointer] * 3, ctypes.c_int)
    library.scan_backward.argtypes = (
        ctypes.POINTER(_Inputs),
        ctypes.POINTER(_Gradients),
        *[pointer] * 5,
        ctypes.c_int,
    )
    return library


def forward(
    u: Tensor,  # [T, D]
    q: Tensor,  # [T, N]
    k: Tensor,  # [T, N]
    dt: Tensor,  # [T, D]
    dt_bias: Tensor | None,  # [D]
    D: Tensor | None,  # [D]
    z: Tensor | None,  # [T, D]
    initial_state: Tensor | None,  # [S, D, N]
    offsets: Tensor,  # [S + 1] int64
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, final states and, with ``save``, the state before every chunk."""
    exact = accumulator(u)
    tensors = _prepare(u, q, k, dt, dt_bias, D, z, initial_state, exact)
    inputs = _inputs(tensors, offsets)
    (tokens, width), states, segments = u.shape, k.shape[1], offsets.shape[0] - 1
    out = torch.empty((tokens, width), dtype=exact)
    final_state = torch.empty((segments, width, states), dtype=exact)
    slots = chunk_slots(tokens, segments, CHUNK) if save else 0
    saved = torch.empty((slots, states, width), dtype=exact)
    failed = _library(exact).scan_forward(
        inputs,
        out.data_ptr(),
        final_state.data_ptr(),
        saved.data_ptr() if save else None,
        native.threads(tokens * width * states),
    )
    if failed:
        raise MemoryError("longhorn_scan: no memory for a chunk of keys and states")
    return out.to(u.dtype), final_state, saved


def backward(
    grad_out: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, D, N]
    u: Tensor,
    q: Tensor,
    k: Tensor,
    dt: Tensor,
    dt_bias: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor | None,
    offsets: Tensor,
    saved: Tensor,  # [slots, N, D]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``forward``'s eight tensors, None where one was absent."""
    exact = accumulator(u)
    tensors = _prepare(u, q, k, dt, dt_bias, D, z, initial_state, exact)
    inputs = _inputs(tensors, offsets)
    (tokens, width), states, segments = u.shape, k.shape[1], offsets.shape[0] - 1
    library = _library(exact)
    blocks = -(-width // ctypes.c_int.in_dll(library, "scan_block").value)

    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=exact)

    grad_u, grad_dt = room(tokens, width), room(tokens, width)
    grad_q, grad_k = room(tokens, states), room(tokens, states)
    parts_q, parts_k = room(blocks, tokens, states), room(blocks, tokens, states)
    grad_bias = parts_bias = grad_skip = parts_skip = grad_z = grad_initial = None
    if dt_bias is not None:
        grad_bias, parts_bias = room(width), room(segments, width)
    if D is not None:
        grad_skip, parts_skip = room(width), room(segments, width)
    if z is not None:
        grad_z = room(tokens, width)
    if initial_state is not None:
        grad_initial = room(segments, width, states)
    if grad_out is not None:
        grad_out = native.rows(grad_out, exact)
    if grad_final is not None:
        grad_final = grad_final.to(exact).contiguous()
    gradients = _Gradients(
        native.address(grad_out),
        native.address(grad_final),
        0 if grad_out is None else grad_out.stride(0),
        *map(
            native.address,
            (grad_u, parts_q, parts_k, grad_dt, parts_bias, parts_skip, grad_z, grad_initial),
        ),
    )
    failed = library.scan_backward(
        inputs,
        gradients,
        saved.data_ptr(),
        grad_q.data_ptr(),
        grad_k.data_ptr(),
        native.address(grad_bias),
        native.address(grad_skip),
        native.threads(tokens * width * states),
    )
    if failed:
        raise MemoryError("longhorn_scan: no memory for a chunk of keys and states")
    return grad_u, grad_q, grad_k, grad_dt, grad_bias, grad_skip, grad_z, grad_initial


def _prepare(u, q, k, dt, dt_bias, D, z, initial_state, exact):
    rows = (native.rows(x, exact) for x in (u, q, k, dt))
    z = None if z is None else native.rows(z, exact)
    return (
        *rows,
        *(native.whole(x, exact) for x in (dt_bias, D)),
        z,
        native.whole(initial_state, exact),
    )


def _inputs(tensors: tuple[Tensor | None, ...], offsets: Tensor) -> _Inputs:
    u, q, k, dt, _, _, z, _ = tensors
    return _Inputs(
        *map(native.address, tensors),
        offsets.data_ptr(),
        offsets.shape[0] - 1,
        u.shape[1],
        k.shape[1],
        u.stride(0),
        q.stride(0),
        k.stride(0),
        dt.stride(0),
        0 if z is None else z.stride(0),
    )
