"""Write the card of a state adapter from its files."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from ssmzoo.checkpoints.weights import read_adapter_config
from ssmzoo.environment.hub_metadata import joined
from ssmzoo.files import package_data
from ssmzoo.publishing.card_facts import read_run
from ssmzoo.publishing.card_metadata import recipe_metadata
from ssmzoo.publishing.markdown import as_table, code, plain


def adapter_card(folder: Path, metadata: Mapping[str, Any], marker: str) -> str:
    """Return the card of a state adapter.

    Args:
        folder: As ``adapter.save_pretrained`` or ``ssmzoo train`` writes it. If a run made it, base
            and data come from the run's recipe.
        metadata: Fields of a recipe's section ``card``, which win over the recipe's.
        marker: The sentence that our cards are known by.

    Raises:
        FileNotFoundError: A part of the adapter is missing.
        ValueError: A file is damaged, or the Hub would not take a field of the metadata.
        LookupError: An unknown field.
    """
    from huggingface_hub import ModelCard, ModelCardData

    config = read_adapter_config(folder)
    shapes: dict[str, list[int]] = config["states"]
    run = folder.resolve().parent
    within = folder.resolve().name == "adapter" and (run / "run.json").is_file()
    told = recipe_metadata(read_run(run).recipe) if within else {}
    fields: dict[str, Any] = joined(told, metadata)
    if "base_model" in fields:
        fields["base_model_relation"] = "adapter"
    card = ModelCard.from_template(
        ModelCardData(library_name="ssmzoo", tags=["ssmzoo", "state-adapter"], **fields),
        template_str=package_data("model_cards/adapter.md").read_text("utf-8"),
        marker=marker,
        name=plain(folder.resolve().name),
        model_type=code(config["model_type"]),
        base=", ".join(code(f"{name} = {value}") for name, value in config["base"].items()),
        digest=code(config["digest"][:12]),
        states=as_table(
            ["State", "Shape"],
            [[code(name), " x ".join(map(str, shape))] for name, shape in shapes.items()],
        ),
        parameters=f"{sum(prod(shape) for shape in shapes.values()):,}",
    )
    return str(card)
