"""Convert forecasters to and from the names of the authors' code, ``HazyResearch/spacetime``.

Read are the tensors below ``state_dict`` of the file that its training saves, of the encoders
``default`` and ``shift``, which have a skip around filters and MLPs in every block.
"""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo.modeling import check_weights, require_fields

from .companion import LONGEST_AVERAGE
from .configuration_spacetime import SpaceTimeConfig
from .modeling_spacetime import SpaceTimeForForecasting

_AS_OFFICIAL = {
    **{"norm_type": "none", "block": "mlp"},
    **{"image_size": None, "intermediate_size": None, "raw_start": True},
}
# in this order in both directions
_OFFICIAL_AND_OURS = (
    ("embedding.layers.", "model.embed_values."),
    ("output.layers.2.", "score."),
    ("decoder.blocks.ssm.", "decoder."),
    ("encoder.blocks.", "model.layers."),
    (".mlp.layers.2.", ".mixer.out_proj."),
    (".ssm.skip", ".mixer.D"),
    (".ssm.", ".mixer."),
)
_ORDERS = 4  # of differences, and their taps; averages are of the other features of each group
_FIXED = "model.layers.0.mixer.fixed"


def from_official(
    state_dict: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], SpaceTimeConfig]:
    """Translate official weights into ours, and read the configuration off their shapes.

    Where layers share state spaces among other numbers of features, each gets its own; a repeating
    embedding becomes a linear one.

    Args:
        state_dict: Weights by official name.
        config: Fields that shapes do not give, by our names, such as ``horizon`` and
            ``mixer_dropout``. They win over fields read off shapes.

    Returns:
        Weights by our names, some sharing memory with the given ones, and the configuration of the
        :class:`SpaceTimeForForecasting` they fit.

    Raises:
        LookupError: A weight of the model is missing, or one belongs to no such model.
        ValueError: A shape contradicts the configuration, or a fixed filter is too long.
    """
    left = {re.sub(r"^(_orig_mod\.|module\.)*", "", name): x for name, x in state_dict.items()}
    left.pop("decoder.blocks.ssm.skip", None)  # which its decoder does not read
    weights: dict[str, Tensor] = {}
    fixed = [left.pop(f"encoder.blocks.0.pre.{name}_kernel", None) for name in ("diff", "ma_r")]
    if fixed[0] is not None and fixed[1] is not None:
        weights[_FIXED] = _joined(fixed[0], fixed[1])
    for name, tensor in left.items():
        for official, own in _OFFICIAL_AND_OURS:
            name = name.replace(official, own)
        weights[re.sub(r"\.[bck]$", lambda m: m[0].upper(), name)] = tensor
    first = "model.layers.0.mixer."
    for name in (first + "a", first + "D", "score.weight"):
        if name not in weights:
            raise LookupError(
                f"not an official SpaceTime forecaster: it lacks the weight that becomes {name}"
            )
    width, channels = weights["score.weight"].shape[1], weights["score.weight"].shape[0]
    if not any(name.startswith("embedding.") for name in left):
        repeated = torch.eye(channels, dtype=weights[first + "D"].dtype)
        weights["model.embed_values.weight"] = repeated.repeat(width // channels, 1)
        weights["model.embed_values.bias"] = torch.zeros_like(weights[first + "D"])
    spaces = re.compile(r"model\.layers\.\d+\.mixer\.[aBC]")
    counts = {len(x) for name, x in weights.items() if spaces.fullmatch(name)}
    if len(counts) > 1:
        for name in filter(spaces.fullmatch, list(weights)):
            heads = width // len(weights[name])
            weights[name] = weights[name].repeat_interleave(heads, dim=0)
    kernels = len(weights[first + "a"])
    found = {
        "hidden_size": width,
        "num_hidden_layers": sum(name.endswith(".mixer.D") for name in weights),
        "d_state": weights[first + "a"].shape[1],
        "n_kernels": None if kernels == width else kernels,
        "preprocess": _FIXED in weights,
        "input_channels": channels,
        "vocab_size": 1,
        **{"norm_type": "none", "raw_start": True},
    }
    ours = SpaceTimeConfig(**{**found, **config})
    check_weights("a SpaceTime forecaster", weights, SpaceTimeForForecasting, ours)
    return weights, ours


def to_official(state_dict: dict[str, Tensor], config: SpaceTimeConfig) -> dict[str, Tensor]:
    """Translate our forecaster's weights into official names, with a linear embedding.

    Raises:
        ValueError: The configuration uses a feature that the official model lacks.
    """
    require_fields(config, _AS_OFFICIAL)
    official: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        if name == _FIXED:
            groups = tensor.flip(1).unflatten(0, (-1, 2 * _ORDERS))
            differences, averages = groups.split(_ORDERS, dim=1)
            official["encoder.blocks.0.pre.diff_kernel"] = differences[..., :_ORDERS].flatten(0, 1)
            averages = F.pad(averages, (0, 1))  # theirs has a place more
            official["encoder.blocks.0.pre.ma_r_kernel"] = averages.flatten(0, 1)
            continue
        for theirs, own in _OFFICIAL_AND_OURS:
            name = name.replace(own, theirs)
        official[re.sub(r"\.[BCK]$", lambda m: m[0].lower(), name)] = tensor
    official["decoder.blocks.ssm.skip"] = torch.zeros_like(official["decoder.blocks.ssm.a"][:, 0])
    return official


def _joined(differences: Tensor, averages: Tensor) -> Tensor:
    """Return our fixed filters, ``[H, 63]`` with the newest tap last, of theirs of two kinds."""
    groups = len(differences) // _ORDERS
    longest = max(differences.shape[1], averages.shape[1], LONGEST_AVERAGE)
    kinds = [
        F.pad(kind, (0, longest - kind.shape[1])).unflatten(0, (groups, -1))
        for kind in (differences, averages)
    ]
    filters = torch.cat(kinds, dim=1).flatten(0, 1)
    if filters[:, LONGEST_AVERAGE:].any():
        raise ValueError(
            f"fixed filters must have at most {LONGEST_AVERAGE} taps to convert, which "
            "max_avg_window 64 gives, got longer ones"
        )
    return filters[:, :LONGEST_AVERAGE].flip(1)
