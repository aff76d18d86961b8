"""Facts of the installed families, of one family, a preset or a saved model."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections import Counter
from dataclasses import asdict
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from ssmzoo.checkpoints.load import model_source, on_hub
from ssmzoo.checkpoints.weights import parameter_count, read_weights
from ssmzoo.environment.messages import first_line
from ssmzoo.family import (
    Family,
    claims,
    conflict,
    load_family,
    malformed,
    owner,
    unmet_need,
)
from ssmzoo.files import read_json


def installed_families(*, load: bool = False) -> list[dict[str, Any]]:
    """Return a row per installed family: its paper, heads and presets, status and origin.

    Args:
        load: Import each plugin. Otherwise nothing is imported, and title, arxiv, heads and
            presets are read from the plugin's source.

    Returns:
        ``name``; ``status``, ``"installed"`` (with ``load``, ``"ok"``) or ``"broken: <reason>"``;
        ``title`` and ``arxiv`` of its paper, ``heads`` and ``presets``, each None where it cannot
        be read; ``distribution``, ``version`` and ``entry_point``.
    """
    rows = []
    for name, points in claims().items():
        for point in points:
            facts: dict[str, Any] = dict.fromkeys(("title", "arxiv", "heads", "presets"))
            if len(points) > 1:
                status = f"broken: {conflict(name, points)}"
            elif load:
                try:
                    facts |= _facts(load_family(name))
                    status = "ok"
                except RuntimeError as error:
                    status = f"broken: {error}"
            else:
                status = _find_status(point)
                if status == "installed":
                    facts |= _declared(point)
            rows.append(
                {
                    "name": name,
                    "status": status,
                    **facts,
                    "distribution": owner(point),
                    "version": point.dist.version if point.dist is not None else None,
                    "entry_point": point.value,
                }
            )
    return rows


def describe(model: str) -> dict[str, Any]:
    """Describe a family, a family's preset, a saved model in a folder or one on the Hub.

    Raises:
        LookupError: There is no such family, preset or model.
        ValueError: The folder holds no readable model.
        RuntimeError: The family's plugin cannot be loaded.
    """
    source = model_source(model)
    if source.family is not None and source.preset is not None:
        return describe_preset(source.family, source.preset)
    if source.family is not None:
        return describe_family(source.family)
    return describe_on_hub(model) if source.folder is None else describe_checkpoint(source.folder)


def describe_family(name: str) -> dict[str, Any]:
    """Return the facts of a family, with the parameter counts of its presets.

    The counts come from building each preset on the meta device: no weights are allocated.

    Returns:
        name, model_type, paper, heads, presets (parameters and fields of each), fields (type and
        default of each), lora_targets, converts (the class whose official weights it reads, or
        None).

    Raises:
        LookupError: No family of that name is installed.
        RuntimeError: Its plugin cannot be loaded.
    """
    family = load_family(name)
    converter = family.converter
    return {
        "name": family.name,
        "model_type": family.model_type,
        "paper": asdict(family.paper),
        "heads": _heads(family),
        "presets": {
            preset: {
                "parameters": _count(_model_class(family, preset), family.config(preset)),
                "fields": dict(fields),
            }
            for preset, fields in family.presets.items()
        },
        "fields": _config_fields(family.config_class),
        "lora_targets": list(family.lora_targets),
        "converts": None if converter is None else converter.model_class.__name__,
    }


def describe_preset(name: str, preset: str) -> dict[str, Any]:
    """Return the facts of an untrained preset in the form of :func:`describe_checkpoint`.

    Raises:
        LookupError: No family or preset of that name is installed.
        RuntimeError: The family's plugin cannot be loaded.
    """
    family = load_family(name)
    config = family.config(preset)
    count = _count(_model_class(family, preset), config)
    return _described(f"{name}:{preset}", config.to_dict(), count)


def describe_checkpoint(folder: str | Path) -> dict[str, Any]:
    """Return the facts of a saved model, from its configuration and weight headers alone.

    Returns:
        path, model_type, parameters (stored numbers; tied weights count once), dtypes (tensors
        by kind), bytes (all files), config.

    Raises:
        ValueError: The configuration or the weights cannot be read.
    """
    path = Path(folder)
    config, tensors = read_json(path / "config.json"), read_weights(path)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return _described(str(path), config, parameter_count(tensors), tensors, size)


def describe_on_hub(model: str) -> dict[str, Any]:
    """Return the facts of a model on the Hub, without fetching its weights.

    Returns:
        As :func:`describe_checkpoint`; ``path`` is the id, ``bytes`` are those of the weights.

    Raises:
        LookupError: The Hub has no such model, does not answer, or it has no safetensors.
    """
    from huggingface_hub import get_safetensors_metadata, hf_hub_download, snapshot_download

    asked = on_hub(model)
    try:
        if not asked:  # it was fetched before
            folder = snapshot_download(model, local_files_only=True)
            return {**describe_checkpoint(folder), "path": model}
        config = read_json(Path(hf_hub_download(model, "config.json")))
        files = get_safetensors_metadata(model).files_metadata.values()
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise LookupError(f"cannot read {model!r} from the Hub: {reason}") from error
    headers = {name: tensor for file in files for name, tensor in file.tensors.items()}
    tensors = {name: (header.dtype, tuple(header.shape)) for name, header in headers.items()}
    size = sum(end - begin for begin, end in (x.data_offsets for x in headers.values()))
    return _described(model, config, parameter_count(tensors), tensors, size)


def _described(
    path: str,
    config: dict[str, Any],
    parameters: int,
    tensors: dict[str, tuple[str, tuple[int, ...]]] | None = None,
    size: int | None = None,
) -> dict[str, Any]:
    return {
        "path": path,
        "model_type": config.get("model_type"),
        "parameters": parameters,
        "dtypes": None if tensors is None else dict(Counter(kind for kind, _ in tensors.values())),
        "bytes": size,
        "config": config,
    }


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


def _facts(family: Family) -> dict[str, Any]:
    return {
        "title": family.paper.title,
        "arxiv": family.paper.arxiv,
        "heads": _heads(family),
        "presets": list(family.presets),
    }


def _heads(family: Family) -> list[str]:
    heads = [name for name in vars(family) if _head_name(name) and getattr(family, name)]
    return [_head_name(name) for name in heads]


def _head_name(field: str) -> str:
    """Return the head that a field of :class:`Family` is the class of; "" of all other fields."""
    if not field.endswith("_class") or field in ("config_class", "model_class"):
        return ""
    return field.removesuffix("_class").replace("_", "-")


def _declared(point: EntryPoint) -> dict[str, Any]:
    """Return the facts that ``FAMILY = Family(...)`` states in a plugin's source, which is not run.

    Computed values, instead of text or the keys of a dictionary, are left out.
    """
    try:
        module = ast.parse(_source(point.module).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    values = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    made = values.get(point.attr)
    if not isinstance(made, ast.Call) or ast.unparse(made.func) != "Family":
        return {}
    given = {keyword.arg: keyword.value for keyword in made.keywords if keyword.arg}
    paper = given.get("paper")
    words = paper.keywords if isinstance(paper, ast.Call) else ()
    told = {keyword.arg: keyword.value for keyword in words}
    return {
        "title": _text(told.get("title")),
        "arxiv": _text(told.get("arxiv")),
        "heads": [_head_name(name) for name in given if _head_name(name)],
        "presets": _keys(given.get("presets"), values),
    }


def _source(module: str) -> Path:
    """Return the file of a module, whose package is found along the path and not imported."""
    package, *inside = module.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None, "its status is installed"
    if not inside:
        return Path(spec.origin or "")
    below = Path(next(iter(spec.submodule_search_locations or ())), *inside)
    return below / "__init__.py" if below.is_dir() else below.with_suffix(".py")


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _keys(node: ast.expr | None, values: dict[str, ast.expr]) -> list[str] | None:
    """Return the keys of a dictionary display, those of others spread into it included."""
    if isinstance(node, ast.Name):
        return _keys(values.get(node.id), values)
    if not isinstance(node, ast.Dict):
        return None
    found: list[str] = []
    for key, value in zip(node.keys, node.values, strict=True):
        keys = _keys(value, values) if key is None else [_text(key)]
        if keys is None or None in keys:
            return None
        found += [name for name in keys if name is not None]
    return found


def _model_class(family: Family, preset: str) -> type:
    """Return the class that a preset names in ``architectures``, else the language model."""
    named = family.presets[preset].get("architectures", ())
    for model_class in family.classes[1:]:
        if model_class.__name__ in named:
            return model_class
    return family.causal_lm_class


def _count(model_class: type, config: object) -> int:
    import torch

    with torch.device("meta"):
        model = model_class(config)
    return sum(parameter.numel() for parameter in model.parameters())


def _config_fields(config_class: type) -> dict[str, dict[str, Any]]:
    """Return type and default by field, as the class and its zoo ancestors declare them."""
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
