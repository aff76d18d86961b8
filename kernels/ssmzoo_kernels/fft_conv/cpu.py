"""The long convolution by torch's complex FFT, everything around it in C: fold.c.

On a circle where going round once changes the sign, 2 M real places are M complex numbers turned by
``e^{i pi m / (2 M)}``, and their transform has M points, every one of them free: a quarter cheaper
than a real transform of 2 M places, and no zeros to pad with where L = K = M.
"""

import ctypes
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssmzoo_kernels import native
from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.fft_conv import pieces
from ssmzoo_kernels.fft_conv.circle import BUFFERS, Circle, good_size, slices, zeros

_SOURCE = Path(__file__).with_name("fold.c")
_FUNCTIONS = ("fold", "unfold", "fold_taps", "unfold_taps", "multiply", "correlate")
# bytes of folded inputs in flight for each thread: within a core's cache
BLOCK = 1 << 20
PADDING = 16  # complex numbers, two cache lines or more


class _Sequences(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "past", "z", "turn", "scale", "add")),
        *((name, ctypes.c_int64) for name in ("batch", "channels", "length", "before", "half")),
        *(
            (name, ctypes.c_int64)
            for name in ("z_row", "x_batch", "x_row", "past_batch", "past_row")
        ),
        *((name, ctypes.c_int64) for name in ("add_batch", "add_row")),
    ]


class _Taps(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("taps", "ahead", "z", "turn")),
        *((name, ctypes.c_int64) for name in ("rows", "count", "count_ahead", "half")),
        *((name, ctypes.c_int64) for name in ("z_row", "taps_row", "ahead_row")),
    ]


class _Spectra(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("inputs", "taps", "outputs", "sums")),
        *((name, ctypes.c_int64) for name in ("batch", "count")),
    ]


def load(dtype: torch.dtype) -> None:
    """Build and load the library of a dtype; errors are those of native.library."""
    for name in _FUNCTIONS:
        _kernel(name, dtype)


@functools.cache
def _kernel(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    kernel = getattr(native.library(_SOURCE, dtype), name)
    kernel.argtypes = (ctypes.c_void_p, ctypes.c_int)
    kernel.restype = ctypes.c_int if name.endswith("taps") else None  # whether it failed
    return kernel


@functools.lru_cache(maxsize=16)
def _turns(half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ``w^m`` for the way there and ``w^m / M`` for the way back, ``[2, M]`` real pairs."""
    angle = torch.arange(half, dtype=torch.float64, device="cpu") * (math.pi / 2 / half)
    there = torch.stack([angle.cos(), angle.sin()])
    return there.to(dtype), (there / half).to(dtype)


class _Room:
    """Folded sequences and their spectra, a block at a time."""

    def __init__(
        self,
        u: Tensor,
        kernel: Tensor,
        state: Tensor | None,
        future: Tensor | None,
        workspace: int,
    ):
        self.shape = Circle.of(u, kernel, state, future)
        self.half = good_size(self.shape.least) // 2
        self.exact = accumulator(u)
        self.there, self.back = _turns(self.half, self.exact)
        budget = min(BLOCK * torch.get_num_threads(), workspace // BUFFERS)
        fitting = max(1, budget // (2 * self.half * self.exact.itemsize))
        self.channels, self.rows = self.shape.blocks(fitting)
        # rows a power of two apart would share a few sets of the cache and push each other out
        room = (self.rows * self.channels, self.half + PADDING)
        self.folded = torch.empty(room, dtype=self.exact.to_complex(), device="cpu")

    def past_of(self, state: Tensor | None, u: Tensor) -> Tensor | None:
        """Return what came before as the inputs would hold it, None if it has no place."""
        return state.to(u.dtype) if state is not None and self.shape.past else None

    def readable(self, x: Tensor) -> Tensor:
        """Return a block as the C code reads it."""
        x = x.to(self.exact)
        return x if x.stride(2) == 1 else x.contiguous()

    def spectrum(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        """Return the spectrum of ``x [b, L, d]`` and what came before it, ``[b, d, M]``."""
        batch, _, width = x.shape
        z = self.folded[: batch * width, : self.half].unflatten(0, (batch, width))
        self._move("fold", x, past, z, self.there)
        return torch.fft.fft(z)

    def taps_spectrum(self, kernel: Tensor, future: Tensor | None) -> Tensor:
        """Return the spectrum of filters ``[d, K]`` and of those that look ahead, ``[d, M]``."""
        kernel = native.rows(kernel, self.exact)
        future = None if future is None else native.rows(future, self.exact)
        z = self.folded[: len(kernel), : self.half]
        self._move_taps("fold_taps", kernel, future, z, self.there)
        return torch.fft.fft(z)

    def return_to(
        self,
        x: Tensor,
        past: Tensor | None,
        spectrum: Tensor,
        add: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> None:
        """Write what a spectrum is of, to ``x`` plus ``scale add``, and to ``past``."""
        z = torch.fft.ifft(spectrum, norm="forward")
        self._move("unfold", x, past, z, self.back, add, scale)

    def return_taps_to(self, kernel: Tensor, future: Tensor | None, spectrum: Tensor) -> None:
        """Write the taps that a spectrum is of."""
        z = torch.fft.ifft(spectrum, norm="forward")
        self._move_taps("unfold_taps", kernel, future, z, self.back)

    def combine(
        self,
        name: str,
        outputs: Tensor,
        taps: Tensor,
        inputs: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> None:
        """Multiply spectra in place; ``sums`` take what the gradient of the taps is of."""
        spectra = (inputs, taps, outputs, sums)
        job = _Spectra(*native.addresses(spectra), len(outputs), taps.numel())
        _kernel(name, self.exact)(ctypes.byref(job), native.threads(outputs.numel()))

    def _move(
        self,
        name: str,
        x: Tensor,
        past: Tensor | None,
        z: Tensor,
        turn: Tensor,
        add: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> None:
        job = _Sequences(
            *native.addresses((x, past, z, turn, scale, add)),
            *(x.shape[0], x.shape[2], x.shape[1], self.shape.past if past is not None else 0),
            *(self.half, z.flatten(0, 1).stride(0)),
            *x.stride()[:2],
            *((0, 0) if past is None else past.stride()[:2]),
            *((0, 0) if add is None else add.stride()[:2]),
        )
        _kernel(name, self.exact)(ctypes.byref(job), native.threads(x.numel()))

    def _move_taps(
        self, name: str, kernel: Tensor, future: Tensor | None, z: Tensor, turn: Tensor
    ) -> None:
        job = _Taps(
            *native.addresses((kernel, future, z, turn)),
            *(len(kernel), self.shape.taps, self.shape.ahead, self.half, z.stride(0)),
            kernel.stride(0),
            0 if future is None else future.stride(0),
        )
        if _kernel(name, self.exact)(ctypes.byref(job), native.threads(z.numel())):
            raise MemoryError("fft_conv: no memory for a row of taps")


def _forward(
    u: Tensor,  # [B, L, D]
    kernel: Tensor,  # [D, K]
    D: Tensor | None,  # [D]
    state: Tensor | None,  # [B, K - 1, D]
    future: Tensor | None,  # [D, F]
    workspace: int,
) -> Tensor:
    if not u.numel():
        return torch.empty_like(u, memory_format=torch.contiguous_format)
    room = _Room(u, kernel, state, future, workspace)
    past = room.past_of(state, u)
    D = native.whole(D, room.exact)
    y = torch.empty_like(u, memory_format=torch.contiguous_format)
    for d in slices(u.shape[2], room.channels):
        spectrum = room.taps_spectrum(kernel[d], None if future is None else future[d])
        direct = None if D is None else D[d]
        for b in slices(u.shape[0], room.rows):
            block = room.readable(u[b, :, d])
            found = room.spectrum(block, None if past is None else room.readable(past[b, :, d]))
            room.combine("multiply", found, spectrum)
            out = y[b, :, d]
            exact = out if y.dtype is room.exact else torch.empty_like(block)
            room.return_to(exact, None, found, None if D is None else block, direct)
            if exact is not out:
                out.copy_(exact)
    return y


def _backward(
    grad_y: Tensor,
    u: Tensor,
    kernel: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    future: Tensor | None,
    workspace: int,
) -> tuple[Tensor | None, ...]:
    grad_u = torch.empty(u.shape, dtype=accumulator(u), device="cpu")
    grad_kernel, grad_state, grad_future = (zeros(x, u) for x in (kernel, state, future))
    assert grad_kernel is not None
    if not u.numel():
        return grad_u, grad_kernel, grad_state, grad_future
    room = _Room(u, kernel, state, future, workspace)
    past = room.past_of(state, u)
    D = native.whole(D, room.exact)
    for d in slices(u.shape[2], room.channels):
        spectrum = room.taps_spectrum(kernel[d], None if future is None else future[d])
        sums = torch.zeros_like(spectrum)
        direct = None if D is None else D[d]
        for b in slices(u.shape[0], room.rows):
            inputs = room.spectrum(
                room.readable(u[b, :, d]), None if past is None else room.readable(past[b, :, d])
            )
            block = room.readable(grad_y[b, :, d])
            outputs = room.spectrum(block)
            room.combine("correlate", outputs, spectrum, inputs, sums)
            before = None if grad_state is None else grad_state[b, :, d]
            add = None if D is None else block
            room.return_to(grad_u[b, :, d], before, outputs, add, direct)
        ahead = None if grad_future is None else grad_future[d]
        room.return_taps_to(grad_kernel[d], ahead, sums)
    return grad_u, grad_kernel, grad_state, grad_future


forward = functools.partial(pieces.forward, _forward)
backward = functools.partial(pieces.backward, _backward)
