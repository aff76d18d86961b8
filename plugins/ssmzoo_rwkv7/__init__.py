"""RWKV-7 for Hugging Face: the generalised delta rule with token shift and channel mixing."""

from ssmzoo import Converter, Family, Paper

from .configuration_rwkv7 import RWKV7Config
from .convert_rwkv7 import from_official, to_official
from .modeling_rwkv7 import RWKV7ForCausalLM, RWKV7ForSequenceClassification, RWKV7Model

_RANKS = ("decay_rank", "rate_rank", "value_rank", "gate_rank")
_1024 = {"hidden_size": 1024, "num_hidden_layers": 24}
_2048 = {**_1024, "hidden_size": 2048, **dict(zip(_RANKS, (96, 96, 64, 256), strict=True))}
_2560 = {**_2048, "hidden_size": 2560, "num_hidden_layers": 32, "gate_rank": 320}

FAMILY = Family(
    name="rwkv7",
    config_class=RWKV7Config,
    model_class=RWKV7Model,
    causal_lm_class=RWKV7ForCausalLM,
    sequence_classification_class=RWKV7ForSequenceClassification,
    paper=Paper(
        title='RWKV-7 "Goose" with Expressive Dynamic State Evolution',
        authors="Bo Peng, Ruichong Zhang, Daniel Goldstein, Eric Alcaide, Xingjian Du, Haowen Hou, "
        "Jiaju Lin, Jiaxing Liu, Janna Lu, William Merrill, Guangyu Song, Kaifeng Tan, Saiteja "
        "Utpala, Nathan Wilce, Johan S. Wind, Tianyi Wu, Daniel Wuttke, Christian Zhou-Zheng",
        arxiv="2503.14456",
        year=2025,
    ),
    presets={
        "rwkv7-168m": {"vocab_size": 50304},
        "rwkv7-191m": {},
        "rwkv7-450m": _1024,
        "rwkv7-1.5b": _2048,
        "rwkv7-2.9b": _2560,
    },
    tiny={
        **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16},
        **{"d_channel": 48, "decay_rank": 4, "rate_rank": 4, "value_rank": 4, "gate_rank": 4},
    },
    lora_targets=("r_proj", "k_proj", "v_proj", "out_proj"),
    converter=Converter(RWKV7ForCausalLM, from_official, to_official),
)
