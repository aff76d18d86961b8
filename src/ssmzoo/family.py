"""Families of models: their declaration, how they are found, loaded and registered.

Built-in and foreign families take the same road, the entry-point group ``ssmzoo.families``: listing
them imports nothing, loading one imports that one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmzoo.environment.messages import suggestion

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

GROUP = "ssmzoo.families"


@dataclass(frozen=True)
class Paper:
    """Where a family comes from."""

    title: str
    authors: str
    arxiv: str
    year: int


@dataclass(frozen=True)
class Converter:
    """Translation of another code's weights into a family's, and back, for ``ssmzoo convert``.

    Attributes:
        model_class: The model that the weights are of.
        from_official: Called with weights by the other code's names and its configuration as a
            dictionary, empty where none was given; returns weights by ours, and ours.
        to_official: Called with our weights and configuration; returns weights by the other
            code's names. None where there is no way back.
        official_config: Called with our configuration; returns the other code's ``config.json``.
            Where there is one, the way back ends in a folder that the other code loads; else in a
            file of weights.
    """

    model_class: type[PreTrainedModel]
    from_official: Callable[[dict[str, Tensor], dict[str, Any]], tuple[dict[str, Tensor], Any]]
    to_official: Callable[[dict[str, Tensor], Any], dict[str, Tensor]] | None = None
    official_config: Callable[[Any], dict[str, Any]] | None = None


@dataclass(frozen=True)
class FromAttention:
    """How a family's mixer starts from an attention layer's weights, for ``ssmzoo prime``.

    Attributes:
        fields: Called with the attention's configuration and the fields of preset and user; returns
            those that make the mixer of the attention's sizes. They win over a preset's, the user's
            own over them.
        copy: Called with the attention and a new mixer in its place; copies queries, keys, values
            and outputs into the mixer's counterparts, but no gate. All else stays as the family
            draws it.
        gate: Called with a mixer; returns the rows of its weights by which values are gated,
            ``[H d, D]``, which then start by :attr:`ssmzoo.modeling.AttentionParts.gate`, or None.
    """

    fields: Callable[[Any, Mapping[str, Any]], dict[str, Any]]
    copy: Callable[[Any, Any], None]
    gate: Callable[[Any], Any] = lambda mixer: None


@dataclass(frozen=True)
class Family:
    """One model family, the type of a plugin's ``FAMILY``.

    Attributes:
        name: The name users type, e.g. ``"longhorn"``; the entry point has the same.
        config_class: Its configuration; ``config_class.model_type`` is the registered type.
        model_class: The bare backbone.
        causal_lm_class: The language model.
        sequence_classification_class: The classifier of sequences.
        paper: Where it comes from.
        presets: Configuration fields by preset name, e.g. ``"longhorn-1.3b"``.
        tiny: Fields of the smallest configuration that takes every branch; tests use it.
        lora_targets: Module names worth adapting. PEFT does not know them: pass them as
            ``LoraConfig(target_modules=list(family.lora_targets))``.
        token_classification_class: The classifier of single tokens, if there is one.
        pair_classification_class: The classifier of pairs of documents, if there is one; it has no
            Auto class.
        image_classification_class: The classifier of images, if there is one.
        forecasting_class: The head that forecasts the values after a series, if there is one;
            it has no Auto class.
        converter: Translates weights of the official code, if it can be done.
        from_attention: Starts a mixer from an attention layer, if it has counterparts of its parts.
    """

    name: str
    config_class: type[PreTrainedConfig]
    model_class: type[PreTrainedModel]
    causal_lm_class: type[PreTrainedModel]
    sequence_classification_class: type[PreTrainedModel]
    paper: Paper
    presets: Mapping[str, Mapping[str, Any]]
    tiny: Mapping[str, Any]
    lora_targets: tuple[str, ...] = field(default=())
    token_classification_class: type[PreTrainedModel] | None = None
    pair_classification_class: type[PreTrainedModel] | None = None
    image_classification_class: type[PreTrainedModel] | None = None
    forecasting_class: type[PreTrainedModel] | None = None
    converter: Converter | None = None
    from_attention: FromAttention | None = None

    def __post_init__(self) -> None:
        """Take the place of its stand-in, where a plugin is imported by its own name."""
        if "ssmzoo.auto" in sys.modules:
            from transformers import CONFIG_MAPPING

            kind = f"ssmzoo_{self.name}"  # a family of ours, as only these have stand-ins
            if kind in CONFIG_MAPPING and hasattr(CONFIG_MAPPING[kind], "stands_for"):
                self.register()

    @property
    def model_type(self) -> str:
        """The ``model_type`` that checkpoints carry."""
        return self.config_class.model_type

    def config(self, preset: str | None = None, **fields: Any) -> PreTrainedConfig:
        """Build a configuration from a preset and single fields; fields win.

        Raises:
            LookupError: No preset of that name; the message lists those there are.
            TypeError: ``preset`` is no text.
        """
        if not isinstance(preset, str | None):
            raise TypeError(f"preset must be a preset's name, got {preset!r}")
        if preset is not None and preset not in self.presets:
            raise LookupError(
                f"{self.name} has no preset {preset!r}{suggestion(preset, self.presets)}; "
                f"presets: {', '.join(sorted(self.presets))}"
            )
        others: Mapping[str, str] = self.config_class.attribute_map
        given = {others.get(name, name) for name in fields}
        chosen = self.presets[preset] if preset is not None else {}
        kept = {name: value for name, value in chosen.items() if name not in given}
        return self.config_class(**kept, **fields)

    @property
    def auto_classes(self) -> dict[str, type[PreTrainedConfig] | type[PreTrainedModel]]:
        """Its classes by the name of the Auto class of transformers that finds them."""
        classes = {
            "AutoConfig": self.config_class,
            "AutoModel": self.model_class,
            "AutoModelForCausalLM": self.causal_lm_class,
            "AutoModelForSequenceClassification": self.sequence_classification_class,
            "AutoModelForTokenClassification": self.token_classification_class,
            "AutoModelForImageClassification": self.image_classification_class,
        }
        return {name: kind for name, kind in classes.items() if kind is not None}

    @property
    def classes(self) -> tuple[type[PreTrainedConfig] | type[PreTrainedModel], ...]:
        """All its classes, the configuration first, those without an Auto class too."""
        others = (self.pair_classification_class, self.forecasting_class)
        return (*self.auto_classes.values(), *(kind for kind in others if kind is not None))

    def register(self) -> None:
        """Make transformers know this family; a second call changes nothing.

        Its Auto classes find it, and its models are attributes of ``transformers``, as others are.

        Raises:
            ValueError: Its ``model_type`` is empty, or that of another configuration.
        """
        import transformers
        from transformers import CONFIG_MAPPING

        if not self.model_type:
            raise ValueError(
                f"{self.config_class.__name__}.model_type must be a name such as "
                f"'ssmzoo_{self.name}', got {self.model_type!r}"
            )
        if self.model_type in CONFIG_MAPPING:
            there, ours = CONFIG_MAPPING[self.model_type], self.config_class
            # a module that was loaded again has equal names
            same = (there.__module__, there.__name__) == (ours.__module__, ours.__name__)
            waiting = getattr(there, "stands_for", None)
            if not same and waiting != self.name:
                holder = f"{there.__module__}.{there.__name__}"
                raise ValueError(
                    f"{ours.__name__}.model_type must be its own, got {self.model_type!r}, which "
                    f"is that of {holder if waiting is None else f'family {waiting!r}'}"
                )
        transformers.AutoConfig.register(self.model_type, self.config_class, exist_ok=True)
        for name, kind in self.auto_classes.items():
            if name != "AutoConfig":
                getattr(transformers, name).register(self.config_class, kind, exist_ok=True)
        # `transformers serve` and TRL look there for the architectures of config.json
        for kind in self.classes:
            there = getattr(transformers, kind.__name__, kind)
            if there.__module__ == kind.__module__:
                setattr(transformers, kind.__name__, kind)


def claims() -> dict[str, tuple[EntryPoint, ...]]:
    """Return, by family name, every entry point that claims it. Nothing is imported.

    Two claims on one name are a conflict of that name only: :func:`load_family` refuses it.
    """
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        others = found.get(point.name, ())
        # owner reads a file: not for a name that only one claims
        if all(owner(point) != owner(other) for other in others):
            found[point.name] = (*others, point)
    return found


def families() -> dict[str, EntryPoint]:
    """Return the installed families by name. Nothing is imported.

    Raises:
        RuntimeError: Two distributions claim one name; the message names both.
    """
    return {name: _single(name, points) for name, points in claims().items()}


def load_family(name: str) -> Family:
    """Import a family's plugin, register it with the Auto classes, and return it.

    Raises:
        LookupError: No such family; the message suggests and lists.
        RuntimeError: Two distributions claim the name, its plugin was made for another version,
            cannot be imported, holds no :class:`Family`, or cannot be registered.
    """
    installed = claims()
    if name not in installed:
        raise LookupError(
            f"no family named {name!r}{suggestion(name, installed)}; "
            f"installed: {', '.join(installed) or 'none'}"
        )
    point = _single(name, installed[name])
    wrong = malformed(point)
    if wrong is not None:
        raise RuntimeError(wrong)
    unmet = unmet_need(point)
    if unmet is not None:
        raise RuntimeError(f"the plugin of family {name!r} {unmet}")
    try:
        family = point.load()
    except (Exception, SystemExit) as error:
        raise RuntimeError(
            f"the plugin of family {name!r} ({owner(point)}: {point.value}) cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(family, Family):
        raise RuntimeError(
            f"{point.value} ({owner(point)}) must be an ssmzoo.Family, got {type(family).__name__}"
        )
    if family.name != name:
        raise RuntimeError(
            f"{point.value} ({owner(point)}) calls itself {family.name!r}, its entry point {name!r}"
        )
    try:
        family.register()
    except Exception as error:
        raise RuntimeError(
            f"family {name!r} ({owner(point)}) cannot be registered with transformers: "
            f"{type(error).__name__}: {error}"
        ) from error
    return family


def family_of(config: PreTrainedConfig | Mapping[str, Any]) -> Family | None:
    """Return the installed family of a model; None for a model that is of none.

    Of ours, only the one it names is imported; families of other packages may have any type.

    Args:
        config: The model's configuration, or the content of its ``config.json``.

    Raises:
        ValueError: It is of a family of ours by its name, and that is not installed.
        RuntimeError: The family that it names is broken.
    """
    if isinstance(config, Mapping):
        model_type, kind = str(config.get("model_type")), None
    else:
        model_type, kind = config.model_type, type(config)
    likely = model_type.removeprefix("ssmzoo_")
    found = claims()
    for name in sorted(found, key=lambda name: (name != likely, name)):
        if name != likely and [owner(point) for point in found[name]] == ["ssmzoo"]:
            continue
        try:
            family = load_family(name)
        except RuntimeError:  # a broken plugin breaks nothing else
            if name == likely:
                raise
            continue
        if family.model_type == model_type:
            return family if kind in (None, family.config_class) else None
    if likely != model_type:
        raise ValueError(
            f"config.json has model_type {model_type!r}, a family that is not installed; "
            f"installed: {', '.join(sorted(found)) or 'none'}"
        )
    return None


def owner(point: EntryPoint) -> str:
    """Return the name of the distribution that declares an entry point."""
    return point.dist.name if point.dist is not None else point.value


def packages_of(family: str) -> list[str]:
    """Return the distributions that a family's models need: ssmzoo, and that of its plugin."""
    return list(dict.fromkeys(["ssmzoo", *map(owner, claims().get(family, ()))]))


def foreign_versions(config: PreTrainedConfig) -> dict[str, str]:
    """Return the versions of other packages whose family a model is of, by their names.

    A version says the commit of the git checkout that the code runs from, if it runs from one:
    ``"0.3.0 (commit 0a1b2c3d4e5f, changed since)"``. Empty for a model of ssmzoo's own families, of
    none, or with code of its own.
    """
    from ssmzoo_kernels.machine import checkout

    try:
        family = family_of(config)
    except (RuntimeError, ValueError):  # not installed here, or broken: it ran from elsewhere
        return {}
    found = {}
    for package in packages_of(family.name)[1:] if family is not None else ():
        with suppress(PackageNotFoundError):
            found[package] = version(package)
            commit, dirty = checkout(Path(sys.modules[type(config).__module__].__file__ or ""))
            if commit is not None:
                found[package] += f" (commit {commit}{', changed since' if dirty else ''})"
    return found


def malformed(point: EntryPoint) -> str | None:
    """Return the error in an entry point's text; None if it names a module."""
    if point.pattern.match(point.value) is not None:
        return None
    return (
        f"the entry point of {owner(point)} must look like package.module:FAMILY, "
        f"got {point.value!r}"
    )


def unmet_need(point: EntryPoint) -> str | None:
    """Return the need of a plugin for another version of ssmzoo, in words; None if it has none."""
    import ssmzoo

    if point.dist is None or point.dist.name == "ssmzoo":
        return None
    for text in point.dist.requires or ():
        if not text.lower().startswith("ssmzoo"):
            continue
        from packaging.requirements import Requirement

        need = Requirement(text)
        wanted = need.name.lower() == "ssmzoo" and (need.marker is None or need.marker.evaluate())
        if wanted and not need.specifier.contains(ssmzoo.__version__, prereleases=True):
            return (
                f"({owner(point)}) needs ssmzoo{need.specifier}, this is {ssmzoo.__version__}; "
                "install a version of either that fits the other"
            )
    return None


def conflict(name: str, points: Sequence[EntryPoint]) -> str:
    """Return the sentence that names everyone who claims a family name."""
    return (
        f"the family name {name!r} is claimed by {' and by '.join(sorted(map(owner, points)))}; "
        "uninstall all but one"
    )


def _single(name: str, points: Sequence[EntryPoint]) -> EntryPoint:
    if len(points) > 1:
        raise RuntimeError(conflict(name, points))
    return points[0]
