"""B'MOJO for Hugging Face: fading and eidetic memory in one layer."""

from typing import Any

from ssmzoo import Family, Paper

from .configuration_bmojo import BMojoConfig
from .modeling_bmojo import (
    BMojoForCausalLM,
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


def _presets() -> dict[str, dict[str, Any]]:
    """Return the paper's models and baselines at each of its sizes; counts are in the tests.

    "parallel" has the wiring of the paper's Algorithm 1. B'MOJO's layers have a state-space model
    as wide as the model, attention and a gated MLP; Mamba's and the hybrid's are twice as wide
    inside and have no MLP.
    """
    presets: dict[str, dict[str, Any]] = {}
    for size, (width, heads, bmojo, mamba, hybrid, window) in _SIZES.items():
        common = {"vocab_size": 32000, "hidden_size": width, "num_attention_heads": heads}
        mlp = {"intermediate_size": round(width * 8 / 3 / 64) * 64}
        full = {**common, **mlp, "num_hidden_layers": bmojo, "expand": 1}
        presets[f"bmojo-{size}"] = full
        presets[f"bmojo-f-{size}"] = {**full, "mixer_types": "bmojo_f"}
        presets[f"bmojo-parallel-{size}"] = {**full, "wiring": "parallel", "use_rope": True}
        presets[f"mamba-{size}"] = {**common, "num_hidden_layers": mamba, "mixer_types": "mamba"}
        presets[f"hybrid-{size}"] = {
            **common,
            "num_hidden_layers": hybrid,
            "mixer_types": ["mamba", "swa"],
        }
        presets[f"swa-{size}"] = {
            **{**common, **mlp, "num_hidden_layers": window},
            **{"mixer_types": "swa", "sliding_window": 1024, "use_rope": True},
        }
    return presets


FAMILY = Family(
    name="bmojo",
    config_class=BMojoConfig,
    model_class=BMojoModel,
    causal_lm_class=BMojoForCausalLM,
    sequence_classification_class=BMojoForSequenceClassification,
    token_classification_class=BMojoForTokenClassification,
    pair_classification_class=BMojoForPairClassification,
    paper=Paper(
        title="B'MOJO: Hybrid State Space Realizations of Foundation Models with Eidetic and "
        "Fading Memory",
        authors="Luca Zancato, Arjun Seshadri, Yonatan Dukler, Aditya Golatkar, Yantao Shen, "
        "Benjamin Bowman, Matthew Trager, Alessandro Achille, Stefano Soatto",
        arxiv="2407.06324",
        year=2024,
    ),
    presets=_presets(),
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
)

__all__ = [
    "FAMILY",
    "BMojoConfig",
    "BMojoForCausalLM",
    "BMojoForPairClassification",
    "BMojoForSequenceClassification",
    "BMojoForTokenClassification",
    "BMojoModel",
]
