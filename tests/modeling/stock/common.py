"""What the tests of accelerated models share: prompts, pieces behind caches, distances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tests.stock_models import VOCABULARY, tiny
from torch import Tensor

import ssmzoo
from ssmzoo.modeling.compat import cache_name

PURE = ("mamba", "falcon_mamba", "mamba2")  # of recurrent layers alone
SETTINGS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
OUT = {"return_dict_in_generate": True, "output_logits": True}


def accelerated(model_type: str, seed: int = 0, **changes: Any) -> Any:
    return ssmzoo.accelerate(tiny(model_type, seed, **changes)).model


def ids(rows: int = 2, length: int = 37, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=draw)


def distance(x: Tensor, judge: Tensor) -> float:
    """Return the greatest difference, in units of the judge's greatest number."""
    return float((x - judge).abs().max() / judge.abs().max().clamp_min(1e-30))


def assert_close(x: Tensor, judge: Tensor) -> None:
    assert distance(x, judge) <= 1e-5


def cached(model: Any, x: Tensor, cache: dict[str, Any], **inputs: Any) -> tuple[Tensor, Any]:
    """Return logits, and the cache by the name that the model takes it by."""
    output = model(x, use_cache=True, **cache, **inputs)
    name = cache_name(output.keys())
    return output.logits, {name: output[name]}


@torch.no_grad()
def in_pieces(model: Any, x: Tensor, cuts: Sequence[int]) -> Tensor:
    """Return the logits of tokens that are read up to each cut in turn, and then to the end."""
    pieces, cache = [], {}
    for begin, end in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
        logits, cache = cached(model, x[:, begin:end], cache)
        pieces.append(logits)
    return torch.cat(pieces, dim=1)
