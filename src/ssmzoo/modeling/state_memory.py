"""How many bytes a model's state takes, and how many there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import torch

from ssmzoo.modeling.cache import RecurrentCache, backbone_of
from ssmzoo.modeling.compat import CACHE


def state_size(
    model: Any, new_cache: Callable[[], RecurrentCache] | None = None
) -> Callable[[int], int]:
    """Return a function from the tokens read, at least one, to the bytes of one sequence's state.

    Args:
        model: A causal language model that keeps a state; it reads three tokens.
        new_cache: Makes what keeps it; None: the model's own kind of cache.
    """
    backbone = backbone_of(model)
    new_cache = new_cache or (lambda: backbone.cache_class(backbone.config))
    first, second = (_measured(model, new_cache(), tokens) for tokens in (1, 2))
    # attention's keys and values grow with each token, all else keeps its size
    return lambda tokens: first + (second - first) * max(tokens - 1, 0)


@torch.no_grad()
def _measured(model: Any, cache: RecurrentCache, tokens: int) -> int:
    backbone = backbone_of(model)
    backbone(torch.zeros(1, tokens, dtype=torch.long, device=model.device), **{CACHE: cache})
    return cache.nbytes


def free_bytes(device: torch.device) -> float:
    """Return the bytes that are free on a device."""
    if device.type == "cuda":
        # torch keeps memory that no tensor has
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    return float(psutil.virtual_memory().available)
