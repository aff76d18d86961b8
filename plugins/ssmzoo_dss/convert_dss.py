"""Convert classifiers to and from the official code's names.

The paper's checkpoints are Lightning files; their ``state_dict`` goes in here. The caller gives
fields that shapes do not, such as the variant or the pooling.
"""

import re
from typing import Any

from torch import Tensor

from ssmzoo.modeling import check_weights, require_fields

from .configuration_dss import DSSConfig
from .modeling_dss import DSSForSequenceClassification

_AS_OFFICIAL = {
    "block": "linear",
    "image_size": None,
    "rms_norm_eps": 1e-5,
}
_PREFIXES = ("_orig_mod.", "module.")
_EMBEDDING = "model.embed_tokens.weight"
_VALUES = "model.embed_values."
# the beginnings of a layer's names
_OFFICIAL_AND_OURS = (
    ("layer.kernel.Lambda_log_im", "mixer.Lambda_im"),
    ("layer.kernel.", "mixer."),
    ("layer.output_linear.", "mixer.out_proj."),
    ("layer.D", "mixer.D"),
    ("norm.norm.", "norm."),
)
_LAYER = re.compile(r"model\.layers\.\d+\.")


def from_official(
    state_dict: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], DSSConfig]:
    """Translate official weights into ours, and read the configuration off their shapes.

    Args:
        state_dict: Weights by official name; prefixes that wrappers add are stripped.
        config: Fields that shapes do not give, by our names: ``kernel_variant`` (default "softmax",
            or "exp" where the real parts are stored as logarithms), ``pooling``, ``bidirectional``,
            ``max_kernel_length``, ``dropout``. They win over fields read off shapes.

    Returns:
        Weights by our names, sharing memory with the given ones, and the configuration of the
        :class:`DSSForSequenceClassification` they fit.

    Raises:
        LookupError: A weight of the model is missing, or one belongs to no such model.
        ValueError: A shape contradicts the configuration.
    """
    weights: dict[str, Tensor] = {}
    for official, tensor in state_dict.items():
        name = official
        while name.startswith(_PREFIXES):
            name = name.split(".", 1)[1]
        if re.fullmatch(r"encoder\.(\d\.)?weight", name) and _encoder_bias(state_dict) is None:
            name = _EMBEDDING
        elif re.match(r"encoder\.(\d\.)?(weight|bias)$", name):
            name = _VALUES + name.rsplit(".", 1)[1]
        elif re.match(r"decoder\.(\d\.)?output_transform\.", name):
            name = "score." + name.rsplit(".", 1)[1]
        elif layer := _LAYER.match(name):
            inner = name[layer.end() :]
            for theirs, own in _OFFICIAL_AND_OURS:
                if inner.startswith(theirs):
                    inner = own + inner.removeprefix(theirs)
                    break
            name = layer.group() + inner
        elif name.startswith("model.norm.norm."):
            name = "model.norm." + name.removeprefix("model.norm.norm.")
        if name.endswith("out_proj.bias"):
            tensor = tensor.flatten()  # [H, 1] there
        weights[name] = tensor
    ours = _configuration(weights, "Lambda_log_im" in " ".join(state_dict), config)
    check_weights("a DSS classifier", weights, DSSForSequenceClassification, ours)
    return weights, ours


def to_official(state_dict: dict[str, Tensor], config: DSSConfig) -> dict[str, Tensor]:
    """Translate our classifier's weights into official names.

    Raises:
        ValueError: The configuration uses a feature that the official model lacks.
    """
    if config.intermediate_size is not None or config.norm_type != "batch":
        raise ValueError(
            "the official model has no MLP and here batch norms only, got "
            f"intermediate_size={config.intermediate_size}, norm_type={config.norm_type!r}"
        )
    require_fields(config, _AS_OFFICIAL)
    if config.conjugate_pairs:
        raise ValueError("the official model has no conjugate_pairs; double W and turn them off")
    official: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        if name == _EMBEDDING or name.startswith(_VALUES):
            name = "encoder.0." + name.rsplit(".", 1)[1]
        elif name.startswith("score."):
            name = "decoder.0.output_transform." + name.removeprefix("score.")
        elif name.startswith("model.norm."):
            name = "model.norm.norm." + name.removeprefix("model.norm.")
        elif layer := _LAYER.match(name):
            inner = name[layer.end() :]
            if inner == "mixer.out_proj.bias":
                tensor = tensor[:, None]
            order = (*_OFFICIAL_AND_OURS[2:], _OFFICIAL_AND_OURS[1])
            if config.kernel_variant == "exp_re_im":
                order = (_OFFICIAL_AND_OURS[0], *order)
            for theirs, own in order:
                if inner.startswith(own):
                    inner = theirs + inner.removeprefix(own)
                    break
            name = layer.group() + inner
        official[name] = tensor
    return official


def _encoder_bias(state_dict: dict[str, Tensor]) -> Tensor | None:
    names = [name for name in state_dict if re.search(r"(^|\.)encoder\.(\d\.)?bias$", name)]
    return state_dict[names[0]] if names else None


def _configuration(weights: dict[str, Tensor], positive: bool, fields: dict[str, Any]) -> DSSConfig:
    first = "model.layers.0.mixer."
    for name in (first + "W", first + "D", "score.weight"):
        if name not in weights:
            raise LookupError(
                f"not an official DSS classifier: it lacks the weight that becomes {name}"
            )
    constrained = first + "Lambda_log_neg_re" in weights
    layers = {name.split(".")[2] for name in weights if _LAYER.match(name)}
    found: dict[str, Any] = {
        "hidden_size": weights[first + "D"].shape[1],
        "channels": weights[first + "D"].shape[0],
        "d_state": weights[first + "W"].shape[2],
        "num_hidden_layers": len(layers),
        "kernel_variant": "exp_re_im" if positive else "exp" if constrained else "softmax",
        "separate_dt_re_im": weights[first + "log_dt"].dim() == 2,
        "norm_type": "batch",
        "prenorm": "model.norm.weight" in weights,
        "num_labels": weights["score.weight"].shape[0],
        "classifier_bias": "score.bias" in weights,
    }
    if _EMBEDDING in weights:
        found["vocab_size"] = weights[_EMBEDDING].shape[0]
    elif _VALUES + "weight" in weights:
        found["input_channels"] = weights[_VALUES + "weight"].shape[1]
    return DSSConfig(**{**found, **fields})
