"""The long convolution by torch's real FFT, a block of channels at a time, with its backward."""

import functools

import torch
from torch import Tensor

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.fft_conv import pieces
from ssmzoo_kernels.fft_conv.circle import BUFFERS, Circle, good_size, slices, zeros

# bytes of padded inputs in flight: within a core's cache, or enough to fill a GPU
BLOCK = {"cpu": 1 << 20, "cuda": 1 << 27}


def _forward(
    u: Tensor,  # [B, L, D]
    kernel: Tensor,  # [D, K]
    D: Tensor | None,  # [D]
    state: Tensor | None,  # [B, K - 1, D]
    future: Tensor | None,  # [D, F]
    workspace: int,
) -> Tensor:
    y = torch.empty_like(u, memory_format=torch.contiguous_format)
    if not y.numel():
        return y
    room = _Room(u, kernel, state, future, workspace)
    for d in slices(u.shape[2], room.channels):
        spectrum = room.kernel_spectrum(d)
        for b in slices(u.shape[0], room.rows):
            found = room.back(room.input_spectrum(b, d).mul_(spectrum))
            _return(y[b, :, d], found[..., : u.shape[1]], u[b, :, d], D, d)
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
    grad_u = torch.empty_like(u, dtype=accumulator(u), memory_format=torch.contiguous_format)
    grad_kernel, grad_state, grad_future = (zeros(x, u) for x in (kernel, state, future))
    assert grad_kernel is not None
    if not u.numel():
        return grad_u, grad_kernel, grad_state, grad_future
    room = _Room(u, kernel, state, future, workspace)
    length, taps, past, ahead = u.shape[1], room.shape.taps, room.shape.past, room.shape.ahead
    for d in slices(u.shape[2], room.channels):
        spectrum = room.kernel_spectrum(d).conj_physical_()
        total = torch.zeros_like(spectrum)
        for b in slices(u.shape[0], room.rows):
            inputs = room.input_spectrum(b, d).conj_physical_()
            outputs = room.output_spectrum(grad_y, b, d)
            total += inputs.mul_(outputs).sum(0)
            found = room.back(outputs.mul_(spectrum))
            _return(grad_u[b, :, d], found[..., :length], grad_y[b, :, d], D, d)
            if grad_state is not None and past:
                grad_state[b, :, d] = found[..., -past:].transpose(1, 2)
        correlation = room.back(total)
        grad_kernel[d, :taps] = correlation[:, :taps]
        if grad_future is not None and ahead:
            grad_future[d, :ahead] = correlation[:, -ahead:].flip(1)
    return grad_u, grad_kernel, grad_state, grad_future


def _return(to: Tensor, found: Tensor, x: Tensor, D: Tensor | None, channels: slice) -> None:
    block = found.transpose(1, 2)
    if D is not None:
        block = block + D[channels].to(block.dtype) * x
    to.copy_(block)


class _Room:
    """Zero-padded sequences and their spectra."""

    def __init__(
        self,
        u: Tensor,
        kernel: Tensor,
        state: Tensor | None,
        future: Tensor | None,
        workspace: int,
    ):
        self.shape = Circle.of(u, kernel, state, future)
        self.size = good_size(self.shape.least)
        self.exact = accumulator(u)
        self.u, self.kernel, self.state, self.future = u, kernel, state, future
        budget = min(BLOCK.get(u.device.type, BLOCK["cpu"]), workspace // BUFFERS)
        fitting = max(1, budget // (self.size * self.exact.itemsize))
        self.channels, self.rows = self.shape.blocks(fitting)
        # between inputs and history it stays zero
        shape = (self.rows * self.channels, self.size)
        self.inputs = u.new_zeros(shape, dtype=self.exact)
        self.outputs: Tensor | None = None

    def kernel_spectrum(self, channels: slice) -> Tensor:
        """Return the spectrum of both kernels ``[d, size // 2 + 1]``."""
        taps = self.kernel[channels, : self.shape.taps].to(self.exact)
        ahead = self.shape.ahead
        if not ahead:
            return torch.fft.rfft(taps, n=self.size)
        assert self.future is not None
        around = taps.new_zeros(taps.shape[0], self.size)
        around[:, : self.shape.taps] = taps
        around[:, -ahead:] = self.future[channels, :ahead].flip(1)
        return torch.fft.rfft(around)

    def input_spectrum(self, rows: slice, channels: slice) -> Tensor:
        """Return the spectrum of inputs and history ``[b, d, size // 2 + 1]``."""
        u = self.u[rows, :, channels]
        around = self._around(self.inputs, u)
        around[..., : u.shape[1]] = u.transpose(1, 2)
        if self.shape.past:
            assert self.state is not None
            history = self.state[rows, :, channels].to(u.dtype)
            around[..., -self.shape.past :] = history.transpose(1, 2)
        return torch.fft.rfft(around)

    def output_spectrum(self, x: Tensor, rows: slice, channels: slice) -> Tensor:
        """Return the spectrum of what lies at the outputs' places."""
        if self.outputs is None:
            self.outputs = torch.zeros_like(self.inputs)
        x = x[rows, :, channels]
        around = self._around(self.outputs, x)
        around[..., : x.shape[1]] = x.transpose(1, 2)
        return torch.fft.rfft(around)

    def back(self, spectrum: Tensor) -> Tensor:
        """Return the inverse transform of a spectrum, ``[..., size]``."""
        return torch.fft.irfft(spectrum, n=self.size)

    def _around(self, room: Tensor, x: Tensor) -> Tensor:
        return room[: x.shape[0] * x.shape[2]].view(x.shape[0], x.shape[2], self.size)


forward = functools.partial(pieces.forward, _forward)
backward = functools.partial(pieces.backward, _backward)
