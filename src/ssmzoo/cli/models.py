"""Commands that look at models and run them: list, info, generate, inspect."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from typing import Any

from ssmzoo.cli.options import (
    ADAPTER,
    DEVICE,
    DTYPE,
    JSON,
    LENGTH,
    MODEL,
    OUTPUT,
    SAVED_MODEL,
    SEED,
    STOCK,
    TEXT,
    TRUST,
    Option,
    Verb,
    whole_numbers,
)
from ssmzoo.cli.show import in_bytes, print_json, print_table, quieten_bars


def _list(options: argparse.Namespace) -> int:
    from ssmzoo.analysis.describe import installed_families

    rows = installed_families(load=options.load)
    if options.json:
        print_json(rows)
    elif rows:
        for row in rows:
            _print_row(row)
    else:
        print("no family is installed")
    return 0


def _print_row(row: dict[str, Any]) -> None:
    """Print a family in a few lines of at most 80 characters."""
    print(f"{row['name']}  {row['status']}  {row['distribution']} {row['version'] or ''}".rstrip())
    paper = row["title"] and f"{row['title']} (arXiv\xa0{row['arxiv'] or '-'})"
    if row["status"] not in ("installed", "ok"):
        return
    for name, value in (("paper", paper), ("heads", row["heads"]), ("presets", row["presets"])):
        text = "not spelt out, --load imports it" if value is None else value or "none"
        lines = textwrap.wrap(
            text if isinstance(text, str) else ", ".join(text),
            width=80,
            initial_indent=f"  {name + ':':10}",
            subsequent_indent=" " * 12,
            break_on_hyphens=False,
        )
        print("\n".join(lines).replace("\xa0", " "))


LIST = Verb(
    "list",
    "show the installed families, their presets and their heads",
    "ssmzoo list",
    (
        Option("--load", action="store_true", help="import each family, to see whether it works"),
        JSON,
    ),
    _list,
)


def _info(options: argparse.Namespace) -> int:
    from ssmzoo.analysis.describe import describe

    quieten_bars()
    facts = describe(options.model)
    if options.json:
        print_json(facts)
    elif "presets" in facts:
        _print_family(facts)
    else:
        _print_checkpoint(facts)
    return 0


def _print_family(facts: dict[str, Any]) -> None:
    paper = facts["paper"]
    print(f"{facts['name']}: {paper['title']} ({paper['authors']}, {paper['year']})")
    print(f"arXiv:       {paper['arxiv']}")
    print(f"model_type:  {facts['model_type']}")
    print(f"heads:       {', '.join(facts['heads'])}")
    print(f"LoRA:        {', '.join(facts['lora_targets']) or '-'}")
    print(f"converts:    {facts['converts'] or '-'}")
    print()
    print_table(
        {"preset": name, "parameters": f"{preset['parameters']:,}"}
        for name, preset in facts["presets"].items()
    )
    print()
    print_table(
        {"field": name, "default": repr(field["default"]), "type": field["type"]}
        for name, field in facts["fields"].items()
    )


def _print_checkpoint(facts: dict[str, Any]) -> None:
    print(facts["path"])
    print(f"model_type:  {facts['model_type']}")
    print(f"parameters:  {facts['parameters']:,}")
    if facts["dtypes"] is not None:
        found = facts["dtypes"].items()
        print(f"dtype:       {', '.join(f'{dtype} ({count} tensors)' for dtype, count in found)}")
        print(f"size:        {in_bytes(facts['bytes'])}")
    print()
    print_table(
        {"field": name, "value": json.dumps(value, ensure_ascii=False, default=str)}
        for name, value in facts["config"].items()
    )


INFO = Verb(
    "info",
    "describe a family, one of its presets, or a saved model",
    "ssmzoo info longhorn",
    (MODEL, JSON),
    _info,
)


def _generate(options: argparse.Namespace) -> int:
    from ssmzoo.evaluation.generate import generate

    quieten_bars()
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    streams = sys.stdout.isatty() and options.beams == 1
    if options.echo:
        print(prompt, end="", flush=True)
    text = generate(
        options.model,
        prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        beams=options.beams,
        seed=options.seed,
        device=options.device,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
        state=options.state,
        save_state=options.save_state,
        stock=options.stock,
        adapter=options.adapter,
        write=_write if streams else None,
    )
    print("" if streams else text)
    return 0


def _write(text: str) -> None:
    print(text, end="", flush=True)


GENERATE = Verb(
    "generate",
    "continue a text",
    'ssmzoo generate runs/longhorn-demo/model "def main(" --max-new-tokens 40',
    (
        SAVED_MODEL,
        Option(
            "prompt",
            metavar="PROMPT",
            help="the text, after -- where it begins with a dash; - reads it from standard input",
        ),
        Option("--max-new-tokens", metavar="N", type=int, default=100, help="(default: 100)"),
        Option(
            "--temperature",
            metavar="T",
            type=float,
            help="0 takes the likeliest token each time (default: 0.8, with beams 0)",
        ),
        Option(
            "--top-p",
            metavar="P",
            type=float,
            default=1.0,
            help="sample among the likeliest tokens that hold this much probability (default: 1)",
        ),
        Option("--beams", metavar="N", type=int, default=1, help="(default: 1)"),
        SEED,
        Option("--echo", action="store_true", help="print the prompt before its continuation"),
        Option(
            "--state",
            metavar="PATH",
            help="continue from the folder of --save-state; the prompt follows it",
        ),
        Option(
            "--save-state",
            metavar="PATH",
            help="write the state after the prompt, to continue from later",
        ),
        DEVICE,
        DTYPE,
        TRUST,
        STOCK,
        ADAPTER,
    ),
    _generate,
)


def _inspect(options: argparse.Namespace) -> int:
    from ssmzoo.analysis.inspect import inspect_model

    quieten_bars()
    report = inspect_model(
        options.model,
        options.output,
        text=options.text,
        ids=options.ids,
        length=options.length,
        sequences=options.sequences,
        layers=options.layers,
        measured=options.measured,
        seed=options.seed,
        device=options.device,
        stock=options.stock,
    )
    if options.json:
        print_json(report)
        return 0
    print_table(_inspected(layer) for layer in report["layers"])
    size = report["state_bytes"]
    print(f"state of a sequence: {report['state_note'] if size is None else in_bytes(size)}")
    print(f"{', '.join(report['pictures'])} and inspection.json in {options.output}")
    if report["not_drawn"]:
        print(f"not drawn, since no layer tells it: {', '.join(report['not_drawn'])}")
    for kind, numbers in report["other_layers"].items():
        what = "the attention of hybrid layers" if kind == "hybrid" else f"{kind} layers"
        print(f"not drawn: {what} {', '.join(map(str, numbers))}")
    return 0


def _inspected(layer: dict[str, Any]) -> dict[str, Any]:
    memory, stability = layer["memory_quantiles"] or {}, layer["stability"] or {}
    outside = stability.get("outside")
    return {
        "layer": layer["layer"],
        "kernel": layer["kernel"],
        "channels": layer["channels"],
        "memory": memory.get("median"),
        "longest": memory.get("max"),
        "margin": stability.get("smallest_margin"),
        "outside": None if outside is None else sum(outside),
    }


INSPECT = Verb(
    "inspect",
    "draw a model's kernels, poles, memory and state",
    "ssmzoo inspect runs/longhorn-demo/model --output inspection --text README.md\n"
    "ssmzoo inspect dss:dss-lra-listops --output untrained",
    (
        MODEL,
        OUTPUT.but(required=True, help="a new folder for pictures and JSON"),
        TEXT.but(help="a text to read (default: random tokens)"),
        Option(
            "--ids",
            metavar="N,M",
            type=whole_numbers,
            nargs="+",
            help="token ids to read instead, a sequence each, all of one length",
        ),
        LENGTH.but(help="tokens of each sequence (default: 1024, or the model's limit)"),
        Option(
            "--sequences", metavar="N", type=int, default=4, help="sequences to read (default: 4)"
        ),
        Option("--layers", metavar="N,M", type=whole_numbers, help="layers, from 0 (default: all)"),
        Option(
            "--measured",
            action="store_true",
            help="measure kernels even where the family knows them",
        ),
        SEED,
        DEVICE,
        STOCK,
        JSON,
    ),
    _inspect,
)
