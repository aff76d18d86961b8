"""From transformers' dense Transformers to hybrids of attention alone, with equal logits, and back.

Layers of one model that differ in window or positions become kinds of their own. Positions of the
types "dynamic" and "longrope" are theirs up to the length that the model was trained for.
"""

import dataclasses
import re
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ssmzoo.modeling import check_weights, require_fields

from .configuration_hybrid import HybridConfig
from .convert_hmf import BODIES, as_body, body_of, hybrid_of
from .modeling_hybrid import HybridForCausalLM

# what no field of theirs says, by model_type
_MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"attention_bias": True, "attention_out_bias": False},
    "qwen3": {"qk_norm": True},
    "smollm3": {},
}
# by any model's configuration, whether its class has them or not
_NEEDED = {"hidden_act": "silu", "mlp_bias": False, "attention_dropout": 0.0}
_NEEDED |= {"rope_interleaved": False, "use_mrope": False}
_IDLE = {"pretraining_tp", "max_window_layers", "is_llama_config", "transformers.js_config"}
_SHARED = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "rms_norm_eps")
_SHARED += ("initializer_range", "use_cache", "tie_word_embeddings")
_SHARED += ("pad_token_id", "bos_token_id", "eos_token_id")
_OWN = ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
_AS_THEIRS = {"norm_type": "rms", "prenorm": True, "mlp_type": "swiglu"}
_AS_THEIRS |= {"input_channels": None, "image_size": None}
_KINDS = {  # by whether it has a window, and positions
    (False, True): "attention",
    (True, True): "window",
    (False, False): "nope",
    (True, False): "window_nope",
}
# within a layer
_THEIRS_AND_OURS = (
    ("self_attn.", "mixer."),
    ("input_layernorm.", "norm."),
    ("post_attention_layernorm.", "mlp_norm."),
)
_LAYER = re.compile(r"(model\.layers\.\d+\.)(.*)")
_PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}


def from_official(
    state_dict: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], HybridConfig]:
    """Translate weights and ``config.json`` of a model of transformers, or of HMF, into ours.

    Weights share memory with the given ones.

    Raises:
        LookupError: Another model, or a weight is missing or unknown.
        ValueError: A field that our layers have nothing for, a shape that contradicts the
            configuration, or a tied head that differs from the embedding.
    """
    theirs = config.get("model_type") in BODIES
    ours = _configuration(body_of(config) if theirs else config)
    if theirs:
        ours, state_dict = hybrid_of(config, ours), as_body(state_dict, config, ours)
    weights = {
        _renamed(name, _THEIRS_AND_OURS): tensor
        for name, tensor in state_dict.items()
        if not name.endswith("rotary_emb.inv_freq")  # a table, no weight
    }
    embedding = weights.get("model.embed_tokens.weight")
    if ours.tie_word_embeddings and embedding is not None:
        head = weights.setdefault("lm_head.weight", embedding)
        if not (head.shape == embedding.shape and head.equal(embedding)):
            raise ValueError(
                "tie_word_embeddings must be false: lm_head.weight is not the embedding"
            )
    check_weights(f"a {config['model_type']}", weights, HybridForCausalLM, ours)
    return weights, ours


def to_official(state_dict: dict[str, Tensor], config: HybridConfig) -> dict[str, Tensor]:
    """Translate our weights into transformers' names; a tied head is left out."""
    back = [(own, theirs) for theirs, own in _THEIRS_AND_OURS]
    weights = {_renamed(name, back): tensor for name, tensor in state_dict.items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return weights


def official_config(config: HybridConfig) -> dict[str, Any]:
    """Return the ``config.json`` of the model of transformers that a hybrid is.

    Raises:
        ValueError: None of theirs is the same.
    """
    require_fields(config, _AS_THEIRS)
    if config.intermediate_size is None:
        raise ValueError("the official model has an MLP, got intermediate_size = None")
    sections = [config.kinds[name] for name in config.mixers]
    for name, section in zip(config.mixers, sections, strict=True):
        if section["family"] != "attention":
            raise ValueError(
                f"mixers must be of attention in every layer to convert, got {name!r} of the "
                f"family {section['family']!r}"
            )
    differing: dict[str, list[str]] = {}
    for kind in _MODELS:
        try:
            theirs = _theirs(kind, config, sections)
        except StrictDataclassError:  # a Llama's heads divide its width
            continue
        back = _configuration(theirs)
        pairs = [*zip(sections, (back.kinds[name] for name in back.mixers), strict=True)]
        differing[kind] = sorted({n for one, two in pairs for n in one if one[n] != two[n]})
        if not differing[kind]:
            return theirs
    nearest = min(differing, key=lambda kind: len(differing[kind]))
    raise ValueError(
        f"kinds must be those of a model of transformers ({', '.join(_MODELS)}) to convert; the "
        f"nearest, {nearest}, has another {', '.join(differing[nearest])}"
    )


def _configuration(config: dict[str, Any]) -> HybridConfig:
    kind = str(config.get("model_type"))
    if kind not in _MODELS:
        raise LookupError(
            f"config must have a model_type of {', '.join([*_MODELS, *BODIES])} to convert, "
            f"got {kind!r}"
        )
    known = {*PreTrainedConfig().to_dict(), *GenerationConfig().to_dict(), "torch_dtype"}
    known |= {field.name for field in dataclasses.fields(CONFIG_MAPPING[kind])}
    known |= {"model_type", "head_dim", "rope_theta", "rope_scaling", *_NEEDED}
    for name, value in config.items():
        if not (name in known | _IDLE or name.startswith("_") or value is None):
            raise ValueError(
                f"{name} of a {kind} must be null to convert, got {value!r}; where it changes no "
                f"output, --set {name}=null"
            )
    # a null may differ from the default: Mistral's window
    theirs: Any = CONFIG_MAPPING[kind].from_dict({x: config[x] for x in config if x in known})
    for name, value in _NEEDED.items():
        if (got := getattr(theirs, name, value)) != value:
            raise ValueError(f"{name} of a {kind} must be {value!r} to convert, got {got!r}")
    heads = theirs.num_attention_heads
    bias = getattr(theirs, "attention_bias", False)
    common = {
        "family": "attention",
        **{name: getattr(theirs, name) for name in _OWN},
        "head_dim": getattr(theirs, "head_dim", None) or theirs.hidden_size // heads,
        **{"attention_bias": bias, "attention_out_bias": bias, **_MODELS[kind]},
    }
    mixers, kinds, rope = [], {}, _rope(kind, theirs.rope_parameters)
    for window, rotary in _layers(kind, theirs):
        name = _KINDS[window, rotary]
        own = {"sliding_window": theirs.sliding_window if window else None}
        kinds[name] = {**common, **own, "rope_parameters": rope if rotary else None}
        mixers.append(name)
    return HybridConfig(
        **{name: getattr(theirs, name) for name in _SHARED},
        mlp_type="swiglu",
        residual_in_fp32=False,  # as theirs, which matters in low precision
        mixers=mixers,
        kinds=kinds,
    )


def _layers(kind: str, theirs: Any) -> list[tuple[bool, bool]]:
    """Return of each layer whether it has a window, and positions."""
    count = theirs.num_hidden_layers
    types = getattr(theirs, "layer_types", None)
    if types is None:
        sliding = getattr(theirs, "sliding_window", None) is not None
        types = ["sliding_attention" if sliding else "full_attention"] * count
    if others := {*types} - {"sliding_attention", "full_attention"}:
        raise ValueError(
            f"layer_types of a {kind} must be full_attention or sliding_attention to convert, got "
            f"{', '.join(map(repr, sorted(others)))}"
        )
    rotary = getattr(theirs, "no_rope_layers", None) or [1] * count
    return [(x == "sliding_attention", bool(turns)) for x, turns in zip(types, rotary, strict=True)]


def _rope(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the positions of a model of theirs, without an older name of their type."""
    rope = {name: x for name, x in given.items() if x is not None and name != "type"}
    share = rope.pop("partial_rotary_factor", 1.0)
    if share != 1.0:
        raise ValueError(
            f"partial_rotary_factor of a {kind} must be null to convert, got {share!r}"
        )
    return rope


def _theirs(kind: str, config: HybridConfig, sections: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the ``config.json`` of one of their models that comes closest to a hybrid."""
    first = sections[0]
    windows, ropes = ([s[x] for s in sections] for x in ("sliding_window", "rope_parameters"))
    window = next((x for x in windows if x is not None), None)
    fields = {
        **{name: getattr(config, name) for name in _SHARED},
        **{name: first[name] for name in _OWN},
        "head_dim": first["head_dim"],
        "hidden_act": "silu",
        "attention_bias": first["attention_bias"],
        "rope_parameters": dict(next((x for x in ropes if x is not None), _PLAIN)),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": ["full_attention" if x is None else "sliding_attention" for x in windows],
        "no_rope_layers": [int(x is not None) for x in ropes],
    }
    cls = CONFIG_MAPPING[kind]
    # read by their attention whether the configuration's class has it or not
    known = {field.name for field in dataclasses.fields(cls)} | {"head_dim"}
    theirs = cls(
        **{name: value for name, value in fields.items() if name in known},
        architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]],
        dtype=config.dtype,
    )
    return theirs.to_diff_dict() | {"model_type": kind}


def _renamed(name: str, table: Any) -> str:
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    layer, rest = found.groups()
    for old, new in table:
        if rest.startswith(old):
            return layer + new + rest.removeprefix(old)
    return name
