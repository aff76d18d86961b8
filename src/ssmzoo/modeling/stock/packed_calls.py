"""Packed and padded sequences in a call of a stock model: found, and kept apart in attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask

from ssmzoo.modeling.compat import CACHE
from ssmzoo.modeling.inputs import BOUNDARIES
from ssmzoo.modeling.packing import Sequences, find_packing
from ssmzoo.modeling.stock.calls import call

# kinds of layers whose masks we know
_MASKED = {"full_attention", "linear_attention", "hybrid", "mlp", "moe"}


def packed_call(
    model: Any, cache: Any, given: dict[str, Any]
) -> tuple[Sequences | None, dict[str, Any]]:
    """Find the packed sequences of a call.

    Args:
        model: The model that is called.
        cache: The cache among its arguments, or None.
        given: Its arguments by name.

    Returns:
        The packing, None if every row is one sequence or an outer model found it; and the arguments
        to call with.

    Raises:
        ValueError: Boundaries that do not fit, or packed sequences together with a cache or, in a
            model with attention, with padding.
    """
    if call.packing is not None:
        return None, given
    cu_seqlens = next((given[n] for n in BOUNDARIES if given.get(n) is not None), None)
    seq_idx, positions = given.get("seq_idx"), given.get("position_ids")
    explicit = cu_seqlens is not None or seq_idx is not None
    if not explicit and (not isinstance(positions, Tensor) or cache is not None):
        return None, given
    inputs = inputs_of(given)
    if not isinstance(inputs, Tensor) or inputs.shape[1] == 1:
        return None, given
    batch, length = inputs.shape[:2]
    if positions is not None and positions.dim() != 2:  # of pictures, in several dimensions
        positions = None
    mask = given.get("attention_mask")
    mask = mask[:, -length:] if isinstance(mask, Tensor) and mask.dim() == 2 else None
    found = find_packing(batch, length, 0, mask, positions, seq_idx, cu_seqlens)
    # one sequence a row, or padding alone
    if found is None or found.padded or found.sequences <= batch:
        return None, given
    if cache is not None or given.get("use_cache"):
        raise ValueError(
            f"{type(model).__name__} takes packed sequences without a cache, got "
            f"{found.sequences} sequences in {batch} rows and a cache; leave it out and "
            "pass use_cache=False"
        )
    given = {name: value for name, value in given.items() if name != "cu_seqlens"}
    if any("Attention" in type(module).__name__ for module in model.modules()):
        if mask is not None and not bool(mask.all()):
            raise ValueError(
                f"{type(model).__name__} has attention, which takes packed sequences without "
                "padding, got an attention_mask with zeros; pack without padding"
            )
        given |= _for_attention(model, found, inputs)
    return found, given | {"use_cache": False}


def _for_attention(model: Any, packing: Sequences, inputs: Tensor) -> dict[str, Any]:
    """Return the mask and positions that keep packed sequences apart in attention."""
    config = model.config.get_text_config()
    if strange := sorted(set(config.layer_types) - _MASKED):
        raise ValueError(
            f"{type(model).__name__} takes no packed sequences: ssmzoo cannot keep them apart "
            f"in layers of {', '.join(strange)}; pass one sequence a row"
        )
    batch, length = inputs.shape[:2]
    places = torch.arange(packing.length, device=inputs.device)
    places = (places - packing.offsets[packing.numbers()]).view(batch, length)
    # transformers makes this mask from positions that begin anew; some models do not pass them on
    nothing: dict[str, Any] = {CACHE: None}
    apart = create_causal_mask(
        config,
        inputs_embeds=torch.empty(batch, length, 1, dtype=dtype_of(model), device=inputs.device),
        attention_mask=None,
        **nothing,
        position_ids=places,
    )
    masks = {"full_attention": apart, "linear_attention": None}
    return {"attention_mask": masks, "position_ids": places}


def dtype_of(model: Any) -> torch.dtype:
    """Return the dtype of a model's embedding; a replica has no parameters to ask."""
    return model.get_input_embeddings().weight.dtype


def positions(given: Mapping[str, Any], seen: int) -> Tensor | None:
    """Return ``position_ids`` ``[B, L]`` that do not count the padding behind a row's first token.

    Args:
        given: The arguments of a call that lacks them.
        seen: The tokens that its cache has seen.

    Returns:
        None: the mask does not say where the tokens stand.

    Raises:
        ValueError: The mask lacks the tokens that attention finds in the cache.
    """
    inputs, mask = inputs_of(given), given.get("attention_mask")
    length = inputs.shape[1]
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    if mask.shape[1] < seen + length:
        raise ValueError(
            f"attention_mask must cover the {seen} tokens that the cache has seen and the {length} "
            f"new ones, got {mask.shape[1]} columns"
        )
    if mask.shape[1] != seen + length:
        return None
    tokens = mask.bool().long()
    first = tokens.argmax(dim=1, keepdim=True)  # transformers counts the padding before it
    return (first + tokens.cumsum(1) - 1).clamp_min(0)[:, seen:]


def inputs_of(given: Mapping[str, Any]) -> Any:
    """Return a call's inputs, ids or embeddings."""
    ids = given.get("input_ids")
    return given.get("inputs_embeds") if ids is None else ids


def padding_of(given: Mapping[str, Any], inputs: Tensor) -> Sequences | None:
    """Return a call's padding as sequences of their own; None: it has none.

    A graph cannot look at the mask: there several tokens with a mask count as padded.
    """
    mask, (batch, length) = given.get("attention_mask"), inputs.shape[:2]
    if isinstance(mask, dict):  # as generate makes them for caches of one size
        mask = mask.get("linear_attention")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    mask = mask[:, -length:]
    if length == 1 if torch.compiler.is_compiling() else bool(mask.all()):
        return None  # in a graph a step's token counts, as transformers has it
    return find_packing(batch, length, 0, mask, None, None, None)
