"""Hybrids for Hugging Face: layers of several families in one model."""

from ssmzoo import Family, Paper

from .configuration_hybrid import HybridConfig
from .modeling_hybrid import (
    HybridForCausalLM,
    HybridForImageClassification,
    HybridForSequenceClassification,
    HybridForTokenClassification,
    HybridModel,
)

FAMILY = Family(
    name="hybrid",
    config_class=HybridConfig,
    model_class=HybridModel,
    causal_lm_class=HybridForCausalLM,
    sequence_classification_class=HybridForSequenceClassification,
    token_classification_class=HybridForTokenClassification,
    image_classification_class=HybridForImageClassification,
    paper=Paper(
        title="An Empirical Study of Mamba-based Language Models",
        authors="Roger Waleffe et al.",
        arxiv="2406.07887",
        year=2024,
    ),
    presets={},
    tiny={
        **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3},
        "mixers": ["linear_attention", "longhorn", "s4"],
        "kinds": {
            "linear_attention": {"num_heads": 2, "head_k_dim": 6, "head_v_dim": 5, "rotary": True},
            "longhorn": {"d_state": 4, "dt_rank": 3},
            "s4": {"d_state": 4, "n_ssm": 4, "dt_min": 0.02, "dt_max": 0.5},
        },
    },
    lora_targets=("in_proj", "out_proj"),
)
