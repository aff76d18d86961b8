"""A run's log: ``metrics.jsonl``, what is shown of it meanwhile, and what trackers get."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ssmzoo.training.distributed import Processes
from ssmzoo.training.metrics import MetricsFile
from ssmzoo.training.run_state import Progress
from ssmzoo.training.schedule import Plan
from ssmzoo.training.trackers import track

logger = logging.getLogger("ssmzoo.metrics")


class RunLog:
    """The lines of a run: in ``metrics.jsonl``, on a progress bar, or in words without a terminal.

    The trackers get them too.

    Closed on leaving the context.

    Args:
        path: ``metrics.jsonl``.
        progress: How far the run is when it begins or resumes.
        plan: The run in steps.
        processes: The processes of the run, of which the first writes.
    """

    def __init__(self, path: Path, progress: Progress, plan: Plan, processes: Processes) -> None:
        from tqdm import tqdm

        self._total, self._file = plan.total, None
        self._accelerator = processes.accelerator
        if processes.main:
            self._file = MetricsFile(
                path,
                after_step=progress.step,
                logged=not progress.meter.waiting,
                validated=not progress.validation_due,
            )
        self._bar = tqdm(
            total=plan.total,
            initial=progress.step,
            desc="train",
            unit="step",
            disable=None if processes.main else True,
        )

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()
        if self._file is not None:
            self._file.close()

    def advance(self) -> None:
        """Count a step."""
        self._bar.update()

    def write(self, line: dict[str, Any]) -> None:
        """Write a line, in the first process, and show it."""
        if self._file is None:
            return
        self._file.write(**line)
        track(self._accelerator, line)
        if self._bar.disable:  # as away from a terminal
            logger.info("%s", in_words(line, self._total))
        elif "loss" in line:
            shown = {"loss": f"{line['loss']:.3f}"}
            if "tokens_per_second" in line:
                shown["tok/s"] = f"{line['tokens_per_second']:,.0f}"
            self._bar.set_postfix(shown)

    def sync(self) -> None:
        """Return when all lines are on the disk."""
        if self._file is not None:
            self._file.sync()


def in_words(line: Mapping[str, Any], total: int) -> str:
    """Return a line of ``metrics.jsonl`` for people, of a run of so many steps; without gauges."""
    parts = []
    for name, value in line.items():
        if name not in ("step", "gauges") and value is not None:
            whole = isinstance(value, int) or value >= 1000
            parts.append(f"{name} {value:,.0f}" if whole else f"{name} {value:.4g}")
    return f"step {line['step']} of {total}: {', '.join(parts)}"
