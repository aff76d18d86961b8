"""What is timed: one entry an op, with its inputs and its count of floating-point operations."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ssmzoo_kernels import causal_conv1d, longhorn_scan


@dataclass(frozen=True)
class Entry:
    """One op: how to call it and what that costs at the least.

    Attributes:
        op: Its name; ``tests/kernels/test_<op>.py`` must pass before it is timed.
        shape: B, L, D, N (K for convolutions).
        make: Inputs for a shape, device and dtype; all get gradients.
        call: Run it on these inputs and return its output.
        flops: Operations of a forward and of a backward pass, per shape.
    """

    op: str
    shape: tuple[int, int, int, int]
    make: Callable[..., list[Tensor]]
    call: Callable[..., Tensor]
    flops: Callable[..., tuple[float, float]]


def _longhorn_inputs(B: int, L: int, D: int, N: int, **where) -> list[Tensor]:
    rows = [torch.randn(B, L, width, **where) for width in (D, N, N, D)]
    rows[1:3] = [x / N**0.5 for x in rows[1:3]]
    return [*rows, torch.zeros(D, **where), torch.ones(D, **where), torch.randn(B, L, D, **where)]


def _longhorn_flops(B: int, L: int, D: int, N: int) -> tuple[float, float]:
    return B * L * (7.0 * D * N + 15.0 * D), B * L * 22.0 * D * N


def _conv_inputs(B: int, L: int, D: int, K: int, **where) -> list[Tensor]:
    return [torch.randn(B, L, D, **where), torch.randn(D, K, **where), torch.randn(D, **where)]


def _conv_flops(B: int, L: int, D: int, K: int) -> tuple[float, float]:
    return B * L * D * (2.0 * K + 10), B * L * D * (6.0 * K + 20)


ENTRIES = [
    Entry(
        "longhorn_scan",
        (4, 2048, 512, 16),
        _longhorn_inputs,
        lambda *x, backend: longhorn_scan(*x, backend=backend)[0],
        _longhorn_flops,
    ),
    Entry(
        "causal_conv1d",
        (4, 2048, 512, 4),
        _conv_inputs,
        lambda *x, backend: causal_conv1d(*x, activation="silu", backend=backend)[0],
        _conv_flops,
    ),
]
