"""The long convolution by torch's FFT, a block of channels at a time, with its own backward.

On a circle of ``size`` places the L inputs start at 0; what came before them lies at the far end,
and so do the taps that look ahead. There is room enough that no sum wraps into a place that is
read.
"""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ssmzoo_kernels.scan import accumulator
from ssmzoo_kernels.segments import by_length

# bytes of padded inputs in flight: within a core's cache, or enough to fill a GPU
WORKSPACE = {"cpu": 1 << 20, "cuda": 1 << 28}
_LINE = 16

Move = Callable[..., None]


def move(to: Tensor, source: Tensor, add: Tensor | None = None, scale: Tensor | None = None):
    """Copy ``source [b, r, c]`` to ``to [b, c, r]``, plus ``scale[r] add[b, c, r]``."""
    block = source.transpose(1, 2)
    if add is not None and scale is not None:
        block = block + scale.to(block.dtype) * add
    to.copy_(block)


def forward(
    u: Tensor,  # [B, L, D]
    kernel: Tensor,  # [D, K]
    D: Tensor | None,  # [D]
    initial_state: Tensor | None,  # [B, K - 1, D]
    future_kernel: Tensor | None,  # [D, F]
    cu_seqlens: Tensor | None,  # [S + 1]
    move: Move = move,
) -> Tensor:
    """Return the outputs ``[B, L, D]`` in u's dtype."""
    with torch.autocast(u.device.type, enabled=False):
        if cu_seqlens is None:
            return _forward(u, kernel, D, initial_state, future_kernel, move)
        y = torch.empty_like(u, memory_format=torch.contiguous_format)
        for members, places in by_length(cu_seqlens):
            state = None if initial_state is None else initial_state[members]
            y[0, places] = _forward(u[0, places], kernel, D, state, future_kernel, move)
        return y


def backward(
    grad_y: Tensor,  # [B, L, D]
    u: Tensor,
    kernel: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    future_kernel: Tensor | None,
    cu_seqlens: Tensor | None,
    move: Move = move,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``forward``'s five tensors, None where one was absent."""
    with torch.autocast(u.device.type, enabled=False):
        if cu_seqlens is None:
            return _backward(grad_y, u, kernel, D, initial_state, future_kernel, move)
        grad_u = torch.empty_like(u, memory_format=torch.contiguous_format)
        sums = [_zeros(x, u) for x in (kernel, D, initial_state, future_kernel)]
        for members, places in by_length(cu_seqlens):
            state = None if initial_state is None else initial_state[members]
            group = (grad_y[0, places], u[0, places], kernel, D, state, future_kernel)
            found, *parts = _backward(*group, move)
            grad_u[0, places] = found.to(u.dtype)
            for i, (total, part) in enumerate(zip(sums, parts, strict=True)):
                if total is None or part is None:
                    continue
                if i == _STATE:
                    total[members] = part
                else:
                    total += part
        return grad_u, *sums


_STATE = 2  # the one gradient that belongs to a segment


def _forward(
    u: Tensor,
    kernel: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    future: Tensor | None,
    move: Move,
) -> Tensor:
    y = torch.empty_like(u, memory_format=torch.contiguous_format)
    if not y.numel():
        return y
    circle = _Circle(u, kernel, state, future, move)
    for d, rows in circle.blocks():
        spectrum = circle.kernel_spectrum(d)
        for b in rows:
            found = circle.back(circle.input_spectrum(b, d).mul_(spectrum))
            direct = () if D is None else (u[b, :, d], D[d])
            move(y[b, :, d], found[..., : u.shape[1]], *direct)
    return y


def _backward(
    grad_y: Tensor,
    u: Tensor,
    kernel: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    future: Tensor | None,
    move: Move,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    grad_u = torch.empty_like(u, dtype=accumulator(u), memory_format=torch.contiguous_format)
    grads = [_zeros(x, u) for x in (kernel, D, state, future)]
    grad_kernel, grad_D, grad_state, grad_future = grads
    assert grad_kernel is not None
    if not u.numel():
        return grad_u, grad_kernel, grad_D, grad_state, grad_future
    circle = _Circle(u, kernel, state, future, move)
    length, past, ahead = u.shape[1], circle.past, circle.ahead
    for d, rows in circle.blocks():
        spectrum = circle.kernel_spectrum(d).conj_physical_()
        total = torch.zeros_like(spectrum)
        for b in rows:
            inputs = circle.input_spectrum(b, d).conj_physical_()
            outputs = circle.output_spectrum(grad_y, b, d)
            total += inputs.mul_(outputs).sum(0)
            found = circle.back(outputs.mul_(spectrum))
            direct = () if D is None else (grad_y[b, :, d], D[d])
            move(grad_u[b, :, d], found[..., :length], *direct)
            if grad_state is not None and past:
                move(grad_state[b, :, d], found[..., -past:])
        correlation = circle.back(total)
        grad_kernel[d, : circle.taps] = correlation[:, : circle.taps]
        if grad_future is not None and ahead:
            grad_future[d, :ahead] = correlation[:, -ahead:].flip(1)
    if grad_D is not None:
        grad_D = (grad_y.to(grad_u.dtype) * u).sum((0, 1))
    return grad_u, grad_kernel, grad_D, grad_state, grad_future


def _zeros(x: Tensor | None, u: Tensor) -> Tensor | None:
    return None if x is None else x.new_zeros(x.shape, dtype=accumulator(u))


class _Circle:
    """The places of one convolution on a circle, and the transforms to and from it."""

    def __init__(
        self, u: Tensor, kernel: Tensor, state: Tensor | None, future: Tensor | None, move: Move
    ):
        batch, length, _ = u.shape
        # taps that could only meet what is not there are left out
        self.taps = kernel.shape[1] if state is not None else min(kernel.shape[1], length)
        self.ahead = 0 if future is None else min(future.shape[1], length - 1)
        self.past = self.taps - 1 if state is not None else 0
        self.size = good_size(length + max(self.taps - 1, self.past + self.ahead))
        self.exact = accumulator(u)
        self.u, self.kernel, self.state, self.future, self.move = u, kernel, state, future, move
        budget = WORKSPACE.get(u.device.type, WORKSPACE["cpu"])
        fitting = max(1, budget // (self.size * self.exact.itemsize))
        # a cache line of channels at the least, or most of what is read would be thrown away
        self.channels = min(u.shape[2], max(_LINE, fitting // batch))
        self.rows = min(batch, max(1, fitting // self.channels))
        # between inputs and history it stays zero
        shape = (self.rows * self.channels, self.size)
        self.inputs = u.new_zeros(shape, dtype=self.exact)
        self.outputs: Tensor | None = None

    def blocks(self) -> Iterator[tuple[slice, list[slice]]]:
        """Yield blocks of channels, each with the blocks of rows to run with it."""
        batch, _, width = self.u.shape
        rows = [slice(b, min(b + self.rows, batch)) for b in range(0, batch, self.rows)]
        for d in range(0, width, self.channels):
            yield slice(d, min(d + self.channels, width)), rows

    def kernel_spectrum(self, channels: slice) -> Tensor:
        """Return the spectrum of both kernels ``[d, size // 2 + 1]``."""
        taps = self.kernel[channels, : self.taps].to(self.exact)
        if not self.ahead:
            return torch.fft.rfft(taps, n=self.size)
        assert self.future is not None
        around = taps.new_zeros(taps.shape[0], self.size)
        around[:, : self.taps] = taps
        around[:, -self.ahead :] = self.future[channels, : self.ahead].flip(1)
        return torch.fft.rfft(around)

    def input_spectrum(self, rows: slice, channels: slice) -> Tensor:
        """Return the spectrum of inputs and history ``[b, d, size // 2 + 1]``."""
        u = self.u[rows, :, channels]
        around = self._around(self.inputs, u)
        self.move(around[..., : u.shape[1]], u)
        if self.past:
            assert self.state is not None
            history = self.state[rows, :, channels].to(u.dtype)
            self.move(around[..., -self.past :], history)
        return torch.fft.rfft(around)

    def output_spectrum(self, x: Tensor, rows: slice, channels: slice) -> Tensor:
        """Return the spectrum of what lies at the outputs' places."""
        if self.outputs is None:
            self.outputs = torch.zeros_like(self.inputs)
        x = x[rows, :, channels]
        around = self._around(self.outputs, x)
        self.move(around[..., : x.shape[1]], x)
        return torch.fft.rfft(around)

    def back(self, spectrum: Tensor) -> Tensor:
        """Return what a spectrum is of, ``[..., size]``."""
        return torch.fft.irfft(spectrum, n=self.size)

    def _around(self, room: Tensor, x: Tensor) -> Tensor:
        return room[: x.shape[0] * x.shape[2]].view(x.shape[0], x.shape[2], self.size)


@functools.lru_cache(maxsize=256)
def good_size(least: int) -> int:
    """Return the smallest even ``2^a 3^b 5^c >= least``, a length that FFTs do fast."""
    best = 1 << max(1, (least - 1).bit_length())
    fives = 1
    while fives < best:
        threes = fives
        while threes < best:
            size = threes * 2
            while size < least:
                size *= 2
            best = min(best, size)
            threes *= 3
        fives *= 5
    return best
