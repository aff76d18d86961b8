"""Tiny models of transformers' recurrent types, for the tests of ``ssmzoo.accelerate``."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 61
_ATTENTION = {
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48},
    **{"max_position_embeddings": 64},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA2 = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 16}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_MOE_DELTA = {**_ATTENTION, **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16, **_MIXED}
_KDA = {"linear_num_heads": 4, "linear_head_dim": 8, "linear_conv_kernel_dim": 4}

# by model type, what differs from its defaults; kinds of what its recurrent layers run on
SCAN: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "jamba": {
        **_ATTENTION,
        **{"mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 2},
        **{"attn_layer_period": 2, "attn_layer_offset": 1},
        **{"expert_layer_period": 2, "expert_layer_offset": 1},
    },
    "zamba": {
        **_ATTENTION,
        **{"num_key_value_heads": 4, "mamba_d_state": 8, "mamba_dt_rank": 4, "n_mamba_heads": 2},
        **{"num_hidden_layers": 5, "attn_layer_period": 2, "attn_layer_offset": 1},
    },
}
ADDITIVE: dict[str, dict[str, Any]] = {
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 16},
    "bamba": {**_ATTENTION, **_MAMBA2, "mamba_n_groups": 2, "attn_layer_indices": [1]},
    "falcon_h1": {**_ATTENTION, **_MAMBA2, "mamba_d_ssm": 64, "head_dim": 8},
    "granitemoehybrid": {
        **_ATTENTION,
        **_MAMBA2,
        **{"num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 32},
        **{"layer_types": ["mamba", "attention"]},
    },
    "nemotron_h": {
        **_ATTENTION,
        **{"ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2},
        **{"chunk_size": 16, "head_dim": 8, "layers_block_type": ["mamba", "attention", "mlp"]},
    },
    "zamba2": {
        **_ATTENTION,
        **{"num_key_value_heads": 4, "mamba_d_state": 8, "n_mamba_heads": 4, "mamba_headdim": 16},
        **{"chunk_size": 16, "mamba_ngroups": 1, "num_hidden_layers": 3},
        **{"layers_block_type": ["mamba", "mamba", "hybrid"]},
    },
}
DELTA: dict[str, dict[str, Any]] = {
    "qwen3_next": _MOE_DELTA,
    "qwen3_5_text": {**_ATTENTION, **_DELTA, **_MIXED},
    "qwen3_5_moe_text": _MOE_DELTA,
    "olmo_hybrid": {**_ATTENTION, **_DELTA, "linear_num_value_heads": 2, **_MIXED},
    "kimi_linear": {
        **_ATTENTION,
        **_KDA,
        **{"num_key_value_heads": 4, "moe_intermediate_size": 16, "num_experts": 4},
        **{"num_experts_per_token": 2, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        **{"qk_rope_head_dim": 8, **_MIXED},
    },
}
TYPES = {**SCAN, **ADDITIVE, **DELTA}
HYBRID = [name for name in TYPES if name not in ("mamba", "falcon_mamba", "mamba2")]


def settings(model_type: str) -> dict[str, Any]:
    """Return the fields of a tiny configuration."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **TYPES[model_type],
    }


def tiny(model_type: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a tiny model of a type with random weights, in evaluation mode."""
    config = AutoConfig.for_model(model_type, **settings(model_type) | changes)
    torch.manual_seed(seed)
    # float64 has no grouped product of experts
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    with torch.no_grad():  # some types start with weights so small that nothing would show
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and not name.endswith(("A_log", "conv1d.weight")):
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.eval()
