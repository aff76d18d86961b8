"""Sweeps: many small models on many small problems, at every learning rate, seed and width.

- Each run has a folder with a ``result.json`` once it is finished. The ledger is made of these
  files, so several processes can share a sweep: each takes runs that no other one is training.
- Lines of the output's ``ledger.csv`` count as finished, too: with the ledger alone the sweep goes
  on, on another machine say.
- The first seed of all runs comes first, so an interrupted sweep has whole seeds.
- Unsupported pairs of model and problem are found before anything is trained, and are listed with
  the reason.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ssmzoo.analysis.cost import costs_of
from ssmzoo.analysis.ledger import (
    COLUMNS,
    Cell,
    Line,
    best_rates,
    cell_of,
    draw_problem,
    read_ledger,
    write_ledger,
)
from ssmzoo.analysis.sweep_plan import CHOICES, COMPARED, PlannedRun, Sweep, load_sweep, selected
from ssmzoo.data.documents import documents_of
from ssmzoo.data.sources import DataSource, data_source, json_digest, without_places
from ssmzoo.environment.device import installed_versions
from ssmzoo.environment.messages import first_line
from ssmzoo.environment.places import require_writable
from ssmzoo.files import CannotWriteError, read_json, write_json
from ssmzoo.recipe import Recipe, load_recipe, read_sections
from ssmzoo.tasks import SUPERVISED_TASKS, length_argument, task_arguments
from ssmzoo.tasks.supervised import SPLITS
from ssmzoo.training.checkpoint import InUseError, locked
from ssmzoo.training.metrics import read_metrics
from ssmzoo.training.model import NoHeadError, build_config
from ssmzoo.training.trainer import NotFiniteError

logger = logging.getLogger("ssmzoo")

Unsupported: TypeAlias = dict[Cell, str]  # why a model cannot be trained on a problem

MOST_TOKENS = 4096  # of the sequence that costs are measured on


def sweep(
    source: str | Path | Sweep,
    output_dir: str | Path,
    *,
    only: Mapping[str, Sequence[Any]] | None = None,
    train: bool = True,
    keep: bool = False,
    stock: bool = False,
) -> list[Line]:
    """Train a sweep's models; write ``ledger.json``, ``ledger.csv`` and a picture a problem.

    Finished runs, and those in ``ledger.csv``, are not trained again; killed ones resume; those
    that another process trains are left to it. Runs of another sweep, or on files that were changed
    since, are an error before anything is trained. A run that fails is reported, and the others go
    on.

    Args:
        source: A YAML file, the name of a shipped sweep, or a sweep.
        output_dir: Where the runs, the ledger and the pictures go.
        only: By ``problem``, ``model``, ``width``, ``lr`` and ``seed`` those to train. Learning
            rates named here are trained at every seed, searched or not.
        train: Whether to train; the ledger of finished runs is written either way.
        keep: Keep the models that are trained now, in ``model`` of the runs' folders.
        stock: Leave transformers' recurrent models as they are, without our kernels.

    Returns:
        The ledger of the whole sweep, a line for each length that a run is evaluated at, its
        training length first: ``problem``, ``model``, ``width``, ``lr``, ``seed``, ``length``,
        ``metric`` (``accuracy``, ``rmse``, ``bits_per_byte`` or ``loss``), ``validation``, by which
        rates are ranked, ``value``, ``last`` (the accuracy of each row's last target), ``targets``,
        ``parameters``, ``state_bytes`` of one sequence of the training length, ``flops_per_token``
        of matrix products, attention and convolutions, ``seconds`` of training, ``cpu_seconds`` of
        the whole run since it was last begun or resumed, ``hardware``, ``date``, ``recipe``, a
        digest. Where a run diverged, ``value`` is None and ``note`` says so; an unsupported pair
        has one line, with the reason as ``note``.

    Raises:
        LookupError: A field, family, preset, model type or name that does not exist.
        ValueError: A wrong value, a folder with runs of another sweep or on other text, a result
            or a ledger that is cut.
        RuntimeError: The machine, a place that cannot be written to, or runs that failed.
    """
    chosen = source if isinstance(source, Sweep) else load_sweep(source)
    planned = chosen.runs()
    wanted = selected(chosen, planned, only or {})
    output = Path(output_dir)
    require_writable(output, "output_dir")
    if not train and not (output / "runs").is_dir() and not (output / "ledger.csv").is_file():
        raise ValueError(f"{output} holds neither runs nor a ledger; without --table it is trained")
    problems = Problems()
    for run in planned:
        _require_same(run, output / "runs" / run.folder, problems)
    before = _finished(planned, output)
    asked = {run.cell for run in wanted}
    unsupported = {cell: why for cell, why in before.unsupported.items() if cell not in asked}
    unsupported |= find_unsupported(wanted, problems)
    failed: list[str] = []
    if train:
        left = [run for run in wanted if run.folder not in before.lines]
        todo = [run for run in left if run.cell not in unsupported]
        later = [] if (only or {}).get("lr") else chosen.later_seeds
        training = _Training(output, problems, keep, stock)
        failed += training.train_all([run for run in todo if run.place["seed"] not in later])
        if rest := [run for run in todo if run.place["seed"] in later]:
            best = _searched(chosen, _finished(planned, output).lines.values())
            at_best = [run for run in rest if best.get(run.cell) == run.place["lr"]]
            failed += training.train_all(at_best)
    ledger = _ledger(planned, _finished(planned, output).lines, unsupported)
    _write(output, chosen, ledger)
    if failed:
        raise RuntimeError(f"{len(failed)} runs failed, the first: {failed[0]}")
    return ledger


def find_unsupported(runs: Iterable[PlannedRun], problems: Problems | None = None) -> Unsupported:
    """Return, by problem, model and width, the pairs that cannot be trained, with the reason.

    Raises:
        LookupError: A name that does not exist.
        ValueError: A wrong value.
    """
    problems, found = problems or Problems(), {}
    for cell, run in {run.cell: run for run in runs}.items():
        source = problems.source(run)
        try:
            build_config(run.recipe.model, source.tokenizer, source.task)
        except NoHeadError as error:
            found[cell] = first_line(error).removeprefix("model.config_of: ")
        except (LookupError, ValueError) as error:
            raise type(error)(f"models.{cell[1]} on problems.{cell[0]}: {error}") from error
    return found


def searched_lines(chosen: Sweep, ledger: Path) -> list[Line]:
    """Return a ledger's unsupported pairs, and the lines of all cells whose search is finished.

    A search is finished when the first ``search_seeds`` seeds are trained at every learning rate.

    Raises:
        ValueError: The ledger is cut, or another sweep's.
    """
    found = _in_ledger(chosen.runs(), ledger)
    cells = _searched(chosen, found.lines.values())
    lines = [line for lines in found.lines.values() for line in lines if cell_of(line) in cells]
    return lines + [_line_of(cell, why) for cell, why in found.unsupported.items()]


class Problems:
    """The problems' data, each opened once, and the models' costs, each measured once."""

    def __init__(self) -> None:
        self._sources: dict[tuple[str, str | None], DataSource] = {}
        self._costs: dict[Cell, Line] = {}
        self._files: dict[str, str | None] = {}

    def source(self, run: PlannedRun) -> DataSource:
        """Return a small part of the data of a run's problem, as it is at seed 0."""
        key = run.place["problem"], run.recipe.model.init_from  # which may bring a tokenizer
        if key not in self._sources:
            recipe = with_few_examples(run.recipe)
            section = recipe.train.model_copy(update={"seed": 0})
            self._sources[key] = data_source(recipe.model_copy(update={"train": section}))
        return self._sources[key]

    def files(self, run: PlannedRun) -> str | None:
        """Return the digest of a problem's files as they were when it was first asked for."""
        problem = run.place["problem"]
        if problem not in self._files:
            self._files[problem] = _files_digest(run.recipe)
        return self._files[problem]

    def costs(self, run: PlannedRun, length: int) -> Line:
        """Return a model's costs, which no rate and no seed changes."""
        if run.cell not in self._costs:
            tokens = min(length, MOST_TOKENS)
            self._costs[run.cell] = costs_of(run.recipe.model, self.source(run), tokens)
        return self._costs[run.cell]


class Finished(NamedTuple):
    """Finished runs: their lines by the run's folder, and the unsupported pairs of a ledger."""

    lines: dict[str, list[Line]]
    unsupported: Unsupported


def _finished(planned: Iterable[PlannedRun], output: Path) -> Finished:
    """Return the finished runs, by the ledger that is there and by their own results."""
    found = _in_ledger(planned, output / "ledger.csv")
    for run in planned:
        result = output / "runs" / run.folder / "result.json"
        if result.exists():
            found.lines[run.folder] = read_json(result)["lines"]
    return found


def _in_ledger(planned: Iterable[PlannedRun], file: Path) -> Finished:
    """Return the runs in a ledger, if there is one.

    Raises:
        ValueError: It is cut, another sweep's, or has a run twice.
    """
    known = {tuple(run.place.values()): run for run in planned}
    cells = {run.cell for run in known.values()}
    found, strange = Finished({}, {}), []
    for line in read_ledger(file) if file.exists() else []:
        place = {name: line[name] for name in CHOICES}
        shown = ", ".join(f"{name} {value}" for name, value in place.items() if value is not None)
        run = known.get(tuple(place.values()))
        if line["lr"] is None and cell_of(line) in cells:
            found.unsupported[cell_of(line)] = line["note"]
        elif run is not None and run.digest == line["recipe"]:
            lines = found.lines.setdefault(run.folder, [])
            if any(other["length"] == line["length"] for other in lines):
                raise ValueError(f"{file} must have each run once, got {shown} twice; take one out")
            lines.append(line)
        else:
            strange.append(shown)
    if strange:
        raise ValueError(
            f"{file} is another sweep's: {strange[0]} was trained by another recipe, or is none of "
            f"its runs, and so are {len(strange) - 1} other lines; choose another folder, or take "
            "them out"
        )
    return found


def _searched(chosen: Sweep, runs: Iterable[list[Line]]) -> dict[Cell, float]:
    """Return the best learning rate of the cells whose search is finished."""
    first = [seed for seed in chosen.seeds if seed not in chosen.later_seeds]
    lines = [line for lines in runs for line in lines if line["seed"] in first]
    trained = defaultdict(set)
    for line in lines:
        trained[cell_of(line)].add((line["lr"], line["seed"]))
    asked = set(product(chosen.learning_rates, first))
    best = best_rates(lines)
    return {cell: best[cell][0]["lr"] for cell, done in trained.items() if done == asked}


def _require_same(run: PlannedRun, folder: Path, problems: Problems) -> None:
    """Check that a run's folder is of this sweep and was trained on the same text.

    Raises:
        ValueError: It is another sweep's, or its text has changed.
    """
    begun: Recipe | None = None
    result = read_json(folder / "result.json") if (folder / "result.json").exists() else None
    if result is not None:
        begun = read_sections(Recipe, result["recipe"], str(folder))
    elif (begun_as := folder / "run/recipe.yaml").exists():
        with suppress(LookupError):  # another process may have finished it by now
            begun = load_recipe(begun_as)
    if begun is not None:
        for name, before, now in begun.differences(run.recipe, COMPARED):
            raise ValueError(
                f"{folder} was trained for another sweep: {name} was {before!r}, is {now!r} now; "
                "choose another folder, or remove the run, and its lines in ledger.csv"
            )
    if result is not None and result.get("files") not in (None, problems.files(run)):
        raise ValueError(
            f"{folder} was trained on other text: problems.{run.place['problem']}.data names files "
            "that were changed since; put them back, choose another folder, or remove the run"
        )


def _files_digest(recipe: Recipe) -> str | None:
    """Return a digest of the local files that a recipe reads its text from, if it does."""
    if recipe.data.task is not None or recipe.data.dataset is not None:
        return None
    return json_digest(without_places(documents_of(recipe.data).find(None)))


def with_few_examples(recipe: Recipe) -> Recipe:
    """Return a recipe whose task generates one example a split."""
    if not recipe.supervised:
        return recipe
    known = inspect.signature(SUPERVISED_TASKS[str(recipe.data.task)]).parameters
    few = {f"num_{split}": 1 for split in SPLITS if f"num_{split}" in known}
    data = recipe.data.model_copy(update={"task_args": {**recipe.data.task_args, **few}})
    return recipe.model_copy(update={"data": data})


@dataclass(frozen=True)
class _Training:
    """How the runs of a call are trained, each into its folder below ``output``."""

    output: Path
    problems: Problems
    keep: bool
    stock: bool

    def train_all(self, todo: Sequence[PlannedRun]) -> list[str]:
        """Train runs one after the other, a line in the log for each; return those that failed."""
        failed: list[str] = []
        metrics = logging.getLogger("ssmzoo.metrics")
        level = metrics.level
        metrics.setLevel(logging.WARNING)
        try:
            for number, run in enumerate(todo, 1):
                title = f"{number}/{len(todo)} {run}"
                try:
                    self._train_one(run, title)
                except InUseError:
                    continue
                except CannotWriteError:
                    raise
                except (LookupError, ValueError, RuntimeError) as error:
                    failed.append(f"{run}: {first_line(error)}")
                    logger.warning("%s: %s", title, first_line(error))
        finally:
            metrics.setLevel(level)
        return failed

    def _train_one(self, run: PlannedRun, title: str) -> None:
        folder = self.output / "runs" / run.folder
        with locked(folder):
            if (folder / "result.json").exists():  # another process was faster
                return
            result = self._result(run, folder)
            write_json(folder / "result.json", result)
            shutil.rmtree(folder / "run", ignore_errors=True)
        line = result["lines"][0]
        shown = line["note"] or f"{line['metric']} {line['value']:.4f}"
        logger.info("%s: %s (%.0f s)", title, shown, line["cpu_seconds"])

    def _result(self, run: PlannedRun, folder: Path) -> Line:
        """Train a run, or resume it, and return its result."""
        from ssmzoo.training.run import train

        begun, place = time.process_time(), folder / "run"
        length = _length_of(run.recipe, self.problems.source(run))
        columns = dict.fromkeys(COLUMNS) | run.place | self.problems.costs(run, length)
        files = _files_digest(run.recipe)  # read anew: a sweep may take days
        note: str | None = None
        lines: list[Line] = []
        try:
            train(run.recipe, output_dir=place, resume=place.exists(), stock=self.stock)
        except NotFiniteError as error:
            note = f"diverged: {first_line(error).partition(';')[0]}"
        facts = read_json(place / "run.json")
        columns |= {
            "cpu_seconds": round(time.process_time() - begun, 1),
            "hardware": facts["hardware"],
            "date": facts["date"],
            "recipe": run.digest,
        }
        if note is None:
            lines = _scores(facts["finished"], place / "metrics.jsonl", run.recipe, length)
            if None in (lines[0]["value"], lines[0]["validation"]):
                note = "diverged: its loss on held-out examples is no finite number"
        if note is not None:
            lines = [{"length": length, "note": note}]
        elif self.keep:
            shutil.rmtree(folder / "model", ignore_errors=True)
            os.replace(place / "model", folder / "model")
        return {
            "place": run.place,
            "recipe": run.recipe.model_dump(exclude_none=True, mode="json"),
            "lines": [columns | line for line in lines],
            "files": files,
            "versions": facts["versions"],
            "environment": facts.get("environment"),
            "recurrent_layers": facts.get("recurrent_layers"),
        }


def _scores(finished: Line, metrics: Path, recipe: Recipe, length: int) -> list[Line]:
    """Return the columns of a finished run's scores, a line for each length."""
    prefix = "validation_"
    validation = {
        name.removeprefix(prefix): value
        for line in read_metrics(metrics)
        for name, value in line.items()
        if name.startswith(prefix)
    }
    test = finished.get("test") or validation
    by_length = {length: test}
    by_length |= {int(other): found for other, found in finished.get("lengths", {}).items()}
    if recipe.data.task is not None:
        metric = field = next(name for name in ("rmse", "mse", "accuracy") if name in test)
        factor = 1.0
    elif recipe.data.tokenizer in (None, "bytes") and recipe.model.init_from is None:
        metric, field, factor = "bits_per_byte", "loss", 1 / math.log(2)
    else:
        metric, field, factor = "loss", "loss", 1.0

    def scaled(found: Line) -> float | None:
        # where logits are NaN, an accuracy is a number all the same
        return None if None in (found["loss"], found[field]) else found[field] * factor

    return [
        {
            "length": other,
            "metric": metric,
            "validation": scaled(validation),
            "value": scaled(found),
            "last": found.get("last_accuracy"),
            "targets": found["targets"],
            "seconds": finished["seconds"],
        }
        for other, found in by_length.items()
    ]


def _length_of(recipe: Recipe, source: DataSource) -> int:
    """Return the length of the examples that a run trains on; where they differ, the first's."""
    if recipe.train.seq_len is not None:
        return recipe.train.seq_len
    name = str(recipe.data.task)
    argument = length_argument(name)
    if argument is not None:
        given, said = recipe.data.task_args, ("split", "seed")
        return int(task_arguments(name, SUPERVISED_TASKS[name], given, said)[argument])
    assert source.task is not None
    return int(source.task.batch([0]).lengths.max())


def _ledger(
    planned: Iterable[PlannedRun], lines: Mapping[str, list[Line]], unsupported: Unsupported
) -> list[Line]:
    """Return the lines of all finished runs and of the unsupported pairs, in the plan's order."""
    found: dict[Any, list[Line]] = {}
    for run in planned:
        if (why := unsupported.get(run.cell)) is not None:
            found.setdefault(run.cell, [_line_of(run.cell, why)])
        else:
            found[run.folder] = lines.get(run.folder, [])
    return [line for lines in found.values() for line in lines]


def _line_of(cell: Cell, why: str) -> Line:
    """Return the ledger's line of an unsupported pair."""
    problem, model, width = cell
    place = {"problem": problem, "model": model, "width": width}
    return dict.fromkeys(COLUMNS) | place | {"note": why}


def _write(output: Path, chosen: Sweep, ledger: list[Line]) -> None:
    output.mkdir(parents=True, exist_ok=True)
    described = {
        "sweep": chosen.model_dump(exclude_none=True, mode="json"),
        "versions": installed_versions("ssmzoo", "torch", "transformers"),
        "ledger": ledger,
    }
    write_json(output / "ledger.json", described)
    write_ledger(ledger, output / "ledger.csv")
    for problem in dict.fromkeys(line["problem"] for line in ledger):
        lines = [line for line in ledger if line["problem"] == problem]
        if any(line["value"] is not None for line in lines):
            draw_problem(lines, output / f"{problem.replace(' ', '-')}.png")
