"""A toy family: a gated short convolution."""

from ssmzoo import Family, Paper

from .modeling_toy import ToyConfig, ToyForCausalLM, ToyForSequenceClassification, ToyModel

FAMILY = Family(
    name="toy",
    config_class=ToyConfig,
    model_class=ToyModel,
    causal_lm_class=ToyForCausalLM,
    sequence_classification_class=ToyForSequenceClassification,
    paper=Paper(title="A toy", authors="You", arxiv="0000.00000", year=2026),
    presets={"toy-small": {"hidden_size": 256, "num_hidden_layers": 4}},
    tiny={"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2},
    lora_targets=("in_proj", "out_proj"),
)
