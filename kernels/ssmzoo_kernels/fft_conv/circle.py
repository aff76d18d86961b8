"""How a long convolution lies on a circle, and in which blocks and groups it is run.

The L inputs start at place 0; what came before them lies at the far end, and so do the taps that
look ahead. There is room enough that no sum wraps into a place that is read.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ssmzoo_kernels.scan import accumulator
from ssmzoo_kernels.segments import by_magnitude

_LINE = 16
_STATE = 2  # the one gradient of a group that belongs to single segments


@dataclass(frozen=True)
class Circle:
    """Shapes of one convolution.

    Attributes:
        batch: B.
        length: L.
        width: D.
        taps: K, or as many taps as can meet an input.
        ahead: F, or as many as can meet one.
        past: Places of what came before: K - 1, or 0 if nothing did.
    """

    batch: int
    length: int
    width: int
    taps: int
    ahead: int
    past: int

    @staticmethod
    def of(u: Tensor, kernel: Tensor, state: Tensor | None, future: Tensor | None) -> "Circle":
        """Return the circle of these arguments."""
        batch, length, width = u.shape
        taps = kernel.shape[1] if state is not None else min(kernel.shape[1], length)
        ahead = 0 if future is None else min(future.shape[1], length - 1)
        return Circle(batch, length, width, taps, ahead, taps - 1 if state is not None else 0)

    @property
    def least(self) -> int:
        """How many places it must have."""
        return self.length + max(self.taps - 1, self.past + self.ahead)

    def blocks(self, fitting: int) -> tuple[int, int]:
        """Return how many channels and rows to run at once, given how many sequences fit."""
        # a cache line of channels at the least, or most of what is read would be thrown away
        channels = min(self.width, max(_LINE, fitting // self.batch))
        return channels, min(self.batch, max(1, fitting // channels))


def slices(count: int, block: int) -> Iterator[slice]:
    """Yield consecutive slices of at most ``block``."""
    for start in range(0, count, block):
        yield slice(start, min(start + block, count))


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


def forward(
    run: Callable[..., Tensor],
    u: Tensor,  # [B, L, D]
    kernel: Tensor,  # [D, K]
    D: Tensor | None,  # [D]
    initial_state: Tensor | None,  # [B, K - 1, D]
    future_kernel: Tensor | None,  # [D, F]
    cu_seqlens: Tensor | None,  # [S + 1]
) -> Tensor:
    """Return the outputs ``[B, L, D]`` in u's dtype, packed sequences in groups."""
    with torch.autocast(u.device.type, enabled=False):
        if cu_seqlens is None:
            return run(u, kernel, D, initial_state, future_kernel)
        y = torch.empty_like(u, memory_format=torch.contiguous_format)
        for group in by_magnitude(cu_seqlens):
            state = None if initial_state is None else initial_state[group.members]
            found = run(group.gather(u[0]), kernel, D, state, future_kernel)
            group.scatter(found, y[0])
        return y


def backward(
    run: Callable[..., tuple[Tensor | None, ...]],
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
            return run(grad_y, u, kernel, D, initial_state, future_kernel)
        grad_u = torch.empty_like(u, dtype=accumulator(u), memory_format=torch.contiguous_format)
        sums = [zeros(x, u) for x in (kernel, D, initial_state, future_kernel)]
        for group in by_magnitude(cu_seqlens):
            state = None if initial_state is None else initial_state[group.members]
            rows = (group.gather(grad_y[0]), group.gather(u[0]))
            found, *parts = run(*rows, kernel, D, state, future_kernel)
            assert found is not None
            group.scatter(found, grad_u[0])
            for i, (total, part) in enumerate(zip(sums, parts, strict=True)):
                if total is None or part is None:
                    continue
                if i == _STATE:
                    total[group.members] = part
                else:
                    total += part
        return grad_u, *sums


def zeros(x: Tensor | None, u: Tensor) -> Tensor | None:
    """Return room for the gradient of ``x`` in the precision of sums over ``u``."""
    return None if x is None else x.new_zeros(x.shape, dtype=accumulator(u))
