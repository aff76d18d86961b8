"""The tables and sentences of a card, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from ssmzoo.environment.portable import portable
from ssmzoo.evaluation.results import is_number
from ssmzoo.family import Family, packages_of
from ssmzoo.publishing.card_facts import CardFacts
from ssmzoo.publishing.card_results import (
    NOT_MEASURED,
    Row,
    ScoredModel,
    ShownScore,
    flat,
    merged,
    recorded,
)
from ssmzoo.publishing.markdown import Markdown, as_table, code, fenced, plain

# The first name that a configuration has; zoo names first, then those of other libraries.
_ARCHITECTURE = (
    ("Hidden size", ("hidden_size", "n_embd", "d_model")),
    ("Layers", ("num_hidden_layers", "n_layer")),
    ("State size", ("d_state", "state_size")),
    ("Expansion", ("expand",)),
    ("Convolution width", ("d_conv", "conv_kernel")),
    ("Attention heads", ("num_attention_heads", "n_head")),
    ("Directions", ("directions",)),
    ("Image size", ("image_size",)),
    ("Patch size", ("patch_size",)),
    ("Vocabulary", ("vocab_size",)),
    ("Longest input", ("max_position_embeddings",)),
    ("Transition", ("transition",)),
    ("Tied embeddings", ("tie_word_embeddings",)),
)
# left out for blocks without a convolution, whose configurations have these fields too
_OF_CONVOLUTIONS = ("Expansion", "Convolution width")
_OF_IMAGES = ("Image size", "Patch size")
_OF_TEXT = ("Vocabulary", "Tied embeddings")


class Head(NamedTuple):
    """A kind of model: its name in words, its module and class, and the Hub's task."""

    words: str
    module: str
    name: str
    pipeline: str


_HEADS = {
    "ForCausalLM": ("language model", "text-generation"),
    "ForSequenceClassification": ("classifier of sequences", "text-classification"),
    "ForTokenClassification": ("classifier of tokens", "token-classification"),
    "ForPairClassification": ("classifier of pairs of documents", "text-classification"),
    "ForImageClassification": ("classifier of images", "image-classification"),
    "ForForecasting": ("forecaster of time series", "time-series-forecasting"),
}


def head_of(config: Mapping[str, Any]) -> Head:
    """Return the kind of model that the first of the configuration's ``architectures`` names.

    Raises:
        ValueError: A card has no words for this class.
    """
    named = next(iter(config.get("architectures") or ()), "ForCausalLM")
    suffix = next((suffix for suffix in _HEADS if named.endswith(suffix)), None)
    if suffix is None:
        raise ValueError(
            f"a card needs a model whose class ends in one of {', '.join(_HEADS)}, got {named}"
        )
    words, pipeline = _HEADS[suffix]
    if suffix in ("ForPairClassification", "ForForecasting"):  # which have no Auto class
        module = str(config.get("model_type"))
        if not (named.isidentifier() and module.isidentifier()):  # they go into a program
            raise ValueError(
                f"config.json must name a model_type and a class, got {module!r} and {named!r}"
            )
        return Head(words, module, named, pipeline)
    return Head(words, "transformers", f"AutoModel{suffix}", pipeline)


def summary(words: Mapping[str, Any] | None, facts: CardFacts, head: Head) -> str:
    """Return a sentence: the family, the kind of model, its size, the tokens it was trained on."""
    kind = words["title"] if words else code(facts.config.get("model_type"))
    tokens = facts.measured.get("tokens")
    trained = f", trained on {_number(tokens)} tokens" if tokens is not None else ""
    return f"A {kind} {head.words} of {_number(facts.parameters)} parameters{trained}."


def packages(family: Family | None) -> str:
    """Return arguments of pip: local checkouts, since anybody may own a name on an index."""
    if family is None:
        return "transformers torch"
    return " ".join(f"./{package}" for package in packages_of(family.name))


def results_table(name: str, own: Sequence[ScoredModel], others: Sequence[ScoredModel]) -> str:
    """Return the model's scores beside those of others on the same examples."""
    columns = {name: merged(own)}
    for entry in others:
        label = (
            entry.name if entry.name not in columns else f"{entry.name} ({portable(entry.source)})"
        )
        while label in columns:  # of folders with one name
            label += " again"
        columns[label] = dict(entry.scores)
    rows = dict.fromkeys(row for column in columns.values() for row in column)
    if not rows:
        return (
            f"{NOT_MEASURED.capitalize()}. `ssmzoo eval` measures, `ssmzoo card --results FILE` "
            "writes it here."
        )
    lines = []
    for row in rows:
        scores = [column.get(row) for column in columns.values()]
        better = next((score.higher_is_better for score in scores if score), None)
        arrow = {True: " ↑", False: " ↓", None: ""}[better]
        counts = [
            "" if count is None else str(count) for count in (row.n, row.num_fewshot, row.seed)
        ]
        shown = [_score(score) for score in scores]
        lines.append([row.task, row.metric + arrow, *shown, *counts, row.settings])
    first, *rest = columns
    names = [Markdown(f"**{plain(first)}**"), *rest]
    header = ["Task", "Metric", *names, "Examples", "Shots", "Seed", "Settings"]
    note = "↑ higher is better, ↓ lower is better; ± is the standard error."
    if others:
        note += " The scores in a row are of the same examples."
    return f"{as_table(header, lines)}\n\n{note}"


def seeds_table(own: Sequence[ScoredModel], others: Sequence[ScoredModel]) -> str | None:
    """Tabulate this model's scores beside those of the same recipe with other seeds."""
    if not others:
        return None
    mine = next(entry for entry in own if entry.is_of_another_seed(others[0]))
    found: dict[Row, list[float]] = {}
    for entry in (mine, *others):
        for row, score in entry.scores.items():
            if score.value is not None:
                found.setdefault(replace(row, seed=None), []).append(score.value)
    lines = []
    for row, score in mine.scores.items():
        values = found.get(replace(row, seed=None), [])
        if len(values) > 1:
            numbers = [_number(x) for x in (median(values), min(values), max(values))]
            lines.append([row.task, row.metric, str(len(values)), _score(score), *numbers])
    names = sorted({str(entry.seed()) for entry in (mine, *others)})
    text = f"The same recipe was trained with the seeds {', '.join(names)}; here is {mine.seed()}."
    header = ["Task", "Metric", "Seeds", "This one", "Median of all", "From", "To"]
    return f"{text}\n\n{as_table(header, lines)}"


def _score(score: ShownScore | None) -> str:
    if score is None or score.value is None:
        return NOT_MEASURED
    return _number(score.value) + (f" ± {_number(score.stderr)}" if score.stderr else "")


def origins_table(results: Sequence[ScoredModel]) -> str | None:
    """Return date, machine and command of each score."""
    origins = dict.fromkeys(
        (entry.name, score.origin) for entry in results for score in entry.scores.values()
    )
    if not origins:
        return None
    commands = dict.fromkeys(origin.command for _, origin in origins)
    rows = [
        [name, origin.date, origin.hardware, origin.environment, origin.versions]
        for name, origin in origins
    ]
    header = ["Model", "Date", "Hardware", "Code, vectors and threads", "Versions"]
    block = fenced("bash", "\n".join(commands))
    return f"To repeat them:\n\n{block}\n\n{as_table(header, rows)}"


def architecture_table(facts: CardFacts) -> str:
    """Tabulate the configuration's sizes and switches."""
    config = facts.config
    rows = [
        ["Type", code(config.get("model_type"))],
        ["Parameters", _number(facts.parameters)],
        ["Stored as", ", ".join(facts.dtypes)],
    ]
    convolves = any("conv" in name for name in facts.modules)
    for label, names in _ARCHITECTURE:
        absent = _OF_IMAGES if config.get("image_size") is None else _OF_TEXT
        if label in absent or (label in _OF_CONVOLUTIONS and not convolves):
            continue
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if isinstance(value, bool):
            rows.append([label, "yes" if value else "no"])
        elif value is not None:
            rows.append([label, str(value)])
    return as_table(["", ""], rows)


def training_table(facts: CardFacts, head: Head) -> str:
    """Tabulate the run's facts and last metrics."""

    def fact(name: str) -> str:
        return flat((facts.run or {}).get(name))

    def metric(name: str, unit: str = "", places: int = 4) -> str:
        value = facts.measured.get(name)
        return _number(value, places) + unit if is_number(value) else NOT_MEASURED

    loss, unit, judged, by = "loss", " nats", "accuracy", "accuracy"
    if facts.config.get("problem_type") == "regression":
        loss, unit, judged, by = "loss, mean squared error", "", "root mean squared error", "rmse"
    elif head.pipeline == "time-series-forecasting":
        unit, judged, by = "", "mean squared error of the forecast", "mse"
    elif head.pipeline == "text-generation":
        unit, judged = " nats per token", "accuracy, next token"
        if facts.recipe and re.search(r"^align:$", facts.recipe, re.MULTILINE):
            loss, unit = "loss of the alignment", ""
    command = fact("command")
    rows = [
        ["Data", fact("data")],
        ["Steps", metric("step")],
        ["Tokens", metric("tokens")],
        [f"Last training {loss}", metric("loss", unit)],
        [f"Last validation {loss}", metric("validation_loss", unit)],
        [f"Last validation {judged}", metric(f"validation_{by}")],
        ["Computed in", fact("dtype")],
        ["Time", metric("seconds", " s", places=1)],
        ["Hardware", fact("hardware")],
        ["Code, vectors and threads", recorded((facts.run or {}).get("environment"))],
        ["Versions", fact("versions")],
        ["Command", command if command == NOT_MEASURED else code(command)],
    ]
    if facts.recipe and re.search(r"^adapter:$", facts.recipe, re.MULTILINE):
        told = (
            "a state adapter, which is a folder of its own; losses are those of the model with it"
        )
        rows.insert(1, ["Trained", told])
    data = (facts.run or {}).get("data")
    source = data.get("source") if isinstance(data, dict) else None
    if source in ("text", "jsonl", "parquet") and "datasets" not in facts.card:
        rows.insert(1, ["From", "files of the machine that trained it: no published data set"])
    if primed := (facts.run or {}).get("primed"):
        rows.insert(0, ["Primed", _primed(primed)])
    if base := (facts.run or {}).get("base"):
        rows.insert(0, ["Base", base])
    return as_table(["", ""], rows)


def _primed(primed: Mapping[str, Any]) -> str:
    """Return which layers of a base got other mixers, and the stages since."""
    told = []
    for stage in ({"stage": "prime", **primed}, *primed["stages"]):
        if stage["stage"] == "prime":
            layers = ", ".join(map(str, stage["layers"]))
            told.append(f"{stage['mixer']} in place of attention in the layers {layers}")
            continue
        name = f"{stage['stage']} ({stage['match']})" if "match" in stage else stage["stage"]
        tokens = f" on {_number(stage['tokens'])} tokens" if "tokens" in stage else ""
        told.append(name + tokens)
    return "; then ".join(told)


def _number(value: Any, places: int = 4) -> str:
    """Write a number readably: whole ones in full, small ones to three digits."""
    if isinstance(value, int):
        return f"{value:,}"
    small = 0 < abs(value) < 10.0 ** (1 - places)
    return f"{value:.2e}" if small else f"{value:,.{places}f}"
