"""Convert checkpoints to and from the names of flash-linear-attention (fla).

Checkpoints by the authors' own names (``emb.weight``, ``blocks.0.att.w1``) are read, too.
"""

import re
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ssmzoo.modeling import check_weights, require_fields

from .configuration_rwkv7 import RWKV7Config
from .modeling_rwkv7 import RWKV7ForCausalLM

_SHIFTS = [f"attn.x_{x}" for x in "rwkvag"]
# parts of a layer, ours and fla's
_LAYER = {
    **{"norm": "attn_norm", "mixer.channel_norm": "ffn_norm", "mixer.channel_shift": "ffn.x_k"},
    **{"mixer.up_proj": "ffn.key", "mixer.down_proj": "ffn.value", "mixer.out_proj": "attn.o_proj"},
    **{f"mixer.{x}_proj": f"attn.{x}_proj" for x in "rkv"},
    **{
        "mixer.removal_scale": "attn.k_k",
        "mixer.rate_scale": "attn.k_a",
        "mixer.bonus": "attn.r_k",
    },
    **{f"mixer.norm_{x}": f"attn.g_norm.{x}" for x in ("weight", "bias")},
}
for _ours, _theirs in {"decay": "w", "rate": "a", "value": "v", "gate": "g"}.items():
    _lora = f"attn.{_theirs}_lora.lora"
    _LAYER[f"mixer.{_ours}.down"], _LAYER[f"mixer.{_ours}.up"] = f"{_lora}.0", f"{_lora}.2"
    _LAYER[f"mixer.{_ours}_bias"] = f"{_lora}.2.bias"
_MODEL = {
    "model.embed_tokens.weight": "model.embeddings.weight",
    **{f"model.embed_norm.{x}": f"model.layers.0.pre_norm.{x}" for x in ("weight", "bias")},
}
# the authors' names and fla's
_AUTHORS = (
    *((r"^emb\.", "model.embeddings."), (r"^ln_out\.", "model.norm."), (r"^head\.", "lm_head.")),
    *((r"^blocks\.", "model.layers."), (r"\.ln0\.", ".pre_norm."), (r"\.ln1\.", ".attn_norm.")),
    *((r"\.ln2\.", ".ffn_norm."), (r"\.att\.", ".attn."), (r"\.ln_x\.", ".g_norm.")),
    *((r"\.attn\.receptance\.", ".attn.r_proj."), (r"\.attn\.key\.", ".attn.k_proj.")),
    *((r"\.attn\.value\.", ".attn.v_proj."), (r"\.attn\.output\.", ".attn.o_proj.")),
    (r"\.attn\.([wavg])0$", r".attn.\1_lora.lora.2.bias"),
    (r"\.attn\.([wavg])1$", r".attn.\1_lora.lora.0.weight"),
    (r"\.attn\.([wavg])2$", r".attn.\1_lora.lora.2.weight"),
)
_FIELDS = {"norm_eps": "rms_norm_eps", "tie_word_embeddings": "tie_word_embeddings"}
_FIELDS |= {x: x for x in ("bos_token_id", "eos_token_id", "pad_token_id")}
# fields of theirs that other values would make another model
_NEEDED = {"model_type": "rwkv7", "hidden_act": "sqrelu", "norm_first": True, "norm_bias": True}
# those that change no output, or show in the weights' shapes
_IDLE = {
    *PreTrainedConfig().to_dict(),
    *("auto_map", "torch_dtype", "use_cache", "attn_mode", "initializer_range", "use_l2warp"),
    *("fuse_norm", "fuse_cross_entropy", "fuse_linear_cross_entropy", "max_position_embeddings"),
    *("vocab_size", "hidden_size", "hidden_ratio", "intermediate_size", "num_hidden_layers"),
    *("head_dim", "num_heads", "value_dim", "decay_low_rank_dim", "gate_low_rank_dim"),
    *("a_low_rank_dim", "v_low_rank_dim"),
}


def from_official(
    state_dict: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], RWKV7Config]:
    """Translate weights by fla's names, or by the authors', into ours; some share memory.

    Sizes are read off the shapes. Of fla's configuration ``norm_eps``, ``tie_word_embeddings`` and
    the tokens' ids count; the authors' files have none.

    Raises:
        LookupError: It is no such model, or a weight is missing or unknown, or a field is unknown.
        ValueError: Our model has nothing for a field, or a shape does not fit.
    """
    told = {name: value for name, value in config.items() if value is not None}
    for name, needed in _NEEDED.items():
        if (got := told.pop(name, needed)) != needed:
            raise ValueError(f"{name} must be {needed!r}, got {got!r}: our model has no other")
    unknown = sorted(told.keys() - _FIELDS.keys() - _IDLE)
    if unknown:
        raise LookupError(f"config must have fields of fla's RWKV-7 only, got {unknown}")
    theirs = _as_fla(state_dict)
    ours = RWKV7Config(**_sizes(theirs), **{_FIELDS[x]: told[x] for x in told.keys() & _FIELDS})
    check_weights("a checkpoint of RWKV-7", theirs, RWKV7ForCausalLM, ours, to_official)
    with torch.device("meta"):
        expected = RWKV7ForCausalLM(ours).state_dict()
    weights = {}
    for name, like in expected.items():
        parts = [theirs[x].reshape(-1, *like.shape[1:]) for x in _names(name)]
        weights[name] = (parts[0] if len(parts) == 1 else torch.cat(parts)).view(like.shape)
    return weights, ours


def to_official(state_dict: dict[str, Tensor], config: RWKV7Config) -> dict[str, Tensor]:
    """Translate our weights into fla's names, the head included.

    Raises:
        ValueError: The configuration has what fla's RWKV-7 has not.
    """
    usual = RWKV7Config()
    fields = ("norm_type", "prenorm", "intermediate_size")
    require_fields(config, {x: getattr(usual, x) for x in fields})
    theirs = {}
    for name, tensor in state_dict.items():
        names = _names(name)
        if name.endswith(".bonus"):
            tensor = tensor.view(-1, config.head_dim)
        rows = [tensor] if len(names) == 1 else tensor[:, None, None].unbind()
        theirs.update(zip(names, rows, strict=True))
    return {"lm_head.weight": theirs["model.embeddings.weight"], **theirs}


def _names(name: str) -> list[str]:
    """Return fla's names of a weight of ours: of the six rows of ``time_shift`` one each."""
    if (found := re.fullmatch(r"(model\.layers\.\d+\.)(.+)", name)) is None:
        return [_MODEL.get(name, name)]
    layer, own = found.groups()
    if own == "mixer.time_shift":
        return [layer + x for x in _SHIFTS]
    part, _, leaf = own.rpartition(".")
    return [layer + (_LAYER[own] if own in _LAYER else f"{_LAYER[part]}.{leaf}")]


def _as_fla(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by the names and in the shapes that fla has now."""
    theirs: dict[str, Tensor] = {}
    authors = "emb.weight" in state_dict
    for name, tensor in state_dict.items():
        if name.endswith(".attn.x_x"):  # fla's, before it had one weight for each
            for x, row in zip("rwkvag", tensor, strict=True):
                theirs[f"{name[:-1]}{x}"] = row.view(1, 1, -1)
        elif not authors:
            theirs[name] = tensor
        elif not re.fullmatch(r"blocks\.0\.att\.v[012]", name):  # in files, but never read
            low = re.search(r"\.att\.[wavg][12]$", name)
            for pattern, other in _AUTHORS:
                name = re.sub(pattern, other, name)
            whole = tensor.dim() < 3 or re.search(r"\.attn\.x_", name)
            theirs[name] = tensor.mT.contiguous() if low else tensor if whole else tensor.flatten()
    return theirs


def _sizes(theirs: dict[str, Tensor]) -> dict[str, Any]:
    """Read the configuration's sizes off the shapes."""
    first = "model.layers.0."
    layers = {x.split(".")[2] for x in theirs if x.startswith("model.layers.")}
    try:
        embedding, heads = theirs["model.embeddings.weight"], theirs[f"{first}attn.r_k"]
        ranks = {
            f"{ours}_rank": theirs[f"model.layers.{i}.attn.{x}_lora.lora.0.weight"].shape[0]
            for ours, x, i in (("decay", "w", 0), ("rate", "a", 0), ("gate", "g", 0))
        }
        inner = theirs[f"{first}ffn.key.weight"].shape[0]
    except KeyError as error:
        raise LookupError(f"state_dict must be a checkpoint of RWKV-7, it has no {error}") from None
    value = theirs.get("model.layers.1.attn.v_lora.lora.0.weight")
    return {
        **ranks,
        **({} if value is None else {"value_rank": value.shape[0]}),  # one layer has none
        **{"vocab_size": embedding.shape[0], "hidden_size": embedding.shape[1]},
        **{"num_hidden_layers": len(layers), "head_dim": heads.shape[1], "d_channel": inner},
    }
