"""Gated linear attention in C: gated_linear_attention.c."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ssmzoo_kernels import native
from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.scan import chunk_slots, interval

_SOURCE = Path(__file__).with_name("gated_linear_attention.c")
_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
Row = Tensor | None


class _Inputs(ctypes.Structure):
    _fields_ = (
        *((x, _POINTER) for x in ("q", "k", "v", "log_decay", "beta", "initial", "offsets")),
        *((x, _INTEGER) for x in ("segments", "groups", "heads", "keys", "width")),
        *((x, _INTEGER) for x in ("rows", "between", "delta")),
        *((f"stride_{x}", _INTEGER) for x in ("q", "k", "v", "decay", "beta")),
        ("scale", ctypes.c_double),
    )


class _Gradients(ctypes.Structure):
    _fields_ = (
        ("out", _POINTER),
        ("final", _POINTER),
        ("stride_out", _INTEGER),
        *((x, _POINTER) for x in ("q", "k", "v", "decay", "beta", "initial")),
    )


@functools.cache
def load(dtype: torch.dtype) -> ctypes.CDLL:
    """Build and load the library of a dtype; errors are those of native.library."""
    library = native.library(_SOURCE, dtype)
    inputs, gradients = ctypes.POINTER(_Inputs), ctypes.POINTER(_Gradients)
    library.gated_linear_attention_forward.argtypes = (inputs, *[_POINTER] * 3, ctypes.c_int)
    library.gated_linear_attention_backward.argtypes = (inputs, gradients, _POINTER, ctypes.c_int)
    return library


def forward(
    q: Tensor,  # [T, G, K]
    k: Tensor,  # [T, G, K]
    v: Tensor,  # [T, H, V]
    log_decay: Row,  # [T, H, 1] or [T, H, K]
    beta: Row,  # [T, H]
    initial_state: Row,  # [S, H, K, V]
    offsets: Tensor,  # [S + 1] int64
    save: bool,
    rule: str,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, final states and, with ``save``, the state before every interval."""
    exact = accumulator(q)
    tensors = _prepared(q, k, v, log_decay, beta, initial_state, exact=exact)
    inputs = _inputs(tensors, offsets, rule, scale, chunk)
    segments, (tokens, heads, width), keys = offsets.shape[0] - 1, v.shape, q.shape[2]
    out = torch.empty(v.shape, dtype=exact, device="cpu")
    final = torch.empty((segments, heads, keys, width), dtype=exact, device="cpu")
    slots = chunk_slots(tokens, segments, inputs.between) if save else 0
    saved = torch.empty((slots, heads, keys, width), dtype=exact, device="cpu")
    failed = load(exact).gated_linear_attention_forward(
        inputs,
        out.data_ptr(),
        final.data_ptr(),
        saved.data_ptr() if save else None,
        native.threads(tokens * heads * keys * width),
    )
    if failed:
        raise MemoryError("gated_linear_attention: no memory for a tile and its state")
    return out.to(v.dtype), final, saved


def backward(
    grad_out: Row,  # [T, H, V]
    grad_final: Row,  # [S, H, K, V]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Row,
    beta: Row,
    initial_state: Row,
    offsets: Tensor,
    saved: Tensor,  # [slots, H, K, V]
    rule: str,
    scale: float,
    chunk: int,
) -> tuple[Row, ...]:
    """Return the gradients of the inputs, from the states that the forward saved."""
    exact = saved.dtype
    tensors = _prepared(q, k, v, log_decay, beta, initial_state, exact=exact)
    inputs = _inputs(tensors, offsets, rule, scale, chunk)
    (tokens, heads, width), (_, groups, keys) = v.shape, q.shape
    if grad_out is not None:
        grad_out = native.blocks(grad_out, exact)
    grad_final = native.whole(grad_final, exact)
    shapes = [None if x is None else x.shape for x in tensors]
    shapes[:2] = [torch.Size((tokens, heads, keys))] * 2  # a row for every head that reads it
    grads: list[Row] = [
        None if x is None else torch.empty(x, dtype=exact, device="cpu") for x in shapes
    ]
    failed = load(exact).gated_linear_attention_backward(
        inputs,
        _Gradients(
            native.address(grad_out),
            native.address(grad_final),
            0 if grad_out is None else grad_out.stride(0),
            *native.addresses(grads),
        ),
        saved.contiguous().data_ptr(),
        native.threads(tokens * heads * keys * width),
    )
    if failed:
        raise MemoryError("gated_linear_attention: no memory for a tile and its states")
    if groups < heads:
        for i in (0, 1):
            x = grads[i]
            assert x is not None
            grads[i] = x.view(tokens, groups, heads // groups, keys).sum(dim=2)
    return (*grads,)


def _prepared(*tensors: Row, exact: torch.dtype) -> list[Row]:
    """Return the inputs in a dtype; heads and columns adjacent, tokens maybe apart."""
    *rows, state = tensors
    found = [x if x is None else native.blocks(x, exact) for x in rows]
    return [*found, native.whole(state, exact)]


def _inputs(tensors: list[Row], offsets: Tensor, rule: str, scale: float, chunk: int) -> _Inputs:
    q, k, v, log_decay, beta, _ = tensors
    assert q is not None
    assert k is not None
    assert v is not None
    strides = [0 if x is None else x.stride(0) for x in (q, k, v, log_decay, beta)]
    return _Inputs(
        *native.addresses(tensors),
        offsets.data_ptr(),
        offsets.shape[0] - 1,
        q.shape[1],
        v.shape[1],
        q.shape[2],
        v.shape[2],
        0 if log_decay is None else log_decay.shape[2],
        interval(q.shape[2], chunk),
        int(rule == "delta"),
        *strides,
        scale,
    )
