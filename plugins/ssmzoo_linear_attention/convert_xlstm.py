"""Convert xLSTM's checkpoints to and from the names of transformers' ``xLSTMForCausalLM``.

The authors' own code calls the embedding ``embedding``; that is read, too. A null counts as left
out.
"""

import re
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ssmzoo.modeling import check_weights, require_fields

from .configuration_linear_attention import LinearAttentionConfig
from .modeling_linear_attention import LinearAttentionForCausalLM

_FIELDS: dict[str, Any] = {
    **{"feature_map": "identity", "d_conv": None, "delta_rule": False, "beta": "exp"},
    **{"decay": "scalar", "gate_logit_normalizer": 1.0, "decay_rank": None, "rotary": False},
    **{"out_norm": "head_layer", "out_gate": "sigmoid", "gate_rank": None, "mlp_type": "swiglu"},
}
_BACKBONE: dict[str, Any] = {
    **{"num_key_heads": None, "skip": False, "norm_type": "rms", "prenorm": True},
    **{"tie_word_embeddings": False, "qk_norm": False, "out_norm_eps": None},
}
# fields of theirs that change no output but roundings
_IDLE = {
    *PreTrainedConfig().to_dict(),
    *("auto_map", "torch_dtype", "use_cache", "mode", "chunk_size", "return_last_states", "eps"),
    *("chunkwise_kernel", "sequence_kernel", "step_kernel", "autocast_kernel_dtype"),
    *("inference_state_dtype", "max_inference_chunksize", "norm_reduction_force_float32"),
}
_NEEDED = {"use_bias": False, "add_out_norm": True, "weight_mode": "single", "gate_soft_cap": 15.0}
_SIZES = ("hidden_size", "num_heads", "ffn_round_up_to_multiple_of")
_FACTORS = ("qk_dim_factor", "v_dim_factor", "ffn_proj_factor")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def from_official(
    state_dict: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], LinearAttentionConfig]:
    """Translate weights by transformers' names, and its configuration, into ours.

    Raises:
        LookupError: A field or a weight is missing, or unknown.
        TypeError: A size is no number.
        ValueError: Our layer has nothing for a field, or a shape contradicts the configuration.
    """
    ours = _configuration(config)
    own = {"embedding.weight": "backbone.embeddings.weight"}
    theirs = {own.get(name, name): tensor for name, tensor in state_dict.items()}
    check_weights("one of xLSTM", theirs, LinearAttentionForCausalLM, ours, to_official)
    with torch.device("meta"):
        plan = _parts(LinearAttentionForCausalLM(ours).state_dict(), ours)
    weights = {}
    for name, parts in plan.items():
        first, *others = (theirs[part] for part in parts)
        weights[name] = torch.cat([first, *others]) if others else first
    return weights, ours


def to_official(state_dict: dict[str, Tensor], config: LinearAttentionConfig) -> dict[str, Tensor]:
    """Translate our weights into transformers' names.

    Raises:
        ValueError: The model is none of xLSTM's.
    """
    require_fields(config, {**_FIELDS, **_BACKBONE})
    parts = _parts(state_dict, config).values()
    return {name: tensor for part in parts for name, tensor in part.items()}


def _configuration(config: dict[str, Any]) -> LinearAttentionConfig:
    left = {name: value for name, value in config.items() if value is not None}
    del left["model_type"]
    for name, twin in (("hidden_size", "embedding_dim"), ("num_hidden_layers", "num_blocks")):
        size = left.pop(twin, None)
        if size is not None and left.setdefault(name, size) != size:
            raise ValueError(f"{twin} of an xlstm must be {name}, {left[name]!r}, got {size!r}")
    for name in (*_SIZES, *_FACTORS):
        if not isinstance(left.get(name, 0), int | float):
            raise TypeError(f"{name} must be a number, got {left[name]!r}")
    try:
        width, heads, step = (left.pop(name) for name in _SIZES)
        factors = [width * left.pop(name) for name in _FACTORS]
        key, value = (int(size) // max(heads, 1) for size in factors[:2])
        ours = LinearAttentionConfig(
            **{**_FIELDS, **{name: left.pop(name, None) for name in _TOKENS}},
            **{name: left.pop(name) for name in ("num_hidden_layers", "vocab_size")},
            hidden_size=width,
            intermediate_size=int((factors[2] + step - 1) // step * step),
            rms_norm_eps=left.pop("norm_eps"),
            tie_word_embeddings=left.pop("tie_word_embeddings", False),
            num_heads=heads,
            head_k_dim=key,
            head_v_dim=value,
            logit_soft_cap=left.pop("output_logit_soft_cap"),
        )
    except KeyError as error:
        raise LookupError(f"config of an xlstm must have {error}") from None
    for name, value in left.items():
        if name not in _IDLE and not name.startswith("_") and _NEEDED.get(name) != value:
            must = _NEEDED.get(name)
            raise ValueError(f"{name} of an xlstm must be {must} to convert, got {value!r}")
    return ours


def _parts(
    weights: dict[str, Tensor], config: LinearAttentionConfig
) -> dict[str, dict[str, Tensor]]:
    """Return, by our names, the tensors by transformers' names that make up each of ours."""
    heads, values = config.num_heads, config.num_heads * config.head_v_dim
    keys = heads * config.head_k_dim
    projected = {"q": keys, "k": keys, "v": values, "fgate_preact": heads, "igate_preact": heads}
    projected["ogate_preact"] = values
    renamed = {
        "model.embed_tokens.weight": "backbone.embeddings.weight",
        "model.norm.weight": "backbone.out_norm.weight",
        "norm.weight": "norm_mlstm.weight",
        "mixer.dt_bias": "mlstm_layer.fgate_preact.bias",
        "mixer.beta_bias": "mlstm_layer.igate_preact.bias",
        "mixer.out_norm.weight": "mlstm_layer.multihead_norm.weight",
        "mixer.out_proj.weight": "mlstm_layer.out_proj.weight",
        "mlp_norm.weight": "norm_ffn.weight",
        "mlp.gate_proj.weight": "ffn.proj_up_gate.weight",
        "mlp.up_proj.weight": "ffn.proj_up.weight",
        "mlp.down_proj.weight": "ffn.proj_down.weight",
    }
    parts = {}
    for own, tensor in weights.items():
        name = re.sub(r"^model\.layers\.\d+\.", "", own)
        before = own.removesuffix(name).replace("model.layers", "backbone.blocks")
        if name == "mixer.in_proj.weight":
            pieces = tensor.split(list(projected.values()))
            names = [f"{before}mlstm_layer.{x}.weight" for x in projected]
            parts[own] = dict(zip(names, pieces, strict=True))
        else:
            parts[own] = {before + renamed.get(name, name): tensor}
    return parts
