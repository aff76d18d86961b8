"""DSS for Hugging Face: diagonal state spaces."""

from ssmzoo import Converter, Family, Paper

from .configuration_dss import DSSConfig
from .convert_dss import from_official, to_official
from .modeling_dss import (
    DSSForCausalLM,
    DSSForImageClassification,
    DSSForPairClassification,
    DSSForSequenceClassification,
    DSSForTokenClassification,
    DSSModel,
)

# common to all of the paper's runs
_PAPER = {
    "architectures": ["DSSForSequenceClassification"],
    "kernel_variant": "softmax",
    "separate_dt_re_im": True,
    "norm_type": "batch",
    "initializer_range": 1.0,
    "classifier_bias": True,
    "num_hidden_layers": 6,
}
_VALUES = {**_PAPER, "input_channels": 1, "vocab_size": 1}
_LISTOPS = {
    **_PAPER,
    "vocab_size": 18,
    "hidden_size": 128,
    "prenorm": False,
    "pooling": "mean",
    "num_labels": 10,
}
_TEXT = {
    **_PAPER,
    "vocab_size": 135,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_labels": 2,
}
_RETRIEVAL = {
    **_PAPER,
    "architectures": ["DSSForPairClassification"],
    "vocab_size": 98,
    "hidden_size": 256,
    "pooling": "mean",
    "num_labels": 2,
}
_IMAGE = {
    **_VALUES,
    "hidden_size": 512,
    "prenorm": False,
    "dropout": 0.2,
    "pooling": "mean",
    "num_labels": 10,
    "kernel_norm_length": 1024,
}
_PATHFINDER = {
    **_VALUES,
    "hidden_size": 256,
    "dropout": 0.1,
    "num_labels": 2,
    "kernel_norm_length": 1024,
}
_PATHX = {
    **_VALUES,
    "hidden_size": 256,
    "pooling": "mean",
    "num_labels": 2,
    "kernel_norm_length": 16384,
    "dt_min": 1e-4,
    "dt_max": 1e-2,
}
_SPEECH = {
    **_VALUES,
    "hidden_size": 128,
    "dropout": 0.1,
    "pooling": "mean",
    "num_labels": 10,
    "kernel_norm_length": 16000,
}
# its Tables 1 and 2, and the ablations of Table 3
_EXP = {"kernel_variant": "exp"}
_NO_SCALE = {"kernel_variant": "exp_no_scale"}
_RANDOM = {"lambda_init": "randn"}
_SHORT = {"max_kernel_length": 128}
# S4D-LegS as in RTF's Table 1: sizes, both directions, GLU
_GATED = {
    **_EXP,
    "separate_dt_re_im": False,
    "conjugate_pairs": True,
    "block": "glu",
    "bidirectional": True,
    "pooling": "mean",
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "dropout": 0.0,
    "dt_max": 1e-1,
    "kernel_norm_length": None,
    "d_state": 32,
}
_SMALL = {**_GATED, "d_state": 2}
_LANGUAGE = {
    "vocab_size": 50304,
    "hidden_size": 768,
    "num_hidden_layers": 16,
    "intermediate_size": 3072,
    "norm_type": "layer",
}

_S4D = {**_LANGUAGE, "d_state": 32, "conjugate_pairs": True}

FAMILY = Family(
    name="dss",
    config_class=DSSConfig,
    model_class=DSSModel,
    causal_lm_class=DSSForCausalLM,
    sequence_classification_class=DSSForSequenceClassification,
    token_classification_class=DSSForTokenClassification,
    pair_classification_class=DSSForPairClassification,
    image_classification_class=DSSForImageClassification,
    paper=Paper(
        title="Diagonal State Spaces are as Effective as Structured State Spaces",
        authors="Ankit Gupta, Albert Gu, Jonathan Berant",
        arxiv="2203.14343",
        year=2022,
    ),
    presets={
        "dss-lra-listops": _LISTOPS,
        "dss-lra-text": _TEXT,
        "dss-lra-retrieval": _RETRIEVAL,
        "dss-lra-image": _IMAGE,
        "dss-lra-pathfinder": _PATHFINDER,
        "dss-lra-pathx": _PATHX,
        "dss-speech-commands": _SPEECH,
        "dss-exp-lra-listops": {**_LISTOPS, **_EXP},
        "dss-exp-lra-text": {**_TEXT, **_EXP},
        "dss-exp-lra-retrieval": {**_RETRIEVAL, **_EXP},
        "dss-exp-lra-image": {**_IMAGE, **_EXP},
        "dss-exp-lra-pathfinder": {**_PATHFINDER, **_EXP},
        "dss-exp-lra-pathx": {**_PATHX, **_EXP},
        "dss-exp-speech-commands": {**_SPEECH, **_EXP},
        "dss-no-scale-lra-listops": {**_LISTOPS, **_NO_SCALE},
        "dss-no-scale-lra-text": {**_TEXT, **_NO_SCALE},
        "dss-no-scale-lra-retrieval": {**_RETRIEVAL, **_NO_SCALE},
        "dss-no-scale-lra-image": {**_IMAGE, **_NO_SCALE},
        "dss-no-scale-lra-pathfinder": {**_PATHFINDER, **_NO_SCALE},
        "dss-no-scale-lra-pathx": {**_PATHX, **_NO_SCALE},
        "dss-no-scale-speech-commands": {**_SPEECH, **_NO_SCALE},
        "dss-random-lra-listops": {**_LISTOPS, **_RANDOM},
        "dss-random-lra-text": {**_TEXT, **_RANDOM},
        "dss-random-lra-image": {**_IMAGE, **_RANDOM},
        "dss-random-lra-pathfinder": {**_PATHFINDER, **_RANDOM},
        "dss-random-lra-pathx": {**_PATHX, **_RANDOM},
        "dss-random-speech-commands": {**_SPEECH, **_RANDOM},
        "dss-short-lra-listops": {**_LISTOPS, **_SHORT},
        "dss-short-lra-text": {**_TEXT, **_SHORT},
        "dss-short-lra-image": {**_IMAGE, **_SHORT},
        "dss-short-lra-pathfinder": {**_PATHFINDER, **_SHORT},
        "dss-short-lra-pathx": {**_PATHX, **_SHORT},
        "dss-short-speech-commands": {**_SPEECH, **_SHORT},
        "dss-s4d-lra-listops": {**_LISTOPS, **_SMALL},
        "dss-s4d-lra-text": {**_TEXT, **_SMALL},
        "dss-s4d-lra-retrieval": {**_RETRIEVAL, **_SMALL},
        "dss-s4d-lra-image": {**_IMAGE, **_GATED, "hidden_size": 512, "dropout": 0.1},
        "dss-s4d-lra-pathfinder": {**_PATHFINDER, **_GATED},
        "dss-s4d-lra-pathx": {**_PATHX, **_GATED},
        "dss-125m": _LANGUAGE,
        "dss-s4d-lin-125m": {**_S4D, "lambda_init": "lin"},
        "dss-s4d-inv-125m": {**_S4D, "lambda_init": "inv"},
        "dss-s4d-legs-125m": _S4D,
    },
    tiny={
        "vocab_size": 96,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "d_state": 6,
        "kernel_variant": "softmax",
        "lambda_init": "randn",
        "kernel_norm_length": 128,
        "separate_dt_re_im": True,
        "dt_min": 0.02,
        "dt_max": 0.5,
        "channels": 2,
    },
    lora_targets=("out_proj",),
    converter=Converter(DSSForSequenceClassification, from_official, to_official),
)
