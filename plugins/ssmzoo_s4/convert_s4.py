"""Convert classifiers to and from the names of the authors' code, ``state-spaces/s4``.

Read is what its training saves, of releases 3 and 4: the tensors below ``state_dict`` of a
Lightning file, with a linear encoder or an embedding, and a decoder of whole sequences.
"""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo.modeling import check_weights, require_fields

from .configuration_s4 import S4Config
from .dplr import System
from .modeling_s4 import S4ForSequenceClassification

_AS_OFFICIAL = {
    **{"image_size": None, "intermediate_size": None},
    **{"rms_norm_eps": 1e-5, "classifier_bias": True},
}
# release 3 and what wrappers add, by release 4
_AS_NOW = (
    (r"^(_orig_mod\.|module\.)*", ""),
    (r"^((en|de)coder)\.(?!0\.)", r"\1.0."),
    (r"^(model\.layers\.\d+\.layer)\.(kernel\b|D$)", r"\1.layer.\2"),
    (r"\.kernel\.kernel\.", ".kernel."),
    (r"\.(inv|log)_w_real$", ".A_real"),
    (r"\.output_linear\.(?!0\.)", ".output_linear.0."),
    (r"\.kernel\.L$", ".kernel.l_kernel"),
)
# in this order in both directions: the general rule comes last
_OFFICIAL_AND_OURS = (
    ("decoder.0.output_transform.", "score."),
    (".norm.norm.", ".norm."),
    (".layer.layer.kernel.A_real", ".mixer.A_log"),
    (".layer.layer.kernel.inv_dt", ".mixer.log_dt"),
    (".layer.layer.D", ".mixer.D"),
    (".layer.output_linear.0.", ".mixer.out_proj."),
    (".layer.layer.kernel.", ".mixer."),
)
_TOKENS, _VALUES = "model.embed_tokens.weight", "model.embed_values."


def from_official(
    state_dict: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], S4Config]:
    """Translate official weights into ours, and read the configuration off their shapes.

    C, which the official kernel learns as ``C (I - Abar^L)``, is solved for, in float64.

    Args:
        state_dict: Weights by official name.
        config: Fields that shapes do not give, by our names: ``pooling`` ("mean" where theirs has
            the decoder's mode "pool"), ``dropout``; and ``dt_transform``, "exp" or "softplus", of
            release 4. They win over fields read off shapes.

    Returns:
        Weights by our names, some sharing memory with the given ones, and the configuration of the
        :class:`S4ForSequenceClassification` they fit.

    Raises:
        LookupError: A weight or a field is missing, or a weight belongs to no such model.
        ValueError: A shape contradicts the configuration, or the layer is none of ours.
    """
    theirs: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        for pattern, now in _AS_NOW:
            name = re.sub(pattern, now, name)
        theirs[name] = tensor
    told = dict(config)
    softplus = _uses_softplus(theirs, told)
    values = "encoder.0.bias" in theirs
    weights: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        for official, own in _OFFICIAL_AND_OURS:
            name = name.replace(official, own)
        if name.startswith("encoder.0."):
            name = _VALUES + name.rsplit(".", 1)[1] if values else _TOKENS
        elif name.endswith((".mixer.P", ".mixer.B", ".mixer.D")):
            if tensor.shape[0] != 1:
                raise ValueError(f"{name} must have rank and channels 1, got {tensor.shape[0]}")
            tensor = tensor[0]
        elif name.endswith(".mixer.C"):
            tensor = tensor.flatten(0, 1)  # [channels, H, N, 2], one or for two directions
        elif name.endswith(".mixer.A_imag"):
            tensor = -tensor
        elif name.endswith(".mixer.w_imag"):
            name = name.replace("w_imag", "A_imag")
        elif name.endswith(".mixer.log_dt"):
            tensor = tensor.flatten()
            if softplus:
                tensor = F.softplus(tensor.double()).log().to(tensor.dtype)
        elif name.endswith(".out_proj.bias"):
            tensor = tensor.flatten()  # [H, 1] in release 3
        weights[name] = tensor
    lengths = {n: int(weights.pop(n)) for n in list(weights) if n.endswith(".mixer.l_kernel")}
    ours = _configuration(weights, told)
    check_weights("an S4 classifier", weights, S4ForSequenceClassification, ours)
    for name, length in lengths.items():
        prefix = name.removesuffix("l_kernel")
        if length:
            weights[prefix + "C"] = _untruncated(weights, prefix, length)
    return weights, ours


def to_official(state_dict: dict[str, Tensor], config: S4Config) -> dict[str, Tensor]:
    """Translate our classifier's weights into the names of release 4, with dt_transform "exp".

    Raises:
        ValueError: The configuration uses a feature that the official model lacks.
    """
    require_fields(config, _AS_OFFICIAL)
    if config.block == "filter" or config.norm_type == "rms":
        raise ValueError(
            "the official model has the blocks 'linear' and 'glu', and no RMSNorm, got "
            f"block={config.block!r}, norm_type={config.norm_type!r}"
        )
    official: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        if name.endswith((".mixer.P", ".mixer.B", ".mixer.D")):
            tensor = tensor[None]
        elif name.endswith(".mixer.C"):
            tensor = tensor.unflatten(0, (-1, config.hidden_size))
            official[_official(name[:-1] + "l_kernel")] = torch.tensor(0)
        elif name.endswith(".mixer.A_imag"):
            tensor = -tensor
        elif name.endswith(".mixer.log_dt"):
            tensor = tensor[:, None]
        official[_official(name)] = tensor
    return official


def _official(name: str) -> str:
    """Return the official name of one of ours."""
    if name.startswith((_TOKENS, _VALUES)):
        return "encoder.0." + name.rsplit(".", 1)[1]
    for official, own in _OFFICIAL_AND_OURS:
        name = name.replace(own, official)
    return name


def _uses_softplus(theirs: dict[str, Tensor], told: dict[str, Any]) -> bool:
    """Take dt_transform from the fields, and tell whether it is a softplus."""
    if not any(name.endswith(".inv_dt") for name in theirs):
        return False  # release 3: an exponential
    transform = told.pop("dt_transform", None)
    if transform not in ("exp", "softplus"):
        raise LookupError(
            "config must have dt_transform, 'exp' or 'softplus' as in the official configuration "
            f"of the layer, got {transform!r}; set it: ssmzoo convert --set dt_transform=softplus"
        )
    return transform == "softplus"


def _configuration(weights: dict[str, Tensor], fields: dict[str, Any]) -> S4Config:
    first = "model.layers.0.mixer."
    needed = [first + name for name in ("A_log", "C", "D", "out_proj.weight")]
    if missing := [name for name in (*needed, "score.weight") if name not in weights]:
        raise LookupError(
            f"not an official S4 classifier: it lacks the weight that becomes {missing[0]}"
        )
    if "pooling" not in fields:
        raise LookupError(
            "config must have pooling, 'mean' or 'last' as in the official configuration of the "
            "decoder; set it: ssmzoo convert --set pooling=mean"
        )
    width, (sets, pairs) = len(weights[first + "D"]), weights[first + "A_log"].shape
    norm = "layer" if "model.layers.0.norm.weight" in weights else "none"
    found: dict[str, Any] = {
        "hidden_size": width,
        "d_state": 2 * pairs,
        "n_ssm": None if sets == width else sets,
        "bidirectional": len(weights[first + "C"]) == 2 * width,
        "block": "glu" if len(weights[first + "out_proj.weight"]) == 2 * width else "linear",
        "num_hidden_layers": len({name.split(".")[2] for name in weights if ".mixer.D" in name}),
        "norm_type": "batch" if "model.layers.0.norm.running_var" in weights else norm,
        "prenorm": "model.norm.weight" in weights,
        "num_labels": len(weights["score.weight"]),
        "classifier_bias": "score.bias" in weights,
    }
    if _TOKENS in weights:
        found["vocab_size"] = len(weights[_TOKENS])
    elif _VALUES + "weight" in weights:
        found["input_channels"] = weights[_VALUES + "weight"].shape[1]
    return S4Config(**{**found, **fields})


def _untruncated(weights: dict[str, Tensor], prefix: str, length: int) -> Tensor:
    """Return C of a layer whose weight is ``C (I - Abar^length)``."""
    A = torch.complex(
        -weights[prefix + "A_log"].double().exp(), weights[prefix + "A_imag"].double()
    )
    P, B, C = (torch.view_as_complex(weights[prefix + name].double()) for name in "PBC")
    dt = weights[prefix + "log_dt"].double().exp()[:, None]
    dt, A, P, B = (x.repeat(len(C) // len(x), 1) for x in (dt, A, P, B))
    Abar = System.of(dt, A, P, B, C).transition()
    lost = torch.eye(Abar.shape[-1]) - torch.linalg.matrix_power(Abar, length)
    whole = torch.linalg.solve(lost.mT, torch.cat([C, C.conj()], dim=-1))
    return torch.view_as_real(whole[:, : C.shape[1]]).to(weights[prefix + "C"].dtype)
