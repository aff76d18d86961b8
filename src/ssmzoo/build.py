"""The model that a recipe asks for: a family of the zoo, a transformers model, or given weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING

from ssmzoo.family import load_family, suggestion
from ssmzoo.recipe import ModelSection

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def build_config(section: ModelSection, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Return the configuration of the model to train, checked against the tokenizer.

    ``vocab_size`` is the tokenizer's length unless the recipe or the preset gives it; the special
    tokens are the tokenizer's unless the recipe gives them.

    Raises:
        LookupError: No such family, preset, model type, weights or field.
        ValueError: A wrong value, or a vocabulary too small for the tokenizer.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    import ssmzoo.auto  # noqa: F401

    given = dict(section.config)
    if section.init_from is not None:
        try:
            config = AutoConfig.from_pretrained(section.init_from)
        except (OSError, ValueError) as error:
            raise _not_found(section.init_from, error) from error
    else:
        if section.preset is None:
            given.setdefault("vocab_size", len(tokenizer))
        try:
            if section.family is not None:
                config = load_family(section.family).config(section.preset, **given)
            else:
                config = _known_class(str(section.config_of), given)(**given)
        except (TypeError, ValueError, StrictDataclassError) as error:
            raise ValueError(f"model.config: {' '.join(str(error).split())}") from error
        for name in _SPECIAL:
            if name not in given:
                setattr(config, name, getattr(tokenizer, name))
    if config.vocab_size < len(tokenizer):
        raise ValueError(
            f"the model's vocab_size must be at least the tokenizer's {len(tokenizer)}, "
            f"got {config.vocab_size}"
        )
    return config


def build_model(section: ModelSection, config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model in float32: new weights from torch's seed, or those of ``init_from``."""
    import torch
    from transformers import AutoModelForCausalLM

    if section.init_from is None:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return load_model(section.init_from)


def load_model(source: str) -> PreTrainedModel:
    """Return the model of a folder or Hub id in float32.

    Raises:
        LookupError: There is none.
    """
    import torch
    from transformers import AutoModelForCausalLM

    import ssmzoo.auto  # noqa: F401

    try:
        with without_bars():
            return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise _not_found(source, error) from error


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep transformers' bars for single weight files off the terminal."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _known_class(model_type: str, given: dict[str, object]) -> type[PreTrainedConfig]:
    """Return transformers' configuration class; it would take an unknown field, so we look."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in (
        MODEL_FOR_CAUSAL_LM_MAPPING
    ):
        raise LookupError(
            f"model.config_of: transformers has no causal language model of type {model_type!r}"
            f"{suggestion(model_type, CONFIG_MAPPING.keys())}"
        )
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in fields(config_class)} | set(config_class.attribute_map)
    for name in given.keys() - known:
        raise LookupError(
            f"model.config: {config_class.__name__} has no field {name!r}{suggestion(name, known)}"
        )
    return config_class


def _not_found(source: str, error: Exception) -> LookupError:
    why = (str(error).strip() or type(error).__name__).splitlines()[0]
    return LookupError(f"model.init_from: no model loads from {source!r}: {why}")
