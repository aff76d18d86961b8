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

import torch
from torch import Tensor

from ssmzoo_kernels import native
from ssmzoo_kernels.fft_conv import circle
from ssmzoo_kernels.fft_conv.circle import Circle, good_size, slices, zeros
from ssmzoo_kernels.scan import accumulator

_SOURCE = Path(__file__).with_name("fold.c")
# bytes of folded inputs in flight: within a core's cache
WORKSPACE = 1 << 20


class _Sequences(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "past", "z", "turn", "scale", "add")),
        *((name, ctypes.c_int64) for name in ("batch", "channels", "length", "before", "half")),
        *((name, ctypes.c_int64) for name in ("x_batch", "x_row", "past_batch", "past_row")),
        *((name, ctypes.c_int64) for name in ("add_batch", "add_row")),
    ]


class _Taps(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("taps", "ahead", "z", "turn")),
        *((name, ctypes.c_int64) for name in ("rows", "count", "count_ahead", "half")),
        *((name, ctypes.c_int64) for name in ("taps_row", "ahead_row")),
    ]


class _Spectra(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("inputs", "taps", "outputs", "sums")),
        *((name, ctypes.c_int64) for name in ("batch", "count")),
    ]


@functools.cache
def _kernel(name: str, dtype: torch.dtype) -> Callable[..., None]:
    kernel = getattr(native.library(_SOURCE, dtype), name)
    kernel.argtypes = (ctypes.c_void_p, ctypes.c_int)
    kernel.restype = None
    return kernel


@functools.lru_cache(maxsize=16)
def _turns(half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ``w^m`` for the way there and ``w^m / M`` for the way back, ``[2, M]`` real pairs."""
    angle = torch.arange(half, dtype=torch.float64, device="cpu") * (math.pi / 2 / half)
    there = torch.stack([angle.cos(), angle.sin()])
    return there.to(dtype), (there / half).to(dtype)


class _Room:
    """Folded sequences and their spectra, a block at a time."""

    def __init__(self, u: Tensor, kernel: Tensor, state: Tensor | None, future: Tensor | None):
        self.shape = Circle.of(u, kernel, state, future)
        self.half = good_size(self.shape.least) // 2
        self.exact = accumulator(u)
        self.there, self.back = _turns(self.half, self.exact)
        fitting = max(1, WORKSPACE // (2 * self.half * self.exact.itemsize))
        self.channels, self.rows = self.shape.blocks(fitting)
        room = (self.rows * self.channels, self.half)
        self.folded = torch.empty(room, dtype=self.exact.to_complex(), device="cpu")

    def spectrum(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        """Return the spectrum of ``x [b, L, d]`` and what came before it, ``[b, d, M]``."""
        batch, _, width = x.shape
        z = self.folded[: batch * width].view(batch, width, self.half)
        self._move("fold", x, past, z, self.there)
        return torch.fft.fft(z)

    def taps_spectrum(self, kernel: Tensor, future: Tensor | None) -> Tensor:
        """Return the spectrum of filters ``[d, K]`` and of those that look ahead, ``[d, M]``."""
        kernel = native.rows(kernel, self.exact)
        future = None if future is None else native.rows(future, self.exact)
        z = self.folded[: len(kernel)]
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
            *map(native.address, (x, past, z, turn, scale, add)),
            *(x.shape[0], x.shape[2], x.shape[1], self.shape.past if past is not None else 0),
            self.half,
            *x.stride()[:2],
            *((0, 0) if past is None else past.stride()[:2]),
            *((0, 0) if add is None else add.stride()[:2]),
        )
        _kernel(name, self.exact)(ctypes.byref(job), native.threads(x.numel()))

    def _move_taps(
        self, name: str, kernel: Tensor, future: Tensor | None, z: Tensor, turn: Tensor
    ) -> None:
        job = _Taps(
            *map(native.address, (kernel, future, z, turn)),
            *(len(kernel), self.shape.taps, self.shape.ahead, self.half),
            kernel.stride(0),
            0 if future is None else future.stride(0),
        )
        _kernel(name, self.exact)(ctypes.byref(job), native.threads(z.numel()))


def _forward(
    u: Tensor,  # [B, L, D]
    kernel: Tensor,  # [D, K]
    D: Tensor | None,  # [D]
    state: Tensor | None,  # [B, K - 1, D]
    future: Tensor | None,  # [D, F]
) -> Tensor:
    if not u.numel():
        return torch.empty_like(u, memory_format=torch.contiguous_format)
    room = _Room(u, kernel, state, future)
    past, u_exact, D = _prepared(room, u, state, D)
    y = torch.empty(u.shape, dtype=room.exact, device="cpu")
    for d in slices(u.shape[2], room.channels):
        spectrum = room.taps_spectrum(kernel[d], None if future is None else future[d])
        direct = None if D is None else D[d]
        for b in slices(u.shape[0], room.rows):
            block = u_exact[b, :, d]
            found = room.spectrum(block, None if past is None else past[b, :, d])
            add = None if D is None else block
            room.return_to(y[b, :, d], None, found.mul_(spectrum), add, direct)
    return y.to(u.dtype)


def _backward(
    grad_y: Tensor,
    u: Tensor,
    kernel: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    future: Tensor | None,
) -> tuple[Tensor | None, ...]:
    grad_u = torch.empty(u.shape, dtype=accumulator(u), device="cpu")
    grads = [zeros(x, u) for x in (kernel, D, state, future)]
    grad_kernel, grad_D, grad_state, grad_future = grads
    assert grad_kernel is not None
    if not u.numel():
        return grad_u, *grads
    room = _Room(u, kernel, state, future)
    past, u_exact, D = _prepared(room, u, state, D)
    grad_y = _readable(grad_y, room.exact)
    run = _kernel("correlate", room.exact)
    for d in slices(u.shape[2], room.channels):
        spectrum = room.taps_spectrum(kernel[d], None if future is None else future[d])
        sums = torch.zeros_like(spectrum)
        direct = None if D is None else D[d]
        for b in slices(u.shape[0], room.rows):
            inputs = room.spectrum(u_exact[b, :, d], None if past is None else past[b, :, d])
            block = grad_y[b, :, d]
            outputs = room.spectrum(block)
            job = _Spectra(
                *map(native.address, (inputs, spectrum, outputs, sums)), len(inputs), sums.numel()
            )
            run(ctypes.byref(job), native.threads(inputs.numel()))
            before = None if grad_state is None else grad_state[b, :, d]
            add = None if D is None else block
            room.return_to(grad_u[b, :, d], before, outputs, add, direct)
        ahead = None if grad_future is None else grad_future[d]
        room.return_taps_to(grad_kernel[d], ahead, sums)
    if grad_D is not None:
        grad_D = (grad_y * u_exact).sum((0, 1))
    return grad_u, grad_kernel, grad_D, grad_state, grad_future


def _prepared(
    room: _Room, u: Tensor, state: Tensor | None, D: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Return history, inputs and direct terms as the C code reads them."""
    past = None
    if state is not None and room.shape.past:
        past = _readable(state.to(u.dtype), room.exact)
    return past, _readable(u, room.exact), native.whole(D, room.exact)


def _readable(x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype)
    return x if x.stride(2) == 1 else x.contiguous()


forward = functools.partial(circle.forward, _forward)
backward = functools.partial(circle.backward, _backward)
