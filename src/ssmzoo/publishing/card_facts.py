"""The facts of a card: the saved model, its run, its family's words.

Facts of model and run are kept as one small file beside a card; from it and the results the card
can be rendered again where the weights are gone. Everything is checked while it is read, so that a
damaged file is one clear error, and no card is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from ssmzoo.checkpoints.load import model_name
from ssmzoo.checkpoints.weights import (
    NO_WEIGHTS,
    SHARDS,
    is_sharded,
    parameter_count,
    read_weights,
    weights_revision,
)
from ssmzoo.environment.hub_metadata import joined
from ssmzoo.environment.portable import portable
from ssmzoo.evaluation.results import is_number
from ssmzoo.family import family_of
from ssmzoo.files import json_of, package_data, parse_yaml, read_json, write_json
from ssmzoo.publishing.card_metadata import base_name, primed_metadata, recipe_metadata
from ssmzoo.training.priming import history

PICTURE = "loss.png"

# of metrics.jsonl, what a card may show: the largest values of the first, the last of the others
_TOTALS = ("step", "tokens", "seconds")
_LAST = ("loss", *(f"validation_{name}" for name in ("loss", "accuracy", "rmse", "mse")))


@dataclass(frozen=True)
class RecordedRun:
    """The facts, recipe and metrics of a run directory."""

    facts: Mapping[str, Any]
    recipe: Any
    records: Sequence[Mapping[str, Any]]
    picture: Path | None

    def last(self, name: str) -> object:
        """Return the last recorded value of a metric, None if it was never recorded."""
        return next((r[name] for r in reversed(self.records) if r.get(name) is not None), None)

    def total(self, name: str) -> object:
        """Return the last value of a counter, its largest; None if it was never recorded."""
        values = [r[name] for r in self.records if is_number(r.get(name))]
        return max(values, default=None)

    @property
    def best_step(self) -> int | None:
        """The step whose weights the run's model has; None if that is the last."""
        finished, recipe = self.facts.get("finished"), self.recipe
        kept = isinstance(recipe, dict) and (recipe.get("checkpoint") or {}).get("best")
        best = (finished or {}).get("best")
        return best["step"] if kept and best else None

    def until(self, step: int | None) -> RecordedRun:
        """Return it with the records up to a step; with all if None."""
        if step is None:
            return self
        return replace(self, records=[r for r in self.records if r.get("step", 0) <= step])


@dataclass(frozen=True)
class CardFacts:
    """A model and its training.

    The ``.json`` beside a card has exactly these fields: what is new goes into ``run`` or
    ``measured``, so that cards that exist can be read.

    Attributes:
        name: The model's, where its results give none.
        revision: The digest of its weights.
        config: The content of its configuration file.
        parameters: How many it has.
        dtypes: The types that its weights are stored as.
        modules: The last names of the modules that hold weights.
        prompt: A text that its tokenizer reads; None if it brings none.
        run: The content of ``run.json``; None if the run is not known.
        recipe: The run's recipe, as YAML.
        measured: The run's last recorded metrics.
        picture: Whether there is a loss curve.
        card: More metadata for the Hub, by the fields of a recipe's section ``card``.
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
    card: dict[str, Any]

    def write(self, path: Path) -> None:
        """Write the file that :func:`read_facts` reads."""
        write_json(path, asdict(self), indent=2)


def read_run(path: Path) -> RecordedRun:
    """Read a run directory.

    Raises:
        ValueError: A file of it is missing or corrupt; the message names the file and the line.
    """
    if not path.is_dir():
        raise ValueError(f"run_dir must be the folder of a run, got {str(path)!r}")
    facts = read_json(path / "run.json")
    texts = {}
    for name in ("recipe.yaml", "metrics.jsonl"):
        try:
            texts[name] = (path / name).read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise ValueError(f"{path / name} does not exist; {path} is not a whole run") from error
        except (OSError, ValueError) as error:
            raise ValueError(f"{path / name} is corrupt: {error}") from error
    try:
        recipe = parse_yaml(texts["recipe.yaml"], "recipe.yaml")
    except ValueError as error:
        raise ValueError(f"{path / 'recipe.yaml'} is corrupt: {error}") from error
    records = []
    for number, line in enumerate(texts["metrics.jsonl"].splitlines(), 1):
        where = f"{path / 'metrics.jsonl'}, line {number}"
        try:
            record = json_of(line)
        except ValueError as error:
            raise ValueError(f"{where} is corrupt: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where} must be an object, got {line!r}")
        records.append(record)
    picture = path / PICTURE
    return RecordedRun(facts, recipe, records, picture if picture.is_file() else None)


def facts_of(folder: Path, run_dir: str | Path | None) -> tuple[CardFacts, Path | None]:
    """Return the summary of a saved model, and its picture if there is one.

    Raises:
        ValueError: A file is missing, corrupt, or not of this model; the message names it.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"model_dir must be a saved model with config.json, got {str(folder)!r}")
    config = read_json(folder / "config.json")
    family_of(config)  # of a family that is not installed nothing can be said
    tensors = read_weights(folder)
    revision = weights_revision(folder)
    run = _run_of(folder, config, revision, run_dir)
    measured: dict[str, float | int | None] = {}
    if run is not None:
        found = {name: run.total(name) for name in _TOTALS}
        found |= {name: run.last(name) for name in _LAST}
        measured = {name: value if is_number(value) else None for name, value in found.items()}
    primed = history(folder)
    base = primed["base"] if primed else base_name(run.recipe) if run else None
    told = {**run.facts, **({"base": base} if base else {})} if run else None
    card = recipe_metadata(run.recipe) if run else {}
    if primed:
        told = {**(told or {}), "base": base, "primed": primed}
        card = joined(primed_metadata(primed), card)
    facts = CardFacts(
        name=model_name(str(folder)),
        revision=revision,
        config=config,
        parameters=parameter_count(tensors),
        dtypes=sorted({dtype for dtype, _ in tensors.values()}),
        modules=sorted({name.split(".")[-2] for name in tensors if name.endswith(".weight")}),
        prompt=_prompt(folder),
        run=told,
        recipe=_recipe(run.recipe) if run else None,
        measured=measured,
        picture=bool(run and run.picture),
        card=card,
    )
    # the file beside a card names no folder of the machine that trained
    plain: Any = portable(asdict(facts))
    return CardFacts(**plain), run.picture if run else None


def read_facts(path: Path) -> CardFacts:
    """Read a file of :meth:`CardFacts.write`.

    Raises:
        ValueError: The file is missing, corrupt, or holds something else.
    """
    content = read_json(path)
    names = {field.name for field in fields(CardFacts)}
    if set(content) != names:
        raise ValueError(f"{path} must have exactly the fields {', '.join(sorted(names))}")
    return CardFacts(**content)


def _prompt(folder: Path) -> str | None:
    """Return a prompt that the tokenizer reads: code, or symbols if it knows only these."""
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


def _run_of(
    folder: Path, config: Mapping[str, Any], revision: str, run_dir: str | Path | None
) -> RecordedRun | None:
    real = folder.resolve()
    if run_dir is None:
        if real.name != "model" or not (real.parent / "run.json").exists():
            return None
        run_dir = real.parent
    run, place = read_run(Path(run_dir)), Path(run_dir).resolve()
    # a checkpoint, or a model of the best step, was made before later records
    step = re.fullmatch(r"step-(\d+)", real.name) if real.parent.name == "checkpoints" else None
    if step is not None:
        run = run.until(int(step[1]))
    elif real.name == "model":
        run = run.until(run.best_step)
    trained = run.facts.get("model_type")
    if trained not in (None, config.get("model_type")):
        raise ValueError(
            f"run_dir {run_dir} trained a {trained!r}, but {folder} holds a "
            f"{config.get('model_type')!r}; give the run that made it"
        )
    if place not in real.parents and not _made(place, folder, revision):
        raise ValueError(
            f"run_dir {run_dir} made other weights than those of {folder}; give the run that "
            "made them"
        )
    return run


def _made(run: Path, folder: Path, revision: str) -> bool:
    """Tell whether a run's model or one of its checkpoints has a folder's weights.

    True if the run has neither any more.
    """
    from safetensors.torch import load_file

    from ssmzoo.training.shards import read_into, stored_tensors

    checkpoints = [path for path in run.glob("checkpoints/*") if is_sharded(path)]
    model = run / "model"
    if not model.is_dir() and not checkpoints:
        return True
    if model.is_dir() and weights_revision(model) == revision:
        return True
    files = [path for path in folder.glob("*.safetensors") if path.name not in NO_WEIGHTS]
    ours = {name: x for path in files for name, x in load_file(path).items()}
    for checkpoint in checkpoints:
        stored = stored_tensors(checkpoint / SHARDS)  # a tied weight may have another of its names
        both = {name: x for name, x in ours.items() if name in stored}
        if not both or any(stored[name].size != x.shape for name, x in both.items()):
            continue
        theirs = {name: x.new_empty(x.shape) for name, x in both.items()}
        read_into(checkpoint / SHARDS, theirs)  # without moments and carried states
        if all(x.equal(theirs[name]) for name, x in both.items()):
            return True
    return False


def family_words(name: str, *, encoder: bool = False) -> dict[str, Any] | None:
    """Read ``model_cards/families/<name>.yaml``; None if there is no such file.

    For an encoder, the fields of ``model_cards/encoder.yaml`` replace these, and its text on the
    architecture is added.
    """
    try:
        path = package_data(f"model_cards/families/{name}.yaml")
    except LookupError:
        return None
    words = yaml.safe_load(path.read_text(encoding="utf-8"))
    if encoder:
        own = yaml.safe_load(package_data("model_cards/encoder.yaml").read_text(encoding="utf-8"))
        words |= {**own, "architecture": f"{words['architecture']} {own['architecture']}"}
    return {key: value.strip() if isinstance(value, str) else value for key, value in words.items()}
