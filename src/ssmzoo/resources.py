"""Files that travel beside the code: tasks, suites, recipes, card templates."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def share(relative: str) -> Path:
    """Return the path of a shipped file or folder, e.g. ``share("eval/tasks")``.

    An installed wheel carries them in the package, a checkout at its root.

    Raises:
        LookupError: Neither has it.
    """
    for root in (_PACKAGE / "_share", _PACKAGE.parent.parent):
        if (root / relative).exists():
            return root / relative
    raise LookupError(f"ssmzoo ships no file {relative!r}")
