"""S5 and the LRU for Hugging Face: one diagonal complex state of a layer."""

import math

from ssmzoo import Converter, Family, Paper

from .configuration_s5 import S5Config
from .convert_s5 import from_official, to_official
from .modeling_s5 import (
    S5ForCausalLM,
    S5ForImageClassification,
    S5ForPairClassification,
    S5ForSequenceClassification,
    S5ForTokenClassification,
    S5Model,
)

# the long range arena: batch norm before each of six layers, the mean of the outputs
_LRA = {"architectures": ["S5ForSequenceClassification"], "norm_type": "batch", "pooling": "mean"}
_LRA |= {"initializer_range": 1.0, "classifier_bias": True, "num_hidden_layers": 6, "num_labels": 2}
_PAIRS = {**_LRA, "architectures": ["S5ForPairClassification"], "vocab_size": 98}
_VALUES = {**_LRA, "input_channels": 1, "vocab_size": 1}
_LISTOPS = {**_LRA, "vocab_size": 18, "hidden_size": 128, "num_labels": 10}
_DEEP = {**_LISTOPS, "num_hidden_layers": 8}
_TEXT = {**_LRA, "vocab_size": 135, "hidden_size": 256, "d_state": 192, "dropout": 0.1}
_RETRIEVAL = {**_PAIRS, "hidden_size": 128, "d_state": 256}
_IMAGE = {**_VALUES, "hidden_size": 512, "d_state": 384, "dropout": 0.1, "num_labels": 10}
_PATHFINDER = {**_VALUES, "hidden_size": 192, "d_state": 256, "bidirectional": True}
_PATHX = {**_PATHFINDER, "hidden_size": 128}
_SPEECH = {**_VALUES, "hidden_size": 96, "d_state": 128, "dropout": 0.1, "num_labels": 35}
_LECUN = {"bidirectional": True, "c_init": "lecun_normal"}
_GATED = {**_LECUN, "activation": "half_glu2"}
_LRU = {"variant": "lru", "activation": "full_glu"}
_MIDDLE = {**_LRU, "r_min": 0.5, "r_max": 0.9}
_OUTER = {**_LRU, "r_min": 0.9, "r_max": 0.999}
_EDGE = {"variant": "lru", "r_min": 0.999, "r_max": 0.9999, "max_phase": math.pi / 10}
_LANGUAGE = {"norm_type": "layer", "num_hidden_layers": 14, "intermediate_size": 3072}
_TINY = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 2, "d_state": 16}

FAMILY = Family(
    name="s5",
    config_class=S5Config,
    model_class=S5Model,
    causal_lm_class=S5ForCausalLM,
    sequence_classification_class=S5ForSequenceClassification,
    token_classification_class=S5ForTokenClassification,
    pair_classification_class=S5ForPairClassification,
    image_classification_class=S5ForImageClassification,
    paper=Paper(
        title="Simplified State Space Layers for Sequence Modeling",
        authors="Jimmy T.H. Smith, Andrew Warrington, Scott W. Linderman",
        arxiv="2208.04933",
        year=2023,
    ),
    presets={
        "s5-lra-listops": {**_DEEP, **_GATED, "d_state": 16, "blocks": 8},
        "s5-lra-text": {**_TEXT, **_GATED, "blocks": 12},
        "s5-lra-retrieval": {**_RETRIEVAL, "bidirectional": True, "blocks": 16},
        "s5-lra-image": {**_IMAGE, **_LECUN, "blocks": 3, "clip_eigs": True},
        "s5-lra-pathfinder": {**_PATHFINDER, "dropout": 0.05, "blocks": 8},
        "s5-lra-pathx": {**_PATHX, "blocks": 16, "c_init": "complex_normal", "dt_min": 1e-4},
        "s5-speech-commands": {**_SPEECH, **_LECUN, "blocks": 16},
        "s5-125m": {**_LANGUAGE, "d_state": 512, "blocks": 8, "clip_eigs": True},
        "lru-lra-listops": {**_LISTOPS, **_LRU, "d_state": 256, "r_max": 0.99},
        "lru-lra-text": {**_TEXT, **_MIDDLE},
        "lru-lra-retrieval": {**_RETRIEVAL, **_MIDDLE, "dropout": 0.1},
        "lru-lra-image": {**_IMAGE, **_OUTER, "input_channels": 3},
        "lru-lra-pathfinder": {**_PATHFINDER, **_OUTER},
        "lru-lra-pathx": {**_PATHX, **_EDGE},
        "lru-125m": {**_LANGUAGE, **_OUTER, "d_state": 256, "num_hidden_layers": 13},
    },
    tiny={**_TINY, "blocks": 2, "dt_min": 0.02, "dt_max": 0.5, "clip_eigs": True},
    lora_targets=("out_proj",),
    converter=Converter(S5ForSequenceClassification, from_official, to_official),
)
