"""Checkpoints of ``awslabs/hybrid-model-factory`` as the hybrids that they are.

Their bodies are Llama's, Qwen2's and Qwen3's. Layers that attend ("*", "SWA") stay what they are;
"GDN" and "M2" are gated DeltaNet and Mamba2 of the family linear attention. In those, queries share
heads of keys and values; ours have a copy of them for each query head, so nothing goes back. "BMF"
is B'MOJO-F, which has one of those two for its state-space model.
"""

import re
from typing import Any

import torch
from torch import Tensor

from .configuration_hybrid import HybridConfig

BODIES = {f"hybrid_{body}": body for body in ("llama", "qwen2", "qwen3")}
_PATTERN = "hybrid_override_pattern"
_KINDS = {"*": "attention", "SWA": "window", "GDN": "gated_deltanet", "M2": "mamba2"}
_KINDS["BMF"] = "bmojo_f"
_MIXERS = {"*": "self_attn.", "SWA": "swa.", "GDN": "gdn.", "M2": "mamba.", "BMF": "bmojo_f."}
_SSMS = {"mamba2": "M2", "gdn": "GDN", "gated_deltanet": "GDN"}  # of "BMF", by their names
# fields that their attention does not read, or that are of layers
_OWN = {_PATTERN, "layer_types", "base_model_name_or_path", "max_window_layers", "sliding_window"}
_OWN |= {f"{kind}_config" for kind in ("swa", "gdn", "mamba2", "gka", "bmojo")}
_OWN |= {"use_sliding_window"}
_RENAMED = {"o_norm": "out_norm", "norm": "out_norm", "o_proj": "out_proj"}
_RENAMED |= {"C_norm": "q_norm", "B_norm": "k_norm"}


def body_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` of the Transformer that a checkpoint's layers replaced."""
    body = {name: value for name, value in config.items() if name not in _OWN}
    return {**body, "model_type": BODIES[config["model_type"]]}


def hybrid_of(config: dict[str, Any], body: HybridConfig) -> HybridConfig:
    """Return a checkpoint's configuration as ours.

    Args:
        config: Its ``config.json``.
        body: The hybrid of attention alone that its body is.

    Raises:
        LookupError: The window of "SWA" is missing.
        ValueError: A kind of layer, or a field of one, that ours have nothing for.
    """
    types = _types(config)
    if others := sorted({*types} - _KINDS.keys()):
        raise ValueError(
            f"{_PATTERN} must be of {', '.join(_KINDS)} to convert, got {', '.join(others)}"
        )
    attention = body.kinds["attention"]
    heads, size = attention["num_attention_heads"], attention["head_dim"]
    every = {"family": "linear_attention", "num_heads": heads}
    every |= {"head_k_dim": size, "head_v_dim": size}
    kinds: dict[str, dict[str, Any]] = {"*": attention, "SWA": dict(attention)}
    if "SWA" in types:
        window = (config.get("swa_config") or {}).get("window_size")
        if window is None:
            raise LookupError("config must have swa_config with window_size for layers 'SWA'")
        kinds["SWA"]["sliding_window"] = window
    kinds["GDN"] = every | _gdn(config.get("gdn_config") or {})
    kinds["M2"] = every | _mamba2(config, body)
    if "BMF" in types:
        kinds["BMF"] = _bmojo_f(config, body, kinds[_ssm_of(config)])
    used = dict.fromkeys(types)
    return HybridConfig.from_dict(
        body.to_dict(),
        mixers=[_KINDS[kind] for kind in types],
        kinds={_KINDS[kind]: kinds[kind] for kind in used},
    )


def as_body(
    state_dict: dict[str, Tensor], config: dict[str, Any], body: HybridConfig
) -> dict[str, Tensor]:
    """Return weights with those of mixers below ``self_attn``, as a body's, but by our names."""
    attention, types = body.kinds["attention"], _types(config)
    groups, heads = attention["num_key_value_heads"], attention["num_attention_heads"]
    size, weights = attention["head_dim"], dict[str, Tensor]()
    layers: list[dict[str, Tensor]] = [{} for _ in types]
    for name, tensor in state_dict.items():
        found = re.fullmatch(r"model\.layers\.(\d+)\.(\w+\.)(.*)", name)
        index = len(types) if found is None else int(found[1])
        if found is not None and index < len(types) and found[2] == _MIXERS[types[index]]:
            layers[index][found[3]] = tensor
        else:
            weights[name] = tensor
    sizes = groups, heads, size
    for index, (kind, mixer) in enumerate(zip(types, layers, strict=True)):
        own = _of_mixer(kind, mixer, config, *sizes)
        weights |= {f"model.layers.{index}.self_attn.{name}": x for name, x in own.items()}
    return weights


def _of_mixer(
    kind: str, mixer: dict[str, Tensor], config: dict[str, Any], *sizes: int
) -> dict[str, Tensor]:
    """Return a mixer's weights by our names; those of unknown parts as they are."""
    if kind == "BMF":
        return _of_bmojo_f(mixer, config, *sizes)
    if kind == "GDN":
        mixer = _stacked_gdn(mixer, *sizes[:2])
    elif kind == "M2":
        mixer = _turned_mamba2(mixer, *sizes)
    else:
        return mixer
    named = {}
    for name, tensor in mixer.items():
        part, _, rest = name.partition(".")
        named[f"{_RENAMED.get(part, part)}.{rest}" if rest else name] = tensor
    return named


def _of_bmojo_f(mixer: dict[str, Tensor], config: dict[str, Any], *sizes: int) -> dict[str, Tensor]:
    kind = _ssm_of(config)
    parts = {"bmojo_attn.": "attention.", _MIXERS[kind]: "ssm."}
    ssm, named = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in mixer.items():
        begin = next((x for x in parts if name.startswith(x)), "")
        rest = name.removeprefix(begin)
        if parts.get(begin) == "ssm.":
            ssm[rest] = tensor
        else:
            named[parts.get(begin, "") + rest] = tensor
    own = _of_mixer(kind, ssm, config, *sizes)
    return {**named, **{f"ssm.{name}": tensor for name, tensor in own.items()}}


def _types(config: dict[str, Any]) -> list[str]:
    return str(config.get(_PATTERN)).split("-")


def _ssm_of(config: dict[str, Any]) -> str:
    """Return the kind of layer whose mixer is the state-space model of "BMF"."""
    given = str((config.get("bmojo_config") or {}).get("ssm_mixer", "mamba2"))
    if given.lower() not in _SSMS:
        raise ValueError(
            f"ssm_mixer of bmojo_config must be of {', '.join(_SSMS)} to convert, got {given!r}"
        )
    return _SSMS[given.lower()]


def _bmojo_f(config: dict[str, Any], body: HybridConfig, ssm: dict[str, Any]) -> dict[str, Any]:
    """Return our fields of B'MOJO-F layers, of their configuration and state-space model."""
    given, attention = config.get("bmojo_config") or {}, body.kinds["attention"]
    rope, heads = attention["rope_parameters"], attention["num_attention_heads"]
    inner, normed = heads * attention["head_dim"], attention["qk_norm"]
    for name, met, must in (
        ("tie_attn_weights of bmojo_config", given.get("tie_attn_weights", True), "true"),
        ("rope_type", rope["rope_type"] == "default", "default for layers 'BMF'"),
        # their softmax is scaled by it
        ("head_dim", normed or inner == body.hidden_size, "hidden_size / num_attention_heads"),
    ):
        if not met:
            raise ValueError(f"{name} must be {must} to convert")
    window = given.get("window_size", 2048)
    same = ("num_attention_heads", "num_key_value_heads", "head_dim", "qk_norm")
    same += ("attention_bias", "attention_out_bias")
    return {
        **{"family": "bmojo", "mixer_types": "bmojo_f", "wiring": "parallel", "use_rope": True},
        **{"rope_theta": rope["rope_theta"], "fading_mode": "offset"},
        **{"sliding_window": window, "num_fading_tokens": window},
        **{name: attention[name] for name in same},
        "ssm": ssm,
    }


def _gdn(given: dict[str, Any]) -> dict[str, Any]:
    """Return our fields of gated DeltaNet layers, of their configuration."""
    if given.get("kv_proj_rank") is not None:
        raise ValueError(
            f"kv_proj_rank of gdn_config must be null to convert, got {given['kv_proj_rank']!r}"
        )
    return {
        "d_conv": given.get("conv_size", 4) if given.get("use_short_conv", True) else None,
        "conv_bias": given.get("conv_bias", False),
        "beta_scale": 2.0 if given.get("allow_neg_eigval", False) else 1.0,
        "out_gate": "silu" if given.get("use_gate", True) else "none",
        "out_norm_eps": given.get("norm_eps", 1e-5),
    }


def _mamba2(config: dict[str, Any], body: HybridConfig) -> dict[str, Any]:
    """Return our fields of Mamba2 layers."""
    given = config.get("mamba2_config") or {}
    types = _types(config)
    normed = BODIES[config["model_type"]] == "qwen3" and given.get("use_qk_norm", True)
    for name, wrong, must in (
        ("use_pos_emb of mamba2_config", given.get("use_pos_emb", False), "false"),
        ("rms_norm_eps", normed and body.rms_norm_eps != 1e-6, "1e-6 for norms of Mamba2's keys"),
    ):
        if wrong and ("M2" in types or ("BMF" in types and _ssm_of(config) == "M2")):
            raise ValueError(f"{name} must be {must} to convert")
    return {
        **{"feature_map": "silu", "decay": "scalar", "delta_rule": False, "beta": "dt"},
        **{"skip": True, "out_norm": "gated_group", "out_gate": "silu", "out_norm_eps": 1e-5},
        **{"conv_bias": True, "d_conv": 4, "qk_norm": normed},
    }


def _repeated(x: Tensor, groups: int, heads: int) -> Tensor:
    """Return rows of key or value heads once for each query head; odd ones as they are."""
    if len(x) % groups:
        return x
    return x.unflatten(0, (groups, -1)).repeat_interleave(heads // groups, dim=0).flatten(0, 1)


def _stacked_gdn(mixer: dict[str, Tensor], groups: int, heads: int) -> dict[str, Tensor]:
    """Return the weights of a gated DeltaNet with its projections and convolutions stacked."""
    rest = {
        name: _repeated(x, groups, heads) if re.match(r"[kv]_(proj|conv1d)\.", name) else x
        for name, x in mixer.items()
    }
    projections = [f"{name}_proj.weight" for name in ("q", "k", "v", "gk", "b", "g")]
    stacks = {"in_proj.weight": [name for name in projections if name in rest]}
    for own in ("weight", "bias"):
        stacks[f"conv1d.{own}"] = [n for x in "qkv" if (n := f"{x}_conv1d.{own}") in rest]
    stacked = {
        own: torch.cat([rest.pop(n) for n in names]) for own, names in stacks.items() if names
    }
    return {**stacked, **rest}


def _turned_mamba2(
    mixer: dict[str, Tensor], groups: int, heads: int, size: int
) -> dict[str, Tensor]:
    """Return the weights of a Mamba2 with the rows of gate, x, B, C and dt in our order."""
    wide, narrow, turned = heads * size, groups * size, dict(mixer)
    rows = {"in_proj.weight": [wide, narrow, narrow, wide, heads]}
    rows |= {f"conv1d.{own}": [0, narrow, narrow, wide, 0] for own in ("weight", "bias")}
    for name, sizes in rows.items():
        if name in mixer and len(mixer[name]) == sum(sizes):
            gate, x, B, C, dt = mixer[name].split(sizes)
            x, B = (_repeated(part, groups, heads) for part in (x, B))
            turned[name] = torch.cat([C, B, x, dt, gate])
    return turned
