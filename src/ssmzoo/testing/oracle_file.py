"""An oracle from a file that the user names, for ``ssmzoo check --oracle FILE.py:function``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import cast

from ssmzoo.environment.messages import suggestion
from ssmzoo.testing.subject import Oracle


def load_oracle(named: str) -> Oracle:
    """Import a Python file and return one of its functions.

    The file may be anywhere. Its folder does not get onto the import path; what it imports must be
    installed.

    Args:
        named: ``FILE.py:function``.

    Raises:
        ValueError: The name has another form, or there is no such file, or it cannot be imported.
        LookupError: The file has no such function.
        TypeError: That name is no function.
    """
    file, _, name = named.rpartition(":")
    if not file or not name.isidentifier():
        raise ValueError(f"oracle must look like FILE.py:function, got {named!r}")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"oracle must be in a Python file, and {file!r} does not exist")
    module_name = f"ssmzoo_oracle_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"oracle must be in a file that ends in .py, got {file!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(
            f"oracle file {file!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    public = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
    if not hasattr(module, name):
        hint = suggestion(name, public) or f"; it has {', '.join(public) or 'none'}"
        raise LookupError(f"oracle file {file!r} has no function {name!r}{hint}")
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"oracle {named!r} must be a function, got {type(function).__name__}")
    return cast("Oracle", function)
