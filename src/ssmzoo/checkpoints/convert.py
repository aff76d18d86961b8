"""Weights of a family's official code as a saved model, and back."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ssmzoo.checkpoints.load import TOKENIZER_FILES, Dtype, load_model, model_folder
from ssmzoo.checkpoints.weights import WEIGHTS, WEIGHTS_INDEX, read_tensors, read_weights
from ssmzoo.family import Converter, claims, family_of, load_family
from ssmzoo.files import (
    appears_whole,
    make_folder_of,
    parse_yaml,
    read_json,
    require_new,
    write_folder,
    write_json,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

_TAKEN = (*TOKENIZER_FILES, "generation_config.json")
OFFICIAL = "official"  # where a family's name may stand: the way back


def to_family(
    source: str | Path,
    family: str,
    output_dir: str | Path,
    *,
    config: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> Path:
    """Save weights of a family's official code as a model of the family.

    Args:
        source: A ``.safetensors`` file, or a folder as ``save_pretrained`` writes it.
        family: The family's name.
        output_dir: The model's folder, new or empty. A tokenizer and a generation configuration
            that lie beside the weights are put there, too.
        config: The official configuration, a JSON file; ``config.json`` beside the weights, if it
            is there, by default.
        overrides: ``KEY=VALUE`` each, the value as YAML, over the file's fields.

    Returns:
        The model's folder.

    Raises:
        LookupError: No such family, or weights or fields that the model needs are missing.
        ValueError: The family has no converter, a file cannot be read, weights and configuration
            do not fit, or the output folder is not empty.
    """
    from huggingface_hub.errors import StrictDataclassError

    loaded = load_family(family)
    converter = loaded.converter
    if converter is None:
        raise ValueError(_none(family))
    target = Path(output_dir)
    require_new(target, "output_dir")
    weights = _read(Path(source).expanduser())
    beside = Path(source).expanduser()
    beside = beside if beside.is_dir() else beside.parent
    told: dict[str, Any] = {}
    if config is not None or (beside / "config.json").is_file():
        told = read_json(beside / "config.json" if config is None else Path(config))
    told |= fields_of_overrides(overrides)
    try:
        ours, ours_config = converter.from_official(weights, told)
    except StrictDataclassError as error:  # a value of another kind than its field
        raise ValueError(" ".join(str(error).split())) from error
    model = _made(converter, ours, ours_config)

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        _take(beside, folder)

    write_folder(target, write)
    return target


def load_hybrid(model: str, dtype: Dtype) -> PreTrainedModel:
    """Return a hybrid, or a Transformer as a hybrid of attention alone.

    Args:
        model: A folder or a Hub id.
        dtype: Of the weights.

    Raises:
        LookupError: There is no such model.
        ValueError: It cannot be loaded, or a hybrid cannot hold it; the message names the field.
    """
    network: Any = load_model(model, model_folder(model), dtype, False)
    if network.config.model_type == "ssmzoo_hybrid":
        return network
    converter = load_family("hybrid").converter
    assert converter is not None
    hybrid = _made(
        converter, *converter.from_official(network.state_dict(), network.config.to_dict())
    )
    hybrid.generation_config = network.generation_config
    return hybrid.eval()


def _made(converter: Converter, weights: dict[str, Tensor], config: Any) -> PreTrainedModel:
    """Return the model of converted weights, which it shares, and their configuration."""
    import torch

    with torch.device("meta"):
        model = converter.model_class(config)
    cast("nn.Module", model).load_state_dict(weights, assign=True)
    model.tie_weights()
    return model


def to_official(model: str | Path, output: str | Path) -> Path:
    """Write a saved model's weights under the names of its family's official code.

    Args:
        model: A folder with a saved model.
        output: A ``.safetensors`` file that is not there yet; of a family that writes the official
            configuration, too (``Converter.official_config``), a folder, new or empty, which also
            gets the model's tokenizer and generation configuration.

    Returns:
        The file or folder.

    Raises:
        ValueError: No such folder, the output is there, the family has no way back, the model is
            not of the class that the official code has, or it has parts that the official model
            lacks.
    """
    folder, target = model_folder(str(model)), Path(output)
    if folder is None:
        raise ValueError(f"source must be a folder with a saved model, got {str(model)!r}")
    config = read_json(folder / "config.json")
    family = family_of(config)
    if family is None:
        raise ValueError(f"{folder} must hold a model of an installed family, and holds another")
    converter = family.converter
    if converter is None or converter.to_official is None:
        raise ValueError(_none(family.name, back=True))
    kind = converter.model_class.__name__
    if kind not in (config.get("architectures") or [kind]):
        raise ValueError(
            f"the official code has a {kind} only, {folder} holds {config['architectures'][0]}"
        )
    ours = family.config_class.from_pretrained(str(folder))
    if converter.official_config is None:
        _require_file(target)
        _write_file(converter.to_official(_read(folder), ours), target)
        return target
    require_new(target, "output")
    told = converter.official_config(ours)
    theirs = converter.to_official(_read(folder), ours)

    def write(unfinished: Path) -> None:
        from huggingface_hub import save_torch_state_dict

        save_torch_state_dict(theirs, unfinished)
        write_json(unfinished / "config.json", told)
        _take(folder, unfinished)

    write_folder(target, write)
    return target


def _require_file(target: Path) -> None:
    if target.suffix != ".safetensors":
        raise ValueError(f"output must end in .safetensors, got {str(target)!r}")
    if target.exists():
        raise ValueError(f"output must be a new file, got {str(target)!r}, which is there")


def _write_file(theirs: dict[str, Tensor], target: Path) -> None:
    from safetensors.torch import save_file

    make_folder_of(target)
    with appears_whole(target) as unfinished:
        # a tied head shares its memory, which safetensors refuses
        save_file({name: tensor.clone() for name, tensor in theirs.items()}, str(unfinished))


def _take(source: Path, target: Path) -> None:
    """Copy the tokenizer and the generation configuration that a folder has."""
    for name in _TAKEN:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _read(source: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    if source.is_dir():
        read_weights(source)  # refuses incomplete weights
        index = source / WEIGHTS_INDEX
        names = set(read_json(index)["weight_map"].values()) if index.exists() else {WEIGHTS}
        files = [source / name for name in sorted(names)]
    elif source.suffix == ".safetensors" and source.is_file():
        read_tensors(source)
        files = [source]
    elif source.is_file():
        raise ValueError(
            f"source must be a .safetensors file, got {str(source)!r}; where you trust it, write "
            "one with torch.load(file, weights_only=True) and safetensors.torch.save_file"
        )
    else:
        raise ValueError(f"source must be a .safetensors file or a folder, no {str(source)!r}")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def fields_of_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return fields by name of ``KEY=VALUE`` each, the value as YAML.

    Raises:
        ValueError: A text has no ``=``, or its value is no YAML.
    """
    fields: dict[str, Any] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"an override must look like trunc_len=1024, got {override!r}")
        try:
            fields[key.strip()] = parse_yaml(value, override)
        except ValueError as error:
            raise ValueError(f"the value of the override {override!r} must be YAML") from error
    return fields


def _none(family: str, *, back: bool = False) -> str:
    """Return the error about a family that has no converter, or no way back."""

    def can(converter: Converter | None) -> bool:
        return converter is not None and not (back and converter.to_official is None)

    able = []
    for name in claims():
        try:
            if can(load_family(name).converter):
                able.append(name)
        except RuntimeError:  # a broken plugin breaks nothing else
            continue
    return (
        f"family {family!r} has no converter{' back' if back else ''}; "
        f"families that have one: {', '.join(able) or 'none'}"
    )
