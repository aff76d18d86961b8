"""The command line: ``ssmzoo COMMAND ...``.

Every command is one function here, which imports what it needs when it runs, so that help, errors
and ``ssmzoo list`` never wait for torch. A user's mistake is one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import logging
import os
import re
import select
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ssmzoo.environment.portable import without_credentials
from ssmzoo.family import suggestion

# where torchao is installed, transformers imports it, and it warns of what torch does not ask for
_CHATTERING = ("torchao", "torch.utils._pytree")

OK, FAILED, USAGE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0 is success, 1 a failed check or a fault of ours, 2 a mistake in what was asked for or
    something the machine refused, 130 an interrupt, 141 a reader that went away. ``train`` that is
    told to stop saves its work and ends with 143 for SIGTERM, 138 for SIGUSR1, 130 for SIGINT.

    Args:
        arguments: What follows the program's name; the process's own if None.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("ssmzoo")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    others = {logging.getLogger(name): logging.getLogger(name).level for name in _CHATTERING}
    for other in others:
        other.setLevel(logging.ERROR)
    try:
        status = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt as error:
        return getattr(error, "status", INTERRUPTED)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return BROKEN_PIPE
        lost = _lost_output()
        if lost is not None and isinstance(error, OSError):
            error = lost
        if "--debug" in arguments:
            traceback.print_exc()
        return _report(error)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        for other, usual in others.items():
            other.setLevel(usual)


class UsageError(ValueError):
    """The command line itself is wrong."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises one-line errors, with a suggestion for what was mistyped."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)
        self.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show the traceback of an error",
        )

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage, which would be a second line."""
        raise UsageError(f"{message} (see '{self.prog} --help')")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(
                action,
                f"no such choice {value!r}{suggestion(str(value), action.choices)}; "
                f"choose from {', '.join(map(str, action.choices))}",
            )


def _run(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["exec"] and len(arguments) > 1 and not arguments[1].startswith("-"):
        # all that follows the program is the program's, --help and --debug too
        return _exec(argparse.Namespace(program=arguments[1], arguments=arguments[2:]))
    parser, commands = _parsers()
    try:
        options, rest = parser.parse_known_args(arguments)
    except UsageError as error:
        # of options with one dash there is only -h
        dashed = next((a for a in arguments if re.match(r"-[^-\d]", a)), None)
        if dashed is None or "arguments are required" not in str(error):
            raise
        raise UsageError(f"{error}; {dashed!r} is an option unless -- stands before it") from None
    if getattr(options, "command", None) is None:
        if rest:
            _refuse(parser, rest[0])
        parser.print_help()
        return OK
    if rest:
        _refuse(commands[options.command], rest[0])
    return options.run(options)


def _refuse(parser: Parser, argument: str) -> NoReturn:
    if not argument.startswith("-"):
        parser.error(f"unexpected argument {argument!r}")
    option = argument.partition("=")[0]
    if option == "--standalone":
        parser.error("no option '--standalone': the code goes along unless --no-code leaves it out")
    known = sorted(set(re.findall(r"--[a-z][a-z-]+", parser.format_usage())))
    parser.error(f"no option {option!r}{suggestion(option, known)}; options: {', '.join(known)}")


def _reader_is_gone() -> bool:
    """Tell a closed stdout from a broken connection elsewhere; quieten Python's last flush."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except io.UnsupportedOperation:  # stdout is no file
        return False
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _lost_output() -> RuntimeError | None:
    """Return why what was printed cannot be written, if so, and quieten Python's last flush."""
    if sys.stdout is None:  # it was closed before the program began
        return None
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return RuntimeError(
            f"standard output cannot be written: {error.strerror}; send it elsewhere"
        )
    return None


def _report(error: Exception) -> int:
    text = " ".join(str(error).split())
    if isinstance(error, UnicodeEncodeError):  # most often of a path
        text = f"{text}: {ascii(error.object)[:200]}"
    text = without_credentials(text)
    mistake = isinstance(
        error, ValueError | TypeError | LookupError | RuntimeError | OSError | ImportError
    )
    # of a missing key, the message is the bare key: nobody raised that one for a reader
    if mistake and not isinstance(error, KeyError | IndexError | NotImplementedError):
        print(f"ssmzoo: error: {text or type(error).__name__}", file=sys.stderr)
        return USAGE
    print(
        f"ssmzoo: error: unexpected {type(error).__name__}: {text} "
        "(a fault of ssmzoo; --debug shows where)",
        file=sys.stderr,
    )
    return FAILED


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    from ssmzoo import __version__

    parser = Parser(
        prog="ssmzoo", description="A zoo of state-space language models for Hugging Face."
    )
    parser.add_argument("--version", action="version", version=f"ssmzoo {__version__}")
    chosen = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    commands: dict[str, Parser] = {}

    def command(run: Callable[[argparse.Namespace], int], name: str, about: str) -> Parser:
        commands[name] = chosen.add_parser(
            name, help=about, description=f"{about[0].upper()}{about[1:]}."
        )
        commands[name].set_defaults(run=run)
        return commands[name]

    sub = command(_list, "list", "show the installed families")
    sub.add_argument("--load", action="store_true", help="import each one, to see whether it works")
    _json_option(sub)

    sub = command(_info, "info", "describe a family, or a saved model")
    sub.add_argument("target", metavar="FAMILY|MODEL_DIR")
    _json_option(sub)

    sub = command(_train, "train", "train a model as a recipe says")
    sub.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a shipped one")
    sub.add_argument(
        "--output", metavar="DIR", help="the run's folder (default: runs/ and the recipe's name)"
    )
    sub.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in that folder; none there: begin it",
    )
    sub.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change one field of the recipe, e.g. train.lr=1e-3; may be repeated",
    )

    sub = command(_generate, "generate", "continue a text")
    _model_argument(sub)
    sub.add_argument("prompt", metavar="PROMPT", help="the text; - reads it from standard input")
    sub.add_argument("--max-new-tokens", metavar="N", type=int, default=100, help="(default: 100)")
    sub.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        help="0 takes the likeliest token each time (default: 0.8, with beams 0)",
    )
    sub.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        default=1.0,
        help="sample among the likeliest tokens that hold this much probability (default: 1)",
    )
    sub.add_argument("--beams", metavar="N", type=int, default=1, help="(default: 1)")
    sub.add_argument("--seed", metavar="N", type=int, default=0, help="(default: 0)")
    sub.add_argument("--echo", action="store_true", help="print the prompt before its continuation")
    sub.add_argument(
        "--state", metavar="DIR", help="go on from what --save-state kept; the prompt follows it"
    )
    sub.add_argument("--save-state", metavar="DIR", help="keep what was read, to go on from later")
    _machine_options(sub)

    sub = command(_eval, "eval", "score a model with lm-eval")
    _model_argument(sub)
    sub.add_argument("--tasks", metavar="A,B", default="", help="lm-eval tasks, ours included")
    sub.add_argument("--suite", metavar="NAME", help="a named set of tasks")
    sub.add_argument("--text", metavar="PATH", help="a file or folder for the tasks that read text")
    sub.add_argument(
        "--output-dir", metavar="DIR", default="eval/results", help="(default: eval/results)"
    )
    sub.add_argument("--name", help="the result file's name (default: the model's)")
    sub.add_argument("--batch-size", metavar="N", type=int, default=8, help="(default: 8)")
    sub.add_argument("--limit", metavar="N", type=int, help="score only so many documents a task")
    sub.add_argument("--seed", metavar="N", type=int, default=1234, help="(default: 1234)")
    _machine_options(sub)
    _json_option(sub)

    sub = command(_card, "card", "render a model card from measured results")
    sub.add_argument(
        "model",
        metavar="MODEL_DIR|JSON",
        help="a saved model, or the .json beside a card that was written elsewhere",
    )
    sub.add_argument(
        "--results",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="a result file of 'ssmzoo eval'; may be repeated",
    )
    sub.add_argument("--run", metavar="DIR", type=Path, dest="run_dir", help="the training run")
    sub.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="(default: README.md in the model's folder, or beside the .json)",
    )

    sub = command(_publish, "publish", "publish a model into a folder or to the Hub")
    sub.add_argument("model", metavar="MODEL_DIR")
    sub.add_argument("target", metavar="TARGET", help="a folder (./x, /x, folder:x) or user/name")
    sub.add_argument(
        "--no-code",
        dest="code",
        action="store_false",
        help="leave out the model's code, with which it loads where ssmzoo is not installed "
        "(with trust_remote_code=True)",
    )
    sub.add_argument(
        "--state",
        action="store_true",
        help="send the prompt along that was saved as state.safetensors in MODEL_DIR",
    )
    sub.add_argument("--dry-run", action="store_true", help="show what would go; write nothing")
    sub.add_argument("--private", action="store_true", help="create the repository private")
    sub.add_argument("--revision", metavar="NAME", help="the branch (default: main)")
    sub.add_argument("--message", metavar="TEXT", help="the commit's title")
    _json_option(sub)

    sub = command(_check, "check", "run the conformance suite on a family")
    sub.add_argument("family", metavar="FAMILY")
    sub.add_argument(
        "--oracle",
        metavar="FILE.py:FUNCTION",
        help="a second implementation to compare logits with, called with (weights, config, "
        "input_ids): numpy arrays by parameter name, the configuration's fields, ids [B, L]; it "
        "returns logits [B, L, V] (default: none, and that check is skipped)",
    )
    for option, means in (("--only", "run these checks alone"), ("--skip", "leave these out")):
        sub.add_argument(option, metavar="NAME[,NAME]", type=_names, help=means)
    _json_option(sub)

    sub = command(_inspect, "inspect", "draw a model's kernels, poles, memory and state")
    sub.add_argument(
        "model",
        metavar="MODEL",
        help="a folder with a saved model, a Hub id, or untrained FAMILY (tiny) or FAMILY:PRESET",
    )
    sub.add_argument(
        "--out", metavar="DIR", required=True, help="a new folder for pictures and JSON"
    )
    sub.add_argument("--text", metavar="FILE", help="the text to read (default: random tokens)")
    sub.add_argument(
        "--ids",
        metavar="N,M",
        type=_numbers,
        nargs="+",
        help="token ids to read instead, a sequence each, all of one length",
    )
    sub.add_argument(
        "--length",
        metavar="N",
        type=int,
        help="positions of each sequence to read (default: 1024, or what the model takes)",
    )
    sub.add_argument("--sequences", metavar="N", type=int, default=4, help="(default: 4)")
    sub.add_argument("--layers", metavar="N,M", type=_numbers, help="layers, from 0 (default: all)")
    sub.add_argument(
        "--measured", action="store_true", help="measure kernels even where the family knows them"
    )
    sub.add_argument("--seed", metavar="N", type=int, default=0, help="(default: 0)")
    sub.add_argument("--device", help="e.g. cpu or cuda:0 (default: the GPU if there is one)")
    _json_option(sub)

    sub = command(_distill, "distill", "put filters of small order in place of long ones")
    _model_argument(sub)
    sub.add_argument("output_dir", metavar="DIR", help="the new model's folder")
    sub.add_argument(
        "--order", metavar="N", type=int, required=True, help="what a channel's state will hold"
    )
    sub.add_argument(
        "--kind",
        choices=("rational", "modal"),
        default="rational",
        metavar="KIND",
        help="rational (default) or modal",
    )
    sub.add_argument(
        "--steps", metavar="N", type=int, default=300, help="steps of descent (default: 300)"
    )
    sub.add_argument("--length", metavar="N", type=int, help="taps to fit (default: all)")
    _json_option(sub)

    sub = command(_recall, "recall", "sweep small models over a recall problem, write a ledger")
    sub.add_argument("sweep", metavar="SWEEP", help="a YAML file: models, widths, rates, seeds")
    sub.add_argument("output_dir", metavar="DIR", help="for the runs, the ledger and its picture")
    _json_option(sub)

    sub = command(_doctor, "doctor", "show what runs on this machine, and why not faster")
    sub.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a saved model, a Hub id, FAMILY (its smallest configuration) or FAMILY:PRESET",
    )
    sub.add_argument("--batch-size", metavar="N", type=int, default=1, help="(default: 1)")
    sub.add_argument(
        "--length", metavar="N", type=int, default=512, help="tokens to read (default: 512)"
    )
    sub.add_argument("--device", help="where to run (default: the GPU if there is one)")
    _json_option(sub)

    sub = command(_bench, "bench", "measure training and decoding speed")
    sub.add_argument("families", metavar="FAMILY", nargs="*", help="(default: all installed)")
    sub.add_argument(
        "--lengths", metavar="N,M", type=_lengths, default=(512, 2048), help="(default: 512,2048)"
    )
    sub.add_argument("--no-peers", action="store_true", help="leave out transformers' own models")
    sub.add_argument(
        "--slow-peers", action="store_true", help="time also those that take minutes a step"
    )
    sub.add_argument(
        "--runs", metavar="N", type=int, default=1, help="time everything N times (default: 1)"
    )
    sub.add_argument(
        "--memory", action="store_true", help="measure the peak memory of training steps, too"
    )
    sub.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="a CSV file, or a folder for <device>.csv; its other rows stay",
    )
    _json_option(sub)

    sub = command(
        _exec, "exec", "run another program, such as lm_eval, with the families registered"
    )
    sub.add_argument(
        "program",
        metavar="PROGRAM",
        help="an installed program (lm_eval, transformers, trl, accelerate, ...), a module or a "
        "Python file; the processes that it starts know the families, too",
    )
    sub.add_argument(
        "arguments",
        metavar="ARGUMENT",
        nargs="*",
        default=[],
        help="all that follows is the program's",
    )
    return parser, commands


def _json_option(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _model_argument(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder with a saved model, or a Hub id")


def _machine_options(parser: Parser) -> None:
    parser.add_argument("--device", help="e.g. cpu or cuda:0 (default: the GPU if there is one)")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the weights: auto (default), float32, bfloat16 or float16",
        metavar="DTYPE",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="let the model bring its own Python code"
    )


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise argparse.ArgumentTypeError(
            f"must be whole numbers from 1 upwards with commas between, got {text!r}"
        )
    return lengths


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be whole numbers with commas between, got {text!r}"
        ) from None


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"must be names with commas between, got {text!r}")
    return names


def _list(options: argparse.Namespace) -> int:
    from ssmzoo.analysis.describe import installed_families

    rows = installed_families(load=options.load)
    if options.json:
        _print_json(rows)
    elif rows:
        _print_table(rows)
    else:
        print("no family is installed")
    return OK


def _info(options: argparse.Namespace) -> int:
    from ssmzoo.analysis.describe import describe

    facts = describe(options.target)
    if options.json:
        _print_json(facts)
    elif "presets" in facts:
        _print_family(facts)
    else:
        _print_checkpoint(facts)
    return OK


def _train(options: argparse.Namespace) -> int:
    from ssmzoo.training.run import train

    output = options.output or Path("runs", Path(options.recipe).stem)
    run = train(options.recipe, output_dir=output, resume=options.resume, overrides=options.set)
    if os.environ.get("RANK", "0") == "0":  # the first of the processes that a launcher started
        print(run)
    return OK


def _generate(options: argparse.Namespace) -> int:
    from ssmzoo.evaluation.generate import generate

    _quieten_bars()
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
        write=_write if streams else None,
    )
    print("" if streams else text)
    return OK


def _eval(options: argparse.Namespace) -> int:
    from ssmzoo.evaluation.evaluate import evaluate

    _quieten_bars()
    path = evaluate(
        options.model,
        tasks=tuple(task.strip() for task in options.tasks.split(",") if task.strip()),
        suite=options.suite,
        text=options.text,
        output_dir=options.output_dir,
        name=options.name,
        batch_size=options.batch_size,
        limit=options.limit,
        seed=options.seed,
        device=options.device,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
    )
    report = json.loads(Path(path).read_text(encoding="utf-8"))
    if options.json:
        _print_json(report)
    else:
        shown = ("task", "metric", "value", "stderr", "n")
        _print_table([{key: row[key] for key in shown} for row in report["results"]])
        print(path)
    return OK


def _card(options: argparse.Namespace) -> int:
    from ssmzoo.publishing.card import render_card

    print(
        render_card(
            options.model, results=options.results, run_dir=options.run_dir, output=options.output
        )
    )
    return OK


def _publish(options: argparse.Namespace) -> int:
    from ssmzoo.publishing.hub import publish

    report = publish(
        options.model,
        options.target,
        code=options.code,
        state=options.state,
        dry_run=options.dry_run,
        private=options.private,
        revision=options.revision,
        commit_message=options.message,
    )
    if options.json:
        _print_json(dataclasses.asdict(report))
        return OK
    _print_table([{"file": file.path, "size": _bytes(file.size)} for file in report.files])
    if report.left_out:
        print(f"left out: {', '.join(report.left_out)}")
    done = "would go to" if report.dry_run else "published to"
    print(f"{len(report.files)} files, {_bytes(report.size)}, {done} {report.url or report.target}")
    print(report.load)
    return OK


def _check(options: argparse.Namespace) -> int:
    from ssmzoo.testing import check, load_oracle

    oracle = load_oracle(options.oracle) if options.oracle is not None else None
    report = check(options.family, oracle=oracle, only=options.only, skip=options.skip or ())
    if options.json:
        _print_json(report.as_dict())
    else:
        print(report.table())
    return OK if report.ok else FAILED


def _inspect(options: argparse.Namespace) -> int:
    from ssmzoo.analysis.inspect import inspect_model

    report = inspect_model(
        options.model,
        options.out,
        text=options.text,
        ids=options.ids,
        length=options.length,
        sequences=options.sequences,
        layers=options.layers,
        measured=options.measured,
        seed=options.seed,
        device=options.device,
    )
    if options.json:
        _print_json(report)
        return OK
    _print_table(_inspected(layer) for layer in report["layers"])
    size = report["state_bytes"]
    print(f"state of a sequence: {report['state_note'] if size is None else _bytes(size)}")
    print(f"{', '.join(report['pictures'])} and inspection.json in {options.out}")
    return OK


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


def _distill(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from ssmzoo.distillation.distill import distill

    _quieten_bars()
    bar = tqdm(desc="distill", unit="layer", disable=None)

    def progress(done: int, layers: int) -> None:
        bar.total = layers
        bar.update(done - bar.n)

    with bar:
        _, report = distill(
            options.model,
            options.order,
            options.kind,
            options.output_dir,
            steps=options.steps,
            length=options.length,
            progress=progress,
        )
    if options.json:
        _print_json(dataclasses.asdict(report))
    else:
        print(report.table())
        print(report.target)
    return OK


def _recall(options: argparse.Namespace) -> int:
    from ssmzoo.analysis.recall import ledger_table, recall

    ledger = recall(options.sweep, options.output_dir)
    if options.json:
        _print_json(ledger)
    else:
        print(ledger_table(ledger))
    return OK


def _doctor(options: argparse.Namespace) -> int:
    from ssmzoo.analysis.doctor import examine_machine, examine_model

    _quieten_bars()
    found: dict[str, Any] = {"machine": examine_machine(options.device)}
    if options.model is not None:
        found["model"] = examine_model(
            options.model,
            batch_size=options.batch_size,
            length=options.length,
            device=options.device,
        )
    if options.json:
        _print_json(found)
        return OK
    for name, value in found["machine"].items():
        shown = (
            "  ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        )
        print(f"{name + ':':14}{shown}")
    if options.model is not None:
        _print_examined(found["model"])
    return OK


def _print_examined(facts: dict[str, Any]) -> None:
    print()
    weights = "random weights" if facts["untrained"] else "saved weights"
    size = _bytes(facts["parameter_bytes"])
    print(f"{facts['model']} ({weights}): {facts['parameters']:,} parameters, {size}")
    state = facts["state_reason"] or _bytes(facts["state_bytes"])
    print(f"state after {facts['length']} tokens, batch {facts['batch_size']}: {state}")
    speed = facts["tokens_per_second"]
    step = "" if speed["step"] is None else f", one by one {speed['step']:,}"
    print(f"tokens per second, without the head: reading {speed['read']:,}{step}")
    print()
    layers: list[list[Any]] = []  # [first, last, what they share]
    for layer in facts["layers"]:
        index, shared = layer["layer"], {k: v for k, v in layer.items() if k != "layer"}
        if layers and layers[-1][2] == shared:
            layers[-1][1] = index
        else:
            layers.append([index, index, shared])
    rows = []
    for first, last, shared in layers:
        plain = {} if shared["read"] or shared["step"] else {"none of ours": "plain torch"}
        for op in {**shared["read"], **shared["step"], **plain}:
            rows.append(
                {
                    "layers": str(first) if first == last else f"{first}-{last}",
                    "mixer": shared["mixer"],
                    "op": op,
                    "reading": shared["read"].get(op, plain.get(op, "")),
                    "step": shared["step"].get(op, plain.get(op, "")),
                    "why not faster": shared["hints"].get(op, ""),
                }
            )
    _print_table(rows)


def _bench(options: argparse.Namespace) -> int:
    from ssmzoo.analysis.bench import bench
    from ssmzoo.family import families

    rows = bench(
        options.families or tuple(families()),
        lengths=options.lengths,
        peers=not options.no_peers,
        slow=options.slow_peers,
        runs=options.runs,
        memory=options.memory,
        output=options.output,
        report=_print_aside if options.json else print,
    )
    if options.json:
        _print_json(rows)
    return OK


def _exec(options: argparse.Namespace) -> int:
    from ssmzoo.cli.execute import execute

    execute(options.program, options.arguments)


def _quieten_bars() -> None:
    """Let transformers and the Hub draw progress bars on a terminal only, as ours do."""
    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _print_aside(line: str) -> None:
    print(line, file=sys.stderr)


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def _print_table(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print rows under the first one's keys, each column as wide as it must be."""
    rows = list(rows)
    if not rows:
        return
    table = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _bytes(size: int) -> str:
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def _print_family(facts: dict[str, Any]) -> None:
    paper = facts["paper"]
    print(f"{facts['name']}: {paper['title']} ({paper['authors']}, {paper['year']})")
    print(f"arXiv:       {paper['arxiv']}")
    print(f"model_type:  {facts['model_type']}")
    print(f"LoRA:        {', '.join(facts['lora_targets']) or '-'}")
    print()
    _print_table(
        {"preset": name, "parameters": f"{preset['parameters']:,}"}
        for name, preset in facts["presets"].items()
    )
    print()
    _print_table(
        {"field": name, "default": repr(field["default"]), "type": field["type"]}
        for name, field in facts["fields"].items()
    )


def _print_checkpoint(facts: dict[str, Any]) -> None:
    dtypes = ", ".join(f"{dtype} ({count} tensors)" for dtype, count in facts["dtypes"].items())
    print(facts["path"])
    print(f"model_type:  {facts['model_type']}")
    print(f"parameters:  {facts['parameters']:,}")
    print(f"dtype:       {dtypes}")
    print(f"size:        {_bytes(facts['bytes'])}")
    print()
    _print_table(
        {"field": name, "value": json.dumps(value, ensure_ascii=False)}
        for name, value in facts["config"].items()
    )


if __name__ == "__main__":
    sys.exit(main())
