"""Eidetic attention in C: eidetic_attention.c."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ssmzoo_kernels import native
from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.eidetic_attention.arguments import Call, Tensors

_SOURCE = Path(__file__).with_name("eidetic_attention.c")
_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_TABLES = (("k", "v"), ("past_k", "past_v"), ("mem_k", "mem_v"))


class _Table(ctypes.Structure):
    _fields_ = (
        *((x, _POINTER) for x in ("k", "v")),
        *((x, _INTEGER) for x in ("stride_k", "stride_v", "rows")),
    )


class _Inputs(ctypes.Structure):
    _fields_ = (
        ("q", _POINTER),
        ("stride_q", _INTEGER),
        ("tables", _Table * len(_TABLES)),
        *((x, _POINTER) for x in ("mem_count", "mem_positions", "offsets", "seen")),
        *((x, _INTEGER) for x in ("segments", "heads", "groups", "width", "window")),
        ("scale", ctypes.c_double),
    )


class _Gradients(ctypes.Structure):
    _fields_ = (
        *((x, _POINTER) for x in ("out", "total", "grad_out")),
        *((f"stride_{x}", _INTEGER) for x in ("out", "grad")),
        ("q", _POINTER),
        ("tables", _POINTER * 2 * len(_TABLES)),
    )


@functools.cache
def load(dtype: torch.dtype) -> ctypes.CDLL:
    """Build and load the library of a dtype; errors are those of native.library."""
    library = native.library(_SOURCE, dtype)
    inputs, gradients = ctypes.POINTER(_Inputs), ctypes.POINTER(_Gradients)
    library.eidetic_attention_forward.argtypes = (inputs, *[_POINTER] * 2, ctypes.c_int)
    library.eidetic_attention_backward.argtypes = (inputs, gradients, ctypes.c_int)
    return library


def forward(tensors: Tensors, call: Call) -> tuple[Tensor, Tensor]:
    """Return outputs ``[T, H, d]`` and the logarithms of sums ``[T, H]``."""
    exact, dtype, shape = accumulator(tensors.q), tensors.q.dtype, tensors.q.shape
    tensors, call = _prepared(tensors, call, exact)
    out = torch.empty(shape, dtype=exact, device="cpu")
    total = torch.empty(shape[:2], dtype=exact, device="cpu")
    keys = 64 if tensors.past_k is None else max(64, tensors.past_k.shape[1])
    failed = load(exact).eidetic_attention_forward(
        _inputs(tensors, call), out.data_ptr(), total.data_ptr(), native.threads(out.numel() * keys)
    )
    if failed:
        raise MemoryError("eidetic_attention: no memory for a tile of keys")
    return out.to(dtype), total


def backward(
    grad_out: Tensor,  # [T, H, d]
    out: Tensor,
    total: Tensor,  # [T, H]
    tensors: Tensors,
    call: Call,
) -> Tensors:
    """Return the gradients of ``forward``'s tensors, None where one was absent."""
    exact = total.dtype
    tensors, call = _prepared(tensors, call, exact)
    grad_out, out = (native.blocks(x, exact) for x in (grad_out, out))
    total = total.contiguous()  # under a name, or its memory would be free by the call
    grads = Tensors(*(None if x is None else x.new_zeros(x.shape) for x in tensors))  # pyright: ignore[reportArgumentType]
    pairs = [(getattr(grads, k), getattr(grads, v)) for k, v in _TABLES]
    gradients = _Gradients(
        out.data_ptr(),
        total.data_ptr(),
        grad_out.data_ptr(),
        out.stride(0),
        grad_out.stride(0),
        grads.q.data_ptr(),
        (_POINTER * 2 * len(_TABLES))(*((_POINTER * 2)(*native.addresses(x)) for x in pairs)),
    )
    failed = load(exact).eidetic_attention_backward(
        _inputs(tensors, call), gradients, native.threads(out.numel() * 64)
    )
    if failed:
        raise MemoryError("eidetic_attention: no memory for a tile of keys")
    return grads


def _prepared(tensors: Tensors, call: Call, exact: torch.dtype) -> tuple[Tensors, Call]:
    """Return tensors in a dtype with heads and columns adjacent, and indices in one piece."""
    rows = {}
    for name, x in zip(Tensors._fields, tensors, strict=True):
        if x is not None:
            apart = "past" in name or "mem" in name  # rows of each sequence or chunk
            rows[name] = native.whole(x, exact) if apart else native.blocks(x, exact)
    indices = {
        name: native.whole(getattr(call, name), torch.int64)
        for name in ("mem_count", "mem_positions", "offsets", "seen")
    }
    return tensors._replace(**rows), call._replace(**indices)


def _inputs(tensors: Tensors, call: Call) -> _Inputs:
    tokens, heads, width = tensors.q.shape
    groups = tensors.k.shape[1]
    tables = []
    for names in _TABLES:
        k, v = (getattr(tensors, name) for name in names)
        if k is None or v is None:
            tables.append(_Table())
        elif k.dim() == 4:
            tables.append(_Table(k.data_ptr(), v.data_ptr(), *[groups * width] * 2, k.shape[1]))
        else:
            tables.append(_Table(k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), 0))
    if call.window is None:  # longer than any sequence
        longest = int(call.seen.max()) if call.seen.numel() else 0
        window = tokens + longest + 1
    else:
        window = call.window
    return _Inputs(
        tensors.q.data_ptr(),
        tensors.q.stride(0),
        (_Table * len(_TABLES))(*tables),
        *native.addresses((call.mem_count, call.mem_positions, call.offsets, call.seen)),
        call.offsets.shape[0] - 1,
        heads,
        groups,
        width,
        window,
        call.scale,
    )
