"""COFFEE for Hugging Face: context-selective state-space models, by feedback."""

from ssmzoo import Family, FromAttention, Paper

from .configuration_coffee import CoffeeConfig
from .from_attention import copy, fields, gate
from .images import CoffeeForImageClassification
from .modeling_coffee import (
    CoffeeForCausalLM,
    CoffeeForPairClassification,
    CoffeeForSequenceClassification,
    CoffeeForTokenClassification,
    CoffeeModel,
)

# the recurrence and nothing around it, as everywhere in the paper
_BARE = {
    "block": "bare",
    "num_hidden_layers": 1,
    "norm_type": "none",
    "residual": False,
    "residual_in_fp32": False,
    "use_skip": False,
    "lambda_param": "clamp",
    "ssm_init": "paper",
}
# Appendix F, for symbols 1 to 7, the padding 0, and an id 8 that never comes
_INDUCTION = {
    **_BARE,
    "vocab_size": 9,
    "hidden_size": 16,
    "d_state": 8,
    "head": "nearest_embedding",
    "embedding_init": "orthonormal",
}
_FROZEN = {**_INDUCTION, "frozen_embedding_index": 8}
_NORMAL = {"embedding_init": "normal", "initializer_range": 1.0}
_SMALL = {**_INDUCTION, **_NORMAL, "d_state": 1}
# Appendix I: 25 x 25 pixels, read from four sides
_MNIST = {
    **_BARE,
    "architectures": ["CoffeeForImageClassification"],
    "vocab_size": 1,
    "hidden_size": 25,
    "d_state": 2,
    "num_labels": 10,
}

FAMILY = Family(
    name="coffee",
    config_class=CoffeeConfig,
    model_class=CoffeeModel,
    causal_lm_class=CoffeeForCausalLM,
    sequence_classification_class=CoffeeForSequenceClassification,
    token_classification_class=CoffeeForTokenClassification,
    pair_classification_class=CoffeeForPairClassification,
    image_classification_class=CoffeeForImageClassification,
    paper=Paper(
        title="Context-Selective State Space Models: Feedback is All You Need",
        authors="Riccardo Zattra, Giacomo Baggio, Umberto Casti, Augusto Ferrante, "
        "Francesco Ticozzi",
        arxiv="2510.14027",
        year=2025,
    ),
    presets={
        "coffee-125m": {"hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50304},
        "coffee-350m": {"hidden_size": 1024, "num_hidden_layers": 48, "vocab_size": 50304},
        # Table 1 and, but for their tasks, 3 to 5
        "coffee-induction": _FROZEN,
        # Table 2
        "coffee-induction-8": {**_SMALL, "hidden_size": 8},
        "coffee-induction-4": {**_SMALL, "hidden_size": 4},
        "coffee-induction-2": {**_SMALL, "hidden_size": 2},
        "coffee-induction-1": {**_SMALL, "hidden_size": 1},
        # Section 6: ids 0 (the trigger), 1 and 2 are the paper's symbols 1, 2 and 3
        "coffee-ih0": {
            **_INDUCTION,
            "vocab_size": 3,
            "hidden_size": 2,
            "d_state": 1,
            "ssm_init": "integrator",
            "embedding_init": [[6.0, 6.0], [-10.0, -1.0], [-1.0, -10.0]],
        },
        # Table 6
        "coffee-induction-s6": {**_INDUCTION, **_NORMAL, "variant": "s6"},
        "coffee-induction-token-gate": {**_INDUCTION, "variant": "token_gate"},
        "coffee-induction-no-feedback": {**_FROZEN, "variant": "no_feedback"},
        "coffee-induction-linear-feedback": {**_FROZEN, "variant": "linear_feedback"},
        # Eq. (6), which the paper derives but does not run
        "coffee-induction-input-matrix": {**_FROZEN, "variant": "input_matrix"},
        # Table 7
        "coffee-mnist": _MNIST,
        "coffee-mnist-filtered": {**_MNIST, "output_filter": True},
        "coffee-mnist-s6": {**_MNIST, "variant": "s6"},
        "coffee-mnist-s6-16": {**_MNIST, "variant": "s6", "d_state": 16},
    },
    tiny={
        "vocab_size": 96,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "d_state": 4,
        "output_filter": True,
    },
    lora_targets=("in_proj", "out_proj"),
    from_attention=FromAttention(fields, copy, gate),
)
