"""The loop of a training run: steps, log lines, validations, checkpoints, on any processes.

- What is learnt is the objective's affair, what lies where the folder's; here is their order.
- The loss of a step is the mean over all its targets, whatever their split into micro-batches and
  processes.
- Losses stay on the device between log lines; a NaN is therefore noticed at the next line, always
  before a checkpoint, and the message names the step where it arose.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np

from ssmzoo.data.labelled import Share, describe_splits, load_splits, open_splits, task_tokenizer
from ssmzoo.data.tokens import Data, open_data, prepare_data, recipe_tokenizer
from ssmzoo.environment.messages import without_bars
from ssmzoo.recipe import HIGHER_IS_BETTER, Recipe
from ssmzoo.training.checkpoint import Metrics, checkpoint_of, checkpoints, save_checkpoint, step_of
from ssmzoo.training.distributed import ALONE
from ssmzoo.training.folder import RunFolder
from ssmzoo.training.gauges import read_gauges
from ssmzoo.training.meter import Meter
from ssmzoo.training.model import build_config, build_model, load_for_task
from ssmzoo.training.objectives import CausalLM, labelled
from ssmzoo.training.optimizer import Schedule, make_optimizer
from ssmzoo.training.plan import Plan, require_ahead
from ssmzoo.training.segments import SegmentedLM, share_of_carried
from ssmzoo.training.state import (
    load_optimizer,
    optimizer_tensors,
    random_state,
    seed_all,
    set_random_state,
    whole,
)
from ssmzoo.training.stopping import Stopped, StopRequest, told_by

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from ssmzoo.evaluation.results import Score
    from ssmzoo.tasks import Supervised

T = TypeVar("T")


class _Step(NamedTuple):
    """What an optimizer step reads."""

    parts: list[list[Any]]  # the pieces of each micro-batch
    targets: list[int]  # what each micro-batch's loss is a mean over
    tokens: int  # of this process
    position: dict[str, Any]  # of the data, after this step


class _Sums:
    """Numbers of all processes, summed: on the device, and here without holding the device up."""

    def __init__(self, accelerator: Accelerator, numbers: list[int]) -> None:
        import torch

        given = torch.tensor(numbers, device=accelerator.device)
        self.values = cast("torch.Tensor", accelerator.reduce(given))
        self._here = self.values.to("cpu", non_blocking=True)
        self._copied: torch.Event | None = None
        if self.values.device.type != "cpu":
            self._copied = torch.Event(self.values.device)
            self._copied.record()

    def read(self) -> list[int]:
        """Wait for the numbers alone, not for what the device was given to do after them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._here.tolist()


class Run:
    """A run's parts and its loop."""

    def __init__(
        self,
        accelerator: Accelerator,
        recipe: Recipe,
        folder: RunFolder,
        request: StopRequest,
        *,
        resume: bool,
    ) -> None:
        import torch

        self.accelerator, self.recipe, self.folder = accelerator, recipe, folder
        self.request, self.ready, self.finished = request, False, False
        self.main = accelerator.is_main_process
        world = accelerator.num_processes
        self.alone: Any = None if world == 1 else torch.distributed.new_group(timeout=ALONE)
        parts = world * recipe.train.accumulate
        if recipe.train.batch_size % parts:
            raise ValueError(
                f"train.batch_size must be a multiple of {world} processes x train.accumulate = "
                f"{parts}, got {recipe.train.batch_size}"
            )
        self.micro = recipe.train.batch_size // parts
        checkpoint = self._on_main(lambda: folder.starting_point(recipe, resume=resume))
        self._require_one_folder()
        done = 0 if checkpoint is None else step_of(checkpoint)
        require_ahead(recipe, recipe.train.total_steps, done)  # before the data is made ready
        self.task: Supervised | None = None
        self.data, manifest = self._open_examples() if recipe.supervised else self._open_rows()
        self.plan = Plan.of(recipe, self.data.epoch_rows)
        require_ahead(recipe, self.plan.total, done)
        self.step, self.tokens, self.unsummed_tokens = 0, 0, 0
        self.best: dict[str, float | int] | None = None
        self.stopped = False
        self.unjudged = False  # a validation is due after the last step and not done
        self.saved = time.monotonic()
        self.meter = Meter()
        self._build(checkpoint)
        # not before all is checked
        self._on_main(lambda: folder.describe(recipe, manifest, self._facts(), step=self.step))
        self.ready = True

    # -- beginning ---------------------------------------------------------------------------

    def _open_rows(self) -> tuple[Data, dict[str, Any]]:
        """Return rows of tokens, and their manifest."""
        recipe, folder = self.recipe, self.folder
        tokenizer = self.tokenizer = recipe_tokenizer(recipe)
        self.config = build_config(recipe.model, tokenizer)
        manifest = self._on_main(
            lambda: prepare_data(recipe, tokenizer, folder.cache, folder.manifest())
        )
        return open_data(recipe, tokenizer, folder.cache, manifest, **self._place()), manifest

    def _open_examples(self) -> tuple[Data, dict[str, Any]]:
        """Return a task's labelled examples, and their manifest."""
        recipe, loaded = self.recipe, []

        def load() -> None:
            loaded.append(load_splits(recipe))

        self._on_main(load)  # first and alone: it may download
        if not self.main:
            load()
        splits = loaded[0]
        task = self.task = splits.train
        self.tokenizer = task_tokenizer(task)
        self.config = build_config(recipe.model, self.tokenizer, task)
        manifest = self._on_main(lambda: describe_splits(recipe, splits, self.folder.manifest()))
        return open_splits(recipe, splits, **self._place()), manifest

    def _place(self) -> dict[str, int]:
        return {"rank": self.accelerator.process_index, "world": self.accelerator.num_processes}

    def _on_main(self, function: Callable[[], T]) -> T:
        """Run a function in the main process and return its result, or raise its error, in all.

        Before the run is ready nothing can be lost, and the function stops as soon as it is told.
        """
        import torch

        outcome: list[Any] = [None, None]
        if self.main:
            try:
                with nullcontext() if self.ready else self.request.obeyed_at_once():
                    outcome[0] = function()
            except (Exception, Stopped) as error:
                outcome[1] = error
        if self.alone is not None:
            torch.distributed.broadcast_object_list(outcome, group=self.alone)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def _require_one_folder(self) -> None:
        """Check that what the main process wrote into the folder is there for every process."""
        import torch

        if self.alone is None:
            return
        lock = self.folder.path / ".lock"
        written = self._on_main(lock.read_text)
        blind = torch.tensor(not lock.is_file() or lock.read_text() != written, dtype=torch.int)
        number = int(self._sum(blind.to(self.accelerator.device)))
        if number:
            raise RuntimeError(
                f"output_dir must be on a file system that all processes share; {number} of "
                f"{self.accelerator.num_processes} do not see in {self.folder.path} what the first "
                "one wrote"
            )

    def _facts(self) -> dict[str, Any]:
        from ssmzoo_kernels.machine import environment, hardware

        return {
            "model_type": self.config.model_type,
            "hardware": hardware(self.accelerator.device),
            "environment": environment(),
            "processes": self.accelerator.num_processes,
            "dtype": "bfloat16" if self.accelerator.mixed_precision == "bf16" else "float32",
        }

    def _build(self, checkpoint: Path | None) -> None:
        """Make model, objective, optimizer and schedule, anew or from the checkpoint."""
        from ssmzoo.training.compat import enable_gradient_checkpointing

        options = self.recipe.train
        seed_all(options.seed)
        if checkpoint is None:
            model = build_model(self.recipe.model, self.config, self.task)
        else:
            model = load_for_task(str(checkpoint), task=self.task)
        if rank := self.accelerator.process_index:  # the first one's weights, but its own dropout
            seed_all(int(np.random.SeedSequence([options.seed, rank]).generate_state(1)[0]))
        model.train()
        if options.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        packs, segments = self.recipe.data.task is None, options.segments
        if segments is not None:
            self.objective = SegmentedLM(model, segments, packs=packs)
        elif self.task is None:
            self.objective = CausalLM(model, packs=packs)
        else:
            self.objective = labelled(model, self.task)
        stop = options.stop_at
        if stop is not None and stop.metric not in self.objective.measured:
            raise ValueError(
                f"train.stop_at.metric must be one of {', '.join(self.objective.measured)}, which "
                f"this run measures, got {stop.metric!r}"
            )
        beta1, beta2 = options.betas
        optimizer = make_optimizer(
            model,
            lr=options.lr,
            weight_decay=options.weight_decay,
            betas=(beta1, beta2),
            groups={
                name: group.model_dump(exclude_none=True) for name, group in options.groups.items()
            },
        )
        self.model, prepared = self.accelerator.prepare(model, optimizer)
        # not through the wrapper, which looks for a package at every step
        self.optimizer: torch.optim.Optimizer = prepared.optimizer
        self.bare: PreTrainedModel = self.accelerator.unwrap_model(self.model)
        self.project: Callable[[], None] | None = getattr(self.bare, "project_parameters", None)
        # not prepared: Accelerate's wrapper steps once for every process
        self.schedule = Schedule(self.optimizer, options, self.plan, higher=self.objective.higher)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.pending: list[torch.Tensor] = []
        if checkpoint is not None:
            self._restore(checkpoint)

    def _restore(self, checkpoint: Path) -> None:
        """Continue from what :meth:`_save` wrote; the weights are loaded already."""
        from safetensors.torch import load_file

        state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        self.step, self.tokens = state["step"], state["tokens"]
        self.meter.restore(state)
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        options = self.recipe.train
        segments = options.segments
        carries = segments is not None and segments.carry
        if len(state["processes"]) != world and (self.recipe.data.streaming or carries):
            what = "carries states" if carries else "streams"
            raise RuntimeError(
                f"a run that {what} must resume on as many processes as before, "
                f"{len(state['processes'])}, got {world}"
            )
        mine = state["processes"][min(rank, len(state["processes"]) - 1)]
        self.data.train.seek(mine["position"])
        load_optimizer(self.bare, self.optimizer, load_file(checkpoint / "optimizer.safetensors"))
        self.schedule.restore(self.step, state["schedule"])
        self.best = state["best"]
        best = self._best_step()
        # it is gone where newer checkpoints were removed by hand
        if best is not None and not checkpoint_of(self.folder.checkpoints, best).exists():
            self.best = None
        stop = self.recipe.train.stop_at
        self.stopped = stop is not None and state["stopped"] == stop.model_dump()
        self.unjudged = state.get("unjudged", False)
        if rank < len(state["processes"]):
            set_random_state(mine["random"])
        if carries:
            kept = [load_file(checkpoint / f"carried-{i:05d}.safetensors") for i in range(world)]
            mine = share_of_carried(kept, rank, options.accumulate)
            self.objective.carry_on(mine, self.accelerator.device)

    # -- running -----------------------------------------------------------------------------

    def go(self) -> None:
        """Train to the last step, write the model, and test it."""
        from tqdm import tqdm

        total = self.plan.total
        self.metrics = None
        if self.main:
            self.metrics = Metrics(
                self.folder.metrics, after_step=self.step, judged=not self.unjudged
            )
        self.bar = tqdm(
            total=total,
            initial=self.step,
            desc="train",
            unit="step",
            disable=None if self.main else True,
        )
        try:
            self._loop(total)
        finally:
            self.bar.close()
            if self.metrics is not None:
                self.metrics.close()
        test = self._test()
        self._on_main(lambda: self._finish(test))
        self.finished = True
        self._stop_if(self._told())

    def _loop(self, total: int) -> None:
        plan = self.plan
        self.meter.start(self.tokens)
        self.saved = time.monotonic()
        self._stop_if(self._told())
        if self.unjudged:
            with self.meter.paused():
                self._close(self.data.train.position(), evaluates=True, saves=True, told=None)
        steps = _ahead(self._read, 0 if self.stopped else total - self.step)
        for read in steps:
            self._optimize(read)
            self.step += 1
            self.unsummed_tokens += read.tokens
            self.bar.update()
            last = self.step == total
            logs = self.step % self.recipe.log.every == 0 or last
            evaluates = (self.step % plan.evaluate_every == 0 or last) and bool(
                self.data.validation
            )
            *flags, due = self.wishes
            told = told_by(flags)
            every = plan.save_every
            saves = (every is not None and self.step % every == 0) or last or bool(due)
            if not (logs or evaluates or saves or told):
                continue
            self._collect()
            if logs:
                self._log(read)
            with self.meter.paused():
                self._close(read.position, evaluates=evaluates, saves=saves, told=told)
            if self.stopped:
                break

    def _close(
        self, position: dict[str, Any], *, evaluates: bool, saves: bool, told: int | None
    ) -> None:
        """Validate after a step and save it, as far as that is due, and stop if told to.

        Raises:
            Stopped: A process was told to stop. The step is saved, and so is that a validation is
                due after it.
        """
        self.unjudged = evaluates
        if evaluates and told is None:
            try:
                better = self._evaluate()
                saves = saves or self.stopped or (better and self.recipe.checkpoint.best)
            except Stopped as stopped:
                told = stopped.signal
        if saves or told:
            self._save(position)
        if told is None and (evaluates or saves):
            told = self._told()
            if told and not saves:
                self._save(position)
        self._stop_if(told)

    def _wishes(self) -> list[int]:
        """Return 1 for what this process asks for: to stop, by signal, and a checkpoint."""
        minutes = self.recipe.checkpoint.minutes
        due = self.main and minutes is not None and time.monotonic() - self.saved >= 60 * minutes
        return [*self.request.flags(), int(due)]

    def _told(self) -> int | None:
        """Return the signal by which any process was told to stop; all processes must call this."""
        wishes = self._wishes()
        if self.alone is not None:
            wishes = _Sums(self.accelerator, wishes).read()
        return told_by(wishes[:-1])

    def _stop_if(self, told: int | None) -> None:
        if told is not None:
            raise Stopped(told)

    def _read(self) -> _Step:
        """Read one step's micro-batches; this runs in a thread, ahead of the training."""
        source = self.data.train
        parts = [source.take(self.micro) for _ in range(self.recipe.train.accumulate)]
        targets = [self.objective.targets(part) for part in parts]
        pieces = [self.objective.pieces(part) for part in parts]
        if self.accelerator.device.type == "cuda":
            pieces = _pinned(pieces)
        tokens = sum(part.tokens for part in parts)
        return _Step(pieces, targets, tokens, source.position())

    def _forward(
        self, model: torch.nn.Module, batch: dict[str, torch.Tensor], **options: Any
    ) -> Any:
        device = self.accelerator.device
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        with self.accelerator.autocast():  # which Accelerate leaves to us where it shards
            return model(**moved, **{**self.objective.options, **options})

    def _optimize(self, read: _Step) -> None:
        import torch

        accelerator, world = self.accelerator, self.accelerator.num_processes
        total: Any = sum(read.targets)
        sums: _Sums | None = None
        if world > 1:
            sums = _Sums(accelerator, [total, *self._wishes()])
            total = sums.values[0]
        loss_of_step: torch.Tensor | float = 0.0
        forward = partial(self._forward, self.model)
        work = [(i, piece) for i, pieces in enumerate(read.parts) for piece in pieces]
        for number, (i, piece) in enumerate(work, 1):
            with nullcontext() if number == len(work) else accelerator.no_sync(self.model):
                # the mean over a micro-batch's targets, weighted to a mean over the whole step's;
                # gradients are averaged over processes, hence `world`
                loss = self.objective.loss_of(forward, piece, i, read.targets[i])
                count = total if world == 1 else total.to(loss.dtype)
                loss = loss * (read.targets[i] / count)
                accelerator.backward(loss * world)
            loss_of_step = loss_of_step + loss.detach()
        largest = self.recipe.train.clip or math.inf
        norm = cast("torch.Tensor", accelerator.clip_grad_norm_(self.parameters, largest))
        self.optimizer.step()
        if self.project is not None:
            self.project()
        self.rate = self.optimizer.param_groups[0]["lr"]
        self.schedule.step()
        self.optimizer.zero_grad()
        self.pending.append(
            torch.stack([torch.as_tensor(loss_of_step), whole(cast("torch.Tensor", norm))])
        )
        # those of all processes when the step began: all obey after the same one
        self.wishes = self._wishes() if sums is None else sums.read()[1:]

    def _collect(self) -> None:
        """Bring losses and norms from the device, and stop where one is not finite."""
        import torch

        if not self.pending:
            return
        tokens = torch.tensor(self.unsummed_tokens, device=self.accelerator.device)
        self.tokens += int(self._sum(tokens))
        self.unsummed_tokens = 0
        values = torch.stack(self.pending).double()
        self.pending.clear()
        values[:, 0] = self._sum(values[:, 0].clone())
        pairs = values.tolist()
        for step, (loss, norm) in enumerate(pairs, self.step - len(pairs) + 1):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                good = checkpoints(self.folder.checkpoints)
                way_out = f"the last good checkpoint is {good[-1]}" if good else "no checkpoint yet"
                raise RuntimeError(
                    f"the loss must be finite, got loss {loss} and gradient norm {norm} at step "
                    f"{step}; {way_out}; try a smaller train.lr or a longer train.warmup"
                )
        self.schedule.saw(loss for loss, _ in pairs)
        self.meter.add([(loss, norm) for loss, norm in pairs])

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes."""
        return cast("torch.Tensor", self.accelerator.reduce(values))

    def _log(self, read: _Step) -> None:
        line: dict[str, Any] = self.meter.line(self.tokens)
        line = {"step": self.step, "tokens": self.tokens, "lr": self.rate, **line}
        if self.plan.epoch_steps is not None:
            line["epoch"] = round(self.step / self.plan.epoch_steps, 6)
        if gauges := self._gauges(read):
            line["gauges"] = gauges
        self._write(line)
        speed = f"{line['tokens_per_second']:,.0f}"
        self.bar.set_postfix({"loss": f"{line['loss']:.3f}", "tok/s": speed})

    def _gauges(self, read: _Step) -> dict[str, list[float]]:
        """Read the layers' gauges at a few tokens of this process's step."""
        piece: Any = read.parts
        while isinstance(piece, list):
            piece = piece[0]
        with self.accelerator.autocast():
            return read_gauges(self.bare, piece)

    def _evaluate(self) -> bool:
        """Measure what is held out; return whether the model is better than ever before."""
        held_out = self.data.validation
        if isinstance(held_out, Share):
            held_out = held_out.after(self.step)
        metrics = self._measure(self.model, held_out)
        self.model.train()
        line = {f"validation_{name}": value for name, value in metrics.items()}
        self._write({"step": self.step, "tokens": self.tokens, **line})
        self.unjudged = False
        value = metrics[self.objective.metric]
        self.schedule.judge(value)
        sign = 1 if self.objective.higher else -1
        before = None if self.best is None else self.best[self.objective.metric]
        better = math.isfinite(value) and (before is None or sign * value > sign * before)
        if better:
            self.best = {"step": self.step, **metrics}
        stop = self.recipe.train.stop_at
        self.stopped = stop is not None and stop.reached(metrics)
        return better

    def _test(self) -> dict[str, float | int] | None:
        """Measure the test split, if there is one, by the checkpoint that becomes the model."""
        if self.data.test is None:
            return None
        final = self.folder.final(self._best_step())
        model = load_for_task(str(final), task=self.task).to(self.accelerator.device)
        return {"step": step_of(final), **self._measure(model, self.data.test)}

    def _measure(self, model: torch.nn.Module, parts: Iterable[Any]) -> dict[str, float | int]:
        """Return the objective's metrics over all processes.

        Raises:
            Stopped: A process was told to stop.
        """
        import torch

        sums = self.objective.zeros(self.accelerator.device)
        model.eval()
        with torch.no_grad():
            for part in parts:
                batch = self.objective.batch(part)
                sums += self.objective.measure(self._forward(model, batch), batch, part)
                self._stop_if(self._told())
        return self.objective.metrics(self._sum(sums))

    def _best_step(self) -> int | None:
        """Return the step whose checkpoint is kept for its validation."""
        if self.best is None or not self.recipe.checkpoint.best:
            return None
        return int(self.best["step"])

    def _write(self, line: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(**line)

    # -- writing -----------------------------------------------------------------------------

    def _save(self, position: dict[str, Any]) -> None:
        """Write a checkpoint: weights, optimizer, random states, position in the data."""
        from accelerate.utils import gather_object
        from safetensors.torch import save_file

        processes = gather_object([{"position": position, "random": random_state()}])
        weights = cast("dict[str, torch.Tensor]", self.accelerator.get_state_dict(self.model))
        names, once = (
            {name for name, _ in self.bare.named_parameters(remove_duplicate=drop)}
            for drop in (False, True)
        )
        for tied in names - once:  # gathered from shards they are copies, and would be saved twice
            weights.pop(tied, None)
        moments = optimizer_tensors(self.bare, self.optimizer)
        carried = gather_object([self.objective.carried()])
        stop = self.recipe.train.stop_at
        state = {
            "step": self.step,
            "tokens": self.tokens,
            **self.meter.state(),
            "schedule": self.schedule.state(),
            "best": self.best,
            "stopped": stop.model_dump() if stop is not None and self.stopped else None,
            "unjudged": self.unjudged,
            "processes": processes,
        }

        def write(folder: Path) -> None:
            with without_bars():
                self.bare.save_pretrained(folder, state_dict=weights)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)
            save_file(moments, folder / "optimizer.safetensors")
            for rank, states in enumerate(carried):
                if states:
                    save_file(states, folder / f"carried-{rank:05d}.safetensors")
            (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")

        def save() -> None:
            assert self.metrics is not None
            self.metrics.sync()
            keep, best = self.recipe.checkpoint.keep, self._best_step()
            save_checkpoint(self.folder.checkpoints, self.step, write, keep=keep, spare=best)
            self.folder.draw(self._title(), self.objective.loss)

        self._on_main(save)
        self.saved = time.monotonic()

    def _title(self) -> str:
        return f"{self.config.model_type}, {self.bare.num_parameters():,} parameters"

    def _finish(self, test: dict[str, float | int] | None) -> None:
        self.folder.draw(self._title(), self.objective.loss, now=True)
        judged = {"best": self.best, "test": test}
        self.folder.finish(
            self.folder.final(self._best_step()),
            step=self.step,
            tokens=self.tokens,
            parameters=self.bare.num_parameters(),
            seconds=round(self.meter.seconds, 1),
            **{name: value for name, value in judged.items() if value is not None},
        )
        if test is not None:
            self._write_results(test)

    def _write_results(self, test: dict[str, float | int]) -> None:
        """Write the test's scores in the form of ``ssmzoo eval``."""
        data, goal = self.recipe.data, self.objective
        scores: list[Score] = []
        for metric in goal.scored:
            value, n = float(test[metric]), int(test["targets"])
            if metric == "exact_match":
                n = int(test["examples"])
            # answers of several labels are not independent of one another, examples are
            single = goal.independent or n == test.get("examples")
            binomial = metric in ("accuracy", "exact_match") and single and n > 1
            scores.append(
                {
                    "task": str(data.task),
                    "metric": metric,
                    "value": value,
                    "stderr": math.sqrt(value * (1 - value) / (n - 1)) if binomial else None,
                    "n": n,
                    "seed": self.recipe.train.seed,
                    "num_fewshot": 0,
                    "higher_is_better": metric in HIGHER_IS_BETTER,
                    "settings": {**data.task_args, "split": "test"},
                }
            )
        self.folder.write_results(scores, self.config.model_type, self.bare.num_parameters())


def _pinned(batch: Any) -> Any:
    """Return a batch, or lists of batches, in memory that a GPU reads without waiting."""
    if isinstance(batch, list):
        return [_pinned(part) for part in batch]
    return {name: tensor.pin_memory() for name, tensor in batch.items()}


def _ahead(function: Callable[[], T], count: int) -> Iterator[T]:
    """Yield ``count`` results of a function, each computed in a thread while the last is used."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(function) if count > 0 else None
        for remaining in range(count - 1, -1, -1):
            assert future is not None
            result = future.result()
            future = pool.submit(function) if remaining else None
            yield result
