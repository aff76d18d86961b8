"""Attention in a sliding window, in turns with a gated linear recurrence."""

from ssmzoo import Family, Paper

from .modeling_window import (
    WindowConfig,
    WindowForCausalLM,
    WindowForSequenceClassification,
    WindowModel,
)

FAMILY = Family(
    name="window",
    config_class=WindowConfig,
    model_class=WindowModel,
    causal_lm_class=WindowForCausalLM,
    sequence_classification_class=WindowForSequenceClassification,
    paper=Paper(
        title="Griffin: Mixing Gated Linear Recurrences with Local Attention",
        authors="De et al.",
        arxiv="2402.19427",
        year=2024,
    ),
    presets={"window-small": {"hidden_size": 256, "num_hidden_layers": 4}},
    tiny={"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2},
    lora_targets=("in_proj", "out_proj"),
)
