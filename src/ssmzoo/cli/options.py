"""Commands, and the options that several of them share.

An option means the same in every command. Options of one command are declared beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ssmzoo.environment.messages import suggestion


class UsageError(ValueError):
    """A mistake in the command line itself."""


class Option:
    """One argument of ``argparse``: its flags, or its name, and its settings."""

    def __init__(self, *flags: str, **settings: Any) -> None:
        self.flags, self.settings = flags, settings

    def but(self, *flags: str, **settings: Any) -> Option:
        """Return the same option with other settings, such as a default or a help text."""
        return Option(*(flags or self.flags), **{**self.settings, **settings})


@dataclass(frozen=True)
class Verb:
    """One command.

    Attributes:
        name: What users type.
        about: One line of help.
        example: Command lines that use it.
        options: Its arguments, in the order in which help lists them.
        run: Runs the command and returns the exit status.
    """

    name: str
    about: str
    example: str
    options: Sequence[Option]
    run: Callable[[argparse.Namespace], int]

    def parser(self, verbs: Any) -> Parser:
        """Add this command to argparse's subparsers."""
        lines = "".join(f"\n  {line}" for line in self.example.splitlines())
        parser = verbs.add_parser(
            self.name,
            description=f"{self.about[0].upper()}{self.about[1:]}.",
            epilog=f"example:{lines}",
        )
        for option in self.options:
            parser.add_argument(*option.flags, **option.settings)
        parser.set_defaults(run=self.run)
        return parser


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises one-line errors, with a suggestion for a mistyped name."""

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

    def refuse(self, argument: str) -> NoReturn:
        """Raise an error about an argument that this parser does not take."""
        known = sorted(flag for flag in self._option_string_actions if flag.startswith("--"))
        if argument.startswith("-"):
            option = argument.partition("=")[0]
            if option in known:
                self.error(
                    f"{option} stands behind --, where options are not read; give it before --"
                )
            self.error(
                f"no option {option!r}{suggestion(option, known)}; options: {', '.join(known)}"
            )
        place = f"; use --output {argument} to write there" if "--output" in known else ""
        self.error(f"unexpected argument {argument!r}{place}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(
                action,
                f"no such choice {value!r}{suggestion(str(value), action.choices)}; "
                f"choose from {', '.join(map(str, action.choices))}",
            )


def comma_separated(kind: Callable[[str], Any], what: str, least: int | None = None) -> Any:
    """Return a parser of comma-separated values; errors call the values ``what``."""

    def parse(text: str) -> tuple[Any, ...]:
        try:
            values = tuple(kind(part) for part in text.split(","))
        except ValueError:
            values = ()
        if not values or (least is not None and min(values) < least):
            bound = "" if least is None else f" from {least} upwards"
            raise argparse.ArgumentTypeError(
                f"must be {what}{bound} with commas between, got {text!r}"
            )
        return values

    return parse


def _name(text: str) -> str:
    if not text.strip():
        raise ValueError("a name must not be empty")
    return text.strip()


NAMES = Option(
    metavar="NAME,NAME", type=comma_separated(_name, "names"), action="extend", default=[]
)
whole_numbers = comma_separated(int, "whole numbers")
lengths = comma_separated(int, "whole numbers", least=1)


def in_folder(model: str) -> str:
    """Return the MODEL of a command that needs its files on this machine.

    Raises:
        ValueError: It is a Hub id, or as :func:`ssmzoo.checkpoints.load.model_folder`.
        LookupError: As :func:`ssmzoo.checkpoints.load.model_folder`.
    """
    from ssmzoo.checkpoints.load import model_folder
    from ssmzoo.checkpoints.weights import is_state_adapter

    if is_state_adapter(model):  # has a card and is published like a model
        return model
    folder = model_folder(model)
    if folder is None:
        raise ValueError(
            f"model must be a folder on this machine, got the Hub id {model!r}; "
            f"fetch it with: hf download {model} --local-dir DIR"
        )
    return str(folder)


MODEL = Option(
    "model",
    metavar="MODEL",
    help="a folder with a saved model, a Hub id, FAMILY or FAMILY:PRESET",
)
SAVED_MODEL = MODEL.but(help="a folder with a saved model, or a Hub id")
LOCAL_MODEL = MODEL.but(help="a folder with a saved model")
FAMILY = Option("family", metavar="FAMILY", help="the name of an installed family")
OUTPUT = Option("--output", metavar="PATH", type=Path, help="where to write")
SET = Option(
    "--set",
    metavar="KEY=VALUE",
    action="append",
    default=[],
    help="change one field; may be repeated",
)
TEXT = Option("--text", metavar="PATH", help="a text to read: a file or a folder")
LENGTH = Option("--length", metavar="N", type=int, help="tokens of a sequence")
BATCH_SIZE = Option(
    "--batch-size", metavar="N", type=int, default=1, help="sequences at a time (default: 1)"
)
SEED = Option(
    "--seed", metavar="N", type=int, default=0, help="seed of all random numbers (default: 0)"
)
DEVICE = Option(
    "--device", metavar="DEVICE", help="e.g. cpu or cuda:0 (default: an NVIDIA GPU, else the CPU)"
)
DTYPE = Option(
    "--dtype",
    metavar="DTYPE",
    choices=("auto", "float32", "bfloat16", "float16"),
    default="auto",
    help="of the weights: auto (default), float32, bfloat16 or float16",
)
TRUST = Option(
    "--trust-remote-code", action="store_true", help="let the model bring its own Python code"
)
STOCK = Option(
    "--stock",
    action="store_true",
    help="leave transformers' recurrent models as they are, without ssmzoo's kernels",
)
ADAPTER = Option(
    "--adapter", metavar="DIR", type=Path, help="start from the state adapter in this folder"
)
JSON = Option("--json", action="store_true", help="print JSON instead of text")
