"""The CPU skeleton's buffers and calls: the loops are in scan.h, a transition in a family's C file.

A family's C file includes ``scan.h`` and is built for float32 or float64 when it first runs.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssmzoo_kernels import native
from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.scan import (
    ROLES,
    Gradients,
    Inputs,
    chunk_slots,
    interval,
    parts_of,
)

CHUNK = 16  # tokens whose states are recomputed at once

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_BY_ROWS = (0, 1, 2, 3, 6)  # of the inputs u, q, k, dt, z rows may lie apart


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


class Transition:
    """A family's recurrence: a C file, built with some macros."""

    def __init__(self, source: Path, **defines: int) -> None:
        self.name = source.stem
        self.load = functools.partial(load, source, tuple(defines.items()))


def forward(
    transition: Transition, inputs: Inputs, offsets: Tensor, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a family's scan.

    Returns:
        Outputs ``[T, D]`` in u's dtype; in the accumulator's, final states ``[S, D, N]`` and, with
        ``save``, the state before every interval ``[slots, N, D]``.
    """
    u, _, k, *_ = inputs
    exact = accumulator(u)
    (tokens, width), states, segments = u.shape, k.shape[1], offsets.shape[0] - 1
    kept, given = _prepare(inputs, offsets, exact)
    out = torch.empty((tokens, width), dtype=exact, device="cpu")
    final_state = torch.empty((segments, width, states), dtype=exact, device="cpu")
    slots = chunk_slots(tokens, segments, given.interval) if save else 0
    saved = torch.empty((slots, states, width), dtype=exact, device="cpu")
    failed = transition.load(exact).scan_forward(
        given,
        out.data_ptr(),
        final_state.data_ptr(),
        saved.data_ptr() if save else None,
        torch.get_num_threads() if tokens * width * states > native.ONE_THREADS_WORK else 1,
    )
    del kept  # until the kernel had read them
    if failed:
        raise MemoryError(f"{transition.name}: no memory for a chunk of keys and states")
    return out.to(u.dtype), final_state, saved


def backward(
    transition: Transition,
    grad_out: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, D, N]
    inputs: Inputs,
    offsets: Tensor,
    saved: Tensor,  # [slots, N, D]
) -> Gradients:
    """Carry gradients back through the recurrence of ``forward``."""
    u, _, k, *_ = inputs
    exact = accumulator(u)
    (tokens, width), states, segments = u.shape, k.shape[1], offsets.shape[0] - 1
    kept, given = _prepare(inputs, offsets, exact)
    library = transition.load(exact)
    blocks = -(-width // ctypes.c_int.in_dll(library, "scan_block").value)
    parts = parts_of(blocks, width, states)
    if grad_out is not None:
        grad_out = native.rows(grad_out, exact)
    grad_final = native.whole(grad_final, exact)
    # sums over channels come in parts, sums over tokens in one a segment
    count = {"q": parts, "k": parts, "dt_bias": segments, "skip": segments, "param": segments}
    grads, sums = [], []
    for role, x in zip(ROLES, inputs, strict=True):
        found = None if x is None else torch.empty(x.shape, dtype=exact, device="cpu")
        part = found
        if x is not None and role in count:
            part = torch.empty((count[role], *x.shape), dtype=exact, device="cpu")
        grads.append(found)
        sums.append(part)
    failed = library.scan_backward(
        given,
        _Gradients(
            native.address(grad_out),
            native.address(grad_final),
            0 if grad_out is None else grad_out.stride(0),
            parts,
            *map(native.address, sums),
        ),
        saved.data_ptr(),
        *(native.address(grads[i]) for i in (1, 2, 4, 5, 7)),
        native.threads(tokens * width * states),
    )
    del kept
    if failed:
        raise MemoryError(f"{transition.name}: no memory for a chunk of keys and states")
    return (*grads,)


@functools.cache
def load(source: Path, defines: tuple[tuple[str, int], ...], dtype: torch.dtype) -> ctypes.CDLL:
    """Build and load a family's kernels; errors are those of native.library."""
    library = native.library(source, dtype, CHUNK=CHUNK, **dict(defines))
    inputs, gradients = ctypes.POINTER(_Inputs), ctypes.POINTER(_Gradients)
    library.scan_forward.argtypes = (inputs, *[_POINTER] * 3, ctypes.c_int)
    library.scan_backward.argtypes = (inputs, gradients, *[_POINTER] * 6, ctypes.c_int)
    return library


def _prepare(inputs: Inputs, offsets: Tensor, exact: torch.dtype) -> tuple[list[Any], _Inputs]:
    """Return the inputs as the kernel reads them, copied only where necessary, and their places."""
    tensors: list[Any] = [*inputs]
    places: list[int | None] = [None] * len(inputs)
    for i, x in enumerate(inputs):
        if x is not None:
            if x.dtype is not exact:
                x = x.to(exact)
            if not x.is_contiguous() and not (i in _BY_ROWS and x.stride(1) == 1):
                x = x.contiguous()
            tensors[i], places[i] = x, x.data_ptr()
    u, q, k, dt, _, _, z, _, _ = tensors
    return tensors, _Inputs(
        *places,
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
