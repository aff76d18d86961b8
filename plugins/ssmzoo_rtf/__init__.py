"""RTF for Hugging Face: rational transfer functions, and the Hyena operator."""

from ssmzoo import Converter, Family, FromAttention, Paper

from .configuration_rtf import RTFConfig
from .convert_rtf import from_official, to_official
from .from_attention import copy, fields
from .modeling_rtf import (
    RTFForCausalLM,
    RTFForImageClassification,
    RTFForPairClassification,
    RTFForSequenceClassification,
    RTFForTokenClassification,
    RTFModel,
)

# common to all of the paper's classifiers
_LAYERS = {
    "block": "s4",
    "norm_type": "batch",
    "kernel_mode": "truncated",
    "denominator_constraint": "none",
    "coefficient_init": "zeros",
    "num_hidden_layers": 6,
    "num_denominators": 1,
    "pooling": "mean",
    "initializer_range": 1.0,
    "classifier_bias": True,
}
_LRA = {
    **_LAYERS,
    "architectures": ["RTFForSequenceClassification"],
    "bidirectional": True,
    "use_cache": False,
    "hidden_size": 256,
}
_VALUES = {"input_channels": 1, "vocab_size": 1}
_IMAGE = {
    **_LRA,
    **_VALUES,
    "hidden_size": 512,
    "d_state": 64,
    "trunc_len": 1024,
    "prenorm": False,
    "dropout": 0.1,
    "mixer_dropout": 0.1,
    "num_labels": 10,
}
# Table 5
_XAVIER = {**_IMAGE, "coefficient_init": "xavier"}
_MONTEL = {**_XAVIER, "denominator_constraint": "l1_montel", "constraint_margin": 0.0}
# Table 4: 12 layers of 768, GPT-2's vocabulary
_WIKITEXT = {
    "vocab_size": 50264,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 3072,
    "norm_type": "layer",
    "block": "hyena",
    "dropout": 0.25,
    "embedding_dropout": 0.25,
    "mixer_dropout": 0.25,
}

FAMILY = Family(
    name="rtf",
    config_class=RTFConfig,
    model_class=RTFModel,
    causal_lm_class=RTFForCausalLM,
    sequence_classification_class=RTFForSequenceClassification,
    token_classification_class=RTFForTokenClassification,
    pair_classification_class=RTFForPairClassification,
    image_classification_class=RTFForImageClassification,
    paper=Paper(
        title="State-Free Inference of State-Space Models: The Transfer Function Approach",
        authors="Rom N. Parnichkun, Stefano Massaroli, Alessandro Moro, Jimmy T.H. Smith, "
        "Ramin Hasani, Mathias Lechner, Qi An, Christopher Ré, Hajime Asama, Stefano Ermon, "
        "Taiji Suzuki, Atsushi Yamashita, Michael Poli",
        arxiv="2405.06147",
        year=2024,
    ),
    presets={
        # parameters: 124,981,248
        "rtf-hyena-125m": {**_WIKITEXT, "mixer_rank": 384, "d_state": 64},
        "hyena-125m": {**_WIKITEXT, "filter": "implicit", "trunc_len": 1024},
        "rtf-lra-listops": {
            **_LRA,
            "vocab_size": 18,
            "d_state": 4,
            "trunc_len": 2048,
            "prenorm": False,
            "num_labels": 10,
        },
        "rtf-lra-text": {
            **_LRA,
            "vocab_size": 135,
            "d_state": 4,
            "trunc_len": 4096,
            "dropout": 0.1,
            "mixer_dropout": 0.1,
            "num_labels": 2,
        },
        "rtf-lra-retrieval": {
            **_LRA,
            "architectures": ["RTFForPairClassification"],
            "vocab_size": 98,
            "d_state": 4,
            "trunc_len": 4000,
            "num_labels": 2,
        },
        "rtf-lra-image": _IMAGE,
        "rtf-lra-image-xavier": _XAVIER,
        "rtf-lra-image-xavier-montel": _MONTEL,
        "rtf-lra-pathfinder": {
            **_LRA,
            **_VALUES,
            "d_state": 64,
            "num_denominators": 256,
            "trunc_len": 1024,
            "dropout": 0.1,
            "mixer_dropout": 0.1,
            "num_labels": 2,
        },
        "rtf-lra-pathx": {
            **_LRA,
            **_VALUES,
            "d_state": 2048,
            "num_denominators": 256,
            "trunc_len": 16384,
            "num_labels": 2,
        },
        "rtf-speech-commands": {
            **_LRA,
            **_VALUES,
            "hidden_size": 128,
            "d_state": 64,
            "num_denominators": 2,
            "trunc_len": 16000,
            "num_labels": 10,
        },
        "rtf-copying": {
            **_LAYERS,
            "architectures": ["RTFForTokenClassification"],
            "vocab_size": 64,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "d_state": 1024,
            "trunc_len": 2048,
            "coefficient_init": "copying",
            "denominator_constraint": "l1_montel",
            "constraint_margin": 0.0,
            "num_labels": 64,
        },
        "rtf-delay": {
            **_LAYERS,
            **_VALUES,
            "architectures": ["RTFForTokenClassification"],
            "block": "filter",
            "hidden_size": 4,
            "num_hidden_layers": 1,
            "d_state": 1024,
            "trunc_len": 4000,
            "norm_type": "none",
            "residual": False,
            "problem_type": "regression",
            "num_labels": 1,
        },
    },
    tiny={
        "vocab_size": 96,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "d_state": 4,
        "num_denominators": 8,
        "mixer_rank": 5,
    },
    lora_targets=("in_proj", "down_proj", "out_proj"),
    converter=Converter(RTFForCausalLM, from_official, to_official),
    from_attention=FromAttention(fields, copy),
)
