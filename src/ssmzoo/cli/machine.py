"""Commands of this machine: ``doctor``, ``check``, ``bench`` and ``exec``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ssmzoo.cli.options import (
    BATCH_SIZE,
    DEVICE,
    FAMILY,
    JSON,
    LENGTH,
    MODEL,
    NAMES,
    OUTPUT,
    STOCK,
    Option,
    Verb,
    lengths,
)
from ssmzoo.cli.show import in_bytes, print_json, print_table, quieten_bars


def _doctor(options: argparse.Namespace) -> int:
    from ssmzoo.analysis.doctor import examine_machine, examine_model

    quieten_bars()
    found: dict[str, Any] = {"machine": examine_machine(options.device)}
    if options.model is not None:
        found["model"] = examine_model(
            options.model,
            batch_size=options.batch_size,
            length=options.length,
            device=options.device,
            stock=options.stock,
        )
    if options.json:
        print_json(found)
        return 0
    for name, value in found["machine"].items():
        shown = (
            "  ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        )
        print(f"{name + ':':14}{shown}")
    if options.model is not None:
        _print_examined(found["model"])
    return 0


def _print_examined(facts: dict[str, Any]) -> None:
    print()
    weights = "random weights, without the head" if facts["untrained"] else "saved weights"
    size = in_bytes(facts["parameter_bytes"])
    print(f"{facts['model']} ({weights}): {facts['parameters']:,} parameters, {size}")
    state = facts["state_reason"] or in_bytes(facts["state_bytes"])
    print(f"state after {facts['length']} tokens, batch {facts['batch_size']}: {state}")
    speed = facts["tokens_per_second"]
    step = "" if speed["step"] is None else f", one by one {speed['step']:,}"
    print(f"tokens per second, without the head: reading {speed['read']:,}{step}")
    if memory := facts["memory"]:
        rates = ", ".join(f"{n} {rate:,}" for n, rate in memory["tokens_per_second"].items())
        print(f"upper bound by memory bandwidth ({memory['read_gb_s']} GB/s), one by one: {rates}")
        print(
            f"fastest here: weights of {memory['for_reading']} for reading, "
            f"of {memory['for_decoding']} (torchao) one by one"
        )
    print()
    layers: list[list[Any]] = []  # [first, last, shared facts]
    for layer in facts["layers"]:
        index, shared = layer["layer"], {k: v for k, v in layer.items() if k != "layer"}
        if layers and layers[-1][2] == shared:
            layers[-1][1] = index
        else:
            layers.append([index, index, shared])
    rows = []
    for first, last, shared in layers:
        theirs = "transformers' own" if shared["stock"] else "plain torch"
        plain = {} if shared["read"] or shared["step"] else {"none of ours": theirs}
        for op in {**shared["read"], **shared["step"], **plain}:
            rows.append(
                {
                    "layers": str(first) if first == last else f"{first}-{last}",
                    "mixer": shared["mixer"],
                    "op": op,
                    "reading": shared["read"].get(op, plain.get(op, "")),
                    "step": shared["step"].get(op, plain.get(op, "")),
                    "why not faster": shared["hints"].get(op, shared["stock"] or ""),
                }
            )
    print_table(rows)


DOCTOR = Verb(
    "doctor",
    "show this machine, a model's kernels on it, and why not faster",
    "ssmzoo doctor\nssmzoo doctor runs/longhorn-demo/model --length 128",
    (
        MODEL.but(
            nargs="?",
            help="a folder with a saved model, a Hub id, FAMILY (its smallest configuration) "
            "or FAMILY:PRESET (default: the machine alone)",
        ),
        BATCH_SIZE,
        LENGTH.but(default=512, help="tokens to read (default: 512)"),
        DEVICE,
        STOCK,
        JSON,
    ),
    _doctor,
)


def _check(options: argparse.Namespace) -> int:
    from ssmzoo.testing import check, load_oracle

    oracle = load_oracle(options.oracle) if options.oracle is not None else None
    report = check(options.family, oracle=oracle, only=options.only, skip=options.skip)
    if options.json:
        print_json(report.as_dict())
    else:
        print(report.table())
    return 0 if report.ok else 1


CHECK = Verb(
    "check",
    "run the conformance suite on a family",
    "ssmzoo check longhorn --only padding,packing",
    (
        FAMILY,
        Option(
            "--oracle",
            metavar="FILE.py:FUNCTION",
            help="a second implementation to compare logits with, called with (weights, "
            "config, input_ids): numpy arrays by parameter name, the configuration's fields, "
            "ids [B, L]; it returns logits [B, L, V] (default: none, and that check is skipped)",
        ),
        NAMES.but("--only", default=None, help="run these checks alone"),
        NAMES.but("--skip", help="leave these checks out"),
        JSON,
    ),
    _check,
)


def _bench(options: argparse.Namespace) -> int:
    from ssmzoo.analysis.bench import bench
    from ssmzoo.family import families

    rows = bench(
        options.families or tuple(families()),
        lengths=options.lengths,
        peers=not options.no_peers,
        slow=options.slow_peers,
        stock=options.stock,
        runs=options.runs,
        memory=options.memory,
        output=options.output,
        report=_print_to_stderr if options.json else print,
    )
    if options.json:
        print_json(rows)
    return 0


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


BENCH = Verb(
    "bench",
    "measure training and decoding speed",
    "ssmzoo bench longhorn --lengths 512 --no-peers",
    (
        Option("families", metavar="FAMILY", nargs="*", help="(default: all installed)"),
        Option(
            "--lengths",
            metavar="N,M",
            type=lengths,
            default=(512, 2048),
            help="tokens of a sequence (default: 512,2048)",
        ),
        Option("--no-peers", action="store_true", help="leave out transformers' own models"),
        STOCK.but(help="leave out transformers' own models on ssmzoo's kernels"),
        Option(
            "--slow-peers", action="store_true", help="time also those that take minutes a step"
        ),
        Option(
            "--runs", metavar="N", type=int, default=1, help="time everything N times (default: 1)"
        ),
        Option(
            "--memory", action="store_true", help="measure the peak memory of training steps, too"
        ),
        OUTPUT.but(help="a CSV file, or a folder for <device>.csv; its other rows stay"),
        JSON,
    ),
    _bench,
)


def _exec(options: argparse.Namespace) -> int:
    from ssmzoo.cli.execute import execute

    execute(options.program, options.arguments)


EXEC = Verb(
    "exec",
    "run another program with the families registered",
    "ssmzoo exec lm_eval --model hf --model_args pretrained=demo/published \\\n"
    "    --tasks lambada_openai",
    (
        Option(
            "program",
            metavar="PROGRAM",
            help="an installed program (lm_eval, transformers, trl, accelerate, ...), a module "
            "or a Python file; the processes that it starts know the families, too",
        ),
        Option(
            "arguments",
            metavar="ARGUMENT",
            nargs=argparse.REMAINDER,
            help="the program's arguments: all that follows",
        ),
    ),
    _exec,
)
