"""The families of this repository, by name, as its own pyproject.toml registers them; models."""

import copy
import tomllib
from pathlib import Path

import torch

from ssmzoo import load_family

_PROJECT = Path(__file__).parents[1] / "pyproject.toml"
_GROUPS = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]

OURS = tuple(sorted(_GROUPS["ssmzoo.families"]))


def language_model(name, **fields):
    """Return a family's tiny language model, with the same weights each time, for evaluation."""
    family = load_family(name)
    torch.manual_seed(0)
    return family.causal_lm_class(family.config(**{**family.tiny, **fields})).eval()


def replica(model):
    """Return a copy with the same parameters as plain attributes, as DataParallel and FSDP1 do."""
    copied = copy.deepcopy(model)
    for module, original in zip(copied.modules(), model.modules(), strict=True):
        for name, parameter in original._parameters.items():
            if parameter is not None:
                del module._parameters[name]
                vars(module)[name] = parameter
    return copied
