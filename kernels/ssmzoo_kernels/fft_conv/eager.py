"""The long convolution by torch's FFT, a block of channels at a time, with its own backward.

On a circle of ``size`` places the L inputs start at 0; what came before them lies at the far end, and
so do the taps that look ahead. There is room enough that no sum wraps into a place that is read.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from ssmzoo_kernels.scan import accumulator
from ssmzoo_kernels.segments import by_length

# bytes of padded inputs in flight: within a core's cache, or enough to fill a GPU
WORKSPACE = {"cpu": 1 << 20, "cuda": 1 << 28}


def forward(
    u: Tensor,  # [B, L, D]
    kernel: Tensor,  # [D, K]
    D: Tensor | None,  # [D]
    initial_state: Tensor | None,  # [B, K - 1, D]
    future_kernel: Tensor | None,  # [D, F]
    cu_seqlens: Tensor | None,  # [S + 1]
) -> Tensor:
    """Return the outputs ``[B, L, D]`` in u's dtype."""
    with torch.autocast(u.device.type, enabled=False):
        if cu_seqlens is None:
            return _forward(u, kernel, D, initial_state, future_kernel)
        y = torch.empty_like(u, memory_format=torch.contiguous_format)
        for members, places in by_length(cu_seqlens):
            state = None if initial_state is None else initial_state[members]
            y[0, places] = _forward(u[0, places], kernel, D, state, future_kernel)
        return y


def backward(
    grad_y: Tensor,  # [B, L, D]
    u: Tensor,
    kernel: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    future_kernel: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``forward``'s five tensors, None where one was absent."""
    with torch.autocast(u.device.type, enabled=False):
        if cu_seqlens is None:
            return _backward(grad_y, u, kernel, D, initial_state, future_kernel)
        grad_u = torch.empty_like(u, memory_format=torch.contiguous_format)
        exact = accumulator(u)
        grad_state = None if initial_state is None else torch.zeros_like(initial_state, dtype=exact)
        sums = [
            None if x is None else x.new_zeros(x.shape, dtype=exact)
            for x in (kernel, D, future_kernel)
        ]
        for members, places in by_length(cu_seqlens):
            state = None if initial_state is None else initial_state[members]
            found = _backward(grad_y[0, places], u[0, places], kernel, D, state, future_kernel)
            grad_u[0, places] = found[0].to(u.dtype)
            if grad_state is not None:
                grad_state[members] = found[3]
            for total, part in zip(sums, (found[1], found[2], found[4]), strict=True):
                if total is not None:
                    total += part
        return grad_u, sums[0], sums[1], grad_state, sums[2]


def _forward(
    u: Tensor, kernel: Tensor, D: Tensor | None, state: Tensor | None, future: Tensor | None
) -> Tensor:
    y = torch.empty_like(u, memory_format=torch.contiguous_format)
    if not y.numel():
        return y
    circle = _Circle(u, kernel, state, future)
    for channels, rows in circle.blocks():
        spectrum = circle.kernel_spectrum(channels)
        for b in rows:
            product = circle.input_spectrum(b, channels).mul_(spectrum)
            block = circle.back(product)[..., : u.shape[1]].transpose(1, 2)
            if D is None:
                y[b, :, channels] = block
            else:
                y[b, :, channels] = block + D[channels].to(block.dtype) * u[b, :, channels]
    return y


def _backward(
    grad_y: Tensor,
    u: Tensor,
    kernel: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    future: Tensor | None,
) -> tuple[Tensor | None, ...]:
    exact = accumulator(u)
    grad_u = torch.empty_like(u, dtype=exact, memory_format=torch.contiguous_format)
    grad_kernel = torch.zeros_like(kernel, dtype=exact)
    grad_future = None if future is None else torch.zeros_like(future, dtype=exact)
    grad_D = None if D is None else torch.zeros_like(D, dtype=exact)
    grad_state = None if state is None else torch.zeros_like(state, dtype=exact)
    if u.numel():
        circle = _Circle(u, kernel, state, future)
        length, taps, ahead = u.shape[1], circle.taps, circle.ahead
        for channels, rows in circle.blocks():
            spectrum = circle.kernel_spectrum(channels)
            total = None
            for b in rows:
                inputs = circle.input_spectrum(b, channels)
                grads = circle.output_spectrum(grad_y, b, channels)
                products = (inputs.conj() * grads).sum(0)
                total = products if total is None else total + products
                block = circle.back(grads * spectrum.conj())
                grad_u[b, :, channels] = block[..., :length].transpose(1, 2)
                if grad_state is not None and taps > 1:
                    grad_state[b, :, channels] = block[..., 1 - taps :].transpose(1, 2)
            assert total is not None
            correlation = circle.back(total)
            grad_kernel[channels, :taps] = correlation[:, :taps]
            if grad_future is not None and ahead:
                grad_future[channels, :ahead] = correlation[:, -ahead:].flip(1)
        if D is not None and grad_D is not None:
            grad_u.addcmul_(grad_y.to(exact), D.to(exact))
            grad_D = torch.einsum("bld,bld->d", grad_y.to(exact), u.to(exact))
    return grad_u, grad_kernel, grad_D, grad_state, grad_future


class _Circle:
    """The places of one convolution on a circle, and the transforms to and from it."""

    def __init__(self, u: Tensor, kernel: Tensor, state: Tensor | None, future: Tensor | None):
        length = u.shape[1]
        # taps that could only meet what is not there are left out
        self.taps = kernel.shape[1] if state is not None else min(kernel.shape[1], length)
        self.ahead = 0 if future is None else min(future.shape[1], length - 1)
        self.past = self.taps - 1 if state is not None else 0
        self.size = good_size(length + max(self.taps - 1, self.past + self.ahead))
        self.exact = accumulator(u)
        self.u, self.kernel, self.state, self.future = u, kernel, state, future

    def blocks(self) -> Iterator[tuple[slice, list[slice]]]:
        """Yield blocks of channels, each with the blocks of rows to run with it."""
        batch, _, width = self.u.shape
        budget = WORKSPACE.get(self.u.device.type, WORKSPACE["cpu"])
        fitting = max(1, budget // (self.size * self.exact.itemsize))
        rows = min(batch, fitting)
        channels = max(1, fitting // rows)
        row_blocks = [slice(b, min(b + rows, batch)) for b in range(0, batch, rows)]
        for d in range(0, width, channels):
            yield slice(d, min(d + channels, width)), row_blocks

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
        around = self._placed(self.u[rows, :, channels])
        if self.past:
            assert self.state is not None
            history = self.state[rows, :, channels].to(self.u.dtype)
            around[..., -self.past :] = history.transpose(1, 2)
        return torch.fft.rfft(around)

    def output_spectrum(self, x: Tensor, rows: slice, channels: slice) -> Tensor:
        """Return the spectrum of what lies at the outputs' places."""
        return torch.fft.rfft(self._placed(x[rows, :, channels]))

    def back(self, spectrum: Tensor) -> Tensor:
        """Return what a spectrum is of, ``[..., size]``."""
        return torch.fft.irfft(spectrum, n=self.size)

    def _placed(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        around = x.new_zeros(batch, width, self.size, dtype=self.exact)
        around[..., :length] = x.transpose(1, 2)
        return around


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
