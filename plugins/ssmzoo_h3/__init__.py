"""H3 for Hugging Face: state spaces for language, alone and beside attention."""

from ssmzoo import Converter, Family, FromAttention, Paper

from .configuration_h3 import H3Config
from .convert_h3 import from_official
from .from_attention import copy, fields
from .modeling_h3 import (
    H3ForCausalLM,
    H3ForImageClassification,
    H3ForSequenceClassification,
    H3ForTokenClassification,
    H3Model,
)

_PAPER = {"vocab_size": 50264, "norm_type": "layer", "embedding_dropout": 0.1}
_SIZE = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
_125M = {**_PAPER, **dict(zip(_SIZE, (768, 12, 3072, 12), strict=True))}
_355M = {**_PAPER, **dict(zip(_SIZE, (1024, 24, 4096, 16), strict=True))}
_1_3B = {**_PAPER, **dict(zip(_SIZE, (2048, 24, 8192, 16), strict=True))}
_2_7B = {**_PAPER, **dict(zip(_SIZE, (2560, 32, 10240, 20), strict=True))}
_TINY = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 2, "d_state": 8}

FAMILY = Family(
    name="h3",
    config_class=H3Config,
    model_class=H3Model,
    causal_lm_class=H3ForCausalLM,
    sequence_classification_class=H3ForSequenceClassification,
    token_classification_class=H3ForTokenClassification,
    image_classification_class=H3ForImageClassification,
    paper=Paper(
        title="Hungry Hungry Hippos: Towards Language Modeling with State Space Models",
        authors="Daniel Y. Fu, Tri Dao, Khaled K. Saab, Armin W. Thomas, Atri Rudra, "
        "Christopher Ré",
        arxiv="2212.14052",
        year=2023,
    ),
    presets={
        "h3-125m": {**_125M, "attn_layer_idx": [6]},
        "h3-355m": {**_355M, "attn_layer_idx": [8, 16]},
        "h3-1.3b": {**_1_3B, "attn_layer_idx": [8, 16]},
        "h3-2.7b": {**_2_7B, "attn_layer_idx": [8, 16, 24]},
        "h3-2.7b-rotary": {**_2_7B, "attn_layer_idx": [10, 21], "rotary_dim": 64},
        "h3-hybrid-125m": {**_125M, "attn_layer_idx": [1, 8]},
        "h3-pure-125m": _125M,
    },
    tiny={**_TINY, "head_dim": 2, "dt_min": 0.02, "dt_max": 0.5},
    lora_targets=("q_proj", "k_proj", "v_proj", "out_proj"),
    converter=Converter(H3ForCausalLM, from_official),
    from_attention=FromAttention(fields, copy),
)
