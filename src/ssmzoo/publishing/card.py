"""Write a model's card from what was measured.

Every number in a card comes from the model's own files, a results file of ``ssmzoo eval`` or the
run directory of ``ssmzoo train``; one that is in none of them reads "not measured". Results count
as this model's only if they carry the digest of its weights. The words are in
``model_cards/template.md`` and ``model_cards/families/<family>.yaml``.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import yaml

from ssmzoo.checkpoints.weights import is_state_adapter
from ssmzoo.environment.credentials import without_credentials
from ssmzoo.environment.hub_metadata import joined
from ssmzoo.environment.messages import missing
from ssmzoo.environment.portable import portable
from ssmzoo.evaluation.results import is_number
from ssmzoo.family import Family, family_of, packages_of
from ssmzoo.files import appears_whole, make_folder_of, require_name, share, write_text
from ssmzoo.publishing.adapter_card import adapter_card
from ssmzoo.publishing.card_facts import (
    NOT_MEASURED,
    PICTURE,
    CardFacts,
    Row,
    ScoredModel,
    ShownScore,
    facts_of,
    family_words,
    flat,
    merged,
    part_results,
    read_facts,
    recorded,
    scored_model,
)
from ssmzoo.publishing.contents import CARD, ENTRIES
from ssmzoo.publishing.markdown import Markdown, as_table, code, fenced, plain

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

MARKER = "Rendered by `ssmzoo card` from measured results; edits are lost when it runs again."

_MANY = 4  # other models whose scores stand in a table in any case
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
# What every configuration of a family names, and a block without a convolution does not have.
_OF_CONVOLUTIONS = ("Expansion", "Convolution width")
_OF_IMAGES = ("Image size", "Patch size")
# of which PEFT refuses the output projection and the convolution
_MAMBAS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
_OF_TEXT = ("Vocabulary", "Tied embeddings")


def render_card(
    model: str | Path,
    *,
    results: Sequence[str | Path] = (),
    run_dir: str | Path | None = None,
    output: str | Path | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model's card, and its loss curve beside it, and return the card's path.

    Beside a card in the model's folder, scores of benchmarks on the Hub stand in
    ``.eval_results/ssmzoo.yaml`` as well, where the Hub's leaderboards look for them. A card
    outside the model's folder gets, under its own name, the curve (``.png``) and what the card says
    of model and run (``.json``); from that file it can be rendered again.

    Args:
        model: A folder as ``save_pretrained`` writes it, of a model or of a state adapter, or the
            ``.json`` beside a card.
        results: Files of ``ssmzoo eval``: this model's own, and those of models to stand beside.
        run_dir: The run that made the model. For ``RUN/model`` it is ``RUN`` if absent.
        output: The card's path; ``README.md`` in the model's folder, or beside the ``.json``, if
            absent. It ends in ``.md``, and its folder is made. A file there that ``ssmzoo card``
            did not write is never overwritten.
        metadata: Fields of a recipe's section ``card``, such as ``{"license": "apache-2.0"}``. They
            win over the run's recipe. Give them at each call, but for a card outside the model's
            folder, whose ``.json`` keeps them.

    Raises:
        ValueError: A file is missing, corrupt, or not of this model, and the message names it; or
            ``output`` does not end in ``.md``; or the Hub would not take a field of the metadata.
        LookupError: An unknown field of the metadata.
        TypeError: A field of the metadata that is no text.
        FileNotFoundError: The folder holds a part of a state adapter.
        RuntimeError: Jinja2 is not installed, or the card cannot be written.
    """
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise missing("a card needs Jinja2", "publish", error) from error

    if output is not None:
        require_name(Path(output), "output")
        if Path(output).suffix != ".md":  # the names of what lies beside a card, say
            raise ValueError(f"output must end in .md, got {str(output)!r}; name a Markdown file")
    place, metadata = Path(model), metadata or {}
    if is_state_adapter(place):
        if results or run_dir is not None:
            raise ValueError(
                f"results and run_dir must be absent with {place}, a state adapter, whose card "
                "says what its files hold"
            )
        target = Path(output) if output is not None else place / CARD
        _require_card(target)
        text = adapter_card(
            place, metadata, share("model_cards/adapter.md").read_text("utf-8"), MARKER
        )
        make_folder_of(target)
        write_text(target, _finished(text))
        return target
    read = [scored_model(Path(path)) for path in results]
    if place.suffix == ".json":
        if run_dir is not None:
            raise ValueError(f"run_dir must be absent with {place}, which holds what the run said")
        facts, picture = read_facts(place), place.with_suffix(".png")
        target = Path(output) if output is not None else place.with_suffix(".md")
        if facts.picture and not picture.is_file():
            raise ValueError(f"{picture} does not exist; it belongs to {place}")
    else:
        facts, picture = facts_of(place, run_dir)
        target = Path(output) if output is not None else place / CARD
    facts = replace(facts, card=joined(facts.card, metadata))
    own, others = part_results(facts.revision, place, read)
    alone = target.resolve().parent != place.resolve()
    shown = target.with_suffix(".png") if alone else target.with_name(PICTURE)
    if alone:
        _require_ours(target, shown)
    _require_card(target)
    text = _render(facts, own, others, picture=shown.name)
    make_folder_of(target)
    with ExitStack() as parts:  # none appears before all are written
        if facts.picture and picture is not None and picture.resolve() != shown.resolve():
            shutil.copyfile(picture, parts.enter_context(appears_whole(shown)))
        if alone:
            facts.write(parts.enter_context(appears_whole(target.with_suffix(".json"))))
        entries = None if alone else _eval_results(own)
        if entries:
            beside = target.parent / ENTRIES
            make_folder_of(beside)
            write_text(parts.enter_context(appears_whole(beside)), entries)
        write_text(parts.enter_context(appears_whole(target)), text)
    if not alone and not entries:
        (target.parent / ENTRIES).unlink(missing_ok=True)  # of former weights
    return target


def _require_ours(target: Path, picture: Path) -> None:
    """Check that what a card beside no model brings along replaces nothing but an earlier card's.

    Raises:
        ValueError: The message names the file.
    """
    facts, found = target.with_suffix(".json"), None
    if facts.exists():
        try:
            read_facts(facts)
        except ValueError:
            found = facts
    elif picture.exists():
        found = picture
    if found is not None:
        raise ValueError(
            f"{found} would be replaced, and is of no card; give the card another name than "
            f"{target}, or move that file away"
        )


def _eval_results(own: Sequence[ScoredModel]) -> str | None:
    """Return what the Hub reads from ``.eval_results``; None if no score is of a benchmark."""
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    entries = [
        EvalResultEntry(
            *score.benchmark,
            value=score.value,
            date=score.origin.date,
            notes=f"{row.task}, {row.metric}, {row.num_fewshot} shots, lm-eval by ssmzoo",
        )
        for row, score in merged(own).items()
        if score.benchmark is not None and score.value is not None
    ]
    return yaml.safe_dump(eval_result_entries_to_yaml(entries)) if entries else None


def _render(
    facts: CardFacts,
    own: Sequence[ScoredModel],
    others: Sequence[ScoredModel],
    *,
    picture: str,
) -> str:
    from huggingface_hub import ModelCard

    name = own[0].name if own else facts.name
    head = _head(facts)
    tasks = {row.task for row in merged(own)}
    seeds = [entry for entry in others if any(entry.is_of_another_seed(o) for o in own)]
    others = [entry for entry in others if entry not in seeds]
    if tasks:
        others = [entry for entry in others if tasks & {row.task for row in entry.scores}]
        if len(others) > _MANY:  # of many, those with the same examples
            rows = merged(own).keys()
            others = [entry for entry in others if rows & entry.scores.keys()]
    family = family_of(facts.config)
    encoder = _is_encoder(facts.config)
    words = family_words(family.name, encoder=encoder) if family else None
    targets = _lora_targets(family, facts)
    card = ModelCard.from_template(
        _metadata(name, family, own, facts, head),
        template_str=share("model_cards/template.md").read_text("utf-8"),
        marker=MARKER,
        name=plain(name),
        source=json.dumps(name, ensure_ascii=False),
        summary=_summary(words, facts, head),
        head=head,
        language_model=head.pipeline == "text-generation",
        picture=quote(picture) if facts.picture else None,
        results=_results(name, own, others),
        seeds=_seeds(own, seeds),
        origins=_origins([*own, *others]),
        packages=_packages(family),
        foreign=packages_of(family.name)[1:] if family else [],
        prompt=json.dumps(facts.prompt) if facts.prompt else None,
        words=words,
        encoder=encoder,
        family=family.name if family else None,
        lora_targets=json.dumps(targets) if targets else None,
        architecture=_architecture(facts),
        training=_training(facts, head),
        recipe=fenced("yaml", facts.recipe.strip()) if facts.recipe else None,
    )
    return _finished(str(card))


def _finished(text: str) -> str:
    return without_credentials(text.rstrip()) + "\n"


def _lora_targets(family: Family | None, facts: CardFacts) -> list[str]:
    """Return the modules to adapt; none for a model whose linear layers PEFT takes all."""
    if family:
        return [name for name in family.lora_targets if name in facts.modules]
    if facts.config.get("model_type") not in _MAMBAS:
        return []
    projections = {name for name in facts.modules if name.endswith("_proj")}
    return sorted(projections - {"out_proj", "dt_proj"})


def _is_encoder(config: Mapping[str, Any]) -> bool:
    """Tell whether a model reads in both directions, or images."""
    return config.get("directions", "forward") != "forward" or config.get("image_size") is not None


def _require_card(target: Path) -> None:
    """Check that a file which is there is a card that ``ssmzoo card`` wrote.

    Raises:
        ValueError: It is none.
    """
    if not target.exists():
        return
    try:
        text = target.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{target} cannot be read as a card: {error}; move it away") from error
    if MARKER not in text:
        raise ValueError(
            f"{target} was not written by `ssmzoo card`; move it away or choose another output"
        )


def _metadata(
    name: str,
    family: Family | None,
    own: Sequence[ScoredModel],
    facts: CardFacts,
    head: _Head,
) -> ModelCardData:
    from huggingface_hub import EvalResult, ModelCardData

    evaluations = []
    for row, score in merged(own).items():
        if score.value is None:
            continue
        settings = {
            "n": row.n,
            "num_fewshot": row.num_fewshot,
            "seed": row.seed,
            "stderr": score.stderr,
        }
        evaluations.append(
            EvalResult(
                task_type=head.pipeline,
                dataset_type=row.task,
                dataset_name=row.task,
                metric_type=row.metric,
                metric_name=row.metric,
                metric_value=score.value,
                metric_args={key: value for key, value in settings.items() if value is not None},
            )
        )
    tags = []
    if family is not None:
        tags = ["ssmzoo", "state-space-model", family.name, f"arxiv:{family.paper.arxiv}"]
    fields: dict[str, Any] = {"pipeline_tag": head.pipeline, **facts.card}
    return ModelCardData(
        library_name="transformers",
        tags=tags or None,
        model_name=name if evaluations else None,
        eval_results=evaluations or None,
        **fields,
    )


class _Head(NamedTuple):
    """What kind of model a card is about: in words, by its class, by the Hub's name."""

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


def _head(facts: CardFacts) -> _Head:
    """Return the kind that the first of the configuration's architectures names.

    Raises:
        ValueError: Cards have no words for it.
    """
    named = next(iter(facts.config.get("architectures") or ()), "ForCausalLM")
    suffix = next((suffix for suffix in _HEADS if named.endswith(suffix)), None)
    if suffix is None:
        raise ValueError(
            f"a card needs a model whose class ends in one of {', '.join(_HEADS)}, got {named}"
        )
    words, pipeline = _HEADS[suffix]
    if suffix in ("ForPairClassification", "ForForecasting"):  # which have no Auto class
        module = str(facts.config.get("model_type"))
        if not (named.isidentifier() and module.isidentifier()):  # they go into a program
            raise ValueError(
                f"config.json must name a model_type and a class, got {module!r} and {named!r}"
            )
        return _Head(words, module, named, pipeline)
    return _Head(words, "transformers", f"AutoModel{suffix}", pipeline)


def _summary(words: Mapping[str, Any] | None, facts: CardFacts, head: _Head) -> str:
    kind = words["title"] if words else code(facts.config.get("model_type"))
    tokens = facts.measured.get("tokens")
    trained = f", trained on {_number(tokens)} tokens" if tokens is not None else ""
    return f"A {kind} {head.words} of {_number(facts.parameters)} parameters{trained}."


def _packages(family: Family | None) -> str:
    """Return what a reader must install: checkouts, since a name on an index may be anybody's."""
    if family is None:
        return "transformers torch"
    return " ".join(f"./{package}" for package in packages_of(family.name))


def _results(name: str, own: Sequence[ScoredModel], others: Sequence[ScoredModel]) -> str:
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


def _seeds(own: Sequence[ScoredModel], others: Sequence[ScoredModel]) -> str | None:
    """Set this model's scores among those of the same recipe with other seeds."""
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


def _origins(results: Sequence[ScoredModel]) -> str | None:
    """Say when, where and by what command the scores came about."""
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


def _architecture(facts: CardFacts) -> str:
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


def _training(facts: CardFacts, head: _Head) -> str:
    """Tabulate what the run recorded."""

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
    if base := (facts.run or {}).get("base"):
        rows.insert(0, ["Base", base])
    return as_table(["", ""], rows)


def _number(value: Any, places: int = 4) -> str:
    """Write a number readably: whole ones in full, small ones to three digits."""
    if isinstance(value, int):
        return f"{value:,}"
    small = 0 < abs(value) < 10.0 ** (1 - places)
    return f"{value:.2e}" if small else f"{value:,.{places}f}"
