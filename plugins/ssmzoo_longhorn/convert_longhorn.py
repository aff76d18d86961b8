"""Convert checkpoints to and from the official code's names.

The paper's pretrained weights are not public; this is for weights trained with the official code.
"""

from typing import Any

from torch import Tensor

from ssmzoo.modeling import check_weights, require_fields

from .configuration_longhorn import LonghornConfig
from .modeling_longhorn import LonghornForCausalLM

_AS_OFFICIAL = {
    "out_norm": False,
    "transition": "diagonal",
    "use_bias": False,
    "intermediate_size": None,
    "norm_type": "rms",
    "prenorm": True,
    "rms_norm_eps": 1e-5,
}
_PREFIXES = ("_orig_mod.", "module.", "transformer.")
# in this order in both directions: the general rule comes last
_OFFICIAL_AND_OURS = (
    ("backbone.embedding.", "model.embed_tokens."),
    ("backbone.norm_f.", "model.norm."),
    ("mixer.dt_head.bias", "mixer.dt_bias"),
    ("mixer.dt_head.", "mixer.dt_proj."),
    ("backbone.", "model."),
)


def from_official(
    state_dict: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], LonghornConfig]:
    """Translate official weights and configuration into ours.

    Args:
        state_dict: Weights by official name; prefixes that wrappers add are stripped.
        config: The official ``config.json``: ``d_model``, ``n_layer``, ``vocab_size`` and, in
            ``ssm_cfg`` or stray at the top, ``d_state``, ``d_conv``, ``expand``, ``dt_rank``.

    Returns:
        Weights by our names, sharing memory with the given ones, and the configuration.

    Raises:
        LookupError: A weight or a field of the configuration is missing, or a weight is unknown.
        ValueError: A shape contradicts the configuration, or ``tie_embeddings`` is true and the
            head differs from the embedding.
    """
    weights: dict[str, Tensor] = {}
    for official, tensor in state_dict.items():
        name = official
        while name.startswith(_PREFIXES):
            name = name.split(".", 1)[1]
        for theirs, own in _OFFICIAL_AND_OURS:
            name = name.replace(theirs, own, 1)
        weights[name] = tensor
    ours = _configuration(weights, config)
    head, embedding = weights.get("lm_head.weight"), weights.get("model.embed_tokens.weight")
    if ours.tie_word_embeddings and embedding is not None:
        if head is not None and not (head.shape == embedding.shape and head.equal(embedding)):
            raise ValueError(
                "tie_embeddings is true but lm_head.weight differs from the embedding; "
                'pass {**config, "tie_embeddings": False}'
            )
        weights["lm_head.weight"] = embedding
    check_weights("a Longhorn checkpoint", weights, LonghornForCausalLM, ours)
    return weights, ours


def to_official(state_dict: dict[str, Tensor], config: LonghornConfig) -> dict[str, Tensor]:
    """Translate our weights into official names, the head included.

    Raises:
        ValueError: The configuration uses a feature that the official model lacks.
    """
    require_fields(config, _AS_OFFICIAL)
    official = {}
    for name, tensor in state_dict.items():
        for theirs, own in _OFFICIAL_AND_OURS:
            name = name.replace(own, theirs, 1)
        official[name] = tensor
    official.setdefault("lm_head.weight", official["backbone.embedding.weight"])
    return official


def _configuration(weights: dict[str, Tensor], config: dict[str, Any]) -> LonghornConfig:
    needed = ("d_model", "n_layer", "vocab_size")
    if missing := [name for name in needed if name not in config]:
        raise LookupError(
            f"config must have {', '.join(needed)}; it lacks {', '.join(missing)}; give the "
            f"official config.json, or numbers: ssmzoo convert --set {missing[0]}=N"
        )
    ssm = {**config, **config.get("ssm_cfg", {})}
    fields = {name: ssm[name] for name in ("d_state", "d_conv", "expand", "dt_rank") if name in ssm}
    if "d_state" not in fields and "model.layers.0.mixer.x_proj.weight" in weights:
        rank = weights["model.layers.0.mixer.dt_proj.weight"].shape[1]
        fields["d_state"] = (weights["model.layers.0.mixer.x_proj.weight"].shape[0] - rank) // 2
    vocab = config["vocab_size"]
    if "model.embed_tokens.weight" in weights:
        # the official embedding is padded beyond the configured vocabulary
        vocab = weights["model.embed_tokens.weight"].shape[0]
    return LonghornConfig(
        vocab_size=vocab,
        hidden_size=config["d_model"],
        num_hidden_layers=config["n_layer"],
        residual_in_fp32=config.get("residual_in_fp32", True),
        tie_word_embeddings=config.get("tie_embeddings", True),
        conv_bias="model.layers.0.mixer.conv1d.bias" in weights,
        **fields,
    )
