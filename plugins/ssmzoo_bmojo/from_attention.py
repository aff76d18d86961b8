"""B'MOJO that starts from an attention layer: its own attention is the same, in a window.

With rotary positions the state-space model's outputs go to attention alone (``wiring="parallel"``),
so that a new layer gives what the window alone would give, but for its fading memory. Scaled rotary
positions have no counterpart. A state-space model of another family starts as that family's own
mixers do.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ssmzoo import Family, families, load_family

from .modeling_bmojo import BMojoMixer

_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")


def fields(attention: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return heads, biases, norms and positions of an attention's configuration.

    And, in ``ssm``, the sizes of another family's mixer, where ``given`` names one.
    """
    found: dict[str, Any] = {
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.groups,
        "head_dim": attention.head_width,
        "qk_norm": attention.qk_norm,
        "attention_bias": attention.attention_bias,
        "attention_out_bias": attention.attention_out_bias,
    }
    rope = attention.rope_parameters
    if rope is not None:
        found |= {"use_rope": True, "rope_theta": rope["rope_theta"], "wiring": "parallel"}
    ssm = given.get("ssm") or {}
    family = _family(ssm)
    if family is not None and family.from_attention is not None:
        chosen = family.presets.get(ssm.get("preset", ""), {})
        found["ssm"] = family.from_attention.fields(attention, {**chosen, **ssm})
    return found


def copy(attention: nn.Module, mixer: BMojoMixer) -> None:
    """Copy queries, keys, values, outputs and norms, also for fading memory where it has its own.

    Raises:
        ValueError: The mixer's attention has other sizes, or its state-space model has.
    """
    family = _family(mixer.config.ssm)
    if family is not None and family.from_attention is not None and mixer.ssm is not None:
        family.from_attention.copy(attention, mixer.ssm)
    ours: Any = mixer.attention
    if ours is None:
        return
    for name in _LAYERS:
        _copy_layer(name, getattr(attention, name), getattr(ours, name))
    for name in ("k_proj", "v_proj"):
        memory = getattr(ours, f"memory_{name}")
        if memory is not None:
            _copy_layer(name, getattr(attention, name), memory)


def gate(mixer: BMojoMixer) -> Tensor | None:
    """Return the rows that gate the values of another family's state-space model."""
    family = _family(mixer.config.ssm)
    if family is None or family.from_attention is None or mixer.ssm is None:
        return None
    return family.from_attention.gate(mixer.ssm)


def _family(ssm: Mapping[str, Any]) -> Family | None:
    """Return the family of a state-space model; None of Mamba's block, and where there is none."""
    return load_family(ssm["family"]) if ssm.get("family") in families() else None


def _copy_layer(name: str, old: Any, new: Any) -> None:
    """Copy a layer's parameters, of those that the mixer could have all."""
    for part in ("weight", "bias"):
        given, ours = getattr(old, part, None), getattr(new, part, None)
        if given is None:
            continue
        if ours is None or given.shape != ours.shape:
            raise ValueError(
                f"B'MOJO must have the {name}.{part} of the attention that it starts from, "
                f"{list(given.shape)}, got {'none' if ours is None else list(ours.shape)}; set its "
                "fields so, or take --start drawn"
            )
        ours.copy_(given)
