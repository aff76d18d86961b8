"""Longhorn for Hugging Face: state-space models as amortized online learners."""

from ssmzoo import Converter, Family, FromAttention, Paper

from .configuration_longhorn import LonghornConfig
from .convert_longhorn import from_official, to_official
from .from_attention import copy, fields, gate
from .modeling_longhorn import (
    LonghornForCausalLM,
    LonghornForImageClassification,
    LonghornForPairClassification,
    LonghornForSequenceClassification,
    LonghornForTokenClassification,
    LonghornModel,
)

_SIZES = {
    "longhorn-125m": {"hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50304},
    "longhorn-350m": {"hidden_size": 1024, "num_hidden_layers": 48, "vocab_size": 50304},
    "longhorn-1.3b": {"hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 32000},
}
# other initial weights than the authors'; the measurements are in README.md
_QUIET = {"key_init_scale": 8.0, "query_init_scale": 0.1}
# the paper's Section 5.5, in the sizes and with the settings of Vision Mamba, whose recipe it takes
_IMAGES = {
    "architectures": ["LonghornForImageClassification"],
    "num_hidden_layers": 24,
    "image_size": 224,
    "patch_size": 16,
    "rms_norm_eps": 1e-6,
    "out_norm": True,
    "classifier_bias": True,
    "num_labels": 1000,
}
_TINY = {**_IMAGES, "hidden_size": 192}
_SMALL = {**_IMAGES, "hidden_size": 384, "drop_path_rate": 0.05}

FAMILY = Family(
    name="longhorn",
    config_class=LonghornConfig,
    model_class=LonghornModel,
    causal_lm_class=LonghornForCausalLM,
    sequence_classification_class=LonghornForSequenceClassification,
    token_classification_class=LonghornForTokenClassification,
    pair_classification_class=LonghornForPairClassification,
    image_classification_class=LonghornForImageClassification,
    paper=Paper(
        title="Longhorn: State Space Models are Amortized Online Learners",
        authors="Bo Liu, Rui Wang, Lemeng Wu, Yihao Feng, Peter Stone, Qiang Liu",
        arxiv="2407.14207",
        year=2024,
    ),
    presets={
        **_SIZES,
        "longhorn-125m-quiet": {**_SIZES["longhorn-125m"], **_QUIET},
        "longhorn-350m-quiet": {**_SIZES["longhorn-350m"], **_QUIET},
        "longhorn-1.3b-quiet": {**_SIZES["longhorn-1.3b"], **_QUIET},
        "vil-tiny": {**_TINY, "directions": "both-separate"},
        "vil-tiny-shared": {**_TINY, "directions": "both-shared"},
        "vil-small": {**_SMALL, "directions": "both-separate"},
        "vil-small-shared": {**_SMALL, "directions": "both-shared"},
    },
    tiny={
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "d_state": 4,
        "dt_rank": 3,
        "use_bias": True,
        "out_norm": False,
    },
    lora_targets=("in_proj", "x_proj", "dt_proj", "out_proj"),
    converter=Converter(LonghornForCausalLM, from_official, to_official),
    from_attention=FromAttention(fields, copy, gate),
)
