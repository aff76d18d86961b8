"""Small models on a recall problem: what a byte of state and an operation per token buy.

A sweep trains every model at every width, learning rate and seed, each in a run folder of its own,
so that a killed sweep goes on where it was. The ledger holds a line for each; the picture shows, at
the learning rate that is best on average, accuracy against the state's size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from ssmzoo.analysis.cost import flops_per_token, state_bytes
from ssmzoo.checkpoints.load import load_model
from ssmzoo.environment.hardware import installed_versions
from ssmzoo.family import suggestion
from ssmzoo.files import appears_whole, read_json, share, write_json
from ssmzoo.recipe import (
    DataSection,
    EvalSection,
    LogSection,
    ModelSection,
    Recipe,
    Section,
    load_recipe,
    read_sections,
)
from ssmzoo.training.metrics import read_metrics

try:
    from pydantic import Field
except ImportError as error:
    raise RuntimeError("sweeps need pydantic: pip install 'ssmzoo[train]'") from error

MOST_TOKENS = 4096  # of the sequence that state and operations are measured on


class Sweep(Section):
    """What ``ssmzoo recall`` reads: a closed YAML file.

    Attributes:
        models: By the name that the ledger shows, a recipe's ``model`` section without
            ``hidden_size``: families of the zoo, and any model type of transformers.
        widths: What ``hidden_size`` runs through.
        learning_rates: What ``train.lr`` runs through.
        seeds: What ``train.seed`` runs through.
        data: A recipe's section: the problem.
        train: A recipe's section without ``lr`` and ``seed``.
        eval: A recipe's section.
        log: A recipe's section.
    """

    models: Annotated[dict[str, ModelSection], Field(min_length=1)]
    widths: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    learning_rates: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    data: DataSection
    train: dict[str, Any]
    eval: EvalSection = EvalSection(every=1_000_000_000, batches="all")
    log: LogSection = LogSection(every=100)

    def recipes(self) -> Iterator[tuple[str, dict[str, Any], Recipe]]:
        """Yield a name, the ledger's columns and the recipe of every run.

        Raises:
            LookupError: A field that a recipe does not have.
            ValueError: Runs that cannot be.
        """
        for name in ("lr", "seed"):
            if name in self.train:
                raise ValueError(
                    f"train.{name} must be left out of a sweep, where learning_rates and seeds "
                    f"say it, got {self.train[name]!r}"
                )
        for model, section in self.models.items():
            if not re.fullmatch(r"[^\W_][^/\\:*?\"<>|]*", model) or not model.isprintable():
                raise ValueError(
                    "models must have names that begin with a letter or digit and hold none of "
                    f'/\\:*?"<>|, for folders are called by them, got {model!r}'
                )
            if "hidden_size" in section.config:
                raise ValueError(
                    f"hidden_size must be left out of models.{model}.config, since widths say it, "
                    f"got {section.config['hidden_size']!r}"
                )
            for width in self.widths:
                for rate in self.learning_rates:
                    for seed in self.seeds:
                        chosen = section.model_dump(exclude_none=True)
                        chosen["config"] = {**section.config, "hidden_size": width}
                        fields = {
                            "model": chosen,
                            "data": self.data.model_dump(exclude_none=True),
                            "train": {**self.train, "lr": rate, "seed": seed},
                            "eval": self.eval.model_dump(),
                            "checkpoint": {"every": 1_000_000_000, "keep": 1},
                            "log": self.log.model_dump(),
                        }
                        name = f"{model.replace(' ', '-')}-{width}-{rate:g}-{seed}"
                        columns = {"model": model, "width": width, "lr": rate, "seed": seed}
                        yield name, columns, read_sections(Recipe, fields, name)


def load_sweep(path: str | Path) -> Sweep:
    """Read and check a sweep and all of its recipes.

    Args:
        path: A YAML file, or the name of a shipped sweep.

    Raises:
        LookupError: No such file, or a field that a sweep or a recipe does not have.
        ValueError: A wrong value, or a file that is not YAML.
    """
    shipped = share("eval/sweeps") / f"{path}.yaml"
    file = shipped if shipped.is_file() else Path(path)
    if not file.exists():
        names = sorted(sweep.stem for sweep in shipped.parent.glob("*.yaml"))
        raise LookupError(
            f"no sweep {str(path)!r}{suggestion(str(path), names)}; shipped: {', '.join(names)}"
        )
    sweep = read_sections(Sweep, file, file.name)
    names = [name for name, _, _ in sweep.recipes()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"models, widths, learning_rates and seeds must not repeat, got {twice} twice"
        )
    return sweep


def recall(sweep: str | Path | Sweep, output_dir: str | Path) -> list[dict[str, Any]]:
    """Train a sweep's models and write ``ledger.json`` and ``ledger.png``.

    Runs that are finished are not run again; those that were killed go on. Runs of another sweep
    are neither: they are an error, which is raised before anything is trained.

    Args:
        sweep: A YAML file, or a sweep.
        output_dir: Where the runs, the ledger and the picture go.

    Returns:
        The ledger, a line a run: ``model``, ``width``, ``lr``, ``seed``, ``accuracy``,
        ``parameters``, ``state_bytes`` of one sequence after as many tokens as a row has,
        ``flops_per_token`` of matrix products, attention and convolutions, ``seconds``.

    Raises:
        LookupError: A field, family, preset or model type that does not exist.
        ValueError: A wrong value, or a folder with runs of another sweep.
        RuntimeError: The machine.
    """
    from ssmzoo.training.run import train

    chosen = sweep if isinstance(sweep, Sweep) else load_sweep(sweep)
    output = Path(output_dir)
    runs = list(chosen.recipes())
    for name, _, recipe in runs:
        _require_same(output / "runs" / name, recipe)
    ledger: list[dict[str, Any]] = []
    for name, columns, recipe in runs:
        folder = output / "runs" / name
        if not (folder / "model").exists():
            train(recipe, output_dir=folder, resume=folder.exists(), stock=True)
        described = read_json(folder / "run.json")
        ledger.append({**columns, **_measured(folder, described["finished"])})
        _write(output, chosen, ledger, described)
    return ledger


def _require_same(folder: Path, recipe: Recipe) -> None:
    """Fail unless what was begun in a run's folder is what the sweep asks for."""
    written = folder / "recipe.yaml"
    if not written.exists():
        return
    begun, asked = load_recipe(written), recipe.with_absolute_paths()
    for name, before, now in begun.differences(asked, ("model", "data", "train", "eval")):
        raise ValueError(
            f"{folder} was trained for another sweep: {name} was {before!r}, is {now!r} now; "
            "choose another folder, or remove the run"
        )


def _measured(folder: Path, finished: dict[str, Any]) -> dict[str, Any]:
    """Return the ledger's other columns of a finished run."""
    judged = finished.get("test") or {
        "accuracy": finished["validation_accuracy"],
        "targets": read_metrics(folder / "metrics.jsonl")[-1]["validation_targets"],
    }
    model = load_model(str(folder / "model"), folder / "model", "float32", False)
    length = min(_row_length(folder), MOST_TOKENS)
    return {
        "accuracy": judged["accuracy"],
        "targets": judged["targets"],
        "parameters": finished["parameters"],
        "length": length,
        "state_bytes": state_bytes(model, length),
        "flops_per_token": flops_per_token(model, length),
        "seconds": finished["seconds"],
    }


def _row_length(folder: Path) -> int:
    from ssmzoo.tasks import load_task

    recipe = load_recipe(folder / "recipe.yaml")
    if recipe.train.seq_len is not None:
        return recipe.train.seq_len
    args = {**recipe.data.task_args, "num_test": 1}
    return load_task(str(recipe.data.task), "test", 0, **args).batch([0]).inputs.shape[1]


def _write(
    output: Path, sweep: Sweep, ledger: list[dict[str, Any]], last_run: dict[str, Any]
) -> None:
    described = {
        "sweep": sweep.model_dump(exclude_none=True, mode="json"),
        "versions": installed_versions("ssmzoo", "torch", "transformers"),
        "hardware": last_run["hardware"],
        "environment": last_run.get("environment"),
        "ledger": ledger,
    }
    write_json(output / "ledger.json", described)
    seeds = "1 seed" if len(sweep.seeds) == 1 else f"median of {len(sweep.seeds)} seeds"
    draw_ledger(ledger, output / "ledger.png", f"{sweep.data.task}, {seeds}")


def best_rates(ledger: list[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return, by model and width, the lines of the learning rate that is best on average."""
    groups: dict[tuple[str, int], dict[float, list[dict[str, Any]]]] = {}
    for line in ledger:
        rates = groups.setdefault((line["model"], line["width"]), {})
        rates.setdefault(line["lr"], []).append(line)

    def mean(lines: list[dict[str, Any]]) -> float:
        return sum(line["accuracy"] for line in lines) / len(lines)

    return {place: max(rates.values(), key=mean) for place, rates in groups.items()}


def draw_ledger(ledger: list[dict[str, Any]], target: Path, title: str) -> None:
    """Draw accuracy against the state's bytes and operations: medians over seeds, and spread.

    Models whose state could not be counted are in the second panel only.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise RuntimeError("pictures need matplotlib: pip install 'ssmzoo[train]'") from error
    figure = Figure(figsize=(11, 5), dpi=120, layout="constrained")
    models: dict[str, list[list[dict[str, Any]]]] = {}
    for (model, _), seeds in best_rates(ledger).items():
        models.setdefault(model, []).append(seeds)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, column, label in (
        (left, "state_bytes", "state of one sequence in bytes"),
        (right, "flops_per_token", "matrix and attention operations a token"),
    ):
        for number, (model, widths) in enumerate(models.items()):
            points = []
            for seeds in widths:
                found = [line["accuracy"] for line in seeds]
                if seeds[0][column] is not None:
                    middle = median(found)
                    low, high = middle - min(found), max(found) - middle
                    points.append((seeds[0][column], middle, low, high))
            sizes, middles, *spread = zip(*sorted(points), strict=True) if points else ((),) * 4
            marker = "osD^vP*Xhd<"[number % 11]  # one more than there are colours
            axes.errorbar(sizes, middles, yerr=spread, marker=marker, capsize=3, label=model)
        axes.set(xlabel=label)
        known = [line[column] for line in ledger if line[column] is not None]
        if known and max(known) > 8 * min(known):
            axes.set_xscale("log", base=2)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.set(ylabel="accuracy", ylim=(-0.02, 1.02))
    right.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(title)
    with appears_whole(target) as unfinished:
        figure.savefig(unfinished, format="png")


def ledger_table(ledger: list[dict[str, Any]]) -> str:
    """Return the ledger's best learning rates as text; of several seeds median and spread."""
    best = best_rates(ledger)
    room = max(len(model) for model in ("model", *(model for model, _ in best)))
    rows = [
        f"{'model':<{room}}{'width':>7}{'lr':>9}{'accuracy':>45}"
        f"{'state bytes':>13}{'flops/token':>13}"
    ]
    for (model, width), seeds in best.items():
        found = sorted(line["accuracy"] for line in seeds)
        shown = f"{median(found):.3f}"
        if len(found) > 1:
            shown = f"median of {len(found)} seeds {shown}, {found[0]:.3f} to {found[-1]:.3f}"
        size = seeds[0]["state_bytes"]
        rows.append(
            f"{model:<{room}}{width:>7}{seeds[0]['lr']:>9g}{shown:>45}"
            f"{'none' if size is None else size:>13}{seeds[0]['flops_per_token']:>13}"
        )
    return "\n".join(rows)
