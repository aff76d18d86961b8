"""The model that a recipe asks for: a family of the zoo, a transformers model, or given weights."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ssmzoo.checkpoints.load import ask_again, is_local, load_model, vocabulary_size
from ssmzoo.checkpoints.weights import is_sharded
from ssmzoo.environment.messages import first_line, suggestion
from ssmzoo.family import family_of, load_family
from ssmzoo.recipe import ModelSection
from ssmzoo.training.consolidate import load_shards

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ssmzoo.tasks import Supervised

logger = logging.getLogger("ssmzoo")


class NoHeadError(LookupError):
    """This type of model cannot do the task."""


_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def build_config(
    section: ModelSection,
    tokenizer: PreTrainedTokenizerBase | None,
    task: Supervised | None = None,
) -> PreTrainedConfig:
    """Return the configuration of the model to train, checked against the tokenizer and the task.

    ``vocab_size`` is enough for the tokenizer's ids unless the recipe or the preset gives it; the
    special tokens are the tokenizer's unless the recipe gives them. A supervised task sets
    vocabulary, labels, channels and ``problem_type``; they win over a preset's, and the log says
    so.

    Raises:
        LookupError: No such family, preset, model type, weights or field.
        NoHeadError: No head for the task.
        ValueError: A wrong value, a vocabulary too small for the tokenizer, or a field that is not
            the task's.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    import ssmzoo.auto  # noqa: F401

    given = {**section.config, **_task_fields(task, section)}
    if section.init_from is not None:
        local = is_local(section.init_from, "model.init_from")
        try:
            config = AutoConfig.from_pretrained(
                section.init_from, trust_remote_code=False, local_files_only=local, **given
            )
        except (OSError, ValueError) as error:
            raise _not_found(section.init_from, error) from error
    else:
        if section.preset is None and tokenizer is not None:
            given.setdefault("vocab_size", vocabulary_size(tokenizer))
        try:
            if section.family is not None:
                config = load_family(section.family).config(section.preset, **given)
            else:
                config = _stock_config_class(str(section.config_of), section.config, task)(**given)
        except LookupError as error:
            if " has no field " not in str(error):
                raise
            raise LookupError(
                f"model.config: {error}; the fields of another family are replaced all by "
                "--set 'model.config={...}'"
            ) from error
        except (TypeError, ValueError, StrictDataclassError) as error:
            raise ValueError(f"model.config: {' '.join(str(error).split())}") from error
        for name in _SPECIAL:
            if name not in given and tokenizer is not None:
                setattr(config, name, getattr(tokenizer, name))
    _require_fit(config, tokenizer, task)
    if task is not None and task.label_names is not None and "id2label" not in section.config:
        config.id2label = dict(enumerate(task.label_names))
        config.label2id = {name: label for label, name in config.id2label.items()}
    return config


def _require_fit(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    task: Supervised | None,
) -> None:
    """Check that a model fits the inputs of tokenizer and task, and has the task's head."""
    from ssmzoo.modeling import SSMForImageClassification

    if tokenizer is not None and config.vocab_size < (size := vocabulary_size(tokenizer)):
        raise ValueError(
            f"the model's vocab_size must be at least {size}, for the ids of the tokenizer "
            f"{tokenizer.name_or_path or 'bytes'!r}, got {config.vocab_size}"
        )
    channels = getattr(config, "input_channels", None)
    if task is not None and channels != task.input_channels:
        raise ValueError(
            f"the model's input_channels must be the task's, {task.input_channels}, got {channels}"
        )
    kind = model_class(config, task)
    size = getattr(config, "image_size", None)
    if task is not None and (size is not None or issubclass(kind, SSMForImageClassification)):
        wanted = None if task.image_shape is None else task.image_shape[:2]
        got = None if size is None else (config.num_channels, size)
        if got != wanted:
            raise ValueError(
                f"the model's num_channels and image_size must be the task's, {wanted}, got {got}"
            )


def build_model(
    section: ModelSection, config: PreTrainedConfig, task: Supervised | None = None
) -> PreTrainedModel:
    """Return the model in float32: new weights from torch's seed, or those of ``init_from``."""
    import torch

    if section.init_from is not None:
        return _load(section.init_from, config, model_class(config, task))
    model = model_class(config, task)._from_config(config, dtype=torch.float32)
    return cast("PreTrainedModel", model)


def _load(source: str, config: PreTrainedConfig, kind: type[PreTrainedModel]) -> PreTrainedModel:
    """Return the model of a folder or Hub id in float32; its head may be new."""
    folder = Path(source) if Path(source).is_dir() else None
    try:
        if folder is not None and is_sharded(folder):
            return load_shards(folder, kind, config)
        return load_model(source, folder, "float32", False, kind=kind, config=config, new_head=True)
    except (OSError, ValueError) as error:
        raise _not_found(source, error) from error


def model_class(config: PreTrainedConfig, task: Supervised | None = None) -> type[PreTrainedModel]:
    """Return the model with the head for a task; None means language modelling.

    Raises:
        NoHeadError: This type of model has no such head.
    """
    family = family_of(config)
    found: Any = None
    if task is not None and task.kind == "token_pairs":
        found = None if family is None else family.pair_classification_class
    elif task is not None and task.objective == "forecast":
        found = None if family is None else family.forecasting_class
    elif family is not None or not _only_of_families(task):
        found = _heads(task).get(type(config), None)
    if found is None:
        what = "causal_lm" if task is None else f"{task.objective} of {task.kind}"
        raise NoHeadError(f"models of type {config.model_type!r} have no head for {what}")
    return found[0] if isinstance(found, tuple) else found


def _task_fields(task: Supervised | None, section: ModelSection) -> dict[str, object]:
    """Return the fields of the configuration that a task sets, checked against the recipe's."""
    if task is None:
        return {}
    said: dict[str, object] = {}
    if task.num_labels is not None:
        regression = task.objective.endswith("regression")
        said["num_labels"] = task.num_labels
        said["problem_type"] = "regression" if regression else "single_label_classification"
    if section.init_from is None and task.vocab_size is not None:
        said["vocab_size"] = task.vocab_size
    if section.family is not None:
        said["input_channels"] = task.input_channels
    if task.horizon is not None and (section.family is None or _forecasts(section.family)):
        said["horizon"] = task.horizon
    for name, value in section.config.items():
        if said.get(name, value) != value:
            raise ValueError(
                f"model.config.{name} must be absent or the task's, {said[name]!r}, got {value!r}"
            )
    if section.family is not None and section.preset is not None:
        preset = load_family(section.family).presets.get(section.preset, {})
        for name in preset.keys() & said.keys():
            if preset[name] != said[name]:
                logger.warning(
                    "preset %s has %s = %s; the task needs and gets %s",
                    section.preset,
                    name,
                    preset[name],
                    said[name],
                )
    return said


def _forecasts(family: str) -> bool:
    return load_family(family).forecasting_class is not None


def _only_of_families(task: Supervised | None) -> bool:
    """Return whether only families of the zoo have the head and the input for a task."""
    known = ("tokens", "images")
    return task is not None and (task.kind not in known or task.objective == "token_regression")


def _heads(task: Supervised | None) -> Any:
    """Return transformers' mapping from configurations to models with the head for a task."""
    import transformers

    if task is None or task.objective == "causal_lm":
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if task.kind == "images":
        return transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    if task.objective.startswith("token_"):
        return transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    return transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING


def _stock_config_class(
    model_type: str, given: dict[str, object], task: Supervised | None
) -> type[PreTrainedConfig]:
    """Return transformers' configuration class, which takes unknown fields: they raise here."""
    from transformers import CONFIG_MAPPING

    what = "causal language model"
    if task is not None and task.objective != "causal_lm":
        what = f"model for {task.objective} of {task.kind}"
    with suppress(ValueError):  # none of ours, or not installed: the error below says so
        family_of({"model_type": model_type})  # imports it
    known_type = model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] in _heads(task)
    if not known_type or _only_of_families(task):
        told = f"model.config_of: transformers has no {what} of type {model_type!r}"
        if model_type in CONFIG_MAPPING:
            raise NoHeadError(told)
        raise LookupError(f"{told}{suggestion(model_type, CONFIG_MAPPING.keys())}")
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in fields(config_class)} | set(config_class.attribute_map)
    for name in given.keys() - known:
        raise LookupError(
            f"model.config: {config_class.__name__} has no field {name!r}{suggestion(name, known)}"
        )
    return config_class


def _not_found(source: str, error: Exception) -> LookupError:
    ask_again()
    return LookupError(f"model.init_from: no model loads from {source!r}: {first_line(error)}")
