"""Norms of stock modules on our op, where it gives what the stock code gives.

This is for whole sequences, with gradients or without; a decoded token goes by ``steps``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ssmzoo.modeling.norms import MANY
from ssmzoo.modeling.stock import steps
from ssmzoo_kernels import rms_norm
from ssmzoo_kernels.validation import transformed

_log = logging.getLogger("ssmzoo")
_OFFSETS = (0.0, 1.0)  # what models add to a norm's weight


def normalised(module: Any, x: Tensor, stock: Callable[[], Tensor]) -> Tensor:
    """Return a norm's output.

    Args:
        module: A module whose class is one for norms by the root mean square.
        x: ``[..., width]``.
        stock: The module's own forward.
    """
    weight = module._parameters.get("weight")
    if (
        type(weight) is not nn.Parameter
        or x.numel() < MANY
        or x.dtype is not weight.dtype
        or x.dtype not in steps.FORMATS
        or torch.compiler.is_compiling()
        or transformed()
    ):
        return stock()
    known = steps.kept(module)
    if known.offset is None:
        return _prove(module, known, x, weight, stock)
    if math.isnan(known.offset):
        return stock()
    return rms_norm(x, weight, eps=steps.eps_of(module), offset=known.offset)


def _prove(
    module: nn.Module,
    known: steps.Decoding,
    x: Tensor,
    weight: Tensor,
    stock: Callable[[], Tensor],
) -> Tensor:
    """Find what is added to the weight, if the module is such a norm at all."""
    with torch.no_grad():
        y = stock()
        if not y.any():
            return stock()  # from which nothing can be told
        known.offset = math.nan
        for offset in _OFFSETS:
            ours = rms_norm(x, weight, eps=steps.eps_of(module), offset=offset)
            if steps.agree(ours, y, x.dtype):
                known.offset = offset
                break
        else:
            _log.info("%s stays stock: its numbers are others", type(module).__name__)
    # what checkpointing runs again must be what ran before
    return normalised(module, x, stock)
