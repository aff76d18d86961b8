"""The families of this repository, by name, as its own pyproject.toml registers them; replicas."""

import copy
import tomllib
from pathlib import Path

_PROJECT = Path(__file__).parents[1] / "pyproject.toml"
_GROUPS = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]

OURS = tuple(sorted(_GROUPS["ssmzoo.families"]))


def replica(model):
    """Return a copy with the same parameters as plain attributes, as DataParallel and FSDP1 do."""
    copied = copy.deepcopy(model)
    for module, original in zip(copied.modules(), model.modules(), strict=True):
        for name, parameter in original._parameters.items():
            if parameter is not None:
                del module._parameters[name]
                vars(module)[name] = parameter
    return copied
