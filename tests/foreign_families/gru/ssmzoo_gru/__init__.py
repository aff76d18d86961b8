"""A GRU: a nonlinear recurrence, token by token in plain torch."""

from ssmzoo import Family, Paper

from .modeling_gru import GRUConfig, GRUForCausalLM, GRUForSequenceClassification, GRUModel

FAMILY = Family(
    name="gru",
    config_class=GRUConfig,
    model_class=GRUModel,
    causal_lm_class=GRUForCausalLM,
    sequence_classification_class=GRUForSequenceClassification,
    paper=Paper(
        title="Learning Phrase Representations using RNN Encoder-Decoder",
        authors="Cho et al.",
        arxiv="1406.1078",
        year=2014,
    ),
    presets={"gru-small": {"hidden_size": 256, "num_hidden_layers": 4}},
    tiny={"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2},
    lora_targets=("in_proj", "out_proj"),
)
