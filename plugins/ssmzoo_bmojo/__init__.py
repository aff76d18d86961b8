"""B'MOJO for Hugging Face: fading and eidetic memory in one layer."""

from typing import Any

from ssmzoo import Converter, Family, FromAttention, Paper

from .configuration_bmojo import BMojoConfig
from .convert_bmojo import from_official
from .from_attention import copy, fields, gate
from .modeling_bmojo import (
    BMojoForCausalLM,
    BMojoForImageClassification,
    BMojoForPairClassification,
    BMojoForSequenceClassification,
    BMojoForTokenClassification,
    BMojoModel,
)

# width, query heads, layers of B'MOJO, Mamba, the hybrid and the sliding-window Transformer
_SIZES = {
    "130m": (768, 12, 12, 28, 34, 15),
    "370m": (1024, 16, 21, 51, 62, 27),
    "790m": (1536, 16, 21, 50, 60, 26),
    "1.4b": (2048, 32, 21, 50, 62, 27),
}


def _preset(kind: str, size: str) -> dict[str, Any]:
    """Return one of the paper's models or baselines at one of its sizes; counts are in the tests.

    "bmojo-parallel" has the wiring of the paper's Algorithm 1. B'MOJO's layers have a state-space
    model as wide as the model, attention and a gated MLP; Mamba's and the hybrid's are twice as
    wide inside and have no MLP.
    """
    width, heads, bmojo, mamba, hybrid, window = _SIZES[size]
    common = {"vocab_size": 32000, "hidden_size": width, "num_attention_heads": heads}
    mlp = {"intermediate_size": round(width * 8 / 3 / 64) * 64}
    full = {**common, **mlp, "num_hidden_layers": bmojo, "expand": 1}
    return {
        "bmojo": full,
        "bmojo-f": {**full, "mixer_types": "bmojo_f"},
        "bmojo-parallel": {**full, "wiring": "parallel", "use_rope": True},
        "mamba": {**common, "num_hidden_layers": mamba, "mixer_types": "mamba"},
        "hybrid": {**common, "num_hidden_layers": hybrid, "mixer_types": ["mamba", "swa"]},
        "swa": {
            **{**common, **mlp, "num_hidden_layers": window},
            **{"mixer_types": "swa", "sliding_window": 1024, "use_rope": True},
        },
    }[kind]


FAMILY = Family(
    name="bmojo",
    config_class=BMojoConfig,
    model_class=BMojoModel,
    causal_lm_class=BMojoForCausalLM,
    sequence_classification_class=BMojoForSequenceClassification,
    token_classification_class=BMojoForTokenClassification,
    pair_classification_class=BMojoForPairClassification,
    image_classification_class=BMojoForImageClassification,
    paper=Paper(
        title="B'MOJO: Hybrid State Space Realizations of Foundation Models with Eidetic and "
        "Fading Memory",
        authors="Luca Zancato, Arjun Seshadri, Yonatan Dukler, Aditya Golatkar, Yantao Shen, "
        "Benjamin Bowman, Matthew Trager, Alessandro Achille, Stefano Soatto",
        arxiv="2407.06324",
        year=2024,
    ),
    presets={
        "bmojo-130m": _preset("bmojo", "130m"),
        "bmojo-f-130m": _preset("bmojo-f", "130m"),
        "bmojo-parallel-130m": _preset("bmojo-parallel", "130m"),
        "mamba-130m": _preset("mamba", "130m"),
        "hybrid-130m": _preset("hybrid", "130m"),
        "swa-130m": _preset("swa", "130m"),
        "bmojo-370m": _preset("bmojo", "370m"),
        "bmojo-f-370m": _preset("bmojo-f", "370m"),
        "bmojo-parallel-370m": _preset("bmojo-parallel", "370m"),
        "mamba-370m": _preset("mamba", "370m"),
        "hybrid-370m": _preset("hybrid", "370m"),
        "swa-370m": _preset("swa", "370m"),
        "bmojo-790m": _preset("bmojo", "790m"),
        "bmojo-f-790m": _preset("bmojo-f", "790m"),
        "bmojo-parallel-790m": _preset("bmojo-parallel", "790m"),
        "mamba-790m": _preset("mamba", "790m"),
        "hybrid-790m": _preset("hybrid", "790m"),
        "swa-790m": _preset("swa", "790m"),
        "bmojo-1.4b": _preset("bmojo", "1.4b"),
        "bmojo-f-1.4b": _preset("bmojo-f", "1.4b"),
        "bmojo-parallel-1.4b": _preset("bmojo-parallel", "1.4b"),
        "mamba-1.4b": _preset("mamba", "1.4b"),
        "hybrid-1.4b": _preset("hybrid", "1.4b"),
        "swa-1.4b": _preset("swa", "1.4b"),
    },
    tiny={
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "mixer_types": ["bmojo", "swa", "bmojo_f"],
        "sliding_window": 4,
        "num_fading_tokens": 2,
        "num_eidetic_tokens": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "d_state": 4,
        "dt_rank": 3,
        "tie_memory_proj": False,
    },
    lora_targets=(
        "in_proj",
        "x_proj",
        "dt_proj",
        "out_proj",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    ),
    converter=Converter(BMojoForCausalLM, from_official),
    from_attention=FromAttention(fields, copy, gate),
)
