"""How a model is measured while it trains and at the end, and what follows from that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ssmzoo.recipe import HIGHER_IS_BETTER, Recipe
from ssmzoo.training.model import load_for_task
from ssmzoo.training.objectives import Objective
from ssmzoo.training.step import Learner

if TYPE_CHECKING:
    from torch import nn

    from ssmzoo.evaluation.results import Score


def measure_held_out(
    learner: Learner, parts: Iterable[Any], model: nn.Module | None = None
) -> dict[str, float | int]:
    """Return the objective's metrics of held-out parts, over all processes.

    Args:
        learner: Its objective measures.
        parts: This process's; as many in every process.
        model: Another model than the learner's.

    Raises:
        Stopped: A process was told to stop.
        ValueError: Nothing is held out that could be predicted.
    """
    import torch

    objective, processes = learner.objective, learner.processes
    judged = learner.model if model is None else model
    sums = objective.zeros(processes.accelerator.device)
    judged.eval()
    with torch.no_grad():
        for part in parts:
            sums += objective.judged(partial(learner.forward, judged), part)
            processes.stop_if_told()
    learner.model.train()
    sums = processes.sum(sums)
    if not sums.any():
        raise ValueError("what is held out must have something to predict, got none")
    return objective.metrics(sums)


def measure_checkpoint(
    learner: Learner, parts: Mapping[str, Iterable[Any]], checkpoint: Path
) -> dict[str, dict[str, float | int]]:
    """Return, by name, the metrics of a checkpoint's model; see :func:`measure_held_out`."""
    from ssmzoo.modeling import load_state_adapter
    from ssmzoo.modeling.stock import accelerate

    model = load_for_task(str(checkpoint), task=learner.task, what="the checkpoint")
    model = cast("nn.Module", model).to(learner.processes.accelerator.device)
    if any(not kernels.startswith("stock") for kernels in learner.recurrent.values()):
        accelerate(model)
    if learner.adapter is not None:
        load_state_adapter(checkpoint, model)
    return {name: measure_held_out(learner, some, model) for name, some in parts.items()}


def is_best(metrics: Mapping[str, float], before: Mapping[str, float] | None, metric: str) -> bool:
    """Return whether a validation is better than the best one before, of equal ones by the loss."""
    if not math.isfinite(metrics[metric]):
        return False
    return before is None or _rank(metrics, metric) > _rank(before, metric)


def _rank(metrics: Mapping[str, float], metric: str) -> tuple[float, float]:
    sign = 1 if metric in HIGHER_IS_BETTER else -1
    return sign * metrics[metric], -metrics.get("loss", math.inf)


def scores_of_test(
    test: Mapping[str, float | None], objective: Objective, recipe: Recipe
) -> list[Score]:
    """Return a test's metrics in the form of ``ssmzoo eval``."""
    scores: list[Score] = []
    for metric in objective.scored:
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
