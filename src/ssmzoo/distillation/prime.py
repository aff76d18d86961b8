"""The start of a hybrid from a Transformer: some of its attention layers become other mixers.

The new mixers take over queries, keys, values and outputs where they have such
(:class:`ssmzoo.family.FromAttention`); everything else is the Transformer's. Training follows:
``align`` in a recipe, then any recipe; :mod:`ssmzoo.training.folder` notes each as a stage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ssmzoo.checkpoints.convert import load_hybrid
from ssmzoo.checkpoints.load import holds_tokenizer, load_tokenizer, model_folder, model_name
from ssmzoo.checkpoints.weights import PRIMING
from ssmzoo.distillation.layer_scores import LayerScores, score_layers
from ssmzoo.environment.hub_metadata import BASE_METADATA, checked
from ssmzoo.environment.messages import first_line
from ssmzoo.family import load_family
from ssmzoo.files import require_new, write_folder, write_json
from ssmzoo.training.priming import history

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("ssmzoo")


def prime(
    model: str,
    mixer: str,
    layers: str,
    output_dir: str | Path,
    *,
    fields: Mapping[str, Any] | None = None,
    start: Literal["copied", "projections", "drawn"] = "copied",
    text: str | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, layers: None,
) -> tuple[Path, list[int], LayerScores | None]:
    """Save a hybrid that begins as a Transformer with other mixers in some layers.

    Args:
        model: A Transformer that a hybrid can hold, or a hybrid; a folder or a Hub id.
        mixer: ``FAMILY`` or ``FAMILY:PRESET``, of which the mixer's fields are taken.
        layers: ``all``; ``half``, every second one from the second on; numbers from 0 on, such as
            ``1,3,5``; or ``best:N``, the N whose attention is missed least in ``text``.
        output_dir: The model's folder, new or empty.
        fields: The mixer's fields, over those of preset and attention.
        start: ``copied`` from attention, gates as the mean of values and outputs; ``projections``,
            the same with gates drawn; or all ``drawn`` as the family draws its parameters.
        text: A file or a folder of text by which layers are scored, for ``best:N``.
        seed: Of the parameters that are drawn.
        progress: Called with the layers that are scored, and all.

    Returns:
        The folder, the layers that have new mixers, and the layers' scores for ``best:N``.

    Raises:
        LookupError: There is no such model, family, preset or field.
        ValueError: The hybrid cannot hold the model, a layer is no attention, a size does not
            fit, or the new mixers have no gates to draw.
    """
    import torch

    target = Path(output_dir).expanduser()
    require_new(target, "output_dir")
    source = model_folder(model)
    wanted = _count(layers) if layers.startswith("best:") else None
    if wanted is not None and text is None:
        raise ValueError(f"layers {layers!r} needs a text to score layers by (--text)")
    if text is not None and wanted is None:
        raise ValueError(f"text must be absent, or layers best:N, got layers {layers!r}")
    network: Any = load_hybrid(model, "auto")
    tokenizer, scores = None, None
    if text is not None or source is None or holds_tokenizer(source):
        tokenizer = load_tokenizer(model, source, False)
    if text is not None and wanted is not None:
        scores = score_layers(network, tokenizer, text, wanted, progress)
        chosen = scores.least(wanted)
    else:
        chosen = _chosen(layers, network.config.num_hidden_layers)
    torch.manual_seed(seed)
    hybrid = _with_mixers(network, mixer, chosen, dict(fields or {}), start)
    told = _history(source, model, {"mixer": mixer, "start": start, "layers": chosen})

    def write(folder: Path) -> None:
        hybrid.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        write_json(folder / PRIMING, told, indent=2)
        if scores is not None:
            scores.write(folder)

    write_folder(target, write)
    return target, chosen, scores


def _count(layers: str) -> int:
    number = layers.removeprefix("best:")
    if not number.isdecimal() or int(number) == 0:
        raise ValueError(f"layers must be best:N with N of at least 1, got {layers!r}")
    return int(number)


def _chosen(layers: str, count: int) -> list[int]:
    """Return the layers that a text names, of ``count``."""
    if layers == "half" and count == 1:
        raise ValueError("layers must be all for a model of one layer, got 'half'")
    if layers in ("all", "half"):
        return list(range(count))[slice(None) if layers == "all" else slice(1, None, 2)]
    parts = layers.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(
            f"layers must be all, half, best:N or numbers such as 1,3,5, got {layers!r}"
        )
    chosen = sorted({int(part) for part in parts})
    if chosen[-1] >= count:
        raise ValueError(f"layers must be from 0 to {count - 1}, got {chosen[-1]}")
    return chosen


def _with_mixers(
    network: Any, mixer: str, layers: list[int], fields: dict[str, Any], start: str
) -> PreTrainedModel:
    """Return a hybrid with the weights of another, but for new mixers in some layers."""
    import torch

    from ssmzoo.modeling import Attention, attention_parts

    old = {index: network.model.layers[index].mixer for index in layers}
    wrong = [index for index, layer in old.items() if not isinstance(layer, Attention)]
    if wrong:
        raise ValueError(f"layers must name layers of attention, got {wrong[0]}, which is none")
    name, _, preset = mixer.partition(":")
    family = load_family(name)
    if family.from_attention is None and start != "drawn":
        logger.warning("family %s has nothing to copy of attention: its mixers are drawn", name)
    own = {"family": name, **({"preset": preset} if preset else {}), **fields}
    known = {**family.presets.get(preset, {}), **fields}
    config, mixers = network.config, list(network.config.mixers)
    kinds = {x: config.kinds[x] for i, x in enumerate(mixers) if i not in old}
    for index, attention in old.items():
        section = own
        if family.from_attention is not None:
            found = family.from_attention.fields(attention.config, known)
            nested = [name for name, value in found.items() if isinstance(value, dict)]
            within = {name: {**found[name], **own.get(name, {})} for name in nested}
            section = {**found, **own, **within}
        alone = {"mixers": ["new"] * len(mixers), "kinds": {"new": section}}
        section = type(config).from_dict({**config.to_dict(), **alone}).kinds["new"]
        mixers[index] = _kind_of(section, preset or name, kinds)
        kinds[mixers[index]] = section
    given = {**config.to_dict(), "mixers": mixers, "kinds": kinds}
    hybrid: Any = type(network)._from_config(type(config).from_dict(given), dtype=network.dtype)
    new = tuple(f"model.layers.{index}.mixer." for index in layers)
    kept = {k: x for k, x in network.state_dict().items() if not k.startswith(new)}
    hybrid.load_state_dict(kept, strict=False, assign=True)
    hybrid.tie_weights()
    hybrid.generation_config = network.generation_config
    if family.from_attention is not None and start in ("copied", "projections"):
        with torch.no_grad():
            for index, attention in old.items():
                new_mixer = hybrid.model.layers[index].mixer
                family.from_attention.copy(attention, new_mixer)
                gate = family.from_attention.gate(new_mixer)
                if gate is None and start == "projections":
                    raise ValueError(
                        f"start 'projections' draws gates, and {mixer} has none that start from "
                        "attention; take 'copied'"
                    )
                if gate is not None and start == "copied":
                    gate.copy_(attention_parts(attention).gate)
    return hybrid


def _kind_of(section: dict[str, Any], name: str, kinds: Mapping[str, Any]) -> str:
    """Return a name that no other kind of mixer has."""
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(each for each in names if kinds.get(each, section) == section)


def _history(source: Path | None, model: str, made: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a base and of its new mixers; a primed base has a history itself."""
    if source is not None and (earlier := history(source)) is not None:
        return {**earlier, "stages": [*earlier["stages"], {"stage": "prime", **made}]}
    base = {"base": model if source is None else model_name(model)}
    if source is None:
        base["base_model"] = model
    return {**_of_its_card(source, model), **base, **made, "stages": []}


def _of_its_card(source: Path | None, model: str) -> dict[str, Any]:
    """Return the base and the licence that a model's card names, as far as a card may."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    place = model if source is None else source / "README.md"
    if source is not None and not (source / "README.md").is_file():
        return {}
    try:
        found = ModelCard.load(place).data.to_dict()
        return checked({name: found[name] for name in BASE_METADATA if name in found})
    except OSError:  # the Hub has none
        return {}
    except (LookupError, TypeError, ValueError, YAMLError) as error:
        logger.warning("the model's card is left out, as it cannot be used: %s", first_line(error))
        return {}
