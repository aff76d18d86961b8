"""The history of a primed model: its base, its new mixers, and the stages since."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ssmzoo.checkpoints.weights import PRIMING
from ssmzoo.files import read_json
from ssmzoo.training.checkpoint import CONTENTS, step_of
from ssmzoo.training.metrics import read_metrics


def history(place: Path) -> dict[str, Any] | None:
    """Return the history of a saved model or of a run's checkpoint; None if it was not primed."""
    if (place / PRIMING).is_file():
        return dict(read_json(place / PRIMING))
    run = place.absolute().parent.parent
    if not ((place / CONTENTS).is_file() and (run / PRIMING).is_file()):
        return None
    told, step = dict(read_json(run / PRIMING)), step_of(place)
    read = [x for x in read_metrics(run / "metrics.jsonl") if x["step"] <= step and "tokens" in x]
    *before, stage = told["stages"]
    reached = {"steps": step, **({"tokens": read[-1]["tokens"]} if read else {})}
    return {**told, "stages": [*before, {**stage, **reached}]}
