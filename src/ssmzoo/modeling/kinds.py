"""Mixers of other families in one model: a section of the configuration, and what it stands for."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from ssmzoo.environment.messages import suggestion
from ssmzoo.family import load_family
from ssmzoo.modeling.attention import AttentionConfig
from ssmzoo.modeling.attention_model import AttentionModel
from ssmzoo.modeling.backbone import SSMModel
from ssmzoo.modeling.configuration import SSMConfig

_TRANSFORMERS, _SHARED = (
    [field.name for field in dataclasses.fields(kind)] for kind in (PreTrainedConfig, SSMConfig)
)


@dataclass(frozen=True)
class Kind:
    """A kind of mixer.

    Attributes:
        family: The name of the family that its mixers are of.
        config: The configuration that they get.
        model_class: The backbone that makes them.
        drawer: One without layers, whose ``_init_weights`` draws their parameters.
    """

    family: str
    config: SSMConfig
    model_class: type[SSMModel]
    drawer: SSMModel

    @property
    def section(self) -> dict[str, Any]:
        """All its own fields, as a configuration has them."""
        own = {name: getattr(self.config, name) for name in _own(type(self.config))}
        return {"family": self.family, **own}


def kind_of(
    where: str,
    section: Mapping[str, Any],
    model: SSMConfig,
    name: str | None = None,
    **instead: Any,
) -> Kind:
    """Return a kind of mixer; equal arguments give the same one.

    Args:
        where: The section, for errors: the field that holds it, perhaps with a key.
        section: Its own fields; ``family``, and ``preset`` whose fields come first.
        model: The configuration with the fields that all mixers share.
        name: The family of a section that has no ``family``.
        **instead: Fields that the mixers get in place of the model's.

    Raises:
        LookupError: There is no such family, preset or field.
        ValueError: A field is not a section's, is out of its range, or does not fit the others; no
            family is named.
    """
    shared = {name: getattr(model, name) for name in _SHARED if name not in _TRANSFORMERS}
    return _kind(where, name, json.dumps(section), json.dumps({**shared, **instead}))


@functools.lru_cache(maxsize=256)  # to find a family reads files, and models ask again and again
def _kind(where: str, name: str | None, section: str, shared: str) -> Kind:
    fields = json.loads(section)
    family, preset = fields.pop("family", name), fields.pop("preset", None)
    if not isinstance(family, str):
        raise ValueError(f"{where} must name a family in its field family, got {section}")
    kind, model_class, presets = _source(where, family, family == name)
    if preset is not None and preset not in presets:
        raise LookupError(
            f"{where}: {family} has no preset {preset!r}{suggestion(preset, presets)}; "
            f"presets: {', '.join(sorted(presets)) or 'none'}"
        )
    chosen = {} if preset is None else _by_own_names(kind, presets[preset])
    fields = _by_own_names(kind, fields)
    _require_own(where, family, kind, fields)
    own = {name: value for name, value in chosen.items() if name in _own(kind)} | fields
    try:
        config = kind(**own, **json.loads(shared))
    except LookupError as error:
        raise LookupError(f"{where}: {error}") from error
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from error
    if config.reads_own_model:
        raise ValueError(
            f"{where} must have mixers that stand alone, got fields of {family} with which they "
            "read parameters of its own model"
        )
    return Kind(family, config, model_class, model_class.without_layers(config))


def _source(
    where: str, family: str, by_name: bool
) -> tuple[Any, Any, Mapping[str, Mapping[str, Any]]]:
    """Return a family's configuration class, its backbone and its presets."""
    if family == "attention":
        return AttentionConfig, AttentionModel, {}
    try:
        found = load_family(family)
    except LookupError as error:
        way = "; name one in its field family" if by_name else ""
        raise LookupError(f"{where}: {error}{way}") from error
    if getattr(found.model_class, "mixer_class", None) is None:
        raise ValueError(
            f"{where} must be of a family that has mixers of its own, got {family!r}, whose "
            f"{found.model_class.__name__} has none"
        )
    return found.config_class, found.model_class, found.presets


def _by_own_names(kind: type[SSMConfig], fields: Mapping[str, Any]) -> dict[str, Any]:
    return {kind.attribute_map.get(name, name): value for name, value in fields.items()}


def _require_own(where: str, family: str, kind: type[SSMConfig], fields: Mapping[str, Any]) -> None:
    for name in fields:
        if name in _SHARED:
            raise ValueError(
                f"{where} must not set {name}, which all layers share; set it in the model's "
                "configuration"
            )
        if name in kind.own_model:
            raise ValueError(
                f"{where} must not set {name}, which {family}'s own model reads, not its mixers"
            )


def _own(kind: type[SSMConfig]) -> list[str]:
    """Return the names of the fields that a section of a family has."""
    others = (*_SHARED, *kind.own_model)
    return [field.name for field in dataclasses.fields(kind) if field.name not in others]
