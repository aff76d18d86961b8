"""How a model is evaluated while it trains and at the end, and which validation is the best."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ssmzoo.recipe import HIGHER_IS_BETTER, Recipe
from ssmzoo.training.consolidate import load_checkpoint
from ssmzoo.training.metrics import finite
from ssmzoo.training.objectives import Objective
from ssmzoo.training.step import Learner

if TYPE_CHECKING:
    from torch import nn

    from ssmzoo.evaluation.results import Score

logger = logging.getLogger("ssmzoo")

Metrics: TypeAlias = dict[str, float | int | None]  # None where it is not finite


def evaluate_parts(
    learner: Learner, parts: Iterable[Any], model: nn.Module
) -> dict[str, float | int]:
    """Return the objective's metrics of held-out parts, over all processes.

    Args:
        learner: Its objective has the metrics.
        parts: This process's; as many in every process.
        model: The learner's, or another one.

    Raises:
        Stopped: A process was told to stop.
        ValueError: Nothing is held out that could be predicted.
    """
    import torch

    objective, processes = learner.objective, learner.processes
    sums = objective.zeros(processes.accelerator.device)
    model.eval()
    with torch.no_grad():
        for part in parts:
            sums += objective.evaluate(partial(learner.forward, model), part)
            processes.stop_if_told()
    learner.model.train()
    sums = processes.sum(sums)
    if not sums.any():
        raise ValueError("the held-out data must have something to predict, got none")
    return objective.metrics(sums)


def evaluate_checkpoint(
    learner: Learner, parts: Mapping[str, Iterable[Any]], checkpoint: Path
) -> dict[str, Metrics]:
    """Return, by name, the metrics of a checkpoint's model; see :func:`evaluate_parts`.

    ``parts`` are the test split, named ``test``, and held-out data of other lengths.
    """
    from ssmzoo.modeling import load_state_adapter
    from ssmzoo.modeling.stock import accelerate

    model = cast("nn.Module", load_checkpoint(checkpoint))
    model = model.to(learner.processes.accelerator.device)
    if any(not kernels.startswith("stock") for kernels in learner.recurrent.values()):
        accelerate(model)
    if learner.adapter is not None:
        load_state_adapter(checkpoint, model)
    found = {name: finite(evaluate_parts(learner, some, model)) for name, some in parts.items()}
    for name, metrics in found.items():
        if None in metrics.values():
            where = "of the test split" if name == "test" else f"at {name} tokens"
            logger.warning("the metrics %s are not all finite numbers", where)
    return found


def is_best(metrics: Mapping[str, float], before: Mapping[str, float] | None, metric: str) -> bool:
    """Return whether a validation is better than the best one before, of equal ones by the loss."""
    if not math.isfinite(metrics[metric]):
        return False
    return before is None or _rank(metrics, metric) > _rank(before, metric)


def _rank(metrics: Mapping[str, float], metric: str) -> tuple[float, float]:
    sign = 1 if metric in HIGHER_IS_BETTER else -1
    return sign * metrics[metric], -metrics.get("loss", math.inf)


def test_scores(
    test: Mapping[str, float | None], objective: Objective, recipe: Recipe
) -> list[Score]:
    """Return a test's metrics in the form of ``ssmzoo eval``."""
    scores: list[Score] = []
    for metric in objective.test_metrics:
        value, n = test[metric], test["examples" if metric == "exact_match" else "targets"]
        assert n is not None  # a count
        # answers of several labels are not independent of one another, examples are
        single = objective.independent or n == test.get("examples")
        stderr = None
        if metric in ("accuracy", "exact_match") and single and n > 1 and value is not None:
            stderr = math.sqrt(value * (1 - value) / (n - 1))
        scores.append(
            {
                "task": str(recipe.data.task),
                "metric": metric,
                "value": value,
                "stderr": stderr,
                "n": int(n),
                "seed": recipe.train.seed,
                "num_fewshot": 0,
                "higher_is_better": metric in HIGHER_IS_BETTER,
                "settings": {**recipe.data.task_args, "split": "test"},
            }
        )
    return scores
