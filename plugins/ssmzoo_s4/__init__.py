"""S4 for Hugging Face: structured state spaces."""

from ssmzoo import Converter, Family, Paper

from .configuration_s4 import S4Config
from .convert_s4 import from_official, to_official
from .modeling_s4 import (
    S4ForCausalLM,
    S4ForImageClassification,
    S4ForPairClassification,
    S4ForSequenceClassification,
    S4ForTokenClassification,
    S4Model,
)

# the runs of DSS's Table 4, which are those of the first release of S4's code
_LRA = {
    "architectures": ["S4ForSequenceClassification"],
    "n_ssm": 1,
    "norm_type": "batch",
    "initializer_range": 1.0,
    "classifier_bias": True,
    "pooling": "mean",
    "hidden_size": 128,
    "num_hidden_layers": 6,
}
_TEN = {"prenorm": False, "num_labels": 10}
_PAIRS = {"architectures": ["S4ForPairClassification"], "num_labels": 2}
_LAST = {**_LRA, "pooling": "last", "num_labels": 2}
_VALUES = {"input_channels": 1, "vocab_size": 1}
# RTF's Table 1, by its Tables 8 and 9 and its code
_BOTH = {**_LRA, "bidirectional": True, "block": "glu", "hidden_size": 256, "num_labels": 2}
_FOUR = {**_BOTH, "d_state": 4}
_OWN = {**_BOTH, **_VALUES, "n_ssm": None}
# RTF's Table 2
_TOKENS = {**_LRA, "architectures": ["S4ForTokenClassification"], "d_state": 1024}
_COPYING = {**_TOKENS, "block": "glu", "hidden_size": 64, "num_hidden_layers": 4}
_LINEAR = {**_TOKENS, "block": "filter", "norm_type": "none", "residual": False}
_DELAY = {**_LINEAR, "hidden_size": 4, "num_hidden_layers": 1, "problem_type": "regression"}
_LANGUAGE = {"n_ssm": 1, "norm_type": "layer", "num_hidden_layers": 16, "intermediate_size": 3072}
_TINY = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 2, "d_state": 8}

FAMILY = Family(
    name="s4",
    config_class=S4Config,
    model_class=S4Model,
    causal_lm_class=S4ForCausalLM,
    sequence_classification_class=S4ForSequenceClassification,
    token_classification_class=S4ForTokenClassification,
    pair_classification_class=S4ForPairClassification,
    image_classification_class=S4ForImageClassification,
    paper=Paper(
        title="Efficiently Modeling Long Sequences with Structured State Spaces",
        authors="Albert Gu, Karan Goel, Christopher Ré",
        arxiv="2111.00396",
        year=2022,
    ),
    presets={
        "s4-lra-listops": {**_LRA, **_TEN, "vocab_size": 18},
        "s4-lra-text": {**_LAST, "vocab_size": 135, "num_hidden_layers": 4},
        "s4-lra-retrieval": {**_LRA, **_PAIRS, "vocab_size": 98, "hidden_size": 256},
        "s4-lra-image": {**_LRA, **_TEN, **_VALUES, "hidden_size": 512, "dropout": 0.2},
        "s4-lra-pathfinder": {**_LAST, **_VALUES, "hidden_size": 256, "dropout": 0.1},
        "s4-lra-pathx": {**_LRA, **_VALUES, "hidden_size": 256, "num_labels": 2},
        "s4-speech-commands": {**_LRA, **_VALUES, "dropout": 0.1, "num_labels": 10},
        "s4-both-lra-listops": {**_FOUR, **_TEN, "vocab_size": 18},
        "s4-both-lra-text": {**_FOUR, "vocab_size": 135},
        "s4-both-lra-retrieval": {**_FOUR, **_PAIRS, "vocab_size": 98},
        "s4-both-lra-image": {**_BOTH, **_TEN, **_VALUES, "hidden_size": 512, "dropout": 0.1},
        "s4-both-lra-pathfinder": _OWN,
        "s4-both-lra-pathx": {**_OWN, "dt_min": 1e-4},
        "s4-copying": {**_COPYING, "vocab_size": 64, "num_labels": 64},
        "s4-delay": {**_DELAY, **_VALUES, "dt_min": 2e-3, "dt_max": 2e-3, "num_labels": 1},
        "s4-125m": _LANGUAGE,
    },
    tiny={**_TINY, "n_ssm": 4, "dt_min": 0.02, "dt_max": 0.5, "block": "glu"},
    lora_targets=("out_proj",),
    converter=Converter(S4ForSequenceClassification, from_official, to_official),
)
