"""What Python runs first in a program that ``ssmzoo exec`` starts, and in the processes it starts.

It registers the families with transformers. Where a machine has a ``sitecustomize`` of its own,
that one runs, too.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_here = Path(__file__).parent
_others = [p for p in sys.path if Path(p or ".").resolve() != _here.resolve()]  # noqa: TID251
_theirs = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _theirs is not None and _theirs.loader is not None:
    _theirs.loader.exec_module(importlib.util.module_from_spec(_theirs))
if importlib.util.find_spec("ssmzoo") is not None:  # a program may start another Python
    import ssmzoo.auto  # noqa: F401
