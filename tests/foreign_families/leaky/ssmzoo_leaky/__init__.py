"""A family with an op of its own, in C."""

from ssmzoo import Family, Paper

from .modeling_leaky import (
    LeakyConfig,
    LeakyForCausalLM,
    LeakyForSequenceClassification,
    LeakyModel,
)

FAMILY = Family(
    name="leaky",
    config_class=LeakyConfig,
    model_class=LeakyModel,
    causal_lm_class=LeakyForCausalLM,
    sequence_classification_class=LeakyForSequenceClassification,
    paper=Paper(title="A leaky sum", authors="You", arxiv="0000.00000", year=2026),
    presets={"leaky-small": {"hidden_size": 256, "num_hidden_layers": 4}},
    tiny={"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2},
    lora_targets=("in_proj", "out_proj"),
)
