"""Gated linear attention for Hugging Face: the models of ten papers as settings of one layer."""

from ssmzoo import Converter, Family, FromAttention, Paper

from .configuration_linear_attention import LinearAttentionConfig
from .convert_linear_attention import from_official, to_official
from .from_attention import copy, fields, gate
from .modeling_linear_attention import (
    LinearAttentionForCausalLM,
    LinearAttentionForImageClassification,
    LinearAttentionForSequenceClassification,
    LinearAttentionModel,
)

_BARE = {"decay": "none", "delta_rule": False, "beta": "none", "d_conv": None}
_BARE = {**_BARE, "feature_map": "identity"}
_LINEAR = {**_BARE, "feature_map": "elu", "out_norm": "none", "out_gate": "none"}
_RETNET = {**_BARE, "decay": "fixed", "rotary": True, "head_k_dim": 256, "head_v_dim": 512}
_GLA = {**_BARE, "decay": "channel", "gate_logit_normalizer": 16.0, "decay_rank": 16}
_DELTANET = {"decay": "none", "out_gate": "none"}
_KDA = {"decay": "channel", "decay_rank": 128, "gate_rank": 128, "out_gate": "sigmoid"}
_MAMBA2 = {"beta": "dt", "delta_rule": False, "num_key_heads": 1, "head_v_dim": 64, "skip": True}
_MAMBA2 = {**_MAMBA2, "feature_map": "silu", "conv_bias": True, "out_norm": "gated_group"}
_MAMBA2 = {**_MAMBA2, "vocab_size": 50288, "num_hidden_layers": 48}
_HGRN2 = {**_BARE, "feature_map": "complement", "decay": "channel", "gate_logit_normalizer": 1.0}
_HGRN2 = {**_HGRN2, "out_norm": "gated", "out_gate": "none", "rms_norm_eps": 1e-6}
_HGRN2 = {**_HGRN2, "vocab_size": 32000, "tie_word_embeddings": False}
_XLSTM = {**_BARE, "decay": "scalar", "gate_logit_normalizer": 1.0, "beta": "exp"}
_XLSTM = {**_XLSTM, "out_norm": "head_layer", "out_gate": "sigmoid", "logit_soft_cap": 30.0}
_DELTAPRODUCT = {"num_writes": 2, "beta_scale": 2.0, "out_gate": "none", "num_heads": 8}

_SMALL = {"hidden_size": 768, "num_hidden_layers": 12, "mlp_type": "swiglu"}
_MIDDLE = {"hidden_size": 1024, "mlp_type": "swiglu", "intermediate_size": 2816}
_LARGE = {"hidden_size": 2048, "mlp_type": "swiglu", "intermediate_size": 5632, "vocab_size": 32000}

FAMILY = Family(
    name="linear_attention",
    config_class=LinearAttentionConfig,
    model_class=LinearAttentionModel,
    causal_lm_class=LinearAttentionForCausalLM,
    sequence_classification_class=LinearAttentionForSequenceClassification,
    image_classification_class=LinearAttentionForImageClassification,
    paper=Paper(
        title="Gated Delta Networks: Improving Mamba2 with Delta Rule",
        authors="Songlin Yang, Jan Kautz, Ali Hatamizadeh",
        arxiv="2412.06464",
        year=2024,
    ),
    presets={
        "linear-transformer-mnist": {
            **_LINEAR,
            **{"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 1024},
            **{"num_heads": 8, "head_k_dim": 32, "head_v_dim": 32, "norm_type": "layer"},
            "vocab_size": 256,
        },
        "linear-transformer-125m": {
            **{**_LINEAR, "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
            **{"num_heads": 12, "head_k_dim": 64, "head_v_dim": 64, "norm_type": "layer"},
        },
        "retnet-125m": {**_RETNET, **_SMALL, "num_heads": 3, "intermediate_size": 1224},
        "retnet-350m": {**_RETNET, **_MIDDLE, "num_heads": 4, "intermediate_size": 1632},
        "gla-125m": {
            **{**_GLA, **_SMALL, "num_heads": 4, "head_k_dim": 96, "head_v_dim": 192},
            "intermediate_size": 2048,
        },
        "gla-350m": {**_GLA, **_MIDDLE, "num_heads": 4, "head_v_dim": 256},
        "gla-1.3b": {**_GLA, **_LARGE, "num_heads": 4, "head_k_dim": 256, "head_v_dim": 512},
        "deltanet-340m": {**_DELTANET, **_MIDDLE, "num_heads": 8, "vocab_size": 32000},
        "deltanet-1.3b": {**_DELTANET, **_LARGE, "num_heads": 16},
        "gated-deltanet-1.3b": {
            **{**_LARGE, "num_hidden_layers": 21, "num_heads": 6},
            **{"head_k_dim": 256, "head_v_dim": 512},
        },
        "kda-1.3b": {**_KDA, **_LARGE, "num_heads": 16},
        "hgrn2-340m": {**_MIDDLE, **_HGRN2, "num_heads": 8},
        "hgrn2-1.3b": {**_LARGE, **_HGRN2, "num_heads": 16},
        "xlstm-7b": {
            **{**_XLSTM, "num_hidden_layers": 32, "mlp_type": "swiglu", "rms_norm_eps": 1e-6},
            **{"hidden_size": 4096, "intermediate_size": 10944, "tie_word_embeddings": False},
            **{"num_heads": 8, "head_k_dim": 256, "head_v_dim": 512},
        },
        "deltaproduct-392m": {
            **{**_DELTAPRODUCT, **_MIDDLE, "decay": "none", "vocab_size": 32000},
        },
        "gated-deltaproduct-392m": {**_DELTAPRODUCT, **_MIDDLE, "vocab_size": 32000},
        "mamba2-130m": {**_MAMBA2, "num_heads": 24, "num_hidden_layers": 24},
        "mamba2-370m": {**_MAMBA2, "num_heads": 32, "hidden_size": 1024},
        "mamba2-780m": {**_MAMBA2, "num_heads": 48, "hidden_size": 1536},
        "mamba2-1.3b": {**_MAMBA2, "num_heads": 64, "hidden_size": 2048},
        "mamba2-2.7b": {**_MAMBA2, "num_heads": 80, "hidden_size": 2560, "num_hidden_layers": 64},
    },
    tiny={
        **{**_KDA, "decay_rank": 3, "gate_rank": 3, "conv_bias": True},
        **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2},
        **{"num_heads": 4, "num_key_heads": 2, "head_k_dim": 6, "head_v_dim": 5},
    },
    lora_targets=("in_proj", "out_proj"),
    converter=Converter(LinearAttentionForCausalLM, from_official, to_official),
    from_attention=FromAttention(fields, copy, gate),
)
