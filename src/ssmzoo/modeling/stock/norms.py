"""Norms of stock modules on our op, where it gives the numbers of the stock code.

This is for whole sequences, with gradients or without; a decoded token goes by ``decoding``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ssmzoo.modeling import decoding
from ssmzoo.modeling.forward_code import current_code
from ssmzoo.modeling.module_parts import FORMATS, name_of_eps
from ssmzoo.modeling.norms import MANY
from ssmzoo.modeling.stock.calls import call
from ssmzoo_kernels import rms_norm
from ssmzoo_kernels.dispatch import is_plain

_log = logging.getLogger("ssmzoo")
OFFSETS = (0.0, 1.0)  # numbers that models add to a norm's weight


def normalised(module: Any, x: Tensor, stock: Callable[[], Tensor]) -> Tensor:
    """Return a norm's output.

    Args:
        module: A module whose class is one for norms by the root mean square.
        x: ``[..., width]``.
        stock: The module's own forward.
    """
    weight = module._parameters.get("weight")
    if (
        not is_plain(x)
        or x.numel() < MANY
        or type(weight) is not nn.Parameter
        or x.dtype is not weight.dtype
        or x.dtype not in FORMATS
        or x.device.type not in ("cpu", "cuda")
        or not (eps := name_of_eps(module))
    ):
        return stock()

    def ours(offset: float) -> Tensor:
        return rms_norm(x, weight, eps=getattr(module, eps), offset=offset)

    known = decoding.decoding_of(module)
    if known.code is not None and not known.code.unchanged(call.checked_code):
        return stock()  # its code was replaced
    if known.offset is None:
        with torch.no_grad():
            y = stock()
            if y.any() and y.isfinite().all():  # others prove nothing
                fit = [o for o in OFFSETS if decoding.agree(ours(o), y, x.dtype)]
                far = {o: decoding.mean_distance(ours(o), y) for o in fit}
                known.offset = min(fit, key=far.__getitem__, default=math.nan)
                known.code = current_code((type(module),))
                if math.isnan(known.offset):
                    _log.info("%s stays stock: its numbers are others", type(module).__name__)
    # also the first time: checkpointing must recompute by the same code
    return stock() if known.offset is None or math.isnan(known.offset) else ours(known.offset)
