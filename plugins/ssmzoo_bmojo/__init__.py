"""B'MOJO for Hugging Face: fading and eidetic memory in one layer."""

from ssmzoo import Family, Paper

from .configuration_bmojo import BMojoConfig
from .modeling_bmojo import (
    BMojoForCausalLM,
    BMojoForPairClassification,
    BMojoForSequenceClassification,
    BMojoForTokenClassification,
    BMojoModel,
)

FAMILY = Family(
    name="bmojo",
    config_class=BMojoConfig,
    model_class=BMojoModel,
    causal_lm_class=BMojoForCausalLM,
    sequence_classification_class=BMojoForSequenceClassification,
    token_classification_class=BMojoForTokenClassification,
    pair_classification_class=BMojoForPairClassification,
    paper=Paper(
        title="B'MOJO: Hybrid State Space Realizations of Foundation Models with Eidetic and "
        "Fading Memory",
        authors="Luca Zancato, Arjun Seshadri, Yonatan Dukler, Aditya Golatkar, Yantao Shen, "
        "Benjamin Bowman, Matthew Trager, Alessandro Achille, Stefano Soatto",
        arxiv="2407.06324",
        year=2024,
    ),
    presets={},
    tiny={
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "mixer_types": ["bmojo", "swa", "bmojo_f"],
        "window_size": 4,
        "num_fading_tokens": 2,
        "num_eidetic_tokens": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "ssm_state_size": 4,
        "time_step_rank": 3,
        "tie_memory_proj": False,
    },
    lora_targets=(
        "in_proj",
        "x_proj",
        "dt_proj",
        "out_proj",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    ),
)

__all__ = [
    "FAMILY",
    "BMojoConfig",
    "BMojoForCausalLM",
    "BMojoForPairClassification",
    "BMojoForSequenceClassification",
    "BMojoForTokenClassification",
    "BMojoModel",
]
