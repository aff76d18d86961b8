"""A diagonal linear recurrence of complex numbers, as in the LRU."""

from ssmzoo import Family, Paper

from .modeling_spiral import (
    SpiralConfig,
    SpiralForCausalLM,
    SpiralForSequenceClassification,
    SpiralModel,
)

FAMILY = Family(
    name="spiral",
    config_class=SpiralConfig,
    model_class=SpiralModel,
    causal_lm_class=SpiralForCausalLM,
    sequence_classification_class=SpiralForSequenceClassification,
    paper=Paper(
        title="Resurrecting Recurrent Neural Networks for Long Sequences",
        authors="Orvieto et al.",
        arxiv="2303.06349",
        year=2023,
    ),
    presets={"spiral-small": {"hidden_size": 256, "num_hidden_layers": 4}},
    tiny={"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2},
    lora_targets=("in_proj", "out_proj"),
)
