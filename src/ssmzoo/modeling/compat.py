"""The differences between versions of transformers, 5.17 to 5.24; names are known here alone.

The argument and output that 5.24 calls ``cache`` was ``past_key_values`` before it, or
``cache_params``. With every version our models take ``cache`` and ``past_key_values``, and their
outputs have both as attributes; outputs of ``generate`` have the version's name. The methods of
``Cache`` that transformers calls on our caches are in ``cache.py`` (length, rows) and
``rollback.py`` (``crop``, recording); those that we call on its layers, in ``stock/cache.py`` and
``stock/mixer_states.py``.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from transformers import modeling_outputs

from ssmzoo.modeling.checkpointing import selective_checkpointing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Given = TypeVar("Given")

_FIELDS = {field.name for field in fields(modeling_outputs.CausalLMOutputWithPast)}
CACHE = "cache" if "cache" in _FIELDS else "past_key_values"  # of an attention model
MIXER_CACHE = "cache" if CACHE == "cache" else "cache_params"  # of a recurrent layer
CACHES = ("cache", "past_key_values", "cache_params")
OTHER_NAMES = frozenset(CACHES) - {CACHE}

if TYPE_CHECKING or CACHE == "cache":
    BaseModelOutputWithPast = modeling_outputs.BaseModelOutputWithPast
    CausalLMOutputWithPast = modeling_outputs.CausalLMOutputWithPast
    SequenceClassifierOutputWithPast = modeling_outputs.SequenceClassifierOutputWithPast
else:

    class _Named:
        cache = property(lambda output: output.past_key_values)

    class BaseModelOutputWithPast(_Named, modeling_outputs.BaseModelOutputWithPast):
        """Of a model without head."""

    class CausalLMOutputWithPast(_Named, modeling_outputs.CausalLMOutputWithPast):
        """Of a language model."""

    class SequenceClassifierOutputWithPast(
        _Named, modeling_outputs.SequenceClassifierOutputWithPast
    ):
        """Of a classifier."""


def cache_name(names: Container[str]) -> str | None:
    """Return the cache's name among a function's parameters, or an output's keys."""
    return next((name for name in CACHES if name in names), None)


def one_cache(cache: Given | None, past_key_values: Given | None) -> Given | None:
    """Return the cache that a call got, by either name.

    Raises:
        ValueError: It got two.
    """
    given_cache({"cache": cache, "past_key_values": past_key_values})
    return past_key_values if cache is None else cache


def given_cache(arguments: Mapping[str, Any]) -> str | None:
    """Return the name under which a call got a cache, if it did.

    Raises:
        ValueError: It got two.
    """
    found = [name for name in CACHES if arguments.get(name) is not None]
    if len(found) > 1:
        raise ValueError(f"{found[1]} must be left out beside {found[0]}, got both")
    return found[0] if found else None


def renamed_cache(arguments: dict[str, Any], name: str = CACHE) -> str | None:
    """Give the cache among a call's arguments, in place, the name that transformers' code has.

    Returns:
        The name that it had, or None where that is ``name`` or there is none.

    Raises:
        ValueError: There are two.
    """
    found = given_cache(arguments)
    for known in CACHES:
        if known != name and known in arguments:
            value = arguments.pop(known)
            if value is not None or name not in arguments:
                arguments[name] = value
    return found if found != name else None


def enable_gradient_checkpointing(model: PreTrainedModel, *, selective: bool = False) -> None:
    """Let a model compute its activations again in the backward pass, without reentrance.

    Args:
        model: The model.
        selective: Keep what :func:`selective_checkpointing` keeps.
    """
    options = {"context_fn": selective_checkpointing} if selective else {}
    # 5.23 has renamed it and warns about the old name
    renamed = getattr(model, "activation_checkpointing_enable", None)
    (renamed or model.gradient_checkpointing_enable)({"use_reentrant": False, **options})


def is_checkpointing(model: PreTrainedModel) -> bool:
    """Return whether a model computes its activations again in the backward pass."""
    renamed = getattr(model, "is_activation_checkpointing", None)
    return model.is_gradient_checkpointing if renamed is None else renamed
