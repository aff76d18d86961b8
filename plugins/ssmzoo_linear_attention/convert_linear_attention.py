"""Convert checkpoints to and from the names of flash-linear-attention (fla).

Its RetNet, GLA, DeltaNet, gated DeltaNet, gated DeltaProduct and HGRN2, with their
``config.json``; a field of it that our layer cannot express is refused before a weight is looked
at. A null counts as left out. xLSTM has a file of its own, ``convert_xlstm``.
"""

import json
import re
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ssmzoo.modeling import check_weights

from . import convert_xlstm
from .configuration_linear_attention import LinearAttentionConfig
from .modeling_linear_attention import LinearAttentionForCausalLM

_ADDITIVE = {"feature_map": "identity", "delta_rule": False, "beta": "none"}
# our fields of fla's models, by their model_type
_MODELS: dict[str, dict[str, Any]] = {
    "retnet": {**_ADDITIVE, "decay": "fixed", "rotary": True, "d_conv": None},
    "gla": {**_ADDITIVE, "decay": "channel", "decay_rank": 16, "gate_logit_normalizer": 16.0},
    "delta_net": {"decay": "none"},
    "gated_deltanet": {"decay": "scalar"},
    "gated_deltaproduct": {"decay": "scalar"},
    "hgrn2": {**_ADDITIVE, "decay": "channel", "gate_logit_normalizer": 1.0, "out_norm": "gated"},
}
_MODELS["hgrn2"] |= {"feature_map": "complement", "out_gate": "none", "d_conv": None}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_BACKBONE = ("norm_type", "prenorm", "residual", "directions", "input_channels", "image_size")
# fields of theirs that change no output, and the values that others must have
_IDLE = {
    *PreTrainedConfig().to_dict(),  # which a config.json leaves out where they are usual
    *("auto_map", "torch_dtype", "use_cache"),
    *("attn_mode", "chunk_size", "initializer_range", "max_position_embeddings", "use_l2warp"),
    *("fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy"),
    "share_conv_kernel",  # would show in the weights
}
_NEEDED = {
    **dict.fromkeys(("elementwise_affine", "use_beta", "use_output_norm", "use_gk"), (True,)),
    "use_lower_bound": (True,),
    **dict.fromkeys(("use_short_conv", "use_gv", "norm_first"), (False,)),
    **{"hidden_act": ("swish", "silu"), "qk_norm": ("l2",), "qk_activation": ("silu",)},
}


def from_official(
    state_dict: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], LinearAttentionConfig]:
    """Translate weights by fla's names, and its configuration, into ours; some share memory.

    Raises:
        LookupError: It is none of those models, or a field or a weight is missing, or unknown.
        TypeError: A size is no number.
        ValueError: Our layer has nothing for a field, a shape contradicts the configuration, or
            ``tie_word_embeddings`` is true and the head differs from the embedding.
    """
    if config.get("model_type") == "xlstm":
        return convert_xlstm.from_official(state_dict, config)
    ours = _configuration(config)
    with torch.device("meta"):
        plan = _parts(LinearAttentionForCausalLM(ours).state_dict(), ours)
    theirs = _as_now(state_dict, ours)
    tied = theirs.get("model.embeddings.weight") if ours.tie_word_embeddings else None
    if tied is not None and not theirs.setdefault("lm_head.weight", tied).equal(tied):
        raise ValueError("tie_word_embeddings must be false: lm_head.weight is not the embedding")
    check_weights("a checkpoint of fla", theirs, LinearAttentionForCausalLM, ours, to_official)
    weights = {}
    for own, names in plan.items():
        first, *others = (theirs[name] for name in names)
        weights[own] = torch.cat([first, *others]) if others else first
    return weights, ours


def _as_now(state_dict: dict[str, Tensor], ours: LinearAttentionConfig) -> dict[str, Tensor]:
    """Return weights by the names that fla has now; it had others before February 2025."""
    norm = ".g_norm." if ours.out_gate == "none" else ".g_norm_swish_gate."  # fuse_norm: either
    joined = (2 * (ours.intermediate_size or 0), ours.hidden_size)  # the gate's rows, then up's
    theirs = {}
    for name, tensor in state_dict.items():
        if ours.decay == "scalar" and name.endswith(".attn.D"):  # in early ones, but never read
            continue
        usual = re.sub(r"\.g_norm(_swish_gate)?\.", norm, name)
        if ours.delta_rule:
            usual = usual.replace(".attn.norm.", ".attn.o_norm.")
        name = name if usual in state_dict else usual
        up = name.replace(".mlp.gate_proj.", ".mlp.up_proj.")
        if up not in state_dict and up != name and tensor.shape == joined:
            theirs[name], theirs[up] = tensor.chunk(2)
        else:
            theirs[name] = tensor
    return theirs


def to_official(state_dict: dict[str, Tensor], config: LinearAttentionConfig) -> dict[str, Tensor]:
    """Translate our weights into fla's names, the head included.

    Raises:
        ValueError: The model is none of those of fla.
    """
    if config.beta == "exp":
        return convert_xlstm.to_official(state_dict, config)
    parts = _parts(state_dict, config).values()
    theirs = {name: tensor for part in parts for name, tensor in part.items()}
    return {"lm_head.weight": theirs["model.embeddings.weight"], **theirs}


def _configuration(config: dict[str, Any]) -> LinearAttentionConfig:
    left = {name: value for name, value in config.items() if value is not None}
    kind = str(left.pop("model_type", None))
    if kind not in _MODELS:
        kinds = ", ".join([*_MODELS, "xlstm"])
        raise LookupError(f"config must have a model_type of {kinds}, got {kind}")
    numbers = ("hidden_size", "num_heads", "head_dim", "expand_k", "expand_v", "hidden_ratio")
    for name in (*numbers, "expand_ratio", "num_householder"):
        if not isinstance(left.get(name, 0), int | float):
            raise TypeError(f"{name} must be a number, got {left[name]!r}")
    grouped, delta, product = kind == "gated_deltanet", "delta" in kind, "product" in kind
    try:
        width, heads = left.pop("hidden_size"), left.pop("num_heads")
        if kind == "hgrn2":
            key = value = width // max(heads, 1)
        elif grouped or product:
            key, value = left["head_dim"], int(left.pop("head_dim") * left.pop("expand_v"))
        else:
            expands = left.pop("expand_k"), left.pop("expand_v")
            key, value = (int(width * x) // max(heads, 1) for x in expands)
        fields = {"num_writes": left.pop("num_householder")} if product else {}
        if product and not left.pop("use_forget_gate"):
            fields["decay"] = "none"
        gate = "use_gate" if delta and not product else "use_output_gate"
        if kind != "hgrn2":
            fields["out_gate"] = "silu" if left.pop(gate) else "none"
        inner = 256 * -(-int(width * left.pop("hidden_ratio", 4) * 2 / 3) // 256)
        taps, bare = left.pop("conv_size", 4), kind in ("retnet", "hgrn2")
        convolved = not bare and left.pop("use_short_conv")
        ours = LinearAttentionConfig(
            **{**_fields(kind, taps if convolved else None), **fields},
            **{name: left.pop(name) for name in ("num_hidden_layers", "vocab_size")},
            **{name: left.pop(name, None) for name in _TOKENS},
            hidden_size=width,
            intermediate_size=left.pop("intermediate_size", inner),
            rms_norm_eps=left.pop("norm_eps"),
            tie_word_embeddings=left.pop("tie_word_embeddings", False),
            num_heads=left.pop("num_v_heads", heads) if grouped else heads,
            num_key_heads=heads if grouped else None,
            head_k_dim=key,
            head_v_dim=value,
            beta_scale=2.0 if delta and left.pop("allow_neg_eigval", False) else 1.0,
        )
    except KeyError as error:
        raise LookupError(f"config of a {kind} must have {error}") from None
    needed = {**_NEEDED, "num_kv_heads": (heads,)}
    needed["expand_ratio"] = (key,) if kind == "hgrn2" and width == key * heads else ()
    for name, value in left.items():
        if name in _IDLE or name.startswith("_"):  # _name_or_path and such
            continue
        if value not in needed.get(name, ()):
            must = " or ".join(map(json.dumps, needed.get(name, ()))) or "null"
            raise ValueError(f"{name} of a {kind} must be {must} to convert, got {value!r}")
    return ours


def _fields(kind: str, taps: int | None) -> dict[str, Any]:
    """Return our fields of a model of fla with or without short convolutions."""
    fields = {"mlp_type": "swiglu", "d_conv": taps, **_MODELS[kind]}
    return {**fields, "feature_map": "silu"} if kind == "gla" and taps else fields


def _model_type(config: LinearAttentionConfig) -> str:
    """Return which of fla's models a configuration of ours is."""
    kind = next(kind for kind, fields in _MODELS.items() if fields["decay"] == config.decay)
    kind = "hgrn2" if config.feature_map == "complement" else kind
    kind = "gated_deltaproduct" if config.num_writes > 1 else kind
    names = (*LinearAttentionConfig.__annotations__, *_BACKBONE)
    want = {name: getattr(LinearAttentionConfig, name) for name in names}
    free = ("num_heads", "num_key_heads", "head_k_dim", "head_v_dim", "num_writes")
    want |= {name: getattr(config, name) for name in free}
    want["key_heads"] = config.key_heads if kind == "gated_deltanet" else config.num_heads
    want["beta_scale"] = 1.0 if config.beta_scale <= 1 else 2.0
    want["out_gate"] = "none" if config.out_gate == "none" else "silu"
    want["intermediate_size"] = config.intermediate_size or 0
    want |= _fields(kind, config.d_conv)
    if kind == "gated_deltaproduct" and config.decay == "none":
        want["decay"] = "none"
    if kind == "hgrn2":
        want["head_k_dim"] = want["head_v_dim"] = config.hidden_size // config.num_heads
    others = [f"{n}={getattr(config, n)!r}" for n, v in want.items() if getattr(config, n) != v]
    if others:
        raise ValueError(
            f"config must be of a model of fla ({', '.join(_MODELS)}), "
            f"whose {kind} has no {', '.join(others)}"
        )
    return kind


def _parts(
    weights: dict[str, Tensor], config: LinearAttentionConfig
) -> dict[str, dict[str, Tensor]]:
    """Return, by our names, the tensors by fla's names that make up each of ours."""
    kind, heads = _model_type(config), config.num_heads
    keys, values = config.key_heads * config.head_k_dim, heads * config.head_v_dim
    writes = config.num_writes
    rows = {"q_proj": keys, "k_proj": keys * writes, "v_proj": values * writes}
    convolved = {f"attn.{name[0]}_conv1d.weight": count for name, count in rows.items()}
    rows |= {"gk_proj.0": config.decay_rank or 0, "a_proj": heads * (config.decay == "scalar")}
    rows |= {
        "b_proj": heads * config.delta_rule * writes,
        "g_proj": values * (config.out_gate == "silu"),
    }
    if kind == "hgrn2":
        rows = {"q_proj": keys, "i_proj": values, "f_proj": keys}
    projected = {f"attn.{name}.weight": count for name, count in rows.items() if count}
    stacked = {"mixer.conv1d.weight": convolved, "mixer.in_proj.weight": projected}
    norm = "g_norm" if config.out_gate == "none" else "g_norm_swish_gate"
    renamed = {
        "model.embed_tokens.weight": "model.embeddings.weight",
        "model.lower_bounds.weight": "model.lower_bounds",
        "norm.weight": "attn_norm.weight",
        "mixer.decay_proj.weight": "attn.gk_proj.1.weight",
        "mixer.dt_bias": "attn.gk_proj.1.bias" if kind == "gla" else "attn.dt_bias",
        "mixer.A_log": "attn.A_log",
        "mixer.out_norm.weight": f"attn.{'o_norm' if config.delta_rule else norm}.weight",
        "mixer.out_proj.weight": "attn.o_proj.weight",
    }
    parts = {}
    for own, tensor in weights.items():
        name = re.sub(r"^model\.layers\.\d+\.", "", own)
        counts = stacked.get(name, {renamed.get(name, name): tensor.shape[0]})
        pieces = tensor.split(list(counts.values()))
        parts[own] = {own.removesuffix(name) + n: x for n, x in zip(counts, pieces, strict=True)}
    return parts
