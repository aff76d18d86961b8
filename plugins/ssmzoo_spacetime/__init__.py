"""SpaceTime for Hugging Face: companion state spaces, and closed-loop forecasts."""

from ssmzoo import Converter, Family, Paper

from .configuration_spacetime import SpaceTimeConfig
from .convert_spacetime import from_official, to_official
from .modeling_spacetime import (
    SpaceTimeForCausalLM,
    SpaceTimeForForecasting,
    SpaceTimeForImageClassification,
    SpaceTimeForPairClassification,
    SpaceTimeForSequenceClassification,
    SpaceTimeForTokenClassification,
    SpaceTimeModel,
)

# RTF's Table 1, by the configurations of its code
_SIZES = {"block": "glu", "hidden_size": 256, "num_hidden_layers": 6, "initializer_range": 1.0}
_HEAD = {"norm_type": "batch", "pooling": "mean", "classifier_bias": True, "num_labels": 2}
_LRA = {**_SIZES, **_HEAD, "architectures": ["SpaceTimeForSequenceClassification"]}
_TOKENS = {**_LRA, "d_state": 4, "n_kernels": 1}
_PAIRS = {**_TOKENS, "architectures": ["SpaceTimeForPairClassification"]}
_ONE = {"input_channels": 1, "vocab_size": 1}
_VALUES = {**_LRA, **_ONE, "dropout": 0.1, "mixer_dropout": 0.1, "tie_dropout": True}
_TEN = {"prenorm": False, "num_labels": 10}
_ETT = {"hidden_size": 128, "num_hidden_layers": 1, "n_kernels": 16, "mixer_dropout": 0.25}
_SERIES = {**_ONE, "architectures": ["SpaceTimeForForecasting"], "norm_type": "none"}
_LANGUAGE = {"block": "glu", "num_hidden_layers": 14, "intermediate_size": 3072}
_TINY = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 2, "d_state": 4}

FAMILY = Family(
    name="spacetime",
    config_class=SpaceTimeConfig,
    model_class=SpaceTimeModel,
    causal_lm_class=SpaceTimeForCausalLM,
    sequence_classification_class=SpaceTimeForSequenceClassification,
    token_classification_class=SpaceTimeForTokenClassification,
    pair_classification_class=SpaceTimeForPairClassification,
    image_classification_class=SpaceTimeForImageClassification,
    forecasting_class=SpaceTimeForForecasting,
    paper=Paper(
        title="Effectively Modeling Time Series with Simple Discrete State Spaces",
        authors="Michael Zhang, Khaled K. Saab, Michael Poli, Tri Dao, Karan Goel, Christopher Ré",
        arxiv="2303.09489",
        year=2023,
    ),
    presets={
        "spacetime-lra-listops": {**_TOKENS, **_TEN, "vocab_size": 18},
        "spacetime-lra-text": {**_TOKENS, "vocab_size": 135},
        "spacetime-lra-retrieval": {**_PAIRS, "vocab_size": 98},
        "spacetime-lra-image": {**_VALUES, **_TEN, "hidden_size": 512},
        "spacetime-lra-pathfinder": _VALUES,
        "spacetime-lra-pathx": {**_VALUES, "d_state": 1024},
        "spacetime-ett": {**_SERIES, **_ETT, "preprocess": True, "horizon": 720},
        "spacetime-125m": {**_LANGUAGE, "kernel_init": "xavier"},
    },
    tiny={**_TINY, "n_kernels": 8},
    lora_targets=("out_proj",),
    converter=Converter(SpaceTimeForForecasting, from_official, to_official),
)
