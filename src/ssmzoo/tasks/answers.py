"""An lm-eval task whose answer is several symbols, predicted at as many places of filler.

A module of its own, since it needs lm-eval; ``eval/tasks/ssmzoo_induction*.yaml`` name it.
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

_FILLER = " t0"


class SymbolAnswers(ConfigurableTask):
    """Ask for each symbol of a document's ``answer`` behind its ``context`` and filler.

    ``acc`` is the share of right symbols, ``exact_match`` whether all of them are.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        """Return one request a symbol."""
        known = {name: kwargs[name] for name in ("metadata",) if name in kwargs}
        return [
            Instance(
                request_type="loglikelihood",
                doc=doc,
                arguments=(ctx + place * _FILLER, f" {symbol}"),
                idx=place,
                **known,
            )
            for place, symbol in enumerate(doc["answer"].split())
        ]

    def process_results(
        self, doc: dict[str, Any], results: list[tuple[float, bool]]
    ) -> dict[str, float]:
        """Score the symbols of one document."""
        right = [is_greedy for _, is_greedy in results]
        return {"acc": sum(right) / len(right), "exact_match": float(all(right))}
