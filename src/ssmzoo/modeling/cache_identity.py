"""Which caches fit which models: by fields of configurations, and by where states began."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Protocol

from transformers import PreTrainedConfig

STATE_ADAPTER = "state_adapter"  # the name of a state adapter in the model around the layers


class Start(Protocol):
    """What a state may have begun from in place of zeros: a state adapter."""

    def digest(self) -> str:
        """Return the SHA-256 of its states."""
        ...


def require_same_start(began: Start | None, adapter: Start | None) -> None:
    """Check that a cache's states began where a model with this state adapter begins.

    Raises:
        ValueError: They began elsewhere.
    """
    made, has = (None if given is None else given.digest() for given in (began, adapter))
    if made != has:
        raise ValueError(
            f"cache began from {start_named(made)}, and this model has {start_named(has)}; "
            "read the prompt again"
        )


def start_named(digest: str | None) -> str:
    """Return in words what states began from, by an adapter's digest."""
    return "no state adapter" if digest is None else f"the state adapter {digest[:12]}"


# fields that change neither what a state means nor its shape
_STATELESS = frozenset(
    {"vocab_size", "initializer_range", "tie_word_embeddings", "use_cache", "pooling"}
    | {"bos_token_id", "eos_token_id", "pad_token_id"}
    | {"dropout", "embedding_dropout", "tie_dropout", "attention_dropout", "hidden_dropout"}
    | {"drop_path_rate", "classifier_bias", "residual_in_fp32"}
)


def difference(before: Any, now: Mapping[str, Any]) -> str:
    """Return in words what two signatures do not share; of two families, their names."""
    if not isinstance(before, dict):  # of a file
        return f"made for {before!r}, got {now}"
    shared = before.keys() & now.keys()
    names = [x for x in {**before, **now} if x not in shared or before[x] != now[x]]
    if "model_type" in names:
        names = ["model_type"]
    made, got = (
        ", ".join(f"{name} = {fields.get(name)!r}" for name in names) for fields in (before, now)
    )
    return f"made for {made}, got {got}"


@functools.cache
def own_fields(kind: type[PreTrainedConfig]) -> tuple[str, ...]:
    """Return the fields of a configuration that a state's meaning or shape may depend on."""
    general = {field.name for field in dataclasses.fields(PreTrainedConfig)} | _STATELESS
    return tuple(field.name for field in dataclasses.fields(kind) if field.name not in general)
