"""What a card is written from: the saved model, its run, its results, its family's words.

Facts of model and run are kept as one small file beside a card; from it and the results the card
can be rendered again where the weights are gone. Everything is checked while it is read, so that a
damaged file is one clear error and never a card with a hole in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from ssmzoo.checkpoints.load import model_name
from ssmzoo.checkpoints.weights import parameter_count, read_weights, weights_revision
from ssmzoo.environment.portable import portable
from ssmzoo.evaluation.results import is_number, read_results
from ssmzoo.family import family_of
from ssmzoo.files import json_of, parse_yaml, read_json, share, write_json
from ssmzoo.publishing.card_metadata import base_of, of_recipe

NOT_MEASURED = "not measured"
NOT_RECORDED = "not recorded"  # what a run of an earlier version did not write down
PICTURE = "loss.png"

_FAMILY_FIELDS = {
    "title",
    "paper",
    "bibtex",
    "architecture",
    "equal_forms",
    "intended_use",
    "limits",
}
_PAPER_FIELDS = {"title", "authors", "venue", "year", "arxiv"}
_LONG = 3  # entries up to which a list is written out
_TOTALS = ("step", "tokens", "seconds")
_LAST = ("loss", *(f"validation_{name}" for name in ("loss", "accuracy", "rmse", "mse")))


@dataclass(frozen=True)
class Row:
    """What two scores must share to stand in one row of the table."""

    task: str
    metric: str
    settings: str
    n: int | None
    num_fewshot: int | None
    seed: int | None


@dataclass(frozen=True)
class Origin:
    """The call of ``ssmzoo eval`` that a score is from, each part as text."""

    date: str
    hardware: str
    environment: str
    versions: str
    command: str


@dataclass(frozen=True)
class ShownScore:
    """A measured value; None where the measurement gave no finite number.

    ``benchmark`` is the data set and the task's id of a benchmark on the Hub, None for others.
    """

    value: float | None
    stderr: float | None
    higher_is_better: bool | None
    origin: Origin
    benchmark: tuple[str, str] | None = None


@dataclass(frozen=True)
class ScoredModel:
    """The scores in one results file, by the row of the table that they stand in."""

    path: Path
    name: str
    source: str
    revision: str | None
    scores: Mapping[Row, ShownScore]
    recipe: Mapping[str, Any] | None = None

    def seed(self) -> object:
        """Return the seed that the recipe trains with, None without a recipe."""
        return None if self.recipe is None else self.recipe["train"].get("seed")

    def is_of_another_seed(self, other: ScoredModel) -> bool:
        """Say whether the same recipe was trained with another seed for these results."""
        if self.recipe is None or other.recipe is None or self.seed() == other.seed():
            return False
        return _without_seed(self.recipe) == _without_seed(other.recipe)


@dataclass(frozen=True)
class RecordedRun:
    """What a run directory says about the training."""

    facts: Mapping[str, Any]
    recipe: Any
    records: Sequence[Mapping[str, Any]]
    picture: Path | None

    def last(self, name: str) -> object:
        """Return the last recorded value of a metric, None if it was never recorded."""
        return next((r[name] for r in reversed(self.records) if r.get(name) is not None), None)

    def total(self, name: str) -> object:
        """Return a whole number that grows: its largest recorded value."""
        values = [r[name] for r in self.records if is_number(r.get(name))]
        return max(values, default=None)

    @property
    def best(self) -> int | None:
        """The step of which the run's model was made, None if that is its last."""
        finished, recipe = self.facts.get("finished"), self.recipe
        kept = isinstance(recipe, dict) and (recipe.get("checkpoint") or {}).get("best")
        best = (finished or {}).get("best")
        return best["step"] if kept and best else None

    def until(self, step: int | None) -> RecordedRun:
        """Return it with what was recorded up to a step; with all if None."""
        if step is None:
            return self
        return replace(self, records=[r for r in self.records if r.get("step", 0) <= step])


@dataclass(frozen=True)
class CardFacts:
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
        card: What the Hub is told besides, by the fields of a recipe's section ``card``.
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


def scored_model(path: Path) -> ScoredModel:
    """Read a results file for a card.

    Raises:
        ValueError: It is none; the message names the file and the field.
    """
    content = read_results(path)
    whole: dict[str, Any] = dict(content)
    scores = {}
    for score in content["results"]:
        entry: dict[str, Any] = dict(score)
        row = Row(
            entry["task"],
            entry["metric"],
            flat(entry["settings"]) if entry.get("settings") else "",
            entry.get("n"),
            entry.get("num_fewshot"),
            entry.get("seed"),
        )
        # a score of an earlier call carries what differs from the file's own
        call = {key: entry.get(key, whole.get(key)) for key in Origin.__annotations__}
        origin = {key: flat(value) for key, value in call.items()}
        origin["environment"] = recorded(call["environment"])
        benchmark = entry.get("benchmark")
        scores[row] = ShownScore(
            entry.get("value"),
            entry.get("stderr"),
            entry.get("higher_is_better"),
            Origin(**origin),
            (benchmark["dataset"], benchmark["task_id"]) if benchmark else None,
        )
    model = content["model"]
    return ScoredModel(
        path, model["name"], model["source"], model["revision"], scores, content.get("recipe")
    )


def _without_seed(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a recipe decides which model comes out, but for the seed."""
    train = {name: value for name, value in recipe["train"].items() if name != "seed"}
    others = {name: recipe.get(name) for name in ("model", "data", "adapter")}
    return {**others, "train": train}


def part_results(
    revision: str, place: Path, results: Sequence[ScoredModel]
) -> tuple[list[ScoredModel], list[ScoredModel]]:
    """Part the results of a model's weights from those of other models.

    Args:
        revision: The digest of the weights.
        place: The folder that holds them, or the file that says so.
        results: All of them.

    Raises:
        ValueError: None are of these weights; some are of the folder's former weights; two files
            disagree about a score.
    """
    if not results:
        return [], []
    own = [entry for entry in results if entry.revision == revision]
    others = [entry for entry in results if entry.revision != revision]
    for entry in others:
        if Path(entry.source).is_dir() and Path(entry.source).resolve() == place.resolve():
            raise ValueError(
                f"{entry.path} was measured on other weights ({entry.revision}) than {place} "
                f"holds now ({revision}); measure again with: ssmzoo eval {place}"
            )
    if not own:
        found = "; ".join(f"{entry.path} is of {entry.source}" for entry in others)
        raise ValueError(
            f"none of the results is of the weights in {place} ({found}); "
            f"measure them with: ssmzoo eval {place}"
        )
    seen: dict[Row, ScoredModel] = {}
    for entry in own:
        for row, score in entry.scores.items():
            first = seen.setdefault(row, entry)
            if first.scores[row].value != score.value:
                raise ValueError(
                    f"{first.path} and {entry.path} give this model different values of "
                    f"{row.task}, {row.metric}; pass the newer one only"
                )
    return own, others


def merged(results: Iterable[ScoredModel]) -> dict[Row, ShownScore]:
    """Return the scores of several files as one mapping."""
    return {row: score for entry in results for row, score in entry.scores.items()}


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
    base = base_of(run.recipe) if run else None
    told = {**run.facts, **({"base": base} if base else {})} if run else None
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
        card=of_recipe(run.recipe) if run else {},
    )
    # what is committed beside cards names no folder of the machine that trained
    plain: Any = portable(asdict(facts))
    return CardFacts(**plain), run.picture if run else None


def read_facts(path: Path) -> CardFacts:
    """Read what :meth:`CardFacts.write` wrote.

    Raises:
        ValueError: The file is missing, corrupt, or holds something else.
    """
    content = {"card": {}, **read_json(path)}  # of an earlier version without
    names = {field.name for field in fields(CardFacts)}
    if set(content) != names:
        raise ValueError(f"{path} must have exactly the fields {', '.join(sorted(names))}")
    return CardFacts(**content)


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


def _run_of(
    folder: Path, config: Mapping[str, Any], revision: str, run_dir: str | Path | None
) -> RecordedRun | None:
    real = folder.resolve()
    if run_dir is None:
        if real.name != "model" or not (real.parent / "run.json").exists():
            return None
        run_dir = real.parent
    run, place = read_run(Path(run_dir)), Path(run_dir).resolve()
    # a checkpoint knows nothing of what was recorded after it, nor does a model made of the best
    step = re.fullmatch(r"step-(\d+)", real.name) if real.parent.name == "checkpoints" else None
    if step is not None:
        run = run.until(int(step[1]))
    elif real.name == "model":
        run = run.until(run.best)
    trained = run.facts.get("model_type")
    if trained not in (None, config.get("model_type")):
        raise ValueError(
            f"run_dir {run_dir} trained a {trained!r}, but {folder} holds a "
            f"{config.get('model_type')!r}; give the run that made it"
        )
    made = [path for path in (place / "model", *place.glob("checkpoints/*")) if path.is_dir()]
    is_copy = place not in real.parents
    if is_copy and made and all(weights_revision(path) != revision for path in made):
        raise ValueError(
            f"run_dir {run_dir} made other weights than those of {folder}; give the run that "
            "made them"
        )
    return run


def family_words(name: str, *, encoder: bool = False) -> dict[str, Any] | None:
    """Return what ``model_cards/families/<name>.yaml`` says; None if there is no such file.

    Of an encoder ``model_cards/encoder.yaml`` has other words, and more on the architecture.

    Raises:
        ValueError: The file is not as it must be; the message names it.
    """
    try:
        path = share(f"model_cards/families/{name}.yaml")
    except LookupError:
        return None
    words = yaml.safe_load(path.read_text(encoding="utf-8"))
    for names, found in ((_FAMILY_FIELDS, words), (_PAPER_FIELDS, (words or {}).get("paper"))):
        if not isinstance(found, dict) or set(found) != names:
            raise ValueError(f"{path} must have exactly the fields {', '.join(sorted(names))}")
    if encoder:
        own = yaml.safe_load(share("model_cards/encoder.yaml").read_text(encoding="utf-8"))
        words |= {**own, "architecture": f"{words['architecture']} {own['architecture']}"}
    return {key: value.strip() if isinstance(value, str) else value for key, value in words.items()}


def recorded(environment: object) -> str:
    """Write what :func:`ssmzoo_kernels.machine.environment` recorded in one line."""
    if not isinstance(environment, Mapping):
        return NOT_RECORDED
    return flat({str(name).replace("_", " "): value for name, value in environment.items()})


def flat(value: object) -> str:
    """Write a fact of any shape in one line; long lists are counted."""
    if value is None or value in ("", {}, []):
        return NOT_MEASURED
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {flat(part)}" for key, part in value.items() if part is not None)
    if isinstance(value, list | tuple):
        return f"({len(value)})" if len(value) > _LONG else ", ".join(map(flat, value))
    return str(value)
