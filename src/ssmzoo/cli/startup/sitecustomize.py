"""What Python runs first in a program that ``ssmzoo exec`` starts, and in the processes it starts.

It has the families registered as soon as transformers is imported, and lm-eval's model ``ssmzoo``
as soon as lm-eval's models are, and imports nothing itself: a process without these stays as quick
as it is, and what a program sets before its imports (``HF_HOME``, ``CUDA_VISIBLE_DEVICES``) still
counts. Where a machine has a ``sitecustomize`` of its own, that one runs, too.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path


def _register_families():
    import ssmzoo.auto  # noqa: F401


def _register_lm():
    from lm_eval.api.registry import model_registry

    model_registry.register("ssmzoo", target="ssmzoo.evaluation.scorer:SharedPrefixLM")


_REGISTER = {"transformers": _register_families, "lm_eval.models": _register_lm}


class _Registering:
    """Finds these modules where the other finders do, and registers once they are imported."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in _REGISTER:
            return None
        others = (finder for finder in sys.meta_path if finder is not cls)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                if importlib.util.find_spec("ssmzoo") is not None:  # not so in another Python
                    _REGISTER[name]()

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Registering)

_here = Path(__file__).parent
_others = [p for p in sys.path if Path(p or ".").resolve() != _here.resolve()]  # noqa: TID251
_theirs = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _theirs is not None and _theirs.loader is not None:
    _theirs.loader.exec_module(importlib.util.module_from_spec(_theirs))
