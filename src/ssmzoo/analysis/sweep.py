"""Sweeps: many small models on many small problems, at every learning rate, seed and width.

- A run is a folder of its own, and its ``result.json`` all that is left of it when it is finished.
  The ledger is made of these files, so nothing is lost where several processes share the work:
  each takes runs that no other one is at.
- What stands in the output's ``ledger.csv`` is finished, too: a ledger alone can be carried to
  another machine, and the sweep goes on there.
- The first seed of all runs comes first, then the second: half a table is a table.
- What a model cannot do is found before anything is trained, and is a hole in the ledger with its
  reason.
"""

from __future__ import annotations

import gc
import inspect
import logging
import math
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ssmzoo.analysis.cost import flops_per_token, state_bytes
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
from ssmzoo.analysis.places import require_place
from ssmzoo.analysis.sweep_plan import CHOICES, COMPARED, PlannedRun, Sweep, load_sweep, selected
from ssmzoo.data.documents import documents_of
from ssmzoo.data.labelled import Examples
from ssmzoo.data.sources import DataSource, data_source, json_digest, without_places
from ssmzoo.environment.hardware import installed_versions
from ssmzoo.environment.messages import first_line
from ssmzoo.files import CannotWriteError, read_json, write_json
from ssmzoo.recipe import Recipe, load_recipe, read_sections
from ssmzoo.tasks import SUPERVISED_TASKS, length_argument, symbol_tokenizer, task_arguments
from ssmzoo.tasks.supervised import SPLITS
from ssmzoo.training.checkpoint import InUseError, locked
from ssmzoo.training.metrics import read_metrics
from ssmzoo.training.model import NoHeadError, build_config, build_model, model_class
from ssmzoo.training.objectives import labelled
from ssmzoo.training.trainer import NotFiniteError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger("ssmzoo")

Holes: TypeAlias = dict[Cell, str]

MOST_TOKENS = 4096  # of the sequence that state and operations are measured on


class Sources:
    """The data of a problem, opened once to ask what its examples are."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str | None], DataSource] = {}
        self._costs: dict[Cell, Line] = {}
        self._files: dict[str, str | None] = {}

    def of(self, run: PlannedRun) -> DataSource:
        """Return the data of a run's problem, as it is at seed 0."""
        key = run.place["problem"], run.recipe.model.init_from  # which may bring a tokenizer
        if key not in self._found:
            recipe = with_few_examples(run.recipe)
            section = recipe.train.model_copy(update={"seed": 0})
            self._found[key] = data_source(recipe.model_copy(update={"train": section}))
        return self._found[key]

    def files(self, run: PlannedRun) -> str | None:
        """Return the digest of a problem's files as they were when it was first asked for."""
        problem = run.place["problem"]
        if problem not in self._files:
            self._files[problem] = _files_digest(run.recipe)
        return self._files[problem]

    def costs(self, run: PlannedRun, length: int) -> Line:
        """Return what a model costs, which no rate and no seed changes."""
        if run.cell not in self._costs:
            self._costs[run.cell] = _costs(run.recipe, self.of(run), min(length, MOST_TOKENS))
        return self._costs[run.cell]


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

    Runs that are finished, or stand in ``ledger.csv``, are not run again; those that were killed
    go on; those that another process is at are left to it. Runs of another sweep, or on files that
    were changed since, are none of these: they are an error, which is raised before anything is
    trained. A run that fails is reported, and the others go on.

    Args:
        source: A YAML file, the name of a shipped sweep, or a sweep.
        output_dir: Where the runs, the ledger and the pictures go.
        only: By ``problem``, ``model``, ``width``, ``lr`` and ``seed`` those to train. Learning
            rates named here are trained at every seed, searched or not.
        train: Whether to train; the ledger of what is there is written either way.
        keep: Keep the models, in ``model`` of the runs' folders.
        stock: Leave transformers' recurrent models as they are, without our kernels.

    Returns:
        The ledger of the whole sweep, a line for each length that a run is judged at, its training
        length first: ``problem``, ``model``, ``width``, ``lr``, ``seed``, ``length``, ``metric``
        (``accuracy``, ``rmse``, ``bits_per_byte`` or ``loss``), ``validation``, by which rates are
        ranked, ``value``, ``last`` (the accuracy of each row's last target), ``targets``,
        ``parameters``, ``state_bytes`` of one sequence of the training length, ``flops_per_token``
        of matrix products, attention and convolutions, ``seconds`` of training, ``cpu_seconds`` of
        the whole run since it was last begun or resumed, ``hardware``, ``date``, ``recipe``, digits
        that tell what was trained from anything else. Of a run that
        diverged ``value`` is None and ``note`` says so; of a hole ``note`` is the reason.

    Raises:
        LookupError: A field, family, preset, model type or name that does not exist.
        ValueError: A wrong value, a folder with runs of another sweep or on other text, or a ledger
            that is cut.
        RuntimeError: The machine, a place that cannot be written to, or runs that failed.
    """
    chosen = source if isinstance(source, Sweep) else load_sweep(source)
    planned = chosen.runs()
    wanted = selected(chosen, planned, only or {})
    output = Path(output_dir)
    require_place(output, "output_dir")
    if not train and not (output / "runs").is_dir() and not (output / "ledger.csv").is_file():
        raise ValueError(f"{output} holds neither runs nor a ledger; without --table it is trained")
    sources = Sources()
    missing = {run.folder for run in planned if not _has_result(run, output, sources)}
    earlier = _earlier(planned, output / "ledger.csv")
    missing -= earlier.lines.keys()
    asked = {run.cell for run in wanted}
    holes = {cell: why for cell, why in earlier.holes.items() if cell not in asked}
    holes |= impossible(wanted, sources)
    failed: list[str] = []
    todo = [run for run in wanted if run.folder in missing and run.cell not in holes]
    later = chosen.later_seeds if not (only or {}).get("lr") else []
    if train:
        first = [run for run in todo if run.place["seed"] not in later]
        failed = _train_all(first, output, sources, keep=keep, stock=stock)
        if rest := [run for run in todo if run.place["seed"] in later]:
            best = _searched(chosen, _collected(planned, holes, output, earlier))
            rest = [run for run in rest if best.get(run.cell) == run.place["lr"]]
            failed += _train_all(rest, output, sources, keep=keep, stock=stock)
    done = [run for run in wanted if run.folder not in missing and run.cell not in holes]
    kept = output / "runs"
    if keep and (bare := [run for run in done if not (kept / run.folder / "model").is_dir()]):
        logger.warning(
            "%d runs were finished before and kept no model, the first: %s; remove their folders "
            "and their lines in ledger.csv to train them again",
            *(len(bare), bare[0]),
        )
    ledger = _collected(planned, holes, output, earlier)
    _write(output, chosen, ledger)
    if failed:
        raise RuntimeError(f"{len(failed)} runs failed, the first: {failed[0]}")
    return ledger


def impossible(runs: Iterable[PlannedRun], sources: Sources | None = None) -> Holes:
    """Return, by problem, model and width, why runs cannot be; all others can be configured.

    Raises:
        LookupError: A name that does not exist.
        ValueError: A wrong value.
    """
    first = {run.cell: run for run in reversed(list(runs))}
    sources, found = sources or Sources(), {}
    for cell, run in reversed(first.items()):
        source = sources.of(run)
        try:
            build_config(run.recipe.model, source.tokenizer, source.task)
        except NoHeadError as error:
            found[cell] = first_line(error).removeprefix("model.config_of: ")
        except (LookupError, ValueError) as error:
            raise type(error)(f"models.{cell[1]} on problems.{cell[0]}: {error}") from error
    return found


class Earlier(NamedTuple):
    """What a ledger has of earlier: the lines of runs, by the run's folder, and holes."""

    lines: dict[str, list[Line]]
    holes: Holes


def _hole(cell: Cell, why: str) -> Line:
    place = dict(zip(("problem", "model", "width"), cell, strict=True))
    return {**dict.fromkeys(COLUMNS), **place, "note": why}


def _earlier(planned: list[PlannedRun], file: Path) -> Earlier:
    """Return what a ledger has, if there is one.

    Raises:
        ValueError: It is cut, another sweep's, or has a run twice.
    """
    known = {_place_of(run.place): run for run in planned}
    cells = {run.cell for run in planned}
    found, strange = Earlier({}, {}), []
    for line in read_ledger(file) if file.exists() else []:
        shown = ", ".join(f"{name} {line[name]}" for name in CHOICES if line[name] is not None)
        if line["lr"] is None and cell_of(line) in cells:
            found.holes[cell_of(line)] = line["note"]
        elif (run := known.get(_place_of(line))) and run.digest == line["recipe"]:
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


def _place_of(line: Line) -> tuple[Any, ...]:
    return tuple(line[name] for name in CHOICES)


def searched_lines(chosen: Sweep, ledger: Path) -> list[Line]:
    """Return a ledger's holes, and the lines of all cells whose search is finished.

    That is: whose first seeds, ``search_seeds`` of them, are trained at every learning rate.

    Raises:
        ValueError: The ledger is cut, or another sweep's.
    """
    found = _earlier(chosen.runs(), ledger)
    lines = [line for lines in found.lines.values() for line in lines]
    cells = _searched(chosen, lines)
    return [
        *(line for line in lines if cell_of(line) in cells),
        *(_hole(cell, why) for cell, why in found.holes.items()),
    ]


def _searched(chosen: Sweep, ledger: list[Line]) -> dict[Cell, float]:
    """Return the best learning rate of the cells whose search is finished."""
    first = [seed for seed in chosen.seeds if seed not in chosen.later_seeds]
    asked = set(product(chosen.learning_rates, first))
    lines = [line for line in ledger if line["seed"] in first]
    finished = defaultdict(set)
    for line in lines:
        finished[cell_of(line)].add((line["lr"], line["seed"]))
    best = best_rates(lines)
    return {cell: best[cell][0]["lr"] for cell, runs in finished.items() if runs == asked}


def _has_result(run: PlannedRun, output: Path, sources: Sources) -> bool:
    """Return whether a run's folder has its result.

    Raises:
        ValueError: What was begun in its folder is another sweep's, or was trained on other text.
    """
    folder, recipe = output / "runs" / run.folder, run.recipe
    begun: Recipe | None = None
    result = _result_of(folder, warns=True)
    if result is not None:
        begun = read_sections(Recipe, result["recipe"], str(folder))
    elif (begun_as := folder / "run/recipe.yaml").exists():
        with suppress(LookupError):  # another process may have finished it by now
            begun = load_recipe(begun_as)
    if begun is not None:
        for name, before, now in begun.differences(recipe, COMPARED):
            raise ValueError(
                f"{folder} was trained for another sweep: {name} was {before!r}, is {now!r} now; "
                "choose another folder, or remove the run, and its lines in ledger.csv"
            )
    if result is not None and result.get("files") not in (None, sources.files(run)):
        raise ValueError(
            f"{folder} was trained on other text: problems.{run.place['problem']}.data names files "
            "that were changed since; put them back, choose another folder, or remove the run"
        )
    return result is not None


def _files_digest(recipe: Recipe) -> str | None:
    """Return a digest of the local files that a recipe reads its text from, if it does."""
    if recipe.data.task is not None or recipe.data.dataset is not None:
        return None
    return json_digest(without_places(documents_of(recipe.data).find(None)))


def _result_of(folder: Path, *, warns: bool = False) -> Line | None:
    """Return what a run has left; None if there is nothing, or a file that was cut.

    Ours appear whole: a file is cut only where somebody else wrote into it.
    """
    file = folder / "result.json"
    if not file.exists():
        return None
    try:
        found = read_json(file)
        if missing := {"place", "recipe", "lines"} - found.keys():
            raise ValueError(f"{file} has no {min(missing)}")
        return found
    except ValueError as error:
        if warns:
            logger.warning("%s; the run counts as not done", error)
        return None


def with_few_examples(recipe: Recipe) -> Recipe:
    """Return a recipe whose task generates next to nothing."""
    if not recipe.supervised:
        return recipe
    known = inspect.signature(SUPERVISED_TASKS[str(recipe.data.task)]).parameters
    few = {f"num_{split}": 1 for split in SPLITS if f"num_{split}" in known}
    data = recipe.data.model_copy(update={"task_args": {**recipe.data.task_args, **few}})
    return recipe.model_copy(update={"data": data})


def _train_all(
    todo: list[PlannedRun], output: Path, sources: Sources, *, keep: bool, stock: bool
) -> list[str]:
    """Train runs one after the other; return what failed, and why."""
    failed: list[str] = []
    with _little_garbage(), _without_metrics():
        for number, run in enumerate(todo, 1):
            folder = output / "runs" / run.folder
            try:
                with locked(folder):
                    if _result_of(folder) is not None:  # another process was faster
                        continue
                    result = _trained(run, folder, sources, keep=keep, stock=stock)
                    write_json(folder / "result.json", result)
                    shutil.rmtree(folder / "run", ignore_errors=True)
            except InUseError:
                continue
            except CannotWriteError:
                raise
            except (LookupError, ValueError, RuntimeError) as error:
                failed.append(f"{run}: {first_line(error)}")
                logger.warning("%d/%d %s", number, len(todo), failed[-1])
                continue
            line = result["lines"][0]
            shown = line["note"] or f"{line['metric']} {line['value']:.4f}"
            logger.info("%d/%d %s: %s (%.0f s)", number, len(todo), run, shown, line["cpu_seconds"])
    return failed


@contextmanager
def _little_garbage() -> Iterator[None]:
    """Let each run's collection of garbage look at its own objects, not at all that is imported."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _without_metrics() -> Iterator[None]:
    """Keep each run's lines of metrics off the log, which has one line a run."""
    metrics = logging.getLogger("ssmzoo.metrics")
    level = metrics.level
    metrics.setLevel(logging.WARNING)
    try:
        yield
    finally:
        metrics.setLevel(level)


def _trained(run: PlannedRun, folder: Path, sources: Sources, *, keep: bool, stock: bool) -> Line:
    """Train a run, or go on with it, and return its result."""
    from ssmzoo.training.run import train

    begun, place = time.process_time(), folder / "run"
    length = _length_of(run.recipe, sources.of(run))
    costs, note = sources.costs(run, length), None  # what fails, fails before the training
    files = _files_digest(run.recipe)  # read anew: a sweep may take days
    try:
        train(run.recipe, output_dir=place, resume=place.exists(), stock=stock)
    except NotFiniteError as error:
        note = f"diverged: {first_line(error).partition(';')[0]}"
    cpu_seconds = round(time.process_time() - begun, 1)
    facts = read_json(place / "run.json")
    shared = {
        **costs,
        "cpu_seconds": cpu_seconds,
        "hardware": facts["hardware"],
        "date": facts["date"],
        "recipe": run.digest,
    }
    judged: list[Line] = []
    if note is None:
        judged = _judged(facts["finished"], place / "metrics.jsonl", run.recipe, length)
        if None in (judged[0]["value"], judged[0]["validation"]):
            note = "diverged: its loss on held-out examples is no finite number"
    if note is not None:
        judged = [{"length": length, "metric": None, "value": None, "validation": None}]
    empty = dict.fromkeys(COLUMNS)
    lines = [{**empty, **run.place, **shared, **line, "note": note} for line in judged]
    if keep and note is None:
        shutil.rmtree(folder / "model", ignore_errors=True)
        os.replace(place / "model", folder / "model")
    return {
        "place": run.place,
        "recipe": run.recipe.model_dump(exclude_none=True, mode="json"),
        "lines": lines,
        "files": files,
        "versions": facts["versions"],
        "environment": facts.get("environment"),
        "recurrent_layers": facts.get("recurrent_layers"),
    }


def _judged(finished: Line, metrics: Path, recipe: Recipe, length: int) -> list[Line]:
    """Return the lines' columns of a finished run, one for each length."""
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
    name, field, factor = _metric_of(test, recipe)

    def scaled(metrics: Line) -> float | None:
        # of logits that are no numbers there are still so many right
        return None if None in (metrics["loss"], metrics[field]) else metrics[field] * factor

    return [
        {
            "length": other,
            "metric": name,
            "validation": scaled(validation),
            "value": scaled(found),
            "last": found.get("last_accuracy"),
            "targets": found["targets"],
            "seconds": finished["seconds"],
        }
        for other, found in by_length.items()
    ]


def _metric_of(test: Line, recipe: Recipe) -> tuple[str, str, float]:
    """Return the metric's name in the ledger, its name in a validation, and the factor between.

    Text of bytes is judged by bits a byte, of which the end of a document is one, too.
    """
    if recipe.data.task is not None:
        name = next(name for name in ("rmse", "mse", "accuracy") if name in test)
        return name, name, 1.0
    if recipe.data.tokenizer in (None, "bytes") and recipe.model.init_from is None:
        return "bits_per_byte", "loss", 1 / math.log(2)
    return "loss", "loss", 1.0


def _length_of(recipe: Recipe, source: DataSource) -> int:
    """Return how long the examples are that a run trains on; where they differ, the first."""
    if recipe.train.seq_len is not None:
        return recipe.train.seq_len
    name = str(recipe.data.task)
    argument = length_argument(name)
    if argument is not None:
        given, said = recipe.data.task_args, ("split", "seed")
        return int(task_arguments(name, SUPERVISED_TASKS[name], given, said)[argument])
    assert source.task is not None
    return int(source.task.batch([0]).lengths.max())


def _costs(recipe: Recipe, source: DataSource, length: int) -> Line:
    """Return parameters, the state's bytes and the operations a token of a model.

    A classifier's, or a regression's, operations are those of the task's first example.
    """
    import torch

    section, task = recipe.model, source.task
    config = build_config(section, source.tokenizer, task)
    model: Any = build_model(section, config, task).eval()
    inputs, tokens, size = None, length, None
    if task is not None and task.objective != "causal_lm":
        example = Examples(task.batch([0]))
        inputs, tokens = labelled(model, task).batch(example), example.tokens
        del inputs["labels"]
    # what is no language model keeps no state, nor does a kernel that depends on the whole input
    with suppress(NoHeadError, ValueError):
        speaker = model
        if task is not None and task.objective != "causal_lm":
            known: PreTrainedConfig = build_config(section, symbol_tokenizer(4))
            speaker = model_class(known)._from_config(known, dtype=torch.float32).eval()
        size = state_bytes(speaker, length)
    return {
        "parameters": model.num_parameters(),
        "state_bytes": size,
        "flops_per_token": flops_per_token(model, tokens, inputs),
    }


def _collected(
    planned: Iterable[PlannedRun], holes: Holes, output: Path, earlier: Earlier
) -> list[Line]:
    """Return the lines of all runs that have left a result, and of the holes."""
    lines, seen = [], set()
    for run in planned:
        if run.cell in holes:
            if run.cell not in seen:
                lines.append(_hole(run.cell, holes[run.cell]))
            seen.add(run.cell)
            continue
        result = _result_of(output / "runs" / run.folder)
        lines += earlier.lines.get(run.folder, []) if result is None else result["lines"]
    return lines


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
