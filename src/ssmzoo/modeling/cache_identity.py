"""Which caches fit which models: by fields of configurations, and by where states began."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

from transformers import PreTrainedConfig

from ssmzoo.modeling.configuration import state_fields

STATE_ADAPTER = "state_adapter"  # the name of a state adapter in the model around the layers


class Start(Protocol):
    """A start of states other than zeros: a state adapter."""

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
    """Return in words the start of states with this digest of an adapter."""
    return "no state adapter" if digest is None else f"the state adapter {digest[:12]}"


def upgraded(owner: Any, wanted: Mapping[str, Any], kind: type[PreTrainedConfig]) -> Any:
    """Return the fields of its model that a file holds, as this version would write them.

    A field that an earlier version lacked gets its default; one that is no longer compared is left
    out.

    Args:
        owner: The fields in the file.
        wanted: Those of the model that the file is loaded for.
        kind: The class of that model's configuration.
    """
    if not isinstance(owner, dict):
        return owner
    defaults = state_fields(kind)
    return {name: owner.get(name, defaults.get(name)) for name in wanted}


def difference(before: Any, now: Mapping[str, Any]) -> str:
    """Return in words how two signatures differ; of two families, their names."""
    if not isinstance(before, dict):  # of a file
        return f"made for {before!r}, got {now}"
    before, now = _flat(before), _flat(now)
    shared = before.keys() & now.keys()
    names = [x for x in {**before, **now} if x not in shared or before[x] != now[x]]
    if "model_type" in names:
        names = ["model_type"]
    made, got = (
        ", ".join(f"{name} = {fields.get(name)!r}" for name in names) for fields in (before, now)
    )
    return f"made for {made}, got {got}"


def _flat(fields: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Return the fields with those in dictionaries, by names such as ``kinds.h3.d_state``."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        found |= (
            _flat(value, f"{within}{name}.") if isinstance(value, dict) else {within + name: value}
        )
    return found


@functools.cache
def own_fields(kind: type[PreTrainedConfig]) -> tuple[str, ...]:
    """Return the fields of a configuration that a state's meaning or shape may depend on."""
    return tuple(state_fields(kind))
