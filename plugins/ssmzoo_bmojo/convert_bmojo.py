"""From transformers' Mamba checkpoints to ``mixer_types="mamba"``, with equal logits."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM

from ssmzoo_bmojo.configuration_bmojo import BMojoConfig
from ssmzoo_bmojo.modeling_bmojo import BMojoForCausalLM

_RENAMED = (
    ("backbone.embeddings.", "model.embed_tokens."),
    ("backbone.norm_f.", "model.norm."),
    ("backbone.layers.", "model.layers."),
    (".mixer.dt_proj.bias", ".mixer.ssm.dt_bias"),
    (".mixer.", ".mixer.ssm."),
)


def from_mamba(model: MambaForCausalLM) -> BMojoForCausalLM:
    """Return the same language model as one of ours; its weights are copied.

    Raises:
        ValueError: A Mamba with biases in its projections, without one in its convolution, or with
            another activation.
        TypeError: Another model.
    """
    if not isinstance(model, MambaForCausalLM):
        raise TypeError(f"model must be a MambaForCausalLM, got {type(model).__name__}")
    config: MambaConfig = model.config
    for name, wanted in (("use_bias", False), ("use_conv_bias", True), ("hidden_act", "silu")):
        if getattr(config, name) != wanted:
            raise ValueError(
                f"a Mamba to convert must have {name} = {wanted!r}, got {getattr(config, name)!r}"
            )
    ours = BMojoForCausalLM(_configuration(config))
    ours.to(model.dtype)  # pyright: ignore[reportArgumentType]
    ours.load_state_dict(rename(model.state_dict()))
    return ours.train(model.training)


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
