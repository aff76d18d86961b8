"""Convert checkpoints to and from the official code's names.

The official filter keeps its denominators in the first rows of ``ab`` and its numerators in the
others, the direct gain in ``h_0`` and the slack of the Montel constraint in ``scalar``. It is the
truncated mode, and the numerators are those of its grid: nothing is recomputed here, decoding
turns them into a recurrence. The paper's authors have published no weights.
"""

import re
from typing import Any

import torch
from torch import Tensor

from ssmzoo.modeling import check_weights, require_fields

from .configuration_rtf import RTFConfig
from .modeling_rtf import RTFForCausalLM

_AS_OFFICIAL = {
    "block": "hyena",
    "filter": "rational",
    "kernel_mode": "truncated",
    "legacy_double_h0": True,
    "prenorm": True,
    "norm_type": "layer",
    "mlp_type": "gelu",
}
_PREFIXES = ("_orig_mod.", "module.", "model.")
_TOP = (
    ("backbone.embeddings.word_embeddings.", "model.embed_tokens."),
    ("backbone.ln_f.", "model.norm."),
)
# the beginnings of a layer's names
_LAYER = (
    ("mixer.short_filter.", "mixer.short_conv."),
    ("mixer.mimo_proj.", "mixer.down_proj."),
    ("mixer.norm.", "mixer.filter_norm."),
    ("mixer.filter_fn.h_0", "mixer.D"),
    ("mixer.filter_fn.scalar", "mixer.montel_slack"),
    ("norm1.", "norm."),
    ("norm2.", "mlp_norm."),
    ("mlp.fc1.", "mlp.up_proj."),
    ("mlp.fc2.", "mlp.down_proj."),
)
_NAME = re.compile(r"(backbone|model)\.(layers\.\d+\.)(.+)")
_AB = "mixer.filter_fn.ab"


def split_ab(ab: Tensor, features: int) -> tuple[Tensor, Tensor]:
    """Return denominators ``[A, n]`` and numerators ``[D, n]`` of an official filter.

    Args:
        ab: ``[A + D, n]``; of a bidirectional filter twice as many rows.
        features: D, or 2 D of a bidirectional filter.

    Raises:
        ValueError: Rows that leave no number of denominators.
    """
    rows = ab.shape[0] - features
    if ab.dim() != 2 or rows < 1 or features % rows:
        raise ValueError(
            f"ab must have shape [A + D, n] with D = {features} and A a divisor of it, "
            f"got {list(ab.shape)}"
        )
    return ab[:rows], ab[rows:]


def from_official(
    state_dict: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], RTFConfig]:
    """Translate the official language model (Hyena-RTF) into ours.

    Args:
        state_dict: Weights by official name; prefixes that wrappers add are stripped.
        config: ``trunc_len``, and ``layer_norm_epsilon`` if it is not 1e-5. Everything else follows
            from the weights' shapes.

    Returns:
        Weights by our names, sharing memory with the given ones, and the configuration: truncated
        kernels, and the direct gain counted twice, as the official code does.

    Raises:
        LookupError: A weight of the model is missing, or one belongs to no such model.
        ValueError: A shape contradicts the others.
    """
    if "trunc_len" not in config:
        raise LookupError("config must have 'trunc_len', which the weights' shapes do not give")
    weights: dict[str, Tensor] = {}
    for official, tensor in state_dict.items():
        name = official
        while name.startswith(_PREFIXES):
            name = name.split(".", 1)[1]
        if name.endswith(_AB):
            layer = "model." + name.removeprefix("backbone.").removesuffix(_AB)
            gain = state_dict.get(official.removesuffix("ab") + "h_0")
            if gain is None:
                raise LookupError(f"{official} has no 'h_0' beside it")
            a, b = split_ab(tensor, gain.shape[0])
            weights[layer + "mixer.a"], weights[layer + "mixer.b"] = a, b
        else:
            weights[_renamed(name, "model", 0)] = tensor
    head, embedding = weights.get("lm_head.weight"), weights.get("model.embed_tokens.weight")
    tied = head is None or (
        embedding is not None and head.shape == embedding.shape and head.equal(embedding)
    )
    if tied and embedding is not None:
        weights["lm_head.weight"] = embedding
    ours = _configuration(weights, config, tied)
    check_weights("a Hyena-RTF checkpoint", weights, RTFForCausalLM, ours)
    return weights, ours


def to_official(state_dict: dict[str, Tensor], config: RTFConfig) -> dict[str, Tensor]:
    """Translate our weights into official names, the head included.

    Raises:
        ValueError: The configuration uses a feature that the official model lacks.
    """
    require_fields(config, _AS_OFFICIAL)
    if config.denominator_constraint == "l1_montel" and config.constraint_margin != 0:
        raise ValueError(
            "the official model has constraint_margin=0, "
            f"got {config.constraint_margin}; take over the constrained denominators instead"
        )
    if config.mixer_rank is None or config.intermediate_size is None:
        raise ValueError("the official model has a mixer_rank and an intermediate_size, got None")
    official = {}
    for name, tensor in state_dict.items():
        if name.endswith("mixer.b"):
            continue
        if name.endswith("mixer.a"):
            layer = name.removesuffix("mixer.a")
            joined = torch.cat([tensor, state_dict[layer + "mixer.b"]])
            official[layer.replace("model.", "backbone.", 1) + _AB] = joined
            continue
        official[_renamed(name, "backbone", 1)] = tensor
    official.setdefault("lm_head.weight", official["backbone.embeddings.word_embeddings.weight"])
    return official


def _renamed(name: str, root: str, column: int) -> str:
    """Return a name of one code as the other has it; ``column`` of the tables is where it is."""
    match = _NAME.fullmatch(name)
    for pair in _TOP if match is None else _LAYER:
        begin, other = pair[column], pair[1 - column]
        own = name if match is None else match[3]
        if own.startswith(begin):
            renamed = other + own[len(begin) :]
            return renamed if match is None else f"{root}.{match[2]}{renamed}"
    return name if match is None else f"{root}.{match[2]}{match[3]}"


def _configuration(weights: dict[str, Tensor], config: dict[str, Any], tied: bool) -> RTFConfig:
    def shape(name: str) -> tuple[int, ...]:
        if name not in weights:
            raise LookupError(f"not an official Hyena-RTF checkpoint: it lacks our {name!r}")
        return tuple(weights[name].shape)

    mixer = "model.layers.0.mixer."
    rows, order = shape(mixer + "a")
    vocab, width = shape("model.embed_tokens.weight")
    layers = {name.split(".")[2] for name in weights if name.startswith("model.layers.")}
    constrained = mixer + "montel_slack" in weights
    return RTFConfig(
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=len(layers),
        intermediate_size=shape("model.layers.0.mlp.up_proj.weight")[0],
        norm_type="layer",
        rms_norm_eps=config.get("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=tied,
        block="hyena",
        mixer_rank=shape(mixer + "down_proj.weight")[0],
        d_conv=shape(mixer + "short_conv.weight")[2],
        d_state=order,
        num_denominators=rows,
        kernel_mode="truncated",
        trunc_len=config["trunc_len"],
        denominator_constraint="l1_montel" if constrained else "none",
        constraint_margin=0.0,
        legacy_double_h0=True,
    )
