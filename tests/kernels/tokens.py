"""What the tests of token_step share: a program of one instruction, and error budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo_kernels.token_step import Program, Value

Write = Callable[[Program, Value], Value]
both = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
some_rows = pytest.mark.parametrize("rows", [1, 5])


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what float32 holds exactly, so that an oracle in float64 reads the same numbers."""
    return torch.randn(*shape).to(dtype)


def run(write: Write, x: Tensor, states: Sequence[Tensor] = (), width: int = 0) -> Tensor:
    """Run a program of one input and one output; states have the numbers 2 and up."""
    program = Program(torch.promote_types(x.dtype, torch.float32))
    y = write(program, program.input(0, x.dtype, x.shape[-1]))
    program.output(y, 1, x.dtype)
    out = x.new_empty(len(x), width or y.width)
    program.run(len(x), (x, out, *states))
    return out


def close(y: Tensor, exact: Tensor, terms: int = 1) -> None:
    """Compare with float64: so many roundings of the greatest number, and 16 of functions."""
    allowed = (terms + 16) * torch.finfo(y.dtype).eps * exact.abs().max()
    assert (y.double() - exact).abs().max() <= allowed


def rounding(x: Tensor, weight: Tensor, group: int) -> Tensor:
    """What rounding x to 16 bits may change: each input by a 65,278th of its group's largest."""
    groups = F.pad(x.double().abs(), (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
    largest = groups.amax(-1, keepdim=True).expand_as(groups).flatten(-2)[..., : x.shape[-1]]
    return F.linear(largest, weight.abs()) / 65278


def soft(x: Tensor) -> Tensor:
    return torch.where(x > 20, x, torch.log1p(torch.exp(x)))
