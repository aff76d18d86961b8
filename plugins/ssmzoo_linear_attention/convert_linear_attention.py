"""Convert checkpoints to and from the names of flash-linear-attention (fla) and Kimi Linear.

With their ``config.json``; a field of it that our layer cannot express is refused before a weight
is looked at. A null counts as left out. Mamba2 and xLSTM have files of their own.
"""

import json
import re
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ssmzoo.modeling import check_weights, require_fields

from . import convert_mamba2, convert_xlstm
from .configuration_linear_attention import LinearAttentionConfig
from .modeling_linear_attention import LinearAttentionForCausalLM

_ADDITIVE = {"feature_map": "identity", "delta_rule": False, "beta": "none"}
# our fields of fla's models and Kimi's, by their model_type
_MODELS: dict[str, dict[str, Any]] = {
    "retnet": {**_ADDITIVE, "decay": "fixed", "rotary": True, "d_conv": None},
    "gla": {**_ADDITIVE, "decay": "channel", "decay_rank": 16, "gate_logit_normalizer": 16.0},
    "delta_net": {"decay": "none"},
    "gated_deltanet": {"decay": "scalar"},
    "gated_deltaproduct": {"decay": "scalar"},
    "hgrn2": {**_ADDITIVE, "decay": "channel", "gate_logit_normalizer": 1.0, "out_norm": "gated"},
    "kda": {"decay": "channel", "out_gate": "sigmoid", "gate_bias": True},
    "kimi_linear": {"decay": "channel", "out_gate": "sigmoid"},
    "linear_attn": {**_ADDITIVE, "decay": "none", "d_conv": None, "out_gate": "none"},
}
_MODELS["hgrn2"] |= {"feature_map": "complement", "out_gate": "none", "d_conv": None}
_FEATURES = {("identity", False), ("elu", True)}  # linear_attn's that ours has
_GROUPED = ("gated_deltanet", "kda")  # may have more heads of values than of keys
_SIZED = (*_GROUPED, "gated_deltaproduct", "kimi_linear")  # tell the size of a head's key
# Kimi's names, from which its A_log differs in shape, too
_KIMI = (
    ("model.embeddings.", "model.embed_tokens."),
    (".attn_norm.", ".input_layernorm."),
    (".mlp_norm.", ".post_attention_layernorm."),
    (".attn.f_proj.0.", ".attn.f_a_proj."),
    (".attn.f_proj.1.", ".attn.f_b_proj."),
    (".attn.g_proj.0.", ".attn.g_a_proj."),
    (".attn.g_proj.1.", ".attn.g_b_proj."),
    (".attn.", ".self_attn."),
)
_EMBEDDING = "model.embed_tokens.weight"
_NUMBERS = ("hidden_size", "num_heads", "head_dim", "hidden_ratio", "num_householder")
_NUMBERS = (*_NUMBERS, "expand_k", "expand_v", "expand_ratio")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_BACKBONE = ("norm_type", "prenorm", "input_channels", "image_size")
# fields of theirs that change no output, and the values that others must have
_IDLE = {
    *PreTrainedConfig().to_dict(),  # which a config.json leaves out where they are usual
    *("auto_map", "torch_dtype", "use_cache"),
    *("attn_mode", "chunk_size", "initializer_range", "max_position_embeddings", "use_l2warp"),
    *("fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy"),
    "tie_feature_map_qk",  # of those that are learned
    "share_conv_kernel",  # would show in the weights
}
_NEEDED = {
    **dict.fromkeys(("elementwise_affine", "use_beta", "use_output_norm", "use_gk"), (True,)),
    **dict.fromkeys(("use_short_conv", "use_gv", "norm_first", "safe_gate"), (False,)),
    **{"use_lower_bound": (True,), "norm_q": (False,), "norm_k": (False,)},
    **{"hidden_act": ("swish", "silu"), "qk_norm": ("l2",), "qk_activation": ("silu",)},
}


def from_official(
    state_dict: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], LinearAttentionConfig]:
    """Translate weights by other codes' names, and a configuration, into ours; some share memory.

    Raises:
        LookupError: It is none of their models, or a field or a weight is missing, or unknown.
        TypeError: A size is no number.
        ValueError: Our layer has nothing for a field, a shape contradicts the configuration, or
            ``tie_word_embeddings`` is true and the head differs from the embedding.
    """
    if config.get("model_type") == "xlstm":
        return convert_xlstm.from_official(state_dict, config)
    if convert_mamba2.is_mamba2(config):
        return convert_mamba2.from_official(state_dict, config)
    ours = _configuration(config)
    with torch.device("meta"):
        blank = LinearAttentionForCausalLM(ours).state_dict()
        plan = _parts(blank, ours)
    theirs = _as_now(state_dict, ours)
    (embedding,) = plan[_EMBEDDING]
    tied = theirs.get(embedding) if ours.tie_word_embeddings else None
    if tied is not None and not theirs.setdefault("lm_head.weight", tied).equal(tied):
        raise ValueError("tie_word_embeddings must be false: lm_head.weight is not the embedding")
    check_weights(
        f"a {config['model_type']}", theirs, LinearAttentionForCausalLM, ours, to_official
    )
    weights = {}
    for own, names in plan.items():
        first, *others = (theirs[name] for name in names)
        weights[own] = torch.cat([first, *others]) if others else first.view(blank[own].shape)
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
        # transformers writes so what Kimi publishes otherwise
        usual = usual.replace(".block_sparse_moe.", ".mlp.")
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
    """Translate our weights into other codes' names, the head included.

    Mamba2 goes to state-spaces' names, mLSTM to transformers' of xLSTM, KDA whose gate has no bias
    to Kimi's, the others to fla's.

    Raises:
        ValueError: The model is none of theirs.
    """
    require_fields(config, {})
    if config.beta == "exp":
        return convert_xlstm.to_official(state_dict, config)
    if config.beta == "dt":
        return convert_mamba2.to_official(state_dict, config)
    parts = _parts(state_dict, config)
    theirs = {name: tensor for part in parts.values() for name, tensor in part.items()}
    return {"lm_head.weight": state_dict[_EMBEDDING], **theirs}


def _configuration(config: dict[str, Any]) -> LinearAttentionConfig:
    left = {name: value for name, value in config.items() if value is not None}
    kind = str(left.pop("model_type", None))
    if kind not in _MODELS:
        kinds = ", ".join([*_MODELS, "xlstm", "mamba2"])
        raise LookupError(
            f"config must have a model_type of {kinds}, or an ssm_cfg of layer Mamba2, got {kind}"
        )
    left = _as_kda(left) if kind == "kimi_linear" else left
    for name in _NUMBERS:
        if not isinstance(left.get(name, 0), int | float):
            raise TypeError(f"{name} must be a number, got {left[name]!r}")
    try:
        width = left.pop("hidden_size")
        inner = 256 * -(-int(width * left.pop("hidden_ratio", 4) * 2 / 3) // 256)
        ours = LinearAttentionConfig(
            **_mixer(kind, width, left),
            **{name: left.pop(name) for name in ("num_hidden_layers", "vocab_size")},
            **{name: left.pop(name, None) for name in _TOKENS},
            hidden_size=width,
            intermediate_size=left.pop("intermediate_size", inner),
            rms_norm_eps=left.pop("norm_eps"),
            tie_word_embeddings=left.pop("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise LookupError(f"config of a {kind} must have {error}") from None
    key, heads = ours.head_k_dim, ours.key_heads
    needed = {**_NEEDED, "num_kv_heads": (heads,)}
    needed["expand_ratio"] = (key,) if kind == "hgrn2" and width == key * heads else ()
    for name, value in left.items():
        if name in _IDLE or name.startswith("_"):  # _name_or_path and such
            continue
        if value not in needed.get(name, ()):
            must = " or ".join(map(json.dumps, needed.get(name, ()))) or "null"
            raise ValueError(f"{name} of a {kind} must be {must} to convert, got {value!r}")
    return ours


def _mixer(kind: str, width: int, left: dict[str, Any]) -> dict[str, Any]:
    """Take the fields of a mixer out of those that are ``left``; return ours."""
    heads = left.pop("num_heads")
    if kind == "hgrn2":
        key = value = width // max(heads, 1)
    elif kind in _SIZED:
        key, value = left["head_dim"], int(left.pop("head_dim") * left.pop("expand_v"))
    else:
        expands = left.pop("expand_k"), left.pop("expand_v")
        key, value = (int(width * x) // max(heads, 1) for x in expands)
    taps = left.pop("conv_size", 4)
    convolved = "d_conv" not in _MODELS[kind] and left.pop("use_short_conv")
    fields = {"num_heads": heads, "head_k_dim": key, "head_v_dim": value}
    fields |= _fields(kind, taps if convolved else None, value)
    if kind in _GROUPED:
        fields |= {"num_key_heads": heads, "num_heads": left.pop("num_v_heads", heads)}
    if kind == "linear_attn":
        normed = left.pop("norm_feature_map", False)
        fields["feature_map"] = _feature_map(left.pop("feature_map"), normed)
    if kind == "gated_deltaproduct":
        fields["num_writes"] = left.pop("num_householder")
        fields["decay"] = "scalar" if left.pop("use_forget_gate") else "none"
    if "out_gate" not in fields:
        own = "use_gate" if kind in ("delta_net", "gated_deltanet") else "use_output_gate"
        fields["out_gate"] = "silu" if left.pop(own) else "none"
    if "delta_rule" not in fields:
        fields["beta_scale"] = 2.0 if left.pop("allow_neg_eigval", False) else 1.0
    return fields


def _as_kda(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a Kimi Linear, all of KDA, as fla has it of a KDA."""
    known = CONFIG_MAPPING["kimi_linear"](**config)
    for name, only in (("layer_types", "linear_attention"), ("mlp_layer_types", "dense")):
        if others := sorted({*getattr(known, name)} - {only}):
            raise ValueError(
                f"{name} of a kimi_linear must be {only} in every layer to convert, got {others}"
            )
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "hidden_act")
    left = {name: getattr(known, name) for name in (*names, "tie_word_embeddings", *_TOKENS)}
    left |= {"num_heads": known.linear_num_heads, "head_dim": known.linear_head_dim}
    left |= {"conv_size": known.linear_conv_kernel_dim, "norm_eps": known.rms_norm_eps}
    return {**left, "expand_v": 1, "use_short_conv": True}


def _feature_map(name: str, normed: bool) -> str:
    """Return ours of a linear_attn's feature map, whose outputs may be ``normed`` by its sums."""
    if (name, normed) not in _FEATURES:
        raise ValueError(
            "feature_map of a linear_attn must be 'elu' with norm_feature_map, or 'identity' "
            f"without it, to convert, got {name!r} and {normed}"
        )
    return name


def _fields(kind: str, taps: int | None, value: int) -> dict[str, Any]:
    """Return our fields of a model of theirs with or without short convolutions."""
    fields = {"mlp_type": "swiglu", "d_conv": taps, **_MODELS[kind]}
    if kind in ("kda", "kimi_linear"):  # the size of a head's value
        fields |= {"decay_rank": value, "gate_rank": value}
    return {**fields, "feature_map": "silu"} if kind == "gla" and taps else fields


def _model_type(config: LinearAttentionConfig) -> str:
    """Return which of their models a configuration of ours is."""
    lacks = {kind: _lacking(kind, config) for kind in _MODELS}
    nearest = min(lacks, key=lambda kind: len(lacks[kind]))
    if lacks[nearest]:
        raise ValueError(
            f"config must be of a model that converts ({', '.join(_MODELS)}), "
            f"whose {nearest} has no {', '.join(lacks[nearest])}"
        )
    return nearest


def _lacking(kind: str, config: LinearAttentionConfig) -> list[str]:
    """Return the fields of a configuration that one of their models cannot have."""
    names = (*LinearAttentionConfig.__annotations__, *_BACKBONE)
    want = {name: getattr(LinearAttentionConfig, name) for name in names}
    free = ("num_heads", "num_key_heads", "head_k_dim", "head_v_dim")
    want |= {name: getattr(config, name) for name in free}
    want["key_heads"] = config.key_heads if kind in _GROUPED else config.num_heads
    want["beta_scale"] = 1.0 if config.beta_scale <= 1 else 2.0
    want["out_gate"] = "none" if config.out_gate == "none" else "silu"
    want["intermediate_size"] = config.intermediate_size or 0
    want |= _fields(kind, config.d_conv, config.head_v_dim)
    if kind == "linear_attn" and config.feature_map == "elu":
        want["feature_map"] = config.feature_map
    if kind == "kimi_linear":
        want |= {"head_v_dim": config.head_k_dim, "beta_scale": 1.0, "d_conv": config.d_conv or 4}
    if kind == "gated_deltaproduct":
        want["num_writes"] = config.num_writes
        want["decay"] = "none" if config.decay == "none" else "scalar"
    if kind == "hgrn2":
        want["head_k_dim"] = want["head_v_dim"] = config.hidden_size // config.num_heads
    return [f"{n}={getattr(config, n)!r}" for n, v in want.items() if getattr(config, n) != v]


def _parts(
    weights: dict[str, Tensor], config: LinearAttentionConfig
) -> dict[str, dict[str, Tensor]]:
    """Return, by our names, the tensors by their names that make up each of ours."""
    kind, heads = _model_type(config), config.num_heads
    keys, values = config.key_heads * config.head_k_dim, heads * config.head_v_dim
    decays, gates = {"gla": "gk_proj"}.get(kind, "f_proj"), values * (config.out_gate != "none")
    writes = config.num_writes
    rows = {"q_proj": keys, "k_proj": keys * writes, "v_proj": values * writes}
    convolved = {f"attn.{name[0]}_conv1d.weight": count for name, count in rows.items()}
    rows |= {f"{decays}.0": config.decay_rank or 0, "a_proj": heads * (config.decay == "scalar")}
    rows |= {"b_proj": heads * config.delta_rule * writes}
    rows |= {"g_proj.0": config.gate_rank} if config.gate_rank else {"g_proj": gates}
    if kind == "hgrn2":
        rows = {"q_proj": keys, "i_proj": values, "f_proj": keys}
    projected = {f"attn.{name}.weight": count for name, count in rows.items() if count}
    stacked = {"mixer.conv1d.weight": convolved, "mixer.in_proj.weight": projected}
    norm = "g_norm" if config.out_gate == "none" else "g_norm_swish_gate"
    norm = "o_norm" if config.delta_rule else "norm" if kind == "linear_attn" else norm
    renamed = {
        _EMBEDDING: "model.embeddings.weight",
        "model.lower_bounds.weight": "model.lower_bounds",
        "norm.weight": "attn_norm.weight",
        "mixer.decay_proj.weight": f"attn.{decays}.1.weight",
        "mixer.dt_bias": "attn.gk_proj.1.bias" if kind == "gla" else "attn.dt_bias",
        "mixer.A_log": "attn.A_log",
        "mixer.gate_proj.weight": "attn.g_proj.1.weight",
        "mixer.gate_proj.bias": "attn.g_proj.1.bias",
        "mixer.out_norm.weight": f"attn.{norm}.weight",
        "mixer.out_proj.weight": "attn.o_proj.weight",
    }
    parts = {}
    for own, tensor in weights.items():
        name = re.sub(r"^model\.layers\.\d+\.", "", own)
        counts = stacked.get(name, {renamed.get(name, name): tensor.shape[0]})
        names = [own.removesuffix(name) + theirs for theirs in counts]
        if kind == "kimi_linear":
            names = [_kimi(theirs) for theirs in names]
            tensor = tensor.view(1, 1, -1, 1) if name == "mixer.A_log" else tensor
        pieces = [tensor] if len(names) == 1 else tensor.split(list(counts.values()))
        parts[own] = dict(zip(names, pieces, strict=True))
    return parts


def _kimi(name: str) -> str:
    """Return Kimi's name of a weight of fla's KDA."""
    for theirs, kimi in _KIMI:
        name = name.replace(theirs, kimi)
    return name
