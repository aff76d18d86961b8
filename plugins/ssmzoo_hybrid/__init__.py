"""Hybrids for Hugging Face: layers of several families in one model."""

from ssmzoo import Converter, Family, Paper

from .configuration_hybrid import HybridConfig
from .convert_hybrid import from_official, official_config, to_official
from .modeling_hybrid import (
    HybridForCausalLM,
    HybridForImageClassification,
    HybridForSequenceClassification,
    HybridForTokenClassification,
    HybridModel,
)

# gated DeltaNet, key heads half as wide as value heads
_DELTA = {"family": "linear_attention", "num_heads": 6, "head_v_dim": 256}
_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}
# a window of 2,048 tokens, rotary positions
_WINDOW = {"family": "attention", "sliding_window": 2048, "rope_parameters": _ROTARY}
_SWIGLU = {"mlp_type": "swiglu", "vocab_size": 32000}
# every fourth layer attends to all tokens, as in Qwen3-Next; the others tell positions
_RATIO = ["gated_deltanet", "gated_deltanet", "gated_deltanet", "attention"]
_MAMBA = {"family": "bmojo", "mixer_types": "mamba"}

FAMILY = Family(
    name="hybrid",
    config_class=HybridConfig,
    model_class=HybridModel,
    causal_lm_class=HybridForCausalLM,
    sequence_classification_class=HybridForSequenceClassification,
    token_classification_class=HybridForTokenClassification,
    image_classification_class=HybridForImageClassification,
    paper=Paper(
        title="Samba: Simple Hybrid State Space Models for Efficient Unlimited Context Language "
        "Modeling",
        authors="Liliang Ren, Yang Liu, Yadong Lu, Yelong Shen, Chen Liang, Weizhu Chen",
        arxiv="2406.07522",
        year=2024,
    ),
    presets={
        "gated-deltanet-attention-125m": {
            **{"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 2048},
            **{"mlp_type": "swiglu", "mixers": _RATIO},
            "kinds": {
                "gated_deltanet": {**_DELTA, "num_heads": 4, "head_k_dim": 96, "head_v_dim": 192},
                "attention": {"num_key_value_heads": 4, "qk_norm": True},
            },
        },
        "gated-deltanet-attention-350m": {
            **{"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 2816},
            **{"mlp_type": "swiglu", "mixers": _RATIO},
            "kinds": {
                "gated_deltanet": {**_DELTA, "num_heads": 4},
                "attention": {"num_key_value_heads": 4, "qk_norm": True},
            },
        },
        "samba-421m": {
            **{**_SWIGLU, "hidden_size": 1536, "num_hidden_layers": 12, "intermediate_size": 4096},
            "mixers": ["mamba", "window"],
            "kinds": {"mamba": _MAMBA, "window": {**_WINDOW, "num_attention_heads": 12}},
        },
        "gated-deltanet-h1-0.4b": {
            **{**_SWIGLU, "hidden_size": 1536, "num_hidden_layers": 12, "intermediate_size": 6144},
            "mixers": ["gated_deltanet", "window"],
            "kinds": {
                "gated_deltanet": {**_DELTA, "num_heads": 9},
                "window": {**_WINDOW, "num_attention_heads": 12},
            },
        },
        "gated-deltanet-h1-1.3b": {
            **{**_SWIGLU, "hidden_size": 2304, "num_hidden_layers": 18, "intermediate_size": 6144},
            "mixers": ["gated_deltanet", "window"],
            "kinds": {
                "gated_deltanet": {**_DELTA, "num_heads": 9, "head_k_dim": 192, "head_v_dim": 384},
                "window": {**_WINDOW, "num_attention_heads": 18},
            },
        },
    },
    tiny={
        **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 24},
        "mixers": ["gated_deltanet", "attention", "longhorn", "s4"],
        "kinds": {
            "gated_deltanet": {
                **{"family": "linear_attention", "num_heads": 2, "head_k_dim": 6, "head_v_dim": 5},
                "rotary": True,
            },
            "attention": {
                **{"num_attention_heads": 4, "num_key_value_heads": 2, "qk_norm": True},
                "sliding_window": 5,
            },
            "longhorn": {"d_state": 4, "dt_rank": 3},
            "s4": {"d_state": 4, "n_ssm": 4, "dt_min": 0.02, "dt_max": 0.5},
        },
    },
    lora_targets=("in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "out_proj"),
    converter=Converter(HybridForCausalLM, from_official, to_official, official_config),
)
