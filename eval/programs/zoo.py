"""Many models trained alike, scored, carded and published: ``make zoo`` and ``make small``.

A file such as ``eval/zoo.yaml`` lists them. Each is trained, scored (of text: on held-out documents
and a recall task; of a task: on its test split), given golden logits and a card, and published into
a folder or to the Hub. After an interruption the same command goes on;
finished stages are not repeated. Everything is checked before anything is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from shared import (
    guarded,
    is_trained,
    place_of,
    require_same,
    say,
    score_once,
    split_once,
    table,
    train_once,
    whole_steps,
)

from ssmzoo.files import STDLIB, read_json, write_json
from ssmzoo.recipe import Recipe, Section, fields_of, read_sections, set_field

ZOO = Path(__file__).resolve().parents[1] / "zoo.yaml"
# folders of the zoo that no model may be named after
_WORK = ("published", "results", "runs", "text")


@dataclass(frozen=True)
class Place:
    """Where models are published.

    Attributes:
        folder: The folder; each is a folder in it.
        hub: The organisation or user on the Hub instead; each is ``ssmzoo-NAME`` there.
        public: Whether a repository is created public.
        code: Whether the models' code goes along.
        dry_run: Whether nothing is published, only checked and shown.
    """

    folder: Path
    hub: str | None = None
    public: bool = False
    code: bool = True
    dry_run: bool = False

    def of(self, name: str) -> str:
        """Return a model's place, as ``publish`` reads it."""
        return (
            f"folder:{self.folder / name}" if self.hub is None else f"hub:{self.hub}/ssmzoo-{name}"
        )

    def check(self) -> None:
        """Check the place before there is a model.

        Raises:
            ValueError: No name of an organisation; a wish that only one of both places has.
            RuntimeError: There is no token.
        """
        if self.hub is None:
            if self.public:
                raise ValueError("PUBLIC needs HUB, the organisation to publish to")
            return
        from huggingface_hub import get_token
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        try:
            validate_repo_id(f"{self.hub}/ssmzoo")
        except HFValidationError:
            raise ValueError(f"HUB must be an organisation or user, got {self.hub!r}") from None
        if get_token() is None and not self.dry_run:
            raise RuntimeError(
                f"publishing to {self.hub} needs a Hugging Face token; run `hf auth login`, set "
                "HF_TOKEN, or look first with DRY_RUN=1"
            )


def zoo(arguments: Sequence[str] | None = None) -> int:
    """Make a zoo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python eval/programs/zoo.py", description=__doc__)
    parser.add_argument("--list", type=Path, help="which models (default: eval/zoo.yaml)")
    parser.add_argument("--only", help="names of models, with commas (default: all)")
    parser.add_argument("--text", help="file or folder to train on (default: the list's)")
    parser.add_argument("--steps", help="training steps (default: the list's)")
    parser.add_argument("--output", type=Path, default=Path("zoo"), help="default: zoo")
    parser.add_argument("--publish", type=Path, help="folder to publish into (default: --output)")
    parser.add_argument("--no-code", action="store_true", help="publish without the models' code")
    parser.add_argument("--hub", help="organisation on the Hub to publish to instead")
    parser.add_argument("--public", action="store_true", help="create repositories public")
    parser.add_argument("--dry-run", action="store_true", help="publish nothing")
    options = parser.parse_args(arguments)

    def work() -> None:
        place = Place(
            (options.publish or options.output).absolute(),
            options.hub,
            options.public,
            not options.no_code,
            options.dry_run,
        )
        run_zoo(
            options.list or ZOO,
            options.output,
            place,
            only=None if options.only is None else options.only.split(","),
            text=options.text,
            steps=whole_steps(options.steps),
        )

    return guarded("zoo", work)


def run_zoo(
    listed: Path,
    output: Path,
    place: Place,
    *,
    only: Sequence[str] | None,
    text: str | None,
    steps: int | None,
) -> None:
    """Do the whole job, or go on with an earlier call's, and print the results."""
    from ssmzoo.training.checkpoint import locked

    place.check()
    recipes = chosen(listed, only, [] if steps is None else [f"train.steps={steps}"])
    sources = text_of(recipes, text)
    asked: dict[str, Any] = {"steps": steps}
    if sources:
        places = [place_of(source) or STDLIB for source in sources]
        asked["text"] = None if places == [STDLIB] else ", ".join(places)
    require_same("zoo", output, asked)
    for name, recipe in recipes.items():
        require_as_trained(output / "runs" / name, recipe)
    with locked(output):
        facts = output / "zoo.json"
        write_json(facts, {**(read_json(facts) if facts.exists() else {}), **asked})
        overrides = split_once(sources, output) if sources else []
        for name, recipe in recipes.items():
            make(name, recipe, output, place, overrides)
        say(f"\n{table((n, output / 'runs' / n, scores_file(n, output)) for n in recipes)}")
        where = place.folder if place.hub is None else f"{place.hub} on the Hub"
        say(f"\n{len(recipes)} models, {'nothing ' if place.dry_run else ''}published in {where}")


class Zoo(Section):
    """Recipes in one file, such as ``eval/zoo.yaml``: many models, trained alike.

    Attributes:
        shared: Sections that all recipes have, ``data`` and ``train`` say.
        models: By name, a model's own sections; a field in them wins over the shared one.
    """

    shared: dict[str, dict[str, Any]] = {}
    models: Annotated[dict[str, dict[str, dict[str, Any]]], Field(min_length=1)]


def load_zoo(path: Path, overrides: Sequence[str] = ()) -> dict[str, Recipe]:
    """Return the recipes of a file by their models' names; see :class:`Zoo`.

    Args:
        path: The YAML file.
        overrides: ``section.field=value``, the value in YAML; they win over the file.

    Raises:
        LookupError: No such file or field; the message suggests.
        ValueError: A wrong value, or a file that is not UTF-8 or not YAML.
    """
    listed, recipes = read_sections(Zoo, fields_of(path), path.name), {}
    for name, own in listed.models.items():
        sections = {**listed.shared, **own}
        fields = {part: {**listed.shared.get(part, {}), **own.get(part, {})} for part in sections}
        for override in overrides:
            set_field(fields, override)
        recipes[name] = read_sections(Recipe, fields, f"{path.name}, {name}")
    return recipes


def chosen(listed: Path, only: Sequence[str] | None, overrides: Sequence[str]) -> dict[str, Recipe]:
    """Return the recipes of a list that are asked for, all of them checked.

    Raises:
        LookupError: A name that the list does not have, a field that a recipe or a model does not.
        ValueError: A wrong value.
    """
    from ssmzoo.analysis.sweep import with_few_examples
    from ssmzoo.data.sources import data_source
    from ssmzoo.environment.messages import suggestion
    from ssmzoo.training.model import build_config

    recipes = load_zoo(listed, overrides)
    for name in only or ():
        if name not in recipes:
            raise LookupError(
                f"ONLY must name models of {listed.name}, got {name!r}{suggestion(name, recipes)}; "
                f"there are {', '.join(recipes)}"
            )
    for name, recipe in recipes.items():
        if name in _WORK or not name.replace("-", "").isalnum() or not name.isascii():
            raise ValueError(
                f"{listed.name}: a model's name must be of letters, digits and hyphens, and none "
                f"of {', '.join(_WORK)}, got {name!r}"
            )
        source = data_source(with_few_examples(recipe))
        try:
            build_config(recipe.model, source.tokenizer, source.task)
        except (LookupError, ValueError) as error:
            raise type(error)(f"{listed.name}, {name}: {error}") from error
    return {name: recipe for name, recipe in recipes.items() if only is None or name in only}


def text_of(recipes: dict[str, Recipe], text: str | None) -> list[str]:
    """Return the text that all models of text read, as files, folders or ``python-stdlib``.

    Raises:
        ValueError: There is no such text, there are several, or no model reads it.
    """
    from ssmzoo.data.paths import expand

    said = {tuple(recipe.data.text) for recipe in recipes.values() if recipe.data.text is not None}
    if text is not None and not said:
        raise ValueError(f"TEXT must be left out where no model reads text, got {text!r}")
    if text is None and len(said) > 1:
        raise ValueError(f"data.text must be the same for all models, got {sorted(said)}")
    sources = [text] if text is not None else [path for paths in said for path in paths]
    expand(sources, "TEXT")
    return sources


def require_as_trained(run: Path, recipe: Recipe) -> None:
    """Fail if a finished run was another recipe's; of an unfinished one ``train`` sees to it.

    Raises:
        ValueError: It was.
    """
    from ssmzoo.recipe import load_recipe

    if not is_trained(run):
        return
    moved = ("data.text", "data.validation")  # the split's folders, or where they were
    begun = load_recipe(run / "recipe.yaml")
    for field, before, now in begun.differences(recipe, ("model", "data", "train")):
        if field not in moved:
            raise ValueError(
                f"{field} must stay as {run} was trained, {before!r}, got {now!r}; train it anew "
                f"with: rm -r {run}"
            )


def scores_file(name: str, output: Path) -> Path:
    """Return the file with a model's scores: its run's, of a task, or ``ssmzoo eval``'s."""
    own = output / "runs" / name / "results.json"
    return own if own.exists() else output / "results" / f"{name}.json"


def make(name: str, recipe: Recipe, output: Path, place: Place, overrides: Sequence[str]) -> None:
    """Train, score, card and publish one model, as far as it is not done."""
    from ssmzoo.checkpoints.weights import GOLDEN
    from ssmzoo.publishing.card import render_card
    from ssmzoo.testing.golden import write_golden

    run = output / "runs" / name
    of_text = recipe.data.text is not None
    train_once(name, recipe, run, stock=False, overrides=overrides if of_text else [])
    if of_text:
        score_once(name, run, output, stock=False)
    if not (run / "model" / GOLDEN).exists():
        say(f"writing {name}'s golden logits and card")
        render_card(run / "model", results=[scores_file(name, output)], run_dir=run)
        write_golden(run / "model")  # last: where it is, the card is
    publish_once(name, run / "model", output / "published" / f"{name}.json", place)


def publish_once(name: str, model: Path, record: Path, place: Place) -> None:
    """Publish a model, unless the record of an earlier call says that it is there."""
    from ssmzoo.checkpoints.weights import weights_revision
    from ssmzoo.publishing.hub import publish

    done: dict[str, Any] = {"target": place.of(name), "revision": weights_revision(model)}
    done["code"] = place.code
    there = place.hub is not None or (place.folder / name).is_dir()
    if there and record.exists() and read_json(record) == done:
        say(f"{name} is published")
        return
    report = publish(
        model,
        done["target"],
        code=place.code,
        dry_run=place.dry_run,
        private=place.hub is not None and not place.public,
    )
    if report.dry_run:
        say(f"{name}: {len(report.files)} files, {report.size:,} bytes would go to {report.target}")
        return
    record.parent.mkdir(exist_ok=True)
    write_json(record, done)
    say(f"published {name}: {report.url}")


if __name__ == "__main__":
    sys.exit(zoo())
