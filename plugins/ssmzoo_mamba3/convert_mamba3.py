"""Convert checkpoints to and from the names of flash-linear-attention (fla).

Those of the authors' code (``mamba_ssm`` with layers of Mamba-3) are read, too.
"""

import re
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from ssmzoo.modeling import check_weights, require_fields

from .configuration_mamba3 import Mamba3Config
from .modeling_mamba3 import Mamba3ForCausalLM

_OURS_AND_FLA = (
    ("model.embed_tokens.", "backbone.embeddings."),
    ("model.norm.", "backbone.norm_f."),
    ("model.layers.", "backbone.layers."),
)
_FIELDS = {"norm_eps": "rms_norm_eps", "is_outproj_norm": "out_norm", "A_floor": "rate_floor"}
_FIELDS |= {x: x for x in ("expand", "head_dim", "n_groups", "rope_fraction", "residual_in_fp32")}
_FIELDS |= {"tie_word_embeddings": "tie_word_embeddings", "headdim": "head_dim"}
_FIELDS |= {"ngroups": "n_groups", "tie_embeddings": "tie_word_embeddings"}
_FIELDS |= {x: x for x in ("bos_token_id", "eos_token_id", "pad_token_id")}
# fields of theirs that other values would make another model
_NEEDED = {"model_type": ("mamba3",), "is_mimo": (False,), "use_bias": (False,)}
_NEEDED |= {"hidden_act": ("silu",), "rms_norm": (True,), "attn_layer_idx": ([],)}
# those that change no output, or show in the weights' shapes
_IDLE = {
    *PreTrainedConfig().to_dict(),
    *("vocab_size", "hidden_size", "state_size", "num_hidden_layers", "num_heads", "mimo_rank"),
    *("chunk_size", "dt_min", "dt_max", "dt_init_floor", "rescale_prenorm_residual", "use_cache"),
    *("fuse_norm", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp", "auto_map"),
    *("initializer_range", "torch_dtype", "d_model", "d_state", "n_layer", "d_intermediate"),
    *("fused_add_norm", "pad_vocab_size_multiple", "attn_cfg", "layer"),
}


def from_official(
    state_dict: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], Mamba3Config]:
    """Translate weights by fla's names, or by the authors', into ours; some share memory.

    The authors' configuration has the layer's fields in ``ssm_cfg``. Their code makes rates by
    another function than fla's, and than it did before June 2026: ``config`` may say ``rate``.

    Raises:
        LookupError: It is no such model, or a weight is missing or unknown, or a field is unknown.
        ValueError: Our model has nothing for a field, or a shape does not fit.
    """
    told = {name: value for name, value in config.items() if value is not None}
    told |= told.pop("ssm_cfg", {})
    for name, needed in _NEEDED.items():
        if (got := told.pop(name, needed[0])) not in needed:
            raise ValueError(f"{name} must be {needed[0]!r}, got {got!r}: our model has no other")
    authors = "backbone.embedding.weight" in state_dict
    rate = told.pop("rate", "heavy_tail" if authors else "softplus")
    unknown = sorted(told.keys() - _FIELDS.keys() - _IDLE)
    if unknown:
        raise LookupError(f"config must have fields of Mamba-3 only, got {unknown}")
    weights: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        name = name.replace("backbone.embedding.", "backbone.embeddings.")
        for ours, theirs in _OURS_AND_FLA:
            name = name.replace(theirs, ours)
        name = name.replace(".norm2.", ".mlp_norm.").replace(".mlp.fc2.", ".mlp.down_proj.")
        if ".mlp.fc1." in name:
            up, gate = tensor.chunk(2)
            weights[name.replace("fc1", "up_proj")] = up
            weights[name.replace("fc1", "gate_proj")] = gate
        elif re.search(r"\.mixer\.[BC]_bias$", name) and tensor.dim() == 3:
            weights[name] = tensor.squeeze(1)
        else:
            weights[name] = tensor
    own = {_FIELDS[name]: told[name] for name in told.keys() & _FIELDS}
    ours = Mamba3Config(**_sizes(weights), **own, rate=rate)
    check_weights("a checkpoint of Mamba-3", weights, Mamba3ForCausalLM, ours)
    return weights, ours


def to_official(state_dict: dict[str, Tensor], config: Mamba3Config) -> dict[str, Tensor]:
    """Translate our weights into fla's names, the head included.

    Raises:
        ValueError: The configuration has what fla's Mamba-3 has not.
    """
    usual = Mamba3Config()
    fields = ("norm_type", "prenorm", "intermediate_size", "rate")
    require_fields(config, {x: getattr(usual, x) for x in fields})
    found = {}
    for name, tensor in state_dict.items():
        for ours, theirs in _OURS_AND_FLA:
            name = name.replace(ours, theirs)
        found[name] = tensor.unsqueeze(1) if name.endswith(("B_bias", "C_bias")) else tensor
    return {"lm_head.weight": found["backbone.embeddings.weight"], **found}


def _sizes(weights: dict[str, Tensor]) -> dict[str, Any]:
    """Read the sizes that shapes give."""
    layers = {x.split(".")[2] for x in weights if x.startswith("model.layers.")}
    first, mlp = "model.layers.0.mixer.", weights.get("model.layers.0.mlp.up_proj.weight")
    try:
        embedding, norm = weights["model.embed_tokens.weight"], weights[f"{first}B_norm.weight"]
    except KeyError as error:
        raise LookupError(
            f"state_dict must be a checkpoint of Mamba-3, it has no {error}"
        ) from None
    return {
        **{"vocab_size": embedding.shape[0], "hidden_size": embedding.shape[1]},
        **{"num_hidden_layers": len(layers), "d_state": norm.shape[0]},
        "intermediate_size": None if mlp is None else mlp.shape[0],
    }
