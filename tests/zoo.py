"""The families of this repository, by name: what its own pyproject.toml registers."""

import tomllib
from pathlib import Path

_PROJECT = Path(__file__).parents[1] / "pyproject.toml"
_GROUPS = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]

OURS = tuple(sorted(_GROUPS["ssmzoo.families"]))
