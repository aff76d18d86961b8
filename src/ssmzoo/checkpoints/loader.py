"""The file beside saved weights that leads transformers to the installed ssmzoo.

transformers does not know the zoo's model types before ``import ssmzoo.auto``. A configuration that
names code makes it ask for ``trust_remote_code=True`` instead of advising an upgrade; the code is
this one import. After ``import ssmzoo.auto`` neither is read nor asked about.

It imports nothing of ssmzoo: it travels with a checkpoint's own code.
"""

from __future__ import annotations

import os
from pathlib import Path

LOADER = "load_with_ssmzoo.py"
AUTO_MAP = {"AutoConfig": "load_with_ssmzoo.SavedConfig"}  # the models follow from it
# saved models hold it: after a change is_loader must know the earlier text too
_TEXT = '''\
"""Let transformers load this model with ``trust_remote_code=True``, by the installed ssmzoo.

A program that says ``import ssmzoo.auto`` first needs neither this file nor that argument.
"""

try:
    from ssmzoo.auto import SavedConfig  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"this model needs ssmzoo 0.2 or later ({error}); no package index has it: run "
        "`pip install .` in a clone of its repository"
    ) from error
'''


def write_loader(folder: str | os.PathLike[str]) -> None:
    """Write the file into a folder."""
    Path(folder, LOADER).write_text(_TEXT, encoding="utf-8")


def is_loader(path: Path) -> bool:
    """Tell whether a file is the loader, to the last character."""
    return path.name == LOADER and path.is_file() and path.read_bytes() == _TEXT.encode()
