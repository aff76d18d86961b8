"""Commands that score models and write down the scores: eval, card."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from ssmzoo.cli.options import (
    ADAPTER,
    BATCH_SIZE,
    DEVICE,
    DTYPE,
    JSON,
    LOCAL_MODEL,
    NAMES,
    OUTPUT,
    SAVED_MODEL,
    SEED,
    STOCK,
    TEXT,
    TRUST,
    Option,
    Verb,
    in_folder,
)
from ssmzoo.cli.show import print_json, print_table, quieten_bars
from ssmzoo.environment.hub_metadata import LISTS


def _eval(options: argparse.Namespace) -> int:
    from ssmzoo.evaluation.evaluate import evaluate

    quieten_bars()
    path = evaluate(
        options.model,
        tasks=options.tasks,
        suite=options.suite,
        text=options.text,
        output_dir=options.output,
        name=options.name,
        batch_size=options.batch_size,
        state_memory=options.state_memory,
        limit=options.limit,
        seed=options.seed,
        device=options.device,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
        stock=options.stock,
        adapter=options.adapter,
    )
    if os.environ.get("RANK", "0") != "0":  # one of several processes: the first one reports
        return 0
    report = json.loads(Path(path).read_text(encoding="utf-8"))
    if options.json:
        print_json(report)
    else:
        shown = ("task", "metric", "value", "stderr", "n")
        print_table({key: row[key] for key in shown} for row in report["results"])
        print(path)
    return 0


def _batch_size(given: str) -> int | str:
    if given != "auto" and not given.lstrip("-").isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number or auto, got {given!r}")
    return given if given == "auto" else int(given)


EVAL = Verb(
    "eval",
    "score a model with lm-eval",
    "ssmzoo eval runs/longhorn-demo/model --suite zoo-recall --output results",
    (
        SAVED_MODEL,
        NAMES.but("--tasks", metavar="A,B", help="lm-eval tasks, ours included"),
        Option("--suite", metavar="NAME", help="a named set of tasks"),
        TEXT.but(help="a text whose bits per byte are measured: a file or a folder"),
        OUTPUT.but(
            default=Path("eval/results"), help="the folder of results files (default: eval/results)"
        ),
        Option("--name", metavar="NAME", help="the result file's name (default: the model's)"),
        BATCH_SIZE.but(
            type=_batch_size, default=8, help="sequences at a time, or auto (default: 8)"
        ),
        Option(
            "--state-memory",
            metavar="MIB",
            type=float,
            help="MiB of states that requests share, kept at once (default: half of what is free)",
        ),
        Option("--limit", metavar="N", type=int, help="documents a task to score (default: all)"),
        SEED.but(default=1234, help="of all that is random (default: 1234)"),
        DEVICE,
        DTYPE,
        TRUST,
        STOCK,
        ADAPTER,
        JSON,
    ),
    _eval,
)


def _card(options: argparse.Namespace) -> int:
    from ssmzoo.publishing.card import render_card

    beside = options.model.endswith(".json")
    model = options.model if beside else in_folder(options.model)
    given = {name: getattr(options, name) for name in _METADATA}
    print(
        render_card(
            model,
            results=options.results,
            run_dir=options.run_dir,
            output=options.output,
            metadata={name: value for name, value in given.items() if value not in (None, [])},
        )
    )
    return 0


_METADATA = {
    "license": ("ID", "the weights' licence: its id on the Hub, e.g. apache-2.0, or other"),
    "license_name": ("NAME", "with --license other: the licence's name"),
    "license_link": ("LINK", "with --license other: its address, or LICENSE, a file in MODEL"),
    "language": ("CODE", "a language of the model, e.g. en; may be repeated"),
    "datasets": ("ID", "a data set on the Hub that it was trained on; may be repeated"),
    "base_model": ("ID", "the model on the Hub that it was trained from; may be repeated"),
    "pipeline_tag": ("TASK", "its task on the Hub (default: that of its head)"),
}


def _metadata_option(name: str) -> Option:
    """Return the option for a field of a recipe's section card."""
    metavar, words = _METADATA[name]
    flag = f"--{name.replace('_', '-').removesuffix('s')}"
    several: dict[str, Any] = {"action": "append", "default": []} if name in LISTS else {}
    return Option(flag, dest=name, metavar=metavar, help=words, **several)


CARD = Verb(
    "card",
    "write a model card from measured results",
    "ssmzoo card runs/longhorn-demo/model --results results/longhorn-demo.json",
    (
        LOCAL_MODEL.but(
            help="a folder with a saved model, or the .json beside a card written elsewhere"
        ),
        Option(
            "--results",
            metavar="FILE",
            type=Path,
            action="append",
            default=[],
            help="a results file of 'ssmzoo eval'; may be repeated",
        ),
        Option("--run", metavar="DIR", type=Path, dest="run_dir", help="the training run"),
        OUTPUT.but(
            help="the card's file (default: README.md in the model's folder, or beside the .json)",
        ),
        *map(_metadata_option, _METADATA),
    ),
    _card,
)
