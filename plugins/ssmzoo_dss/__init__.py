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

# what all of the paper's runs have in common
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
        "dss-lra-listops": {
            **_PAPER,
            "vocab_size": 18,
            "hidden_size": 128,
            "prenorm": False,
            "pooling": "mean",
            "num_labels": 10,
        },
        "dss-lra-text": {
            **_PAPER,
            "vocab_size": 135,
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_labels": 2,
        },
        "dss-lra-retrieval": {
            **_PAPER,
            "architectures": ["DSSForPairClassification"],
            "vocab_size": 98,
            "hidden_size": 256,
            "pooling": "mean",
            "num_labels": 2,
        },
        "dss-lra-image": {
            **_VALUES,
            "hidden_size": 512,
            "prenorm": False,
            "dropout": 0.2,
            "pooling": "mean",
            "num_labels": 10,
            "kernel_norm_length": 1024,
        },
        "dss-lra-pathfinder": {
            **_VALUES,
            "hidden_size": 256,
            "dropout": 0.1,
            "num_labels": 2,
            "kernel_norm_length": 1024,
        },
        "dss-lra-pathx": {
            **_VALUES,
            "hidden_size": 256,
            "pooling": "mean",
            "num_labels": 2,
            "kernel_norm_length": 16384,
            "dt_min": 1e-4,
            "dt_max": 1e-2,
        },
        "dss-speech-commands": {
            **_VALUES,
            "hidden_size": 128,
            "dropout": 0.1,
            "pooling": "mean",
            "num_labels": 10,
            "kernel_norm_length": 16000,
        },
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

__all__ = [
    "FAMILY",
    "DSSConfig",
    "DSSForCausalLM",
    "DSSForImageClassification",
    "DSSForPairClassification",
    "DSSForSequenceClassification",
    "DSSForTokenClassification",
    "DSSModel",
]
