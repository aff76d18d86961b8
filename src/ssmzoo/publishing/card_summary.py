"""What a card says of a model and its training, as one small file to keep beside the card.

From it and the results a card can be rendered again where the weights are gone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from ssmzoo.checkpoints.load import model_name
from ssmzoo.checkpoints.weights import parameter_count, read_weights, weights_revision
from ssmzoo.environment.portable import portable
from ssmzoo.files import read_json, write_json
from ssmzoo.publishing.card_sources import Run, family_of, is_number, read_run

_TOTALS = ("step", "tokens", "seconds")
_LAST = ("loss", "validation_loss", "validation_accuracy", "validation_rmse")


@dataclass(frozen=True)
class Summary:
    """A model and its training.

    Attributes:
        name: The model's, where its results give none.
        revision: The digest of its weights.
        config: What its configuration file holds.
        parameters: How many it has.
        dtypes: The types that its weights are stored as.
        modules: The names of those that hold weights, without their places in the model.
        prompt: A text that its tokenizer reads; None if it brings none.
        run: What ``run.json`` says; None if the run is not known.
        recipe: The run's recipe, as YAML.
        measured: What the run recorded last.
        picture: Whether there is a loss curve.
    """

    name: str
    revision: str
    config: dict[str, Any]
    parameters: int
    dtypes: list[str]
    modules: list[str]
    prompt: str | None
    run: dict[str, Any] | None
    recipe: str | None
    measured: dict[str, float | int | None]
    picture: bool

    def write(self, path: Path) -> None:
        """Write the file that :func:`read_summary` reads."""
        write_json(path, asdict(self), indent=2)


def summarise(folder: Path, run_dir: str | Path | None) -> tuple[Summary, Path | None]:
    """Return the summary of a saved model, and its picture if there is one.

    Raises:
        ValueError: A file is missing, corrupt, or not of this model; the message names it.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"model_dir must be a saved model with config.json, got {str(folder)!r}")
    config = read_json(folder / "config.json")
    family_of(config)  # of a family that is not installed nothing can be said
    tensors = read_weights(folder)
    run = _run_of(folder, config, run_dir)
    measured: dict[str, float | int | None] = {}
    if run is not None:
        found = {name: run.total(name) for name in _TOTALS}
        found |= {name: run.last(name) for name in _LAST}
        measured = {name: value if is_number(value) else None for name, value in found.items()}
    summary = Summary(
        name=model_name(str(folder)),
        revision=weights_revision(folder),
        config=config,
        parameters=parameter_count(tensors),
        dtypes=sorted({dtype for dtype, _ in tensors.values()}),
        modules=sorted({name.split(".")[-2] for name in tensors if name.endswith(".weight")}),
        prompt=_prompt(folder),
        run=dict(run.facts) if run else None,
        recipe=_recipe(run.recipe) if run else None,
        measured=measured,
        picture=bool(run and run.picture),
    )
    # what is committed beside cards names no folder of the machine that trained
    plain: Any = portable(asdict(summary))
    return Summary(**plain), run.picture if run else None


def read_summary(path: Path) -> Summary:
    """Read what :meth:`Summary.write` wrote.

    Raises:
        ValueError: The file is missing, corrupt, or holds something else.
    """
    content = read_json(path)
    names = {field.name for field in fields(Summary)}
    if set(content) != names:
        raise ValueError(f"{path} must have exactly the fields {', '.join(sorted(names))}")
    return Summary(**content)


def _prompt(folder: Path) -> str | None:
    """Return code for tokenizers of text; for those of symbols, which read no other, symbols."""
    if not (folder / "tokenizer_config.json").exists():
        return None
    file = folder / "tokenizer.json"
    kind = read_json(file).get("model", {}) if file.exists() else {}
    if kind.get("type") != "WordLevel":
        return "def mean(values):"
    symbols = sorted(kind["vocab"], key=kind["vocab"].__getitem__)
    return " ".join(symbols[1:5])  # the first is filler


def _recipe(recipe: Any) -> str:
    """Return a recipe as YAML whose local paths are cut to their last parts."""
    return yaml.safe_dump(portable(recipe), sort_keys=False, allow_unicode=True)


def _run_of(folder: Path, config: Mapping[str, Any], run_dir: str | Path | None) -> Run | None:
    real = folder.resolve()
    if run_dir is None:
        if real.name != "model" or not (real.parent / "run.json").exists():
            return None
        run_dir = real.parent
    # a checkpoint knows nothing of what was recorded after it
    step = re.fullmatch(r"step-(\d+)", real.name) if real.parent.name == "checkpoints" else None
    run = read_run(Path(run_dir), until_step=int(step[1]) if step else None)
    trained = run.facts.get("model_type")
    if trained not in (None, config.get("model_type")):
        raise ValueError(
            f"run_dir {run_dir} trained a {trained!r}, but {folder} holds a "
            f"{config.get('model_type')!r}; give the run that made it"
        )
    return run
