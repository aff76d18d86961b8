"""How a long convolution lies on a circle, and in which blocks of channels and rows it is run.

The L inputs start at place 0; what came before them lies at the far end, and so do the taps that
look ahead. There is room enough that no sum wraps into a place that is read.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ssmzoo_kernels.declaration import accumulator

LINE = 16
BUFFERS = 12  # of the padded inputs' size that a backward has at once, at the most


@dataclass(frozen=True)
class Circle:
    """Shapes of one convolution.

    Attributes:
        batch: B.
        length: L.
        width: D.
        taps: K, or as many taps as can meet an input.
        ahead: F, or as many as can meet one.
        past: Places of earlier inputs: K - 1, or 0 without any.
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
        # a cache line of channels at the least, or most of what is read would be thrown away; more
        # of them before more rows: they lie side by side, and fetching them is half of the work
        channels = min(self.width, max(LINE, fitting // LINE * LINE))
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


def zeros(x: Tensor | None, u: Tensor) -> Tensor | None:
    """Return room for the gradient of ``x`` in the precision of sums over ``u``."""
    return None if x is None else x.new_zeros(x.shape, dtype=accumulator(u))
