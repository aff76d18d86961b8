"""In which groups and in which pieces a long convolution is run.

Packed sequences of about the same length run side by side. Where circles of whole sequences would
take more memory than is given, outputs are cut into spans and the filter into blocks of taps
(overlap-save). A pair of these is a convolution of its own: of the inputs that a span's outputs see
through that block, with those just before them as the state.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.fft_conv.circle import BUFFERS, LINE, Circle, good_size, slices, zeros
from ssmzoo_kernels.segments import by_magnitude

# bytes that the transforms may take if the caller does not say
WORKSPACE = {"cpu": 1 << 28, "cuda": 1 << 31}
_STATE = 1  # the one gradient of a group that belongs to single segments
_LEAST = 64  # places of the smallest circle
# larger circles than so many times the taps save nothing, but calls where taps are few
_ROOM, _ENOUGH = 8, 1 << 14


def default_workspace(u: Tensor) -> int:
    """Return the bytes that the transforms may take on a device."""
    return WORKSPACE.get(u.device.type, WORKSPACE["cpu"])


def forward(
    run: Callable[..., Tensor],
    u: Tensor,  # [B, L, D]
    kernel: Tensor,  # [D, K]
    D: Tensor | None,  # [D]
    initial_state: Tensor | None,  # [B, K - 1, D]
    future_kernel: Tensor | None,  # [D, F]
    cu_seqlens: Tensor | None,  # [S + 1]
    workspace: int,
) -> Tensor:
    """Return the outputs ``[B, L, D]`` in u's dtype."""
    with torch.autocast(u.device.type, enabled=False):
        if cu_seqlens is None:
            return _forward(run, u, kernel, D, initial_state, future_kernel, workspace)
        y = torch.empty_like(u, memory_format=torch.contiguous_format)
        for group in by_magnitude(cu_seqlens):
            state = None if initial_state is None else initial_state[group.members]
            found = _forward(run, group.gather(u[0]), kernel, D, state, future_kernel, workspace)
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
    workspace: int,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``forward``'s five tensors, None where one was absent."""
    with torch.autocast(u.device.type, enabled=False):
        if cu_seqlens is None:
            grads = _backward(run, grad_y, u, kernel, D, initial_state, future_kernel, workspace)
            return _with_direct(D, *grads)
        grad_u = torch.empty_like(u, dtype=accumulator(u), memory_format=torch.contiguous_format)
        sums = [zeros(x, u) for x in (kernel, initial_state, future_kernel)]
        for group in by_magnitude(cu_seqlens):
            state = None if initial_state is None else initial_state[group.members]
            rows = (group.gather(grad_y[0]), group.gather(u[0]))
            found, *parts = _backward(run, *rows, kernel, D, state, future_kernel, workspace)
            assert found is not None
            group.scatter(found, grad_u[0])
            for i, (total, part) in enumerate(zip(sums, parts, strict=True)):
                if total is None or part is None:
                    continue
                if i == _STATE:
                    total[group.members] = part
                else:
                    total += part
        return _with_direct(D, grad_u, *sums)


def _with_direct(
    D: Tensor | None,
    grad_u: Tensor | None,
    grad_kernel: Tensor | None,
    grad_state: Tensor | None,
    grad_future: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Insert the direct term's gradient: it meets the same inputs as the kernel's first tap."""
    assert grad_kernel is not None
    grad_D = None if D is None else grad_kernel[:, 0].clone()
    return grad_u, grad_kernel, grad_D, grad_state, grad_future


def _forward(
    run: Callable[..., Tensor],
    u: Tensor,
    kernel: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    future: Tensor | None,
    workspace: int,
) -> Tensor:
    cut = Cut.of(u, kernel, state, future, workspace) if u.numel() else None
    if cut is None:
        return run(u, kernel, D, state, future, workspace)
    y = torch.empty_like(u, memory_format=torch.contiguous_format)
    for d in slices(u.shape[2], cut.channels):
        for b in slices(u.shape[0], cut.rows):
            inputs = _Inputs(u[b, :, d], None if state is None else state[b, :, d])
            for span in slices(u.shape[1], cut.span):
                total = inputs.u.new_zeros(inputs.u[:, span].shape, dtype=accumulator(u))
                for block in cut.blocks(kernel, future):
                    found = inputs.seen(span, block)
                    if found is not None:
                        total += run(found[0], block.taps(d), None, found[1], None, workspace)
                if D is not None:
                    total += D[d].to(total.dtype) * inputs.u[:, span]
                y[b, span, d] = total
    return y


def _backward(
    run: Callable[..., tuple[Tensor | None, ...]],
    grad_y: Tensor,
    u: Tensor,
    kernel: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    future: Tensor | None,
    workspace: int,
) -> tuple[Tensor | None, ...]:
    cut = Cut.of(u, kernel, state, future, workspace) if u.numel() else None
    if cut is None:
        return run(grad_y, u, kernel, D, state, future, workspace)
    grad_u = zeros(u, u)
    grad_kernel, grad_state, grad_future = (zeros(x, u) for x in (kernel, state, future))
    assert grad_u is not None
    assert grad_kernel is not None
    for d in slices(u.shape[2], cut.channels):
        for b in slices(u.shape[0], cut.rows):
            inputs = _Inputs(u[b, :, d], None if state is None else state[b, :, d])
            before = None if grad_state is None else grad_state[b, :, d]
            grads = _Inputs(grad_u[b, :, d], before)
            blocks = zip(
                cut.blocks(kernel, future), cut.blocks(grad_kernel, grad_future), strict=True
            )
            for block, grad_block in blocks:
                for span in slices(u.shape[1], cut.span):
                    found = inputs.seen(span, block)
                    if found is not None:
                        outer = grad_y[b, span, d].to(grad_u.dtype)
                        grad_window, grad_taps, grad_before, _ = run(
                            outer, found[0], block.taps(d), None, found[1], None, workspace
                        )
                        assert grad_taps is not None
                        grads.add(span, block, grad_window, grad_before)
                        grad_block.add(d, grad_taps)
            if D is not None:
                for span in slices(u.shape[1], cut.span):
                    grads.u[:, span] += D[d].to(grad_u.dtype) * grad_y[b, span, d]
    return grad_u, grad_kernel, grad_state, grad_future


@dataclass(frozen=True)
class _Block:
    """Consecutive taps of a filter: of the kernel, or of what looks ahead.

    Attributes:
        source: The filter ``[D, K]``.
        places: Which of its taps.
        ahead: Whether it looks ahead; its last tap then meets the earliest input.
    """

    source: Tensor
    places: slice
    ahead: bool

    @property
    def count(self) -> int:
        """How many taps."""
        return self.places.stop - self.places.start

    @property
    def lead(self) -> int:
        """How far before an output the input stands that the first tap meets."""
        return -self.places.stop if self.ahead else self.places.start

    def taps(self, channels: slice) -> Tensor:
        """Return the taps ``[d, count]`` in the order of a causal filter."""
        taps = self.source[channels, self.places]
        return taps.flip(1) if self.ahead else taps

    def add(self, channels: slice, taps: Tensor) -> None:
        """Add to the taps."""
        self.source[channels, self.places] += taps.flip(1) if self.ahead else taps


@dataclass(frozen=True)
class Cut:
    """Sizes of the pieces.

    Attributes:
        taps: How many taps of the kernel can meet an input.
        ahead: How many of those that look ahead can.
        span: Outputs of a piece.
        block: Taps of a piece.
        channels: Channels at once.
        rows: Rows of the batch at once.
    """

    taps: int
    ahead: int
    span: int
    block: int
    channels: int
    rows: int

    @staticmethod
    def of(
        u: Tensor, kernel: Tensor, state: Tensor | None, future: Tensor | None, workspace: int
    ) -> "Cut | None":
        """Return how to cut a convolution, or None where whole sequences fit."""
        circle = Circle.of(u, kernel, state, future)
        numbers = workspace // (BUFFERS * accumulator(u).itemsize)
        most = max(_LEAST, numbers // min(circle.width, LINE))
        if good_size(circle.least) <= most:
            return None
        lags = max(circle.taps, circle.ahead)
        places = 1 << (min(most, max(_ENOUGH, _ROOM * lags)).bit_length() - 1)
        block = min(lags, places // 2)
        channels, rows = circle.blocks(max(1, numbers // places))
        return Cut(circle.taps, circle.ahead, places - block + 1, block, channels, rows)

    def blocks(self, kernel: Tensor, future: Tensor | None) -> Iterator[_Block]:
        """Yield blocks of taps of both kernels."""
        for places in slices(self.taps, self.block):
            yield _Block(kernel, places, ahead=False)
        if future is not None:
            for places in slices(self.ahead, self.block):
                yield _Block(future, places, ahead=True)


@dataclass(frozen=True)
class _Inputs:
    """A sequence with what came before it, zeros around both; or the gradients of these.

    Attributes:
        u: ``[b, L, d]``.
        state: ``[b, K - 1, d]``.
    """

    u: Tensor
    state: Tensor | None

    def seen(self, span: slice, block: _Block) -> tuple[Tensor, Tensor | None] | None:
        """Return the inputs that outputs see through a block of taps, and those before them.

        None if all of these are zeros.
        """
        begin, count = span.start - block.lead, span.stop - span.start
        before = self._read(begin - (block.count - 1), begin)
        window = self._read(begin, begin + count)
        if window is None:
            if before is None:
                return None
            window = before.new_zeros(before.shape[0], count, before.shape[2])
        return window, before

    def add(self, span: slice, block: _Block, window: Tensor | None, before: Tensor | None) -> None:
        """Add to the result of ``seen``."""
        begin = span.start - block.lead
        for x, start in ((window, begin), (before, begin - (block.count - 1))):
            if x is not None:
                for part, places, found in self._parts(start, start + x.shape[1]):
                    part[:, places] += x[:, found]

    def _read(self, begin: int, end: int) -> Tensor | None:
        parts = self._parts(begin, end)
        if not parts:
            return None
        exact = accumulator(self.u)
        source, places, found = parts[0]
        if found == slice(0, end - begin):
            return source[:, places].to(self.u.dtype).to(exact)
        out = self.u.new_zeros(self.u.shape[0], end - begin, self.u.shape[2], dtype=exact)
        for source, places, found in parts:
            out[:, found] = source[:, places].to(self.u.dtype)
        return out

    def _parts(self, begin: int, end: int) -> list[tuple[Tensor, slice, slice]]:
        """Return where places lie, from ``begin`` to ``end``: whose, its places, ours."""
        parts = []
        past = 0 if self.state is None else self.state.shape[1]
        for source, first in ((self.state, -past), (self.u, 0)):
            if source is None:
                continue
            start, stop = max(begin, first), min(end, first + source.shape[1])
            if start < stop:
                places = slice(start - first, stop - first)
                parts.append((source, places, slice(start - begin, stop - begin)))
        return parts


__all__ = ["WORKSPACE", "Cut", "backward", "default_workspace", "forward"]
