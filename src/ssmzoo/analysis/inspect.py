"""From a model's name to a folder with pictures and one JSON file."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssmzoo.analysis.backbone import (
    LoadedBackbone,
    given_ids,
    load_backbone,
    reference_inputs,
    text_tokens,
)
from ssmzoo.analysis.measure import (
    ENERGY,
    Inspection,
    LayerInspection,
    as_arguments,
    measure_layers,
)
from ssmzoo.analysis.pictures import PICTURES, draw_pictures, require_matplotlib
from ssmzoo.environment.places import require_ours, require_writable
from ssmzoo.files import require_name, write_folder, write_json

REPORT = "inspection.json"
FORMAT = "ssmzoo-inspection-1"
LENGTH = 1024  # of the reference sequences, where nothing else is asked for
SHORTEST = 16

logger = logging.getLogger("ssmzoo")


def inspect_model(
    model: str | Path,
    output_dir: str | Path,
    *,
    text: str | Path | None = None,
    ids: Sequence[Sequence[int]] | None = None,
    length: int | None = None,
    sequences: int = 4,
    layers: Sequence[int] | None = None,
    measured: bool = False,
    seed: int = 0,
    device: str | None = None,
    stock: bool = False,
) -> dict[str, Any]:
    """Write a model's pictures and ``inspection.json`` into a folder, and return the latter.

    Args:
        model: A folder with a saved model, a Hub id, or an untrained model: a family's name for its
            smallest configuration, or ``family:preset``. Of transformers' models those with layers
            that :func:`ssmzoo.accelerate` serves.
        output_dir: A folder that is not there yet, or empty, or an earlier inspection to replace.
        text: A UTF-8 file to read as reference; random tokens, or values, without.
        ids: Token ids to read instead, in rows of one length; ``length`` and ``sequences`` are
            theirs.
        length: Positions of each reference sequence; None is 1024, halved for as long as the
            model says that it cannot take so many.
        sequences: How many reference sequences.
        layers: Which layers; None is all.
        measured: Measure the kernels even where the family knows them.
        seed: Of untrained weights and random references.
        device: Where to run; the GPU if there is one.
        stock: Leave transformers' recurrent models as they are; then nothing tells their decay.

    Raises:
        LookupError: No such model, family or preset.
        ValueError: An argument out of range, a folder in the way, or a text too short.
        RuntimeError: matplotlib is missing, or the folder cannot be written.
    """
    for name, value in (("sequences", sequences), ("length", length)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if ids is not None and (text is not None or length is not None):
        raise ValueError("ids must be given without text and length, got both")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be from 0 to 2**63 - 1, got {seed}")
    require_name(Path(output_dir), "output_dir")  # a working directory would be replaced, too
    target = Path(output_dir).expanduser().absolute()
    require_matplotlib()  # before minutes of measuring
    require_ours(target, (REPORT, *PICTURES), "output_dir", "an earlier inspection")
    require_writable(target.resolve().parent, "output_dir")
    loaded = load_backbone(str(model), seed=seed, device=device, stock=stock)
    if ids is not None:
        inputs = given_ids(loaded, ids)
    else:
        tokens = None if text is None else text_tokens(loaded, str(model), text)
        inputs = _references(loaded, length, sequences, tokens, seed)
    found = measure_layers(loaded.model, inputs, layers=layers, measured=measured)
    report = _report(loaded, found)
    kind = "random tokens" if loaded.channels is None else "random values"
    if text is not None or ids is not None:
        kind = "text" if text is not None else "given tokens"
    report["input"] = {
        "kind": kind,
        "length": found.length,
        "sequences": found.sequences,
        "seed": seed,
    }

    def write(folder: Path) -> None:
        report["pictures"] = draw_pictures(found, folder, title=loaded.name)
        report["not_drawn"] = [name for name in PICTURES if name not in report["pictures"]]
        write_json(folder / REPORT, report)

    write_folder(target, write)
    return report


def _report(loaded: LoadedBackbone, found: Inspection) -> dict[str, Any]:
    """Return the content of ``inspection.json``, without the input and the pictures' names."""
    trajectories = found.trajectories
    return {
        "format": FORMAT,
        "model": loaded.name,
        "model_type": loaded.model.config.model_type,
        "untrained": loaded.untrained,
        "parameters": sum(p.numel() for p in loaded.whole.parameters()),
        "energy": ENERGY,
        "state_bytes": found.state_bytes,
        "state_note": found.state_note,
        "layers": [_layer_report(layer) for layer in found.layers],
        "other_layers": {
            kind: [n for n, other in found.others.items() if other == kind]
            for kind in sorted(set(found.others.values()))
        },
        "trajectories": None
        if trajectories is None
        else {name: tensor.tolist() for name, tensor in vars(trajectories).items()},
    }


def _references(
    loaded: LoadedBackbone, length: int | None, sequences: int, tokens: Tensor | None, seed: int
) -> Tensor:
    """Return reference sequences as long as asked for, or as the default and the model allow."""
    if length is not None:
        return reference_inputs(loaded, length, sequences, tokens=tokens, seed=seed)
    length = LENGTH if tokens is None else min(LENGTH, max(1, len(tokens)))
    while True:
        inputs = reference_inputs(loaded, length, sequences, tokens=tokens, seed=seed)
        try:
            with torch.no_grad():
                loaded.model(**as_arguments(loaded.model, inputs[:1]), use_cache=False)
        except ValueError as error:
            if length <= SHORTEST:
                raise
            logger.info("fewer than %d positions, because the model says: %s", length, error)
            length //= 2
        else:
            return inputs


def _layer_report(layer: LayerInspection) -> dict[str, Any]:
    lags = sorted(lag for lag in layer.memory if lag is not None)
    report: dict[str, Any] = {
        "layer": layer.layer,
        "kernel": layer.source,
        "channels": layer.kernel.shape[0],
        "lags": layer.kernel.shape[1],
        "future_lags": 0 if layer.future_kernel is None else layer.future_kernel.shape[1],
        "memory": layer.memory,
        "memory_quantiles": _quantiles(lags),
        "poles": None,
        "stability": None,
        "time_steps": None,
        "decay": None,
    }
    if layer.poles is not None:
        report["poles"] = {
            "rows": layer.poles.shape[0],
            "per_row": layer.poles.shape[1],
            "radius_quantiles": _quantiles(layer.poles.abs().flatten().tolist()),
        }
    if layer.radius is not None:
        report["stability"] = {
            "margin": (1 - layer.radius).tolist(),
            "smallest_margin": float(1 - layer.radius.max()),
            "outside": None if layer.outside is None else layer.outside.tolist(),
        }
    if layer.time_steps is not None:
        report["time_steps"] = layer.time_steps.tolist()
    if layer.decay is not None:
        report["decay"] = {
            "slowest": layer.decay.amax(dim=1).tolist(),
            "fastest": layer.decay.amin(dim=1).tolist(),
            "quantiles": _quantiles(layer.decay.flatten().tolist()),
        }
    return report


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return the values at 0, 10, 50, 90 and 100 % of a list, in its own numbers."""
    if not values:
        return None
    ranked = sorted(values)
    names = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}
    return {name: ranked[round(share * (len(ranked) - 1))] for name, share in names.items()}
