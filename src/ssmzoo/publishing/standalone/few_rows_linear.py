"""Linear maps; they stand in for ``ssmzoo_kernels.few_rows_linear``, whose kernel is C."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

MOST_ROWS = 0  # for which there is a kernel
MUCH_WORK = 0


def few_rows_linear(
    x: Tensor,  # [..., I]
    weight: Tensor,  # [O, I]
    bias: Tensor | None = None,  # [O]
) -> Tensor:
    """Compute ``x @ weight.T + bias``, ``[..., O]``."""
    return F.linear(x, weight, bias)


def many_rows_linear(
    x: Tensor,  # [..., I]
    weight: Tensor,  # [O, I]
    bias: Tensor | None = None,  # [O]
) -> Tensor:
    """Compute ``x @ weight.T + bias``, ``[..., O]``."""
    return F.linear(x, weight, bias)


PARTS_OF_FEW_BITS: tuple[str, ...] = ()


def few_bits(weight: Any) -> None:
    """Return what a weight of few bits is made of, for a kernel: there is none."""
