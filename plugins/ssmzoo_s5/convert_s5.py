"""Convert classifiers to and from the names of S5's code and of ``minimal-LRU``, both in flax.

Their variables are nested dictionaries, which their code does not save; here they are flat, as
``flax.traverse_util.flatten_dict(variables, sep=".")`` makes them:
``params.encoder.layers_0.seq.B`` and ``batch_stats.encoder.layers_0.norm.mean``.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ssmzoo.modeling import check_weights, require_fields

from .configuration_s5 import S5Config
from .modeling_s5 import S5ForSequenceClassification

_AS_OFFICIAL = {
    **{"image_size": None, "intermediate_size": None},
    **{"irregular_steps": False, "classifier_bias": True},
}
_EPS = {"batch": 1e-5, "layer": 1e-6}  # flax's
_ENCODER = ("encoder.encoder.kernel", "encoder.encoder.bias")
_TOKENS, _COUNT = "model.embed_tokens.weight", "norm.num_batches_tracked"
# how several of their tensors become one of ours, and one of ours so many of theirs
_Pair = tuple[Callable[[list[Tensor]], Tensor], Callable[[Tensor, int], Sequence[Tensor]]]
_FORMS: dict[str, _Pair] = {
    "rows": (torch.cat, lambda x, n: x.chunk(n)),
    "modes": (lambda x: torch.cat(x, dim=1), lambda x, n: x.chunk(n, dim=1)),
    "column": (lambda x: x[0].flatten(), lambda x, _: [x[:, None]]),
    "complex": (lambda x: torch.stack(x, dim=-1), lambda x, _: x.unbind(-1)),
    "dense": (lambda x: torch.cat([y.T for y in x]), lambda x, n: [y.T for y in x.chunk(n)]),
}


def from_official(
    state_dict: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], S5Config]:
    """Translate official weights into ours, and read the configuration off their shapes.

    Args:
        state_dict: Variables by official name, with "." or "/" between its parts.
        config: Fields that shapes do not give, by our names: ``prenorm``; ``activation`` of a half
            GLU; ``clip_eigs`` where it changes an eigenvalue; ``input_channels`` where several
            values are read instead of one or of tokens; ``pooling``, "mean" by default; and S5's
            ``conj_sym`` and ``discretization``. They win over fields read off shapes.

    Returns:
        Weights by our names, some sharing memory with the given ones, and the configuration of the
        :class:`S5ForSequenceClassification` they fit.

    Raises:
        LookupError: A variable or a field is missing, or a variable belongs to no such model.
        ValueError: A shape contradicts the configuration, or the layer is none of ours.
    """
    theirs = {
        re.sub(r"^(params|batch_stats)\.", "", name.replace("/", ".")): tensor
        for name, tensor in state_dict.items()
    }
    told = dict(config)
    if (rule := told.pop("discretization", "zoh")) != "zoh":
        raise ValueError(f"discretization must be 'zoh' to convert, got {rule!r}")
    pairs = told.pop("conj_sym", True)
    ours = _configuration(theirs, told)
    plan = _plan(ours)
    used = {name for _, names in plan.values() for name in names} | {*_ENCODER}
    if used != theirs.keys():
        missing, unknown = sorted(used - theirs.keys()), sorted(theirs.keys() - used)
        raise LookupError(
            "state_dict must be a classifier of S5 or the LRU, got missing "
            f"{missing[:3]}, unknown {unknown[:3]}"
        )
    weights: dict[str, Tensor] = {}
    for own, (form, names) in plan.items():
        weights[own] = _FORMS[form][0]([theirs[name] for name in names])
        if not pairs and own.endswith(".C"):
            weights[own] = weights[own] / 2  # ours adds a conjugate to each mode
        if own.endswith("norm.running_var"):
            weights[own.replace("norm.running_var", _COUNT)] = torch.tensor(0)
    if ours.input_channels is None:
        weights[_TOKENS] = theirs[_ENCODER[0]] + theirs[_ENCODER[1]]
    check_weights("a classifier of S5 or the LRU", weights, S5ForSequenceClassification, ours)
    return weights, ours


def to_official(state_dict: dict[str, Tensor], config: S5Config) -> dict[str, Tensor]:
    """Translate our classifier's weights into official names, for ``conj_sym=True``.

    Raises:
        ValueError: The configuration uses a feature that the official model lacks.
    """
    require_fields(config, _AS_OFFICIAL | {"rms_norm_eps": _EPS.get(config.norm_type, 1e-5)})
    glu = config.activation == "full_glu" and not config.bidirectional
    if config.norm_type not in _EPS or (config.prenorm and config.final_norm):
        raise ValueError(
            "the official model has BatchNorms or LayerNorms, none of them behind the layers, got "
            f"norm_type={config.norm_type!r}, final_norm={config.final_norm}"
        )
    if config.variant == "lru" and not glu:
        raise ValueError(
            "the official LRU has a full GLU and reads forwards, got "
            f"activation={config.activation!r}, bidirectional={config.bidirectional}"
        )
    official: dict[str, Tensor] = {}
    for own, (form, names) in _plan(config).items():
        pieces = _FORMS[form][1](state_dict[own], len(names))
        official |= dict(zip(names, pieces, strict=True))
    if config.input_channels is None:
        kernel = state_dict[_TOKENS]
        official |= dict(zip(_ENCODER, (kernel, torch.zeros_like(kernel[0])), strict=True))
    return {
        f"{'batch_stats' if name.endswith(('.mean', '.var')) else 'params'}.{name}": x.contiguous()
        for name, x in official.items()
    }


def _configuration(theirs: dict[str, Tensor], told: dict[str, Any]) -> S5Config:
    """Return the configuration that names, shapes and told fields give."""
    first = "encoder.layers_0."
    lru = first + "seq.nu_log" in theirs
    modes = theirs.get(first + ("seq.nu_log" if lru else "seq.Lambda_re"))
    kernel, classes = theirs.get(_ENCODER[0]), theirs.get("decoder.bias")
    if modes is None or kernel is None or classes is None:
        raise LookupError(
            f"not an official classifier of S5 or the LRU: it has {', '.join(sorted(theirs)[:3])}"
        )
    readout = theirs.get(first + "seq.C")
    both = not lru and (readout is None or readout.shape[1] == 2 * len(modes))
    found: dict[str, Any] = {
        "variant": "lru" if lru else "s5",
        "hidden_size": kernel.shape[1],
        "d_state": len(modes) if lru else 2 * len(modes),
        "num_hidden_layers": sum(name.endswith(".seq.D") for name in theirs),
        "bidirectional": both,
        "c_init": "complex_normal" if both and readout is not None else "rows",
        "norm_type": "batch" if any(name.endswith(".mean") for name in theirs) else "layer",
        "final_norm": False,
        "pooling": "mean",
        "num_labels": len(classes),
        "classifier_bias": True,
        "vocab_size": kernel.shape[0],
        "input_channels": 1 if kernel.shape[0] == 1 else None,
    }
    found["rms_norm_eps"] = _EPS[found["norm_type"]]
    if first + "out1.kernel" in theirs:
        found["activation"] = "full_glu"
    elif first + "out2.kernel" not in theirs:
        found["activation"] = "gelu"
    real = [x for name, x in theirs.items() if name.endswith(".Lambda_re")]
    for name, unclear, values in (
        ("prenorm", True, "true or false"),
        ("activation", "activation" not in found, "half_glu1 or half_glu2"),
        ("clip_eigs", any((x > -1e-4).any() for x in real), "true or false"),
    ):
        if unclear and name not in told:
            raise LookupError(
                f"config must have {name}, {values} as the model was trained; set it: "
                f"ssmzoo convert --set {name}=..."
            )
    return S5Config(**{**found, **told})


def _plan(config: S5Config) -> dict[str, tuple[str, list[str]]]:
    """Return, by our names, the form and the names of theirs that make up each of ours."""
    plan = {"score.weight": ("dense", ["decoder.kernel"]), "score.bias": ("rows", ["decoder.bias"])}
    if config.input_channels is not None:
        plan["model.embed_values.weight"] = ("dense", [_ENCODER[0]])
        plan["model.embed_values.bias"] = ("rows", [_ENCODER[1]])
    mixer = {"mixer.D": ("rows", ["seq.D"])}
    if config.variant == "lru":
        for name in ("nu_log", "theta_log", "gamma_log"):
            mixer[f"mixer.{name}"] = ("rows", [f"seq.{name}"])
        for name in "BC":
            mixer[f"mixer.{name}"] = ("complex", [f"seq.{name}_re", f"seq.{name}_im"])
    else:
        for name in ("Lambda_re", "Lambda_im", "B", "C"):
            mixer[f"mixer.{name}"] = ("rows", [f"seq.{name}"])
        mixer["mixer.log_dt"] = ("column", ["seq.log_step"])
        if config.bidirectional and config.c_init != "complex_normal":
            mixer["mixer.C"] = ("modes", ["seq.C1", "seq.C2"])
    gates = {"gelu": [], "full_glu": ["out1", "out2"]}.get(config.activation, ["out2"])
    if gates:
        mixer["mixer.out_proj.weight"] = ("dense", [f"{gate}.kernel" for gate in gates])
        mixer["mixer.out_proj.bias"] = ("rows", [f"{gate}.bias" for gate in gates])
    norm = {"weight": "scale", "bias": "bias"}
    if config.norm_type == "batch":
        norm |= {"running_mean": "mean", "running_var": "var"}
    name = "normalization" if config.variant == "lru" else "norm"
    mixer |= {f"norm.{own}": ("rows", [f"{name}.{theirs}"]) for own, theirs in norm.items()}
    for index in range(config.num_hidden_layers):
        for own, (form, names) in mixer.items():
            layer = [f"encoder.layers_{index}.{name}" for name in names]
            plan[f"model.layers.{index}.{own}"] = (form, layer)
    return plan
