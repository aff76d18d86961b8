"""RWKV-7 with an op of its own, in C."""

from ssmzoo import Family, Paper

from .modeling_goose import (
    GooseConfig,
    GooseForCausalLM,
    GooseForSequenceClassification,
    GooseModel,
)

FAMILY = Family(
    name="goose",
    config_class=GooseConfig,
    model_class=GooseModel,
    causal_lm_class=GooseForCausalLM,
    sequence_classification_class=GooseForSequenceClassification,
    paper=Paper(
        title='RWKV-7 "Goose" with Expressive Dynamic State Evolution',
        authors="Peng et al.",
        arxiv="2503.14456",
        year=2025,
    ),
    presets={
        "goose-191m": {
            "vocab_size": 65536,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "tie_word_embeddings": False,
        }
    },
    tiny={
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "decay_rank": 4,
        "rate_rank": 4,
        "value_rank": 4,
        "gate_rank": 4,
    },
    lora_targets=("r_proj", "k_proj", "v_proj", "out_proj"),
)
