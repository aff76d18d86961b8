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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from ssmzoo.build import build_config, build_model, load_model, without_bars
from ssmzoo.checkpoint import Metrics, checkpoints, save_checkpoint
from ssmzoo.data import open_data, prepare_data, recipe_tokenizer
from ssmzoo.machine import hardware
from ssmzoo.meter import Meter
from ssmzoo.objective import CausalLM
from ssmzoo.optimizer import make_optimizer, make_schedule, resume_schedule
from ssmzoo.recipe import Recipe
from ssmzoo.run_folder import RunFolder
from ssmzoo.state import (
    load_optimizer,
    optimizer_tensors,
    random_state,
    seed_all,
    set_random_state,
    whole,
)

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel

T = TypeVar("T")


class _Step(NamedTuple):
    """What an optimizer step reads."""

    batches: list[dict[str, torch.Tensor]]
    targets: list[int]  # predicted tokens of each batch
    tokens: int
    position: dict[str, Any]  # of the data, after this step


class Run:
    """A run's parts and its loop."""

    def __init__(
        self, accelerator: Accelerator, recipe: Recipe, folder: RunFolder, *, resume: bool
    ) -> None:
        self.accelerator, self.recipe, self.folder = accelerator, recipe, folder
        self.main = accelerator.is_main_process
        world = accelerator.num_processes
        parts = world * recipe.train.accumulate
        if recipe.train.batch_size % parts:
            raise ValueError(
                f"train.batch_size must be a multiple of {world} processes x train.accumulate = "
                f"{parts}, got {recipe.train.batch_size}"
            )
        self.micro = recipe.train.batch_size // parts
        checkpoint = self._on_main(lambda: folder.starting_point(recipe, resume=resume))
        self.tokenizer = recipe_tokenizer(recipe)
        self.config = build_config(recipe.model, self.tokenizer)
        manifest = self._on_main(
            lambda: prepare_data(recipe, self.tokenizer, folder.cache, folder.manifest())
        )
        self.data = open_data(
            recipe,
            self.tokenizer,
            folder.cache,
            manifest,
            rank=accelerator.process_index,
            world=world,
        )
        self.step, self.tokens = 0, 0
        self.meter = Meter()
        self._build(checkpoint)
        # not before all is checked
        self._on_main(lambda: folder.describe(recipe, manifest, self._facts()))

    # -- beginning ---------------------------------------------------------------------------

    def _on_main(self, function: Callable[[], T]) -> T:
        """Run a function in the main process and return its result, or raise its error, in all."""
        from accelerate.utils import broadcast_object_list

        outcome: list[Any] = [None, None]
        if self.main:
            try:
                outcome[0] = function()
            except Exception as error:
                outcome[1] = error
        if self.accelerator.num_processes > 1:
            broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def _facts(self) -> dict[str, Any]:
        return {
            "model_type": self.config.model_type,
            "hardware": hardware(self.accelerator.device),
            "processes": self.accelerator.num_processes,
            "dtype": "bfloat16" if self.accelerator.mixed_precision == "bf16" else "float32",
        }

    def _build(self, checkpoint: Path | None) -> None:
        """Make model, objective, optimizer and schedule, anew or from the checkpoint."""
        from ssmzoo.compat import enable_gradient_checkpointing

        options = self.recipe.train
        seed_all(options.seed)
        if checkpoint is None:
            model = build_model(self.recipe.model, self.config)
        else:
            model = load_model(str(checkpoint))
        model.train()
        if options.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        self.objective = CausalLM(model, packs=self.recipe.data.task is None)
        beta1, beta2 = options.betas
        optimizer = make_optimizer(
            model, lr=options.lr, weight_decay=options.weight_decay, betas=(beta1, beta2)
        )
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.raw_optimizer: torch.optim.Optimizer = self.optimizer.optimizer
        self.bare: PreTrainedModel = self.accelerator.unwrap_model(self.model)
        # not prepared: Accelerate's wrapper steps once for every process
        self.schedule = make_schedule(self.raw_optimizer, options)
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
        if len(state["processes"]) != world and self.recipe.data.streaming:
            raise RuntimeError(
                f"a streaming run must resume on as many processes as before, "
                f"{len(state['processes'])}, got {world}"
            )
        mine = state["processes"][min(rank, len(state["processes"]) - 1)]
        self.data.train.seek(mine["position"])
        load_optimizer(
            self.bare, self.raw_optimizer, load_file(checkpoint / "optimizer.safetensors")
        )
        resume_schedule(self.schedule, self.step)
        if len(state["processes"]) == world:
            set_random_state(mine["random"])

    # -- running -----------------------------------------------------------------------------

    def go(self) -> None:
        """Train to the last step and write the model."""
        from tqdm import tqdm

        total = self.recipe.train.total_steps
        self.metrics = None
        if self.main:
            self.metrics = Metrics(self.folder.metrics, after_step=self.step)
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
        self._on_main(self._finish)

    def _loop(self, total: int) -> None:
        plan = self.recipe
        self.meter.start(self.tokens)
        steps = _ahead(self._read, total - self.step)
        for read in steps:
            self._optimize(read)
            self.step += 1
            self.tokens += read.tokens * self.accelerator.num_processes
            self.bar.update()
            last = self.step == total
            logs = self.step % plan.log.every == 0 or last
            evaluates = (self.step % plan.eval.every == 0 or last) and bool(self.data.validation)
            saves = self.step % plan.checkpoint.every == 0 or last
            if not (logs or evaluates or saves):
                continue
            self._collect()
            if logs:
                self._log()
            with self.meter.paused():
                if evaluates:
                    self._evaluate()
                if saves:
                    self._save(read.position)

    def _read(self) -> _Step:
        """Read one step's micro-batches; this runs in a thread, ahead of the training."""
        source = self.data.train
        parts = [source.take(self.micro) for _ in range(self.recipe.train.accumulate)]
        targets = [self.objective.targets(part) for part in parts]
        batches = [self.objective.batch(part) for part in parts]
        if self.accelerator.device.type == "cuda":
            batches = [{name: x.pin_memory() for name, x in b.items()} for b in batches]
        tokens = sum(part.input_ids.size for part in parts)
        return _Step(batches, targets, tokens, source.position())

    def _forward(self, batch: dict[str, torch.Tensor]) -> Any:
        device = self.accelerator.device
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        return self.model(**moved, use_cache=False)

    def _optimize(self, read: _Step) -> None:
        import torch

        accelerator, world = self.accelerator, self.accelerator.num_processes
        total: int | torch.Tensor = sum(read.targets)
        if world > 1:
            total = self._sum(torch.tensor(total, device=accelerator.device))
        loss_of_step: torch.Tensor | float = 0.0
        for i, (batch, targets) in enumerate(zip(read.batches, read.targets, strict=True)):
            last = i == len(read.batches) - 1
            with nullcontext() if last else accelerator.no_sync(self.model):
                # the model's mean over its targets, weighted to a mean over the whole step's;
                # gradients are averaged over processes, hence `world`
                loss = self._forward(batch).loss * (targets / total)
                accelerator.backward(loss * world)
            loss_of_step = loss_of_step + loss.detach()
        largest = self.recipe.train.clip or math.inf
        norm = cast("torch.Tensor", accelerator.clip_grad_norm_(self.parameters, largest))
        self.optimizer.step()
        self.rate = self.raw_optimizer.param_groups[0]["lr"]
        self.schedule.step()
        self.optimizer.zero_grad()
        self.pending.append(
            torch.stack([torch.as_tensor(loss_of_step), whole(cast("torch.Tensor", norm))])
        )

    def _collect(self) -> None:
        """Bring losses and norms from the device, and stop where one is not finite."""
        import torch

        if not self.pending:
            return
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
        self.meter.add([(loss, norm) for loss, norm in pairs])

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes."""
        return cast("torch.Tensor", self.accelerator.reduce(values))

    def _log(self) -> None:
        line = self.meter.line(self.tokens)
        line = {"step": self.step, "tokens": self.tokens, "lr": self.rate, **line}
        if self.data.epoch_rows is not None:
            row_tokens = self.recipe.train.seq_len * self.data.epoch_rows
            line["epoch"] = round(self.tokens / row_tokens, 6)
        self._write(line)
        speed = f"{line['tokens_per_second']:,.0f}"
        self.bar.set_postfix({"loss": f"{line['loss']:.3f}", "tok/s": speed})

    def _evaluate(self) -> None:
        """Measure the objective's metrics on what is held out."""
        import torch

        sums = self.objective.zeros(self.accelerator.device)
        self.model.eval()
        with torch.no_grad():
            for rows in self.data.validation:
                batch = self.objective.batch(rows)
                sums += self.objective.measure(self._forward(batch), batch, rows)
        self.model.train()
        metrics = self.objective.metrics(self._sum(sums))
        self._write({"step": self.step, "tokens": self.tokens, **metrics})

    def _write(self, line: dict[str, float | int]) -> None:
        if self.metrics is not None:
            self.metrics.write(**line)

    # -- writing -----------------------------------------------------------------------------

    def _save(self, position: dict[str, Any]) -> None:
        """Write a checkpoint: weights, optimizer, random states, position in the data."""
        from accelerate.utils import gather_object
        from safetensors.torch import save_file

        processes = gather_object([{"position": position, "random": random_state()}])
        weights = cast("dict[str, torch.Tensor]", self.accelerator.get_state_dict(self.model))
        moments = optimizer_tensors(self.bare, self.raw_optimizer)
        state = {
            "step": self.step,
            "tokens": self.tokens,
            **self.meter.state(),
            "processes": processes,
        }

        def write(folder: Path) -> None:
            with without_bars():
                self.bare.save_pretrained(folder, state_dict=weights)
            self.tokenizer.save_pretrained(folder)
            save_file(moments, folder / "optimizer.safetensors")
            (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")

        def save() -> None:
            assert self.metrics is not None
            self.metrics.sync()
            keep = self.recipe.checkpoint.keep
            save_checkpoint(self.folder.checkpoints, self.step, write, keep=keep)
            self.folder.draw(self._title())

        self._on_main(save)

    def _title(self) -> str:
        return f"{self.config.model_type}, {self.bare.num_parameters():,} parameters"

    def _finish(self) -> None:
        self.folder.draw(self._title(), now=True)
        self.folder.finish(
            step=self.step,
            tokens=self.tokens,
            parameters=self.bare.num_parameters(),
            seconds=round(self.meter.seconds, 1),
        )


def _ahead(function: Callable[[], T], count: int) -> Iterator[T]:
    """Yield ``count`` results of a function, each computed in a thread while the last is used."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(function) if count > 0 else None
        for remaining in range(count - 1, -1, -1):
            assert future is not None
            result = future.result()
            future = pool.submit(function) if remaining else None
            yield result
