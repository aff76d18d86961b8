"""One step of a diagonal recurrence in C: diagonal_step.c."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ssmzoo_kernels import native

_SOURCE = Path(__file__).with_name("diagonal_step.c")


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("u", "state", "decay", "drive", "readout", "D")),
        *((name, ctypes.c_void_p) for name in ("y", "next")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "modes")),
    ]


@functools.cache
def load(dtype: torch.dtype) -> Callable[..., None]:
    """Build and load the library of a dtype; errors are those of native.library."""
    kernel = native.library(_SOURCE, dtype.to_real()).diagonal_step
    kernel.argtypes = (ctypes.POINTER(_Step), ctypes.c_int)
    kernel.restype = None
    return kernel


def forward(
    u: Tensor,  # [B, H]
    state: Tensor,  # [B, H, N] complex
    decay: Tensor,  # [H, N] complex
    drive: Tensor | None,  # [H, N] complex
    readout: Tensor,  # [H, N] complex
    D: Tensor | None,  # [H]
) -> tuple[Tensor, Tensor]:
    """Return outputs ``[B, H]`` in u's dtype and the new state ``[B, H, N]``."""
    exact = state.dtype.to_real()
    whole = [_whole(x, state.dtype) for x in (state, decay, drive, readout)]
    inputs, direct = native.whole(u, exact), native.whole(D, exact)
    y = torch.empty(u.shape, dtype=exact, device="cpu")
    new_state = torch.empty(state.shape, dtype=state.dtype, device="cpu")
    step = _Step(*native.addresses((inputs, *whole, direct, y, new_state)), *state.shape)
    load(exact)(step, native.threads(state.numel()))
    return y.to(u.dtype), new_state


def _whole(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    # a lazily conjugated tensor's memory holds the conjugate
    return native.whole(x if x is None else x.resolve_conj(), dtype)
