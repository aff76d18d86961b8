"""Score models with lm-eval, write the scores to results files, and generate text.

``scoring`` runs tasks in lm-eval and returns their scores; ``scorer`` is the model that it asks;
``likelihoods`` and ``shared_states`` compute its likelihoods, as ``planner`` orders them.

From outside: ``evaluate.evaluate``, ``generate.generate``, ``results.read_results``, and
:class:`SharedPrefixLM` for lm-eval's own evaluator.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssmzoo.evaluation.scorer import SharedPrefixLM

__all__ = ["SharedPrefixLM"]


def __getattr__(name: str) -> Any:
    if name != "SharedPrefixLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ssmzoo.evaluation.scorer import SharedPrefixLM  # imports lm-eval

    return SharedPrefixLM
