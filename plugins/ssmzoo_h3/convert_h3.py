"""Read checkpoints of the official code.

The paper's are at danfu09/H3-125M, -355M, -1.3B and -2.7B on the Hub; their ``model.pt`` goes in
here, the tensors below ``state_dict`` where it is a Lightning file.
"""

import re
from typing import Any

from torch import Tensor

from ssmzoo.modeling import check_weights

from .configuration_h3 import H3Config
from .modeling_h3 import H3ForCausalLM

_OFFICIAL_AND_OURS = (
    (r"^(_orig_mod\.|module\.|model\.)*", ""),
    (r"^(s4seq\.encoder|backbone)\.", "model."),
    (r"^(model\.embeddings\.word_embeddings|embedding)\.", "model.embed_tokens."),
    (r"\.norm1\.", ".norm."),
    (r"\.norm2\.", ".mlp_norm."),
    (r"^model\.ln_f\.", "model.norm."),
    (r"\.mlp\.fc1\.", ".mlp.up_proj."),
    (r"\.mlp\.fc2\.", ".mlp.down_proj."),
    (r"\.mixer\.output_linear\.", ".mixer.out_proj."),
    (r"\.mixer\.ssm_k_(kernel\.kernel\.)?", ".mixer.shift_"),
    (r"\.mixer\.kernel\.kernel\.", ".mixer."),
    (r"\.inv_A_real$", ".A_log"),
)


def from_official(
    state_dict: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], H3Config]:
    """Translate official weights into ours, and read the configuration off their shapes.

    Both orders of norms that their code reads are taken; prefixes that wrappers add are stripped.
    ``config`` has the fields that shapes do not give, by our names, and wins:
    ``num_attention_heads`` where a layer attends, ``rotary_dim``, ``disc`` (of their ``ssm_cfg``;
    the weights do not tell) where it is not "bilinear".

    Raises:
        LookupError: A weight of the model is missing, or one belongs to no such model.
        ValueError: A shape contradicts the configuration.
    """
    weights: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        for theirs, own in _OFFICIAL_AND_OURS:
            name = re.sub(theirs, own, name)
        if ".mixer.Wqkv." in name:
            for part, own in zip(tensor.chunk(3), "qkv", strict=True):
                weights[name.replace("Wqkv", f"{own}_proj")] = part
        elif name.endswith((".mixer.C", ".mixer.shift_C")):
            weights[name] = tensor.squeeze(0)  # one channel
        elif not name.endswith("rotary_emb.inv_freq"):  # a table, no weight
            weights[name] = tensor
    layers = sorted({int(m[1]) for n in weights if (m := re.match(r"model\.layers\.(\d+)\.", n))})
    filters = [i for i in layers if f"model.layers.{i}.mixer.A_imag" in weights]
    inner = weights.get("model.layers.0.mlp.up_proj.weight")
    embedding = weights.get("model.embed_tokens.weight")
    if not filters or embedding is None or inner is None:
        raise LookupError(f"not an official H3 model; it has {', '.join(sorted(state_dict)[:3])}")
    attends = [i for i in layers if i not in filters]
    if attends and "num_attention_heads" not in config:
        raise LookupError(f"config must have num_attention_heads: layers {attends} attend")
    if not any("ln_f" in name for name in state_dict):
        # older files count the norms from one before the first layer, not from the layer's own
        norms = [f"model.layers.{i}.{norm}." for i in layers for norm in ("norm", "mlp_norm")]
        norms.append("model.norm.")
        moved = dict(zip([norms[-1], *norms[:-1]], norms, strict=True))
        pattern = r"model\.(layers\.\d+\.(mlp_)?)?norm\."
        weights = {re.sub(pattern, lambda m: moved[m[0]], n): x for n, x in weights.items()}
    weights.setdefault("lm_head.weight", embedding)
    first = f"model.layers.{filters[0]}.mixer."
    found = {
        "vocab_size": embedding.shape[0],
        "hidden_size": embedding.shape[1],
        "num_hidden_layers": len(layers),
        "intermediate_size": inner.shape[0],
        "norm_type": "layer",
        "d_state": 2 * weights[first + "A_imag"].shape[1],
        "head_dim": embedding.shape[1] // weights[first + "D"].shape[0],
        "attn_layer_idx": attends or None,
    }
    ours = H3Config(**{**found, **config})
    check_weights("an H3 checkpoint", weights, H3ForCausalLM, ours)
    return weights, ours
