"""A sweep's file and the runs that it plans."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from ssmzoo.analysis.ledger import Cell, Line, cell_of
from ssmzoo.environment.messages import missing, suggestion
from ssmzoo.files import package_data
from ssmzoo.recipe import (
    DataSection,
    ModelSection,
    Recipe,
    Section,
    fields_of,
    read_sections,
    set_field,
)

try:
    from pydantic import Field
except ImportError as error:
    raise missing("sweeps need pydantic", "train", error) from error

NEVER = 1_000_000_000  # steps
COMPARED = ("model", "data", "train", "eval")  # sections that change a run's result
# by column of the ledger, the field of a sweep with its values
CHOICES = {
    "problem": "problems",
    "model": "models",
    "width": "widths",
    "lr": "learning_rates",
    "seed": "seeds",
}


class Problem(Section):
    """One problem of a sweep.

    Attributes:
        data: A recipe's section.
        train: A recipe's section without ``lr`` and ``seed``.
        eval: A recipe's section. If absent, all held-out data is evaluated, once, at the end.
    """

    data: DataSection
    train: dict[str, Any]
    eval: dict[str, Any] = {}


class Sweep(Section):
    """The closed YAML file of ``ssmzoo sweep``.

    Attributes:
        models: By the name that the ledger shows, a recipe's ``model`` section without
            ``hidden_size``: families of the zoo and foreign ones, model types of transformers, and
            saved models, which have a width of their own.
        problems: By the name that the ledger shows, the data and the training.
        widths: The values of ``hidden_size``.
        learning_rates: The values of ``train.lr``.
        seeds: The values of ``train.seed``.
        search_seeds: The number of first seeds that run at every learning rate; the others run at
            the best of them alone, once these are finished. If absent, all run at every rate.
    """

    models: Annotated[dict[str, ModelSection], Field(min_length=1)]
    problems: Annotated[dict[str, Problem], Field(min_length=1)]
    widths: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    learning_rates: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    search_seeds: Annotated[int, Field(ge=1)] | None = None

    @property
    def later_seeds(self) -> list[int]:
        """The seeds that run at the best learning rate alone."""
        return [] if self.search_seeds is None else self.seeds[self.search_seeds :]

    def runs(self) -> list[PlannedRun]:
        """Return every run in the order of training: the first seed of all comes first.

        Raises:
            LookupError: A field that a recipe does not have.
            ValueError: A wrong value, or a name or number that appears twice.
        """
        self._check()
        found: dict[str, PlannedRun] = {}
        for seed, problem, (model, section) in product(
            self.seeds, self.problems, self.models.items()
        ):
            widths = self.widths if section.init_from is None else [None]  # it has its own
            for width, lr in product(widths, self.learning_rates):
                place = {"problem": problem, "model": model, "width": width, "lr": lr, "seed": seed}
                recipe = self._recipe(place)
                run = PlannedRun(place, recipe.with_absolute_paths(), _digest(recipe))
                if run.folder in found:
                    raise ValueError(
                        "problems, models, widths, learning_rates and seeds must not repeat, got "
                        f"{run.folder} twice"
                    )
                found[run.folder] = run
        return list(found.values())

    def _check(self) -> None:
        if self.search_seeds is not None and self.search_seeds > len(self.seeds):
            raise ValueError(
                f"search_seeds must be at most the {len(self.seeds)} seeds, got {self.search_seeds}"
            )
        for name in (*self.models, *self.problems):
            if not re.fullmatch(r"[^\W_][^/\\:*?\"<>|,=]*", name) or not name.isprintable():
                raise ValueError(
                    "models and problems must have names that begin with a letter or digit and "
                    f'hold none of /\\:*?"<>|,=, for folders are called by them, got {name!r}'
                )
        said_elsewhere = [
            *(
                (f"models.{name}.config", said.config, "hidden_size", "widths")
                for name, said in self.models.items()
            ),
            *(
                (f"problems.{name}.train", said.train, field, CHOICES[field])
                for name, said in self.problems.items()
                for field in ("lr", "seed")
            ),
        ]
        for where, given, field, values in said_elsewhere:
            if field in given:
                raise ValueError(
                    f"{field} must be left out of {where}, since {values} say it, got "
                    f"{given[field]!r}"
                )

    def _recipe(self, place: Line) -> Recipe:
        said, section = self.problems[place["problem"]], self.models[place["model"]]
        model = section.model_dump(exclude_none=True)
        if place["width"] is not None:
            model["config"] = {**section.config, "hidden_size": place["width"]}
        fields = {
            "model": model,
            "data": said.data.model_dump(exclude_none=True),
            "train": {**said.train, "lr": place["lr"], "seed": place["seed"]},
            "eval": {"every": NEVER, "batches": "all", **said.eval},
            "checkpoint": {"every": NEVER, "keep": 1},
            "log": {"every": 100, "curves": False},
        }
        recipe = read_sections(Recipe, fields, f"problems.{place['problem']}")
        if not recipe.supervised and recipe.data.validation is None:
            raise ValueError(f"problems.{place['problem']}.data needs validation to evaluate on")
        return recipe


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep.

    Attributes:
        place: Its ``problem``, ``model``, ``width`` (None of a saved model), ``lr`` and ``seed``.
        recipe: Its recipe.
        digest: Tells its recipe from others in the ledger.
    """

    place: Line
    recipe: Recipe
    digest: str

    @property
    def folder(self) -> str:
        """Where it lies in the folder of runs."""
        place = self.place
        width = "own" if place["width"] is None else place["width"]
        name = f"{place['model']}-{width}-{place['lr']:g}-{place['seed']}"
        return f"{place['problem']}/{name}".replace(" ", "-")

    @property
    def cell(self) -> Cell:
        """Its problem, model and width, which make the configuration."""
        return cell_of(self.place)

    def __str__(self) -> str:
        shown = (f"{name} {value}" for name, value in self.place.items() if value is not None)
        return ", ".join(shown)


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read and check a sweep and all of its recipes.

    Args:
        path: A YAML file, or the name of a shipped sweep.
        overrides: ``field=value``, the value in YAML; they win over the file, or add to it:
            ``models.mine={family: mine}``.

    Raises:
        LookupError: No such file, or a field that a sweep or a recipe does not have.
        ValueError: A wrong value, or a file that is not YAML.
    """
    shipped = package_data("eval/sweeps") / f"{path}.yaml"
    file = shipped if shipped.is_file() else Path(path)
    if not file.exists():
        names = sorted(sweep.stem for sweep in shipped.parent.glob("*.yaml"))
        raise LookupError(
            f"no sweep {str(path)!r}{suggestion(str(path), names)}; shipped: {', '.join(names)}"
        )
    fields = fields_of(file)
    if isinstance(fields, dict):
        for override in overrides:
            set_field(fields, override)
    found = read_sections(Sweep, fields, file.name)
    found.runs()
    return found


def _digest(recipe: Recipe) -> str:
    """Return a digest of twelve digits of the sections that change a run's result."""
    text = {
        name: getattr(recipe, name).model_dump(exclude_defaults=True, mode="json")
        for name in COMPARED
    }
    return hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()[:12]


def selection(terms: Iterable[str]) -> dict[str, list[Any]]:
    """Parse terms such as ``problem=NAME``, ``width=N`` and ``lr=RATE``; values by field.

    Raises:
        LookupError: No such field.
        ValueError: A term of another form.
    """
    kinds = {"width": int, "lr": float, "seed": int}
    found: dict[str, list[Any]] = {}
    for term in terms:
        field, equals, value = term.partition("=")
        if not equals:
            raise ValueError(f"only must look like problem=NAME,model=NAME,seed=0, got {term!r}")
        try:
            found.setdefault(field, []).append(kinds.get(field, str)(value))
        except ValueError:
            raise ValueError(f"only must have a number for {field}, got {term!r}") from None
    return found


def selected(
    chosen: Sweep, planned: list[PlannedRun], only: Mapping[str, Sequence[Any]]
) -> list[PlannedRun]:
    """Return the runs that are asked for.

    Raises:
        LookupError: A name or number that the sweep does not have.
    """
    for field, values in only.items():
        if field not in CHOICES:
            raise LookupError(f"only has no field {field!r}{suggestion(field, CHOICES)}")
        known = list(getattr(chosen, CHOICES[field]))
        for value in values:
            if value not in known:
                texts = [f"{x:g}" if isinstance(x, float) else str(x) for x in known]
                near = suggestion(value, texts) if isinstance(value, str) else ""
                raise LookupError(
                    f"the sweep has no {field} {value!r}{near}; "
                    f"{CHOICES[field]}: {', '.join(texts)}"
                )
    return [
        run
        for run in planned
        if all(run.place[field] in values for field, values in only.items() if values)
    ]
