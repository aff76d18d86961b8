"""The loop of a training run: steps, log lines, validations, checkpoints, on any processes.

- The objective defines loss and metrics, the learner takes a step; the loop calls both.
- The loss of a step is the mean over all its targets, whatever their split into micro-batches and
  processes.
- Losses stay on the device between log lines; a NaN is therefore noticed at the next line, always
  before a checkpoint, and the message names the step where it arose.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ssmzoo.data.sources import data_source
from ssmzoo.environment.device import numeric_variables
from ssmzoo.family import foreign_versions
from ssmzoo.recipe import Recipe
from ssmzoo.training import run_state
from ssmzoo.training.checkpoint import checkpoints, save_checkpoint, step_of
from ssmzoo.training.curves import require_curves
from ssmzoo.training.distributed import Processes, Sums
from ssmzoo.training.folder import RunFolder
from ssmzoo.training.log import RunLog
from ssmzoo.training.metrics import finite
from ssmzoo.training.model import build_config
from ssmzoo.training.schedule import Plan, require_ahead
from ssmzoo.training.step import NOTHING_TO_PREDICT, Learner, Step
from ssmzoo.training.stopping import Stopped, StopRequest, signal_of
from ssmzoo.training.trackers import start_trackers, track_picture, track_sample
from ssmzoo.training.validation import (
    Metrics,
    evaluate_checkpoint,
    evaluate_parts,
    is_best,
    test_scores,
)

if TYPE_CHECKING:
    from pathlib import Path

    from accelerate import Accelerator
    from transformers import PreTrainedConfig

T = TypeVar("T")


class NotFiniteError(RuntimeError):
    """The loss, or its gradient, is not a number or infinite."""


class Run:
    """A run's parts, and the order in which they work.

    Attributes:
        processes: The processes that train together.
        folder: Where everything is written.
        source: The kind of data that the recipe names.
        data: This process's share of it.
        plan: The run in steps.
        learner: Model, objective, optimizer and schedule.
        progress: How far the run is.
        finished: Whether the model is written.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        recipe: Recipe,
        folder: RunFolder,
        request: StopRequest,
        *,
        resume: bool,
    ) -> None:
        from ssmzoo.training.shards import Background

        self.recipe, self.folder, self.finished = recipe, folder, False
        processes = self.processes = Processes(accelerator, request)
        self._join_processes()
        checkpoint = processes.on_main(lambda: folder.starting_point(recipe, resume=resume))
        processes.require_shared_folder(folder.path)
        done = 0 if checkpoint is None else step_of(checkpoint)
        require_ahead(recipe, recipe.train.total_steps, done)  # before the data is made ready
        source = self.source = processes.main_first(lambda: data_source(recipe))
        self.config = build_config(recipe.model, source.tokenizer, source.task)
        _require_pieces(recipe, self.config, processes)
        manifest = processes.on_main(lambda: source.prepare(folder.cache, folder.manifest()))
        share = {"rank": processes.reader, "world": processes.readers}
        self.data = source.open(folder.cache, manifest, **share)
        self.plan = Plan.of(recipe, self.data.epoch_rows)
        require_ahead(recipe, self.plan.total, done)
        self.progress = run_state.Progress()
        self.learner = Learner(
            processes, recipe, self.config, self.plan, source.task, resumes=checkpoint is not None
        )
        for examples in self.data.lengths.values():
            self.learner.objective.batch(next(iter(examples)))  # fails where they are too long
        if checkpoint is not None:
            run_state.restore_run(checkpoint, self.learner, self.progress, recipe, self.data.train)
            if self.data.validation and self.progress.lacks_last_validation(self.plan.total):
                self.progress.validation_due = True
        self._background = Background(processes.count)
        self._new_tokens = 0  # of this process, since the last line
        # not before all is checked
        processes.on_main(
            lambda: start_trackers(accelerator, recipe, folder.path, step=self.progress.step)
        )
        processes.on_main(
            lambda: folder.describe(recipe, manifest, _facts(self), step=self.progress.step)
        )
        processes.ready = True

    def _join_processes(self) -> None:
        """Check that all processes have one recipe that so many can train, and group them."""
        recipe, processes = self.recipe, self.processes
        processes.require_same(recipe)  # before groups are made as the recipe says
        if recipe.adapter is not None and processes.count > 1:
            raise ValueError(
                f"adapter needs one process, got {processes.count}; a state adapter is small, and "
                "so is its data"
            )
        processes.share_rows(recipe.train.sequence_parallel)
        recipe.train.micro_batch(processes.readers)  # fails where it is no whole number
        if recipe.log.curves:
            processes.on_main(require_curves)

    def go(self) -> None:
        """Train to the last step, write the model, and test it."""
        with RunLog(self.folder.metrics, self.progress, self.plan, self.processes) as log:
            self._log = log
            with self._background:
                self._loop()
        best = self.progress.best_step(self.recipe)
        final = self.processes.on_main(lambda: self.folder.final_checkpoint(best))
        test, lengths = self._test(final)
        self.processes.on_main(lambda: self._finish(final, test, lengths))
        self.finished = True
        self.processes.stop_if_told()

    def _loop(self) -> None:
        plan, progress, recipe = self.plan, self.progress, self.recipe
        progress.meter.start(progress.tokens)
        self._saved = time.monotonic()
        self.processes.stop_if_told()
        if progress.step == plan.total:  # a resume may have brought the end forward
            self._log_rest()
        if progress.validation_due:
            with progress.meter.paused():
                position = self.data.train.position()
                self._validate_and_save(position, True, True, None)
        remaining = 0 if progress.stopped else plan.total - progress.step
        for read in _ahead(lambda: self.learner.read(self.data.train), remaining):
            *flags, save_due = self.take_step(read)
            signal, step = signal_of(flags), progress.step
            last = step == plan.total
            logs = step % recipe.log.every == 0 or last
            validates = bool(self.data.validation) and (step % plan.evaluate_every == 0 or last)
            every = plan.save_every
            saves = (every is not None and step % every == 0) or last or bool(save_due)
            if not (logs or validates or saves or signal):
                continue
            self._collect()
            if logs:
                self._log_losses(read)
            with progress.meter.paused():
                self._validate_and_save(read.position, validates, saves, signal)
            if progress.stopped:
                break

    def take_step(self, read: Step) -> list[int]:
        """Take a step and count it.

        Returns:
            The requests of all processes, summed. Several processes are asked before the step, so
            that all act after the same one.
        """
        total: Any = sum(read.targets)
        sums: Sums | None = None
        if self.processes.count > 1:
            sums = Sums(self.processes.accelerator, [total, *self._requests()])
            total = sums.values[0]
        self.learner.update(read, total)
        self.progress.step += 1
        self._new_tokens += read.tokens
        self._log.advance()
        if sums is None:
            return self._requests()
        targets, *requests = sums.read()
        if not targets:
            raise ValueError(NOTHING_TO_PREDICT)
        return requests

    def _requests(self) -> list[int]:
        """Return this process's requests, 0 or 1: to stop, by signal, and to save, by the clock."""
        minutes = self.recipe.checkpoint.minutes
        due = minutes is not None and time.monotonic() - self._saved >= 60 * minutes
        return [*self.processes.request.flags(), int(due and self.processes.main)]

    def _validate_and_save(
        self, position: dict[str, Any], validates: bool, saves: bool, signal: int | None
    ) -> None:
        """Validate and save after a step, if that is due, and stop if told to.

        Raises:
            Stopped: A process was told to stop. The step is saved, and so is that a validation is
                due after it.
        """
        progress = self.progress
        progress.validation_due = validates
        if validates and signal is None:
            try:
                best = self._validate()
                saves = saves or progress.stopped or (best and self.recipe.checkpoint.best)
            except Stopped as stopped:
                signal = stopped.signal
        if saves or signal:
            self.save(position)
        if signal is None and (validates or saves):
            signal = self.processes.requested_signal()
            if signal and not saves:
                self.save(position)
        if signal is not None:
            raise Stopped(signal)

    def _collect(self) -> None:
        """Count the tokens since the last line, and stop where a loss was not finite."""
        import torch

        processes, progress = self.processes, self.progress
        new = torch.tensor(self._new_tokens, device=processes.accelerator.device)
        progress.tokens += int(processes.sum(new))
        self._new_tokens = 0
        pairs = self.learner.collect()
        for step, (loss, norm) in enumerate(pairs, progress.step - len(pairs) + 1):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._background.wait()
                good = checkpoints(self.folder.checkpoints)
                way_out = f"the last good checkpoint is {good[-1]}" if good else "no checkpoint yet"
                raise NotFiniteError(
                    f"the loss must be finite, got loss {loss} and gradient norm {norm} at step "
                    f"{step}; {way_out}; try a smaller train.lr or a longer train.warmup"
                )
        progress.meter.add(pairs)

    def _log_rest(self) -> None:
        """Log the steps since the last line, if there are any, without gauges.

        A resumed run has no step at hand to read them from, and must write the same line.
        """
        if self.progress.meter.waiting:
            self._log_losses(None)

    def _log_losses(self, read: Step | None) -> None:
        progress, rate = self.progress, self.learner.schedule.rate
        means = progress.meter.line(progress.tokens)
        line: dict[str, Any] = {"step": progress.step, "tokens": progress.tokens, "lr": rate}
        line |= means
        if self.plan.epoch_steps is not None:
            line["epoch"] = round(progress.step / self.plan.epoch_steps, 6)
        if read is not None and (gauges := self.learner.gauges(read)):
            line["gauges"] = gauges
        self._log.write(line)

    def _validate(self) -> bool:
        """Evaluate the held-out data; return whether the model is the best so far."""
        progress, objective, learner = self.progress, self.learner.objective, self.learner
        metrics = evaluate_parts(learner, self.data.validation.after(progress.step), learner.model)
        stop = self.recipe.train.stop_at
        progress.stopped = stop is not None and stop.reached(metrics)
        if progress.stopped:
            self._log_rest()
        known = finite(metrics)
        line = {f"validation_{name}": value for name, value in known.items()}
        self._log.write({"step": progress.step, "tokens": progress.tokens, **line})
        progress.validation_due, progress.validated = False, progress.step
        learner.schedule.observe_validation(metrics[objective.metric])
        best = is_best(metrics, progress.best, stop.metric if stop else objective.metric)
        if best:
            progress.best = {"step": progress.step}
            progress.best |= {name: value for name, value in known.items() if value is not None}
        return best

    def save(self, position: dict[str, Any]) -> None:
        """Begin to write a checkpoint, with this process's position in the data.

        Each process writes its own tensors while the training goes on.
        """
        tokenizer, task = self.source.tokenizer, self.source.task
        processor = None if task is None else task.processor
        self._background.wait()  # before more memory is taken
        write_part, write_rest = run_state.gather(
            self.learner, self.progress, self.recipe, position, tokenizer, processor
        )
        save_folder = partial(
            save_checkpoint,
            self.folder.checkpoints,
            self.progress.step,
            keep=self.recipe.checkpoint.keep,
            spare=self.progress.best_step(self.recipe),
        )

        def write_lines() -> None:
            self._log.sync()
            if self.recipe.log.curves:
                self.folder.draw(self._title(), self.learner.objective.loss_name)

        self.processes.on_main(write_lines)
        self._background.start(save_folder, write_part, write_rest)
        self._saved = time.monotonic()

    def _test(self, final: Path) -> tuple[Metrics | None, dict[str, Metrics]]:
        """Evaluate the checkpoint that becomes the model: the test split, and other lengths."""
        parts: dict[str, Any] = {str(length): rows for length, rows in self.data.lengths.items()}
        if self.data.test is not None:
            parts["test"] = self.data.test
        lengths = evaluate_checkpoint(self.learner, parts, final) if parts else {}
        test = lengths.pop("test", None)
        return test and {"step": step_of(final), **test}, lengths

    def _finish(self, final: Path, test: Metrics | None, lengths: dict[str, Metrics]) -> None:
        progress, objective = self.progress, self.learner.objective
        facts = {"best": progress.best, "test": test, "lengths": lengths or None}
        self.folder.finish(
            final,
            scores=None if test is None else test_scores(test, objective, self.recipe),
            model_type=self.config.model_type,
            parameters=self.learner.bare.num_parameters(),
            step=progress.step,
            tokens=progress.tokens,
            seconds=round(progress.meter.seconds, 1),
            **{name: value for name, value in facts.items() if value is not None},
        )
        if self.recipe.log.curves:
            self.folder.draw(self._title(), objective.loss_name, now=True)
            track_picture(self.processes.accelerator, self.folder.picture, step=progress.step)
        if self.source.task is None and (tokenizer := self.source.tokenizer) is not None:
            track_sample(
                self.processes.accelerator, self.learner.bare, tokenizer, step=progress.step
            )

    def _title(self) -> str:
        return f"{self.config.model_type}, {self.learner.bare.num_parameters():,} parameters"


def _require_pieces(recipe: Recipe, config: PreTrainedConfig, processes: Processes) -> None:
    """Check that a model which reads rows in pieces can pass its states on."""
    from ssmzoo.modeling import SSMConfig
    from ssmzoo.modeling.sequence_parallel import require_passing

    if processes.row is None:
        return
    if isinstance(config, SSMConfig):
        require_passing(config)
    elif recipe.model.stock:
        raise ValueError(
            "train.sequence_parallel must be 1 with --stock (model.stock), got "
            f"{processes.pieces}: the states of rows in pieces go through ssmzoo's "
            "kernels; leave out --stock"
        )


def _facts(run: Run) -> dict[str, Any]:
    """Return the facts of a run for ``run.json`` beside recipe, data, time and versions."""
    from ssmzoo_kernels.machine import environment, hardware

    accelerator = run.processes.accelerator
    recurrent = sorted(set(run.learner.recurrent.values()))
    return {
        "model_type": run.config.model_type,
        **({"recurrent_layers": recurrent} if recurrent else {}),
        "hardware": hardware(accelerator.device),
        "environment": environment(),
        "versions": foreign_versions(run.config),
        "variables": numeric_variables(),
        "processes": run.processes.count,
        **({"sequence_parallel": run.processes.pieces} if run.processes.row else {}),
        "dtype": "bfloat16" if accelerator.mixed_precision == "bf16" else "float32",
    }


def _ahead(function: Callable[[], T], count: int) -> Iterator[T]:
    """Yield ``count`` results of a function, each computed in a thread while the last is used."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(function) if count > 0 else None
        for remaining in range(count - 1, -1, -1):
            assert future is not None
            result = future.result()
            future = pool.submit(function) if remaining else None
            yield result
