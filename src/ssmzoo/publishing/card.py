"""Write a model's card from what was measured.

Every number in a card comes from the model's own files, a results file of ``ssmzoo eval`` or the
run directory of ``ssmzoo train``; one that is in none of them reads "not measured". Results count
as this model's only if they carry the digest of its weights. The words are in
``model_cards/template.md`` and ``model_cards/families/<family>.yaml``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ssmzoo.checkpoints.weights import is_state_adapter
from ssmzoo.environment.credentials import without_credentials
from ssmzoo.environment.hub_metadata import joined
from ssmzoo.environment.messages import missing
from ssmzoo.family import Family, family_of, packages_of
from ssmzoo.files import appears_whole, make_folder_of, package_data, require_name, write_text
from ssmzoo.publishing.adapter_card import adapter_card
from ssmzoo.publishing.card_facts import PICTURE, CardFacts, facts_of, family_words, read_facts
from ssmzoo.publishing.card_metadata import benchmark_entries, model_metadata
from ssmzoo.publishing.card_results import ScoredModel, merged, scored_model, split_results
from ssmzoo.publishing.card_text import (
    architecture_table,
    head_of,
    origins_table,
    packages,
    results_table,
    seeds_table,
    summary,
    training_table,
)
from ssmzoo.publishing.contents import CARD, ENTRIES
from ssmzoo.publishing.markdown import fenced, plain

MARKER = "Rendered by `ssmzoo card` from measured results; edits are lost when it runs again."

_MANY = 4  # so many other models are shown even if they were scored on other examples
# PEFT refuses the output projection and the convolution of these
_MAMBAS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")


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
    outside the model's folder gets, under its own name, the curve (``.png``) and the facts of model
    and run (``.json``), from which it can be rendered again.

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
        make_folder_of(target)
        write_text(target, _finished(adapter_card(place, metadata, MARKER)))
        return target
    read = [scored_model(Path(path)) for path in results]
    if place.suffix == ".json":
        if run_dir is not None:
            raise ValueError(f"run_dir must be absent with {place}, which holds what the run said")
        facts, picture = read_facts(place), place.with_suffix(".png")
        target = place.with_suffix(".md")
        if facts.picture and not picture.is_file():
            raise ValueError(f"{picture} does not exist; it belongs to {place}")
    else:
        facts, picture = facts_of(place, run_dir)
        target = place / CARD
    if output is not None:
        target = Path(output)
    facts = replace(facts, card=joined(facts.card, metadata))
    own, others = split_results(facts.revision, place, read)
    alone = target.resolve().parent != place.resolve()
    shown = target.with_suffix(".png") if alone else target.with_name(PICTURE)
    if alone:
        _require_ours(target, shown)
    _require_card(target)
    text = _render(facts, own, others, picture=shown.name)
    entries = None if alone else benchmark_entries(own)
    if not facts.picture or (picture is not None and picture.resolve() == shown.resolve()):
        picture = None  # there is none, or it is in its place
    _write(target, text, entries, facts if alone else None, picture, shown)
    return target


def _write(
    target: Path,
    text: str,
    entries: str | None,
    facts: CardFacts | None,
    picture: Path | None,
    shown: Path,
) -> None:
    """Write a card with the files beside it; none appears before all are written."""
    make_folder_of(target)
    beside = target.parent / ENTRIES
    with ExitStack() as parts:
        if picture is not None:
            shutil.copyfile(picture, parts.enter_context(appears_whole(shown)))
        if facts is not None:
            facts.write(parts.enter_context(appears_whole(target.with_suffix(".json"))))
        if entries is not None:
            make_folder_of(beside)
            write_text(parts.enter_context(appears_whole(beside)), entries)
        write_text(parts.enter_context(appears_whole(target)), text)
    if facts is None and entries is None:
        beside.unlink(missing_ok=True)  # an earlier card's, of other weights


def _require_ours(target: Path, picture: Path) -> None:
    """Check that the files beside a card replace only an earlier card's.

    Raises:
        ValueError: One replaces another file, which the message names.
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


def _require_card(target: Path) -> None:
    """Check that an existing file is a card that ``ssmzoo card`` wrote.

    Raises:
        ValueError: It is not.
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


def _render(
    facts: CardFacts, own: Sequence[ScoredModel], others: Sequence[ScoredModel], *, picture: str
) -> str:
    from huggingface_hub import ModelCard

    name = own[0].name if own else facts.name
    head, family = head_of(facts.config), family_of(facts.config)
    seeds = [entry for entry in others if any(entry.is_of_another_seed(o) for o in own)]
    others = _comparable(own, [entry for entry in others if entry not in seeds])
    encoder = _is_encoder(facts.config)
    words = family_words(family.name, encoder=encoder) if family else None
    targets = _lora_targets(family, facts)
    card = ModelCard.from_template(
        model_metadata(name, family, own, {"pipeline_tag": head.pipeline, **facts.card}),
        template_str=package_data("model_cards/template.md").read_text("utf-8"),
        marker=MARKER,
        name=plain(name),
        source=json.dumps(name, ensure_ascii=False),
        summary=summary(words, facts, head),
        head=head,
        language_model=head.pipeline == "text-generation",
        picture=quote(picture) if facts.picture else None,
        results=results_table(name, own, others),
        seeds=seeds_table(own, seeds),
        origins=origins_table([*own, *others]),
        packages=packages(family),
        foreign=packages_of(family.name)[1:] if family else [],
        prompt=json.dumps(facts.prompt) if facts.prompt else None,
        words=words,
        encoder=encoder,
        family=family.name if family else None,
        lora_targets=json.dumps(targets) if targets else None,
        architecture=architecture_table(facts),
        training=training_table(facts, head),
        recipe=fenced("yaml", facts.recipe.strip()) if facts.recipe else None,
    )
    return _finished(str(card))


def _comparable(own: Sequence[ScoredModel], others: list[ScoredModel]) -> list[ScoredModel]:
    """Return other models with scores of the same tasks; if many, only on the same examples."""
    rows = merged(own).keys()
    tasks = {row.task for row in rows}
    if tasks:
        others = [entry for entry in others if tasks & {row.task for row in entry.scores}]
    if tasks and len(others) > _MANY:
        others = [entry for entry in others if rows & entry.scores.keys()]
    return others


def _finished(text: str) -> str:
    return without_credentials(text.rstrip()) + "\n"


def _lora_targets(family: Family | None, facts: CardFacts) -> list[str]:
    """Return the modules to adapt with LoRA; none where PEFT takes all linear layers."""
    if family:
        return [name for name in family.lora_targets if name in facts.modules]
    if facts.config.get("model_type") not in _MAMBAS:
        return []
    projections = {name for name in facts.modules if name.endswith("_proj")}
    return sorted(projections - {"out_proj", "dt_proj"})


def _is_encoder(config: Mapping[str, Any]) -> bool:
    """Tell whether a model reads in both directions, or images."""
    return config.get("directions", "forward") != "forward" or config.get("image_size") is not None
