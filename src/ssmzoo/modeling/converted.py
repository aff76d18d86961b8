"""What every translation of official weights ends with."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ssmzoo.modeling.configuration import SSMConfig


def check_weights(
    what: str, weights: dict[str, Tensor], kind: type[PreTrainedModel], config: SSMConfig
) -> None:
    """Fail unless translated weights are those of a model of this configuration.

    Args:
        what: What they must come from, for the error: ``"a Longhorn checkpoint"``.
        weights: Under our names.
        kind: The model that they are for.
        config: Its configuration.

    Raises:
        LookupError: One is missing, or unknown.
        ValueError: One has another shape.
    """
    with torch.device("meta"):
        expected = kind(config).state_dict()
    missing = sorted(expected.keys() - weights.keys())
    unknown = sorted(weights.keys() - expected.keys())
    if missing or unknown:
        raise LookupError(
            f"not {what} of this configuration: missing {missing[:3]}, unknown {unknown[:3]}"
        )
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{name} must have shape {list(expected[name].shape)}, got {list(tensor.shape)}"
            )
