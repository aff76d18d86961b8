"""What is installed, what a family is, what a checkpoint holds: facts for people and for JSON."""

from __future__ import annotations

import importlib.util
import inspect
from collections import Counter
from dataclasses import asdict
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from ssmzoo.checkpoints.load import model_folder
from ssmzoo.checkpoints.weights import parameter_count, read_weights
from ssmzoo.family import (
    Family,
    claims,
    conflict,
    load_family,
    malformed,
    owner,
    suggestion,
    unmet_need,
)
from ssmzoo.files import read_json


def installed_families(*, load: bool = False) -> list[dict[str, Any]]:
    """Return a row per installed family: name, status, distribution, version, entry_point.

    The status is ``"broken: <reason>"`` if the name is contested or its package cannot be found,
    else ``"installed"``, and nothing is imported. With ``load`` each plugin is imported too, and
    the status is ``"ok"`` or ``"broken: <reason>"``.
    """
    rows = []
    for name, points in claims().items():
        point, *others = points
        if others:
            status = f"broken: {conflict(name, points)}"
        elif load:
            status = _load_status(name)
        else:
            status = _find_status(point)
        rows.extend(
            {
                "name": name,
                "status": status,
                "distribution": owner(point),
                "version": point.dist.version if point.dist is not None else None,
                "entry_point": point.value,
            }
            for point in points
        )
    return rows


def describe_family(name: str) -> dict[str, Any]:
    """Return a family's paper, presets with parameter counts, configuration fields, LoRA targets.

    The counts come from building each preset on the meta device: no weights are allocated.

    Raises:
        LookupError: No family of that name is installed.
        RuntimeError: Its plugin cannot be loaded.
    """
    family = load_family(name)
    return {
        "name": family.name,
        "model_type": family.model_type,
        "paper": asdict(family.paper),
        "presets": {
            preset: {
                "parameters": _count(_model_class(family, preset), family.config(preset)),
                "fields": dict(fields),
            }
            for preset, fields in family.presets.items()
        },
        "fields": _config_fields(family.config_class),
        "lora_targets": list(family.lora_targets),
    }


def describe_checkpoint(folder: str | Path) -> dict[str, Any]:
    """Return what a saved model holds, from its configuration and weight headers alone.

    Returns:
        path, model_type, parameters (stored numbers; tied weights count once), dtypes (tensors
        by kind), bytes (all files), config.

    Raises:
        ValueError: The folder, its configuration or its weights cannot be read.
    """
    path = model_folder(str(folder))
    if path is None:
        raise ValueError(f"the model must be a folder with a config.json, got {str(folder)!r}")
    config = read_json(path / "config.json")
    tensors = read_weights(path)
    return {
        "path": str(path),
        "model_type": config.get("model_type"),
        "parameters": parameter_count(tensors),
        "dtypes": dict(Counter(dtype for dtype, _ in tensors.values())),
        "bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        "config": config,
    }


def describe(target: str) -> dict[str, Any]:
    """Describe a family by name or a checkpoint by folder; an installed family's name wins.

    Raises:
        LookupError: The target is neither.
        ValueError: The folder holds no readable model.
        RuntimeError: The family's plugin cannot be loaded.
    """
    installed = claims()
    if target in installed:
        return describe_family(target)
    if Path(target).expanduser().is_dir():
        return describe_checkpoint(target)
    raise LookupError(
        f"{target!r} is neither an installed family nor a folder"
        f"{suggestion(target, installed)}; families: {', '.join(installed) or 'none'}"
    )


def _find_status(point: EntryPoint) -> str:
    wrong = malformed(point)
    if wrong is not None:
        return f"broken: {wrong}"
    package = point.module.partition(".")[0]
    # of a top-level name: looks along the path, imports nothing
    if importlib.util.find_spec(package) is None:
        return f"broken: package {package!r} is not there; reinstall {owner(point)}"
    unmet = unmet_need(point)
    return "installed" if unmet is None else f"broken: the plugin {unmet}"


def _load_status(name: str) -> str:
    try:
        load_family(name)
    except RuntimeError as error:
        return f"broken: {error}"
    return "ok"


def _model_class(family: Family, preset: str) -> type:
    """Return the class that a preset names in ``architectures``, else the language model."""
    named = family.presets[preset].get("architectures", ())
    classes = (
        family.model_class,
        family.sequence_classification_class,
        family.token_classification_class,
        family.pair_classification_class,
        family.image_classification_class,
    )
    for model_class in classes:
        if model_class is not None and model_class.__name__ in named:
            return model_class
    return family.causal_lm_class


def _count(model_class: type, config: object) -> int:
    import torch

    with torch.device("meta"):
        model = model_class(config)
    return sum(parameter.numel() for parameter in model.parameters())


def _config_fields(config_class: type) -> dict[str, dict[str, Any]]:
    """Return type and default by field: what the class and its zoo ancestors declare."""
    from transformers import PreTrainedConfig

    types: dict[str, object] = {}
    for ancestor in reversed(config_class.__mro__):
        if not issubclass(PreTrainedConfig, ancestor):
            types |= inspect.get_annotations(ancestor)
    if not types:  # a configuration with an __init__ of its own instead of typed fields
        types = {
            parameter.name: parameter.annotation
            for parameter in inspect.signature(config_class).parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        }
    defaults = config_class()
    return {
        name: {"type": _type_name(kind), "default": getattr(defaults, name, None)}
        for name, kind in types.items()
        if not name.startswith("_") and "ClassVar" not in str(kind)
    }


def _type_name(kind: object) -> str:
    if kind is inspect.Parameter.empty:
        return ""
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
