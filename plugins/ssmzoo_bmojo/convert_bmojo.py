"""From transformers' Mamba checkpoints to ``mixer_types="mamba"``, with equal logits."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM

from ssmzoo.modeling import SSMForCausalLM, check_weights

from .configuration_bmojo import BMojoConfig
from .modeling_bmojo import BMojoForCausalLM

_RENAMED = (
    ("backbone.embeddings.", "model.embed_tokens."),
    ("backbone.norm_f.", "model.norm."),
    ("backbone.layers.", "model.layers."),
    (".mixer.dt_proj.bias", ".mixer.ssm.dt_bias"),
    (".mixer.", ".mixer.ssm."),
)


def from_mamba(model: MambaForCausalLM) -> SSMForCausalLM:
    """Return the same language model as one of ours; its weights are copied.

    Raises:
        ValueError: As :func:`from_official`.
        TypeError: Another model.
    """
    if not isinstance(model, MambaForCausalLM):
        raise TypeError(f"model must be a MambaForCausalLM, got {type(model).__name__}")
    weights, config = from_official(model.state_dict(), model.config.to_dict())
    ours = BMojoForCausalLM(config)
    ours.to(model.dtype)  # pyright: ignore[reportArgumentType]
    ours.load_state_dict(weights)
    return ours.train(model.training)


def from_official(
    state_dict: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], BMojoConfig]:
    """Translate weights and configuration of transformers' Mamba into ours.

    Args:
        state_dict: Weights of a ``MambaForCausalLM``; a tied head may be left out.
        config: Its ``config.json``.

    Returns:
        Weights by our names, sharing memory with the given ones but for those kept in float32, and
        the configuration.

    Raises:
        LookupError: A weight of the model is missing, or one is unknown to Mamba.
        ValueError: Another model's configuration; a Mamba with biases in its projections, without
            one in its convolution, or with another activation; a shape that contradicts it.
    """
    if config.get("model_type") != MambaConfig.model_type:
        raise ValueError(
            f"config must be a config.json of transformers' Mamba, with model_type "
            f"{MambaConfig.model_type!r}, got {config.get('model_type')!r}"
        )
    theirs = MambaConfig.from_dict(config)
    for name, wanted in (("use_bias", False), ("use_conv_bias", True), ("hidden_act", "silu")):
        if getattr(theirs, name) != wanted:
            raise ValueError(
                f"a Mamba to convert must have {name} = {wanted!r}, got {getattr(theirs, name)!r}"
            )
    ours, weights = _configuration(theirs), rename(state_dict)
    if ours.tie_word_embeddings and "model.embed_tokens.weight" in weights:
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    check_weights("a Mamba of transformers", weights, BMojoForCausalLM, ours)
    return weights, ours


def _configuration(config: MambaConfig) -> BMojoConfig:
    return BMojoConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        mixer_types="mamba",
        expand=config.expand,
        d_state=config.state_size,
        d_conv=config.conv_kernel,
        dt_rank=int(config.time_step_rank),
        rms_norm_eps=config.layer_norm_epsilon,
        residual_in_fp32=config.residual_in_fp32,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )


def rename(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the weights of transformers' Mamba by our names."""
    renamed = {}
    for theirs, tensor in weights.items():
        ours = theirs
        for old, new in _RENAMED:
            if old in ours and not (old == ".mixer." and ".mixer.ssm." in ours):
                ours = ours.replace(old, new)
        exact = ours.rpartition(".")[2] in ("A_log", "D", "dt_bias")
        renamed[ours] = (
            tensor.to(torch.promote_types(torch.float32, tensor.dtype)) if exact else tensor
        )
    return renamed
