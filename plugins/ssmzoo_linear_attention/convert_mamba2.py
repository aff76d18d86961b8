"""Convert Mamba2's checkpoints: state-spaces' names in and out, transformers' and fla's in.

Their layers are one: a projection gives gate, values, keys, queries and time steps, in this order.
Only the configurations differ, and the name of the embedding.
"""

import json
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ssmzoo.modeling import check_weights

from .configuration_linear_attention import LinearAttentionConfig
from .modeling_linear_attention import LinearAttentionForCausalLM

_MAMBA2: dict[str, Any] = {
    **{"feature_map": "silu", "decay": "scalar", "delta_rule": False, "beta": "dt", "skip": True},
    **{"out_norm": "gated_group", "out_gate": "silu"},
}
# values that Mamba2 has of other fields
_ONLY = ("norm_type", "prenorm", "input_channels", "image_size")
_ONLY = (*_ONLY, "intermediate_size", "rotary", "decay_rank", "gate_rank", "qk_norm")
_ONLY = (*_ONLY, "out_norm_eps", "logit_soft_cap")
# by state-spaces' name: transformers' name, and the value where it is left out
_STATE_SPACES: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 50277),
    "d_model": ("hidden_size", 2560),
    "n_layer": ("num_hidden_layers", 64),
    "residual_in_fp32": ("residual_in_fp32", True),
    "tie_embeddings": ("tie_word_embeddings", True),
    "d_state": ("state_size", 128),
    "d_conv": ("conv_kernel", 4),
    "expand": ("expand", 2),
    "headdim": ("head_dim", 64),
    "ngroups": ("n_groups", 1),
    "conv_bias": ("use_conv_bias", True),
    "bias": ("use_bias", False),
}
# in this order in both directions: the general rule comes last
_OFFICIAL_AND_OURS = (
    ("backbone.embedding.", "model.embed_tokens."),
    ("backbone.norm_f.", "model.norm."),
    (".mixer.norm.", ".mixer.out_norm."),
    ("backbone.", "model."),
)
# fields of theirs that change no output, and the values that others must have
_IDLE = {
    *PreTrainedConfig().to_dict(),
    *("auto_map", "torch_dtype", "use_cache", "initializer_range", "rescale_prenorm_residual"),
    *("fuse_norm", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp"),
    *("A_init_range", "conv_init", "dt_min", "dt_max", "dt_init_floor", "chunk_size"),
    *("time_step_rank", "time_step_min", "time_step_max", "time_step_floor"),
    *("fused_add_norm", "use_mem_eff_path", "attn_cfg"),
}
# transformers writes infinity as an object
_UNLIMITED = [[0.0, float("inf")], (0.0, float("inf")), [0.0, {"__float__": "Infinity"}]]
_NEEDED: dict[str, list[Any]] = {
    **{"use_bias": [False], "hidden_act": ["silu"], "rmsnorm": [True], "rms_norm": [True]},
    **{"norm_before_gate": [False], "D_has_hdim": [False]},
    **{"attn_layer_idx": [[]], "d_intermediate": [0]},
    **{"time_step_limit": _UNLIMITED, "dt_limit": _UNLIMITED},
}


def is_mamba2(config: dict[str, Any]) -> bool:
    """Tell whether another code's configuration is of a Mamba2."""
    own: dict[str, Any] = config.get("ssm_cfg") or {}
    return config.get("model_type") == "mamba2" or own.get("layer") == "Mamba2"


def from_official(
    state_dict: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], LinearAttentionConfig]:
    """Translate weights and configuration into ours; some weights share memory.

    Raises:
        LookupError: A field or a weight is missing, or a weight is unknown.
        TypeError: A size is no number.
        ValueError: Our layer has nothing for a field, a shape contradicts the configuration, or
            embeddings are tied and the head differs.
    """
    ours = _configuration(config)
    theirs = {
        n.replace("backbone.embeddings.", "backbone.embedding."): state_dict[n] for n in state_dict
    }
    tied = theirs.get("backbone.embedding.weight") if ours.tie_word_embeddings else None
    if tied is not None and not theirs.setdefault("lm_head.weight", tied).equal(tied):
        raise ValueError("embeddings must not be tied: lm_head.weight is not the embedding")
    check_weights("a Mamba2 checkpoint", theirs, LinearAttentionForCausalLM, ours, to_official)
    weights = {}
    for name, tensor in theirs.items():
        tensor = _turned(name, tensor, ours, back=False)
        for official, own in _OFFICIAL_AND_OURS:
            name = name.replace(official, own, 1)
        weights[name] = tensor
    return weights, ours


def to_official(state_dict: dict[str, Tensor], config: LinearAttentionConfig) -> dict[str, Tensor]:
    """Translate our weights into state-spaces' names, the head included.

    Raises:
        ValueError: The configuration has what Mamba2 lacks.
    """
    want = {name: getattr(LinearAttentionConfig, name) for name in _ONLY} | _MAMBA2
    others = [f"{n}={getattr(config, n)!r}" for n, v in want.items() if getattr(config, n) != v]
    if others or config.d_conv is None:
        raise ValueError(
            f"config must be Mamba2's, which has no {', '.join(others) or 'd_conv=None'}"
        )
    theirs = {}
    for name, tensor in state_dict.items():
        tensor = _turned(name, tensor, config, back=True)
        for official, own in _OFFICIAL_AND_OURS:
            name = name.replace(own, official, 1)
        theirs[name] = tensor
    return {"lm_head.weight": theirs["backbone.embedding.weight"], **theirs}


def _turned(name: str, tensor: Tensor, config: LinearAttentionConfig, *, back: bool) -> Tensor:
    """Return a tensor with its rows in our order, or ``back`` in theirs."""
    keys, values = config.key_heads * config.head_k_dim, config.num_heads * config.head_v_dim
    if ".mixer.conv1d." in name:
        sizes = [keys, keys, values] if back else [values, keys, keys]
        return torch.cat(tensor.split(sizes)[::-1])
    if not name.endswith(".mixer.in_proj.weight"):
        return tensor
    if back:
        q, k, v, dt, gate = tensor.split([keys, keys, values, config.num_heads, values])
        return torch.cat([gate, v, k, q, dt])
    gate, v, k, q, dt = tensor.split([values, values, keys, keys, config.num_heads])
    return torch.cat([q, k, v, dt, gate])


def _configuration(config: dict[str, Any]) -> LinearAttentionConfig:
    left = {name: value for name, value in config.items() if value is not None}
    left = _renamed(left) if "ssm_cfg" in left else left
    left.pop("model_type", None)
    for name in ("hidden_size", "head_dim", "expand", "vocab_size"):
        if not isinstance(left.get(name, 0), int | float):
            raise TypeError(f"{name} must be a number, got {left[name]!r}")
    try:
        width, size = left.pop("hidden_size"), left.pop("head_dim")
        heads = int(left.pop("expand") * width) // max(size, 1)
        ours = LinearAttentionConfig(
            **_MAMBA2,
            **{name: left.pop(name) for name in ("num_hidden_layers", "vocab_size")},
            **{name: left.pop(name, None) for name in ("bos_token_id", "eos_token_id")},
            pad_token_id=left.pop("pad_token_id", None),
            hidden_size=width,
            rms_norm_eps=left.pop("norm_eps" if "norm_eps" in left else "layer_norm_epsilon"),
            residual_in_fp32=left.pop("residual_in_fp32", True),
            tie_word_embeddings=left.pop("tie_word_embeddings", False),
            num_heads=heads,
            num_key_heads=left.pop("n_groups"),
            head_k_dim=left.pop("state_size"),
            head_v_dim=size,
            d_conv=left.pop("conv_kernel"),
            conv_bias=left.pop("use_conv_bias"),
        )
    except KeyError as error:
        raise LookupError(f"config of a Mamba2 must have {error}") from None
    for name, value in left.items():
        needed = [heads] if name == "num_heads" else _NEEDED.get(name, [])
        if name not in _IDLE and not name.startswith("_") and value not in needed:
            must = json.dumps(needed[0]) if needed else "null"
            raise ValueError(f"{name} of a Mamba2 must be {must} to convert, got {value!r}")
    return ours


def _renamed(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of state-spaces' code by transformers' names."""
    left = {**config, **config["ssm_cfg"]}
    for name in ("ssm_cfg", "layer"):
        del left[name]
    fields = {own: left.pop(name, usual) for name, (own, usual) in _STATE_SPACES.items()}
    fields["vocab_size"] += -fields["vocab_size"] % left.pop("pad_vocab_size_multiple", 8)
    return {**left, **fields, "layer_norm_epsilon": 1e-5}
