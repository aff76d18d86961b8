"""The CPU skeleton's buffers and calls: the loops are in scan.h, a transition in a family's C file.

A family's C file includes ``scan.h`` and is built for float32 or float64 when it first runs.
"""

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ssmzoo_kernels import native
from ssmzoo_kernels.scan import accumulator, chunk_slots, interval, parts_of

CHUNK = 16  # tokens whose states are recomputed at once

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64


class _Inputs(ctypes.Structure):
    """``Inputs`` of scan.h."""

    _fields_ = (
        *((x, _POINTER) for x in ("u", "q", "k", "dt", "bias", "skip", "z", "param", "initial")),
        ("offsets", _POINTER),
        *((x, _INTEGER) for x in ("segments", "width", "states", "interval")),
        *((f"stride_{x}", _INTEGER) for x in ("u", "q", "k", "dt", "z")),
    )


class _Gradients(ctypes.Structure):
    """``Gradients`` of scan.h."""

    _fields_ = (
        ("out", _POINTER),
        ("final", _POINTER),
        ("stride_out", _INTEGER),
        ("parts", _INTEGER),
        *((f"grad_{x}", _POINTER) for x in ("u", "q", "k", "dt", "bias", "skip", "z", "param")),
        ("grad_initial", _POINTER),
    )


class Gradients(NamedTuple):
    """What ``backward`` returns: one gradient per input, None where an input was absent."""

    u: Tensor
    q: Tensor
    k: Tensor
    dt: Tensor
    dt_bias: Tensor | None
    skip: Tensor | None
    z: Tensor | None
    param: Tensor | None
    initial_state: Tensor | None


def forward(
    source: Path,
    u: Tensor,  # [T, D]
    q: Tensor,  # [T, N]
    k: Tensor,  # [T, N]
    dt: Tensor,  # [T, D]
    dt_bias: Tensor | None,  # [D]
    skip: Tensor | None,  # [D]
    z: Tensor | None,  # [T, D]
    param: Tensor | None,  # [D, N]
    initial_state: Tensor | None,  # [S, D, N]
    offsets: Tensor,  # [S + 1] int64
    save: bool,
    **defines: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the recurrence whose transition is in ``source``, built with these macros.

    Returns:
        Outputs ``[T, D]`` in u's dtype; in the accumulator's, final states ``[S, D, N]`` and, with
        ``save``, the state before every interval ``[slots, N, D]``.
    """
    exact = accumulator(u)
    tensors = _prepare(exact, u, q, k, dt, dt_bias, skip, z, param, initial_state)
    (tokens, width), states, segments = u.shape, k.shape[1], offsets.shape[0] - 1
    out = torch.empty((tokens, width), dtype=exact, device="cpu")
    final_state = torch.empty((segments, width, states), dtype=exact, device="cpu")
    slots = chunk_slots(tokens, segments, interval(states, CHUNK)) if save else 0
    saved = torch.empty((slots, states, width), dtype=exact, device="cpu")
    failed = load(source, exact, **defines).scan_forward(
        _inputs(tensors, offsets),
        out.data_ptr(),
        final_state.data_ptr(),
        saved.data_ptr() if save else None,
        native.threads(tokens * width * states),
    )
    if failed:
        raise MemoryError(f"{source.stem}: no memory for a chunk of keys and states")
    return out.to(u.dtype), final_state, saved


def backward(
    source: Path,
    grad_out: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, D, N]
    u: Tensor,
    q: Tensor,
    k: Tensor,
    dt: Tensor,
    dt_bias: Tensor | None,
    skip: Tensor | None,
    z: Tensor | None,
    param: Tensor | None,
    initial_state: Tensor | None,
    offsets: Tensor,
    saved: Tensor,  # [slots, N, D]
    **defines: int,
) -> Gradients:
    """Carry gradients back through the recurrence of ``forward`` with the same macros."""
    exact = accumulator(u)
    tensors = _prepare(exact, u, q, k, dt, dt_bias, skip, z, param, initial_state)
    (tokens, width), states, segments = u.shape, k.shape[1], offsets.shape[0] - 1
    library = load(source, exact, **defines)
    blocks = -(-width // ctypes.c_int.in_dll(library, "scan_block").value)
    part_count = parts_of(blocks, width, states)

    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=exact, device="cpu")

    if grad_out is not None:
        grad_out = native.rows(grad_out, exact)
    grad_final = native.whole(grad_final, exact)
    grads = Gradients(
        u=room(tokens, width),
        q=room(tokens, states),
        k=room(tokens, states),
        dt=room(tokens, width),
        dt_bias=None if dt_bias is None else room(width),
        skip=None if skip is None else room(width),
        z=None if z is None else room(tokens, width),
        param=None if param is None else room(width, states),
        initial_state=None if initial_state is None else room(segments, width, states),
    )
    # sums over channels come in parts, sums over tokens in one a segment
    parts = grads._replace(
        q=room(part_count, tokens, states),
        k=room(part_count, tokens, states),
        dt_bias=None if dt_bias is None else room(segments, width),
        skip=None if skip is None else room(segments, width),
        param=None if param is None else room(segments, width, states),
    )
    failed = library.scan_backward(
        _inputs(tensors, offsets),
        _Gradients(
            native.address(grad_out),
            native.address(grad_final),
            0 if grad_out is None else grad_out.stride(0),
            part_count,
            *map(native.address, parts),
        ),
        saved.data_ptr(),
        *map(native.address, (grads.q, grads.k, grads.dt_bias, grads.skip, grads.param)),
        native.threads(tokens * width * states),
    )
    if failed:
        raise MemoryError(f"{source.stem}: no memory for a chunk of keys and states")
    return grads


@functools.cache
def load(source: Path, dtype: torch.dtype, **defines: int) -> ctypes.CDLL:
    """Build and load a family's kernels, or raise what native.library raises."""
    library = native.library(source, dtype, CHUNK=CHUNK, **defines)
    inputs, gradients = ctypes.POINTER(_Inputs), ctypes.POINTER(_Gradients)
    library.scan_forward.argtypes = (inputs, *[_POINTER] * 3, ctypes.c_int)
    library.scan_backward.argtypes = (inputs, gradients, *[_POINTER] * 6, ctypes.c_int)
    return library


_Optional = Tensor | None
_Prepared = tuple[
    Tensor, Tensor, Tensor, Tensor, _Optional, _Optional, _Optional, _Optional, _Optional
]


def _prepare(
    exact: torch.dtype,
    u: Tensor,
    q: Tensor,
    k: Tensor,
    dt: Tensor,
    dt_bias: Tensor | None,
    skip: Tensor | None,
    z: Tensor | None,
    param: Tensor | None,
    initial_state: Tensor | None,
) -> _Prepared:
    """Return the inputs as the kernel reads them, copying only what must be."""
    return (
        native.rows(u, exact),
        native.rows(q, exact),
        native.rows(k, exact),
        native.rows(dt, exact),
        native.whole(dt_bias, exact),
        native.whole(skip, exact),
        None if z is None else native.rows(z, exact),
        native.whole(param, exact),
        native.whole(initial_state, exact),
    )


def _inputs(tensors: _Prepared, offsets: Tensor) -> _Inputs:
    u, q, k, dt, _, _, z, _, _ = tensors
    return _Inputs(
        *map(native.address, tensors),
        offsets.data_ptr(),
        offsets.shape[0] - 1,
        u.shape[1],
        k.shape[1],
        interval(k.shape[1], CHUNK),
        u.stride(0),
        q.stride(0),
        k.stride(0),
        dt.stride(0),
        0 if z is None else z.stride(0),
    )
