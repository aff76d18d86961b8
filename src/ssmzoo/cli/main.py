"""The program ``ssmzoo COMMAND ...``: its commands, its errors, its exit statuses.

Commands import their modules when they run, so that help, errors and ``ssmzoo list`` never wait
for torch. A user's mistake is one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from ssmzoo.cli import machine, models, publishing, scoring, training
from ssmzoo.cli.options import Parser
from ssmzoo.environment.credentials import without_credentials
from ssmzoo.environment.messages import shortened
from ssmzoo.files import few_files

# in the order of a day's work
VERBS = (
    models.LIST,
    models.INFO,
    machine.DOCTOR,
    training.TRAIN,
    training.CONSOLIDATE,
    models.GENERATE,
    scoring.EVAL,
    models.INSPECT,
    scoring.CARD,
    publishing.PUBLISH,
    publishing.EXPORT,
    publishing.CONVERT,
    training.PRIME,
    training.DISTILL,
    training.SWEEP,
    machine.EXEC,
    machine.CHECK,
    machine.BENCH,
    publishing.EXPORT_KERNELS,
)

# transformers imports torchao where it is installed, which then warns
_CHATTERING = ("torchao", "torch.utils._pytree")

OK, FAILED, USAGE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141
# a failed assertion in a library written in Rust; seen in tokenizers
_OF_RUST = (
    "a library cannot go on: most often a pattern of the tokenizer's takes too many tries on a "
    "text; correct the pattern in tokenizer.json, or take another tokenizer"
)
# commands that several processes may run; exec leaves that to the other program
_FOR_MANY = ("train", "eval", "exec")
_OF_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0 is success, 1 a failed check or a fault of ours, 2 a user's mistake or a refusal of the
    machine, 130 an interrupt, 141 a closed pipe. ``train`` saves its work at a signal and returns
    128 plus the signal's number, such as 143 for SIGTERM.

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
        lost = _stdout_error(error)
        if lost is not None and isinstance(error, OSError):
            if isinstance(lost, BrokenPipeError):
                return BROKEN_PIPE
            error = RuntimeError(
                f"standard output cannot be written: {lost.strerror}; send it elsewhere"
            )
        if "--debug" in arguments:
            sys.stderr.write(without_credentials(traceback.format_exc()))
        return _report(error)
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        return _report(RuntimeError(f"{error}; {_OF_RUST}"))  # which is no Exception
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        for other, usual in others.items():
            other.setLevel(usual)


def _run(arguments: Sequence[str]) -> int:
    parser, commands = parsers()
    options, rest = parser.parse_known_args(arguments)
    if options.command is None:
        if rest:
            parser.refuse(rest[0])
        parser.print_help()
        return OK
    if rest:
        commands[options.command].refuse(rest[0])
    world = os.environ.get("WORLD_SIZE") or "1"
    if world != "1" and options.command not in _FOR_MANY:
        raise RuntimeError(
            f"ssmzoo {options.command} runs in one process, and WORLD_SIZE asks for {world}; start "
            f"it without a launcher, or unset WORLD_SIZE"
        )
    with few_files():
        return options.run(options)


def _stdout_error(error: Exception) -> OSError | None:
    """Return the error of a standard output that cannot be written, else None.

    Python's last flush then goes to the null device.
    """
    if sys.stdout is None:  # it was closed before the program began
        return None
    try:
        if isinstance(error, OSError) and error.filename is None and error.errno in _OF_OUTPUT:
            sys.stdout.write("\n")  # what could not be written is no longer in the buffer
        sys.stdout.flush()
    except OSError as found:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return found
    return None


def _report(error: Exception) -> int:
    text = " ".join(str(error).split())
    if isinstance(error, UnicodeEncodeError):  # most often of a path
        text = f"{text}: {ascii(error.object)[:200]}"
    text = shortened(without_credentials(text), 4000)
    mistake = isinstance(
        error, ValueError | TypeError | LookupError | RuntimeError | OSError | ImportError
    )
    # these are raised by a fault in code, with a message such as the bare key
    if mistake and not isinstance(error, KeyError | IndexError | NotImplementedError):
        print(f"ssmzoo: error: {text or type(error).__name__}", file=sys.stderr)
        return USAGE
    print(
        f"ssmzoo: error: unexpected {type(error).__name__}: {text} "
        "(a fault of ssmzoo; --debug shows where)",
        file=sys.stderr,
    )
    return FAILED


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """Return the program's parser, and each command's by name."""
    from ssmzoo import __version__

    parser = Parser(
        prog="ssmzoo",
        usage="ssmzoo [-h] [--debug] [--version] COMMAND ...",
        description="A zoo of state-space language models for Hugging Face.",
        epilog="\n".join(
            [
                "commands:",
                *(f"  {verb.name:15} {verb.about}" for verb in VERBS),
                "\n'ssmzoo COMMAND --help' shows its options and an example.",
            ]
        ),
    )
    parser.add_argument("--version", action="version", version=f"ssmzoo {__version__}")
    chosen = parser.add_subparsers(
        dest="command", prog="ssmzoo", metavar="COMMAND", help=argparse.SUPPRESS
    )
    return parser, {verb.name: verb.parser(chosen) for verb in VERBS}


if __name__ == "__main__":
    sys.exit(main())
