"""Commands that make models: train, consolidate, prime, distill, sweep."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path

from ssmzoo.cli.options import (
    JSON,
    LENGTH,
    NAMES,
    OUTPUT,
    SAVED_MODEL,
    SEED,
    SET,
    STOCK,
    TEXT,
    Option,
    Verb,
)
from ssmzoo.cli.show import layer_bar, print_json


def _train(options: argparse.Namespace) -> int:
    from ssmzoo.training.run import train

    output = options.output or Path("runs", Path(options.recipe).stem)
    run = train(
        options.recipe,
        output_dir=output,
        resume=options.resume,
        overrides=options.set,
        stock=options.stock,
    )
    if os.environ.get("RANK", "0") == "0":  # the first of the processes that a launcher started
        print(run)
    return 0


TRAIN = Verb(
    "train",
    "train a model from a recipe",
    "ssmzoo train longhorn-demo --set train.steps=20 --output runs/short",
    (
        Option("recipe", metavar="RECIPE", help="a YAML file, or the name of a shipped one"),
        OUTPUT.but(help="the run's folder (default: runs/ and the recipe's name)"),
        Option(
            "--resume",
            action="store_true",
            help="resume the run in that folder, or start if the folder is empty",
        ),
        SET.but(help="change one field of the recipe, e.g. train.lr=1e-3; may be repeated"),
        STOCK,
    ),
    _train,
)


def _consolidate(options: argparse.Namespace) -> int:
    from ssmzoo.training.consolidate import consolidate

    print(consolidate(options.checkpoint, options.output))
    return 0


CONSOLIDATE = Verb(
    "consolidate",
    "join the shards of a run's checkpoint into a model",
    "ssmzoo consolidate runs/long/checkpoints/step-00001000 --output my-model",
    (
        Option(
            "checkpoint",
            metavar="CHECKPOINT",
            type=Path,
            help="one of a run's checkpoints, written by one process or by several",
        ),
        OUTPUT.but(required=True, help="the model's new folder"),
    ),
    _consolidate,
)


def _prime(options: argparse.Namespace) -> int:
    from ssmzoo.checkpoints.convert import fields_of_overrides
    from ssmzoo.distillation.prime import prime

    with layer_bar("score", shown=options.text is not None) as progress:
        folder, layers, scores = prime(
            options.model,
            options.mixer,
            options.layers,
            options.output,
            fields=fields_of_overrides(options.set),
            start=options.start,
            text=options.text,
            seed=options.seed,
            progress=progress,
        )
    if scores is not None:
        print(scores.table())
    print(f"layers {', '.join(map(str, layers))} are {options.mixer}")
    print(folder)
    return 0


PRIME = Verb(
    "prime",
    "start a hybrid from a Transformer",
    "ssmzoo prime runs/llama/model --mixer longhorn --output runs/primed",
    (
        SAVED_MODEL,
        Option("--mixer", metavar="FAMILY[:PRESET]", required=True, help="the new mixer"),
        Option(
            "--layers",
            metavar="LAYERS",
            default="half",
            help="half (default), all, numbers such as 1,3,5, or best:N by --text",
        ),
        OUTPUT.but(required=True, help="the hybrid's new folder"),
        SET.but(help="a field of the mixer, e.g. d_state=32; may be repeated"),
        Option(
            "--start",
            choices=("copied", "projections", "drawn"),
            default="copied",
            metavar="START",
            help="copied: from attention (default); projections: the same with gates drawn; drawn: "
            "nothing is copied",
        ),
        TEXT.but(help="a text to score layers by, for best:N: a file or a folder"),
        SEED.but(help="seed of what is drawn (default: 0)"),
    ),
    _prime,
)


def _distill(options: argparse.Namespace) -> int:
    from ssmzoo.distillation.distill import distill

    with layer_bar("distill") as progress:
        _, report = distill(
            options.model,
            options.order,
            options.kind,
            options.output,
            steps=options.steps,
            length=options.length,
            progress=progress,
        )
    if options.json:
        print_json(dataclasses.asdict(report))
    else:
        print(report.table())
        print(report.target)
    return 0


DISTILL = Verb(
    "distill",
    "replace a model's long filters by recurrences of small order",
    "ssmzoo distill runs/hyena-demo/model --order 16 --output runs/distilled",
    (
        SAVED_MODEL,
        Option(
            "--order",
            metavar="N",
            type=int,
            required=True,
            help="numbers in the state of a channel",
        ),
        OUTPUT.but(required=True, help="the new model's folder"),
        Option(
            "--kind",
            choices=("rational", "modal"),
            default="rational",
            metavar="KIND",
            help="rational (default) or modal",
        ),
        Option("--steps", metavar="N", type=int, default=300, help="of descent (default: 300)"),
        LENGTH.but(help="taps of each filter to fit (default: all, where filters end)"),
        JSON,
    ),
    _distill,
)


def _sweep(options: argparse.Namespace) -> int:
    from ssmzoo.analysis.ledger import ledger_table
    from ssmzoo.analysis.sweep import sweep
    from ssmzoo.analysis.sweep_plan import load_sweep, selection

    ledger = sweep(
        load_sweep(options.sweep, options.set),
        options.output,
        only=selection(options.only),
        train=not options.table,
        keep=options.keep,
        stock=options.stock,
    )
    if options.json:
        print_json(ledger)
    else:
        print(ledger_table(ledger))
    return 0


SWEEP = Verb(
    "sweep",
    "train small models on small problems, write a ledger",
    "ssmzoo sweep zoo --output runs/zoo --only problem=parity,model=longhorn",
    (
        Option("sweep", metavar="SWEEP", help="a YAML file, or the name of a shipped one"),
        OUTPUT.but(required=True, help="a folder for the runs, the ledger and its pictures"),
        NAMES.but(
            "--only",
            metavar="FIELD=VALUE,...",
            help="run these alone: problem=NAME, model=NAME, width=N, lr=RATE, seed=N",
        ),
        SET.but(help="change or add one field, e.g. models.mine='{family: mine}'; may be repeated"),
        Option("--table", action="store_true", help="train nothing; show the finished runs"),
        Option("--keep", action="store_true", help="keep the models that are trained now"),
        STOCK,
        JSON,
    ),
    _sweep,
)
