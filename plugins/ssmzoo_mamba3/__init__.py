"""Mamba-3 for Hugging Face: the trapezoidal rule and complex states, on linear attention's op."""

from ssmzoo import Converter, Family, Paper

from .configuration_mamba3 import Mamba3Config
from .convert_mamba3 import from_official, to_official
from .modeling_mamba3 import Mamba3ForCausalLM, Mamba3ForSequenceClassification, Mamba3Model

FAMILY = Family(
    name="mamba3",
    config_class=Mamba3Config,
    model_class=Mamba3Model,
    causal_lm_class=Mamba3ForCausalLM,
    sequence_classification_class=Mamba3ForSequenceClassification,
    paper=Paper(
        title="Mamba-3: Improved Sequence Modeling using State Space Principles",
        authors="Aakash Lahoti, Kevin Y. Li, Berlin Chen, Caitlin Wang, Aviv Bick, J. Zico Kolter, "
        "Tri Dao, Albert Gu",
        arxiv="2603.15569",
        year=2026,
    ),
    presets={
        "mamba3-130m": {"vocab_size": 50288},
        "mamba3-1.4b": {
            **{"vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 48},
            "tie_word_embeddings": False,
        },
    },
    tiny={
        **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "d_state": 8},
        **{"head_dim": 16, "n_groups": 2, "out_norm": True},
    },
    lora_targets=("in_proj", "out_proj"),
    converter=Converter(Mamba3ForCausalLM, from_official, to_official),
)
