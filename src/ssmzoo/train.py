"""One training loop for every model and machine, on Accelerate.

- The loss of a step is the mean over all tokens predicted in it, whatever their split into
  micro-batches and processes.
- A killed run resumes from its newest checkpoint to the same weights, bit for bit on one machine.
- Losses stay on the device between log lines; a NaN is therefore noticed at the next line, always
  before a checkpoint, and the message names the step where it arose.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from ssmzoo.build import build_config, build_model, load_model, without_bars
from ssmzoo.checkpoint import (
    CONTENTS,
    Metrics,
    checkpoints,
    locked,
    newest_checkpoint,
    read_metrics,
    save_checkpoint,
)
from ssmzoo.curves import draw_curves
from ssmzoo.data import open_data, prepare_data, recipe_tokenizer
from ssmzoo.files import write_folder, write_json, write_text
from ssmzoo.machine import hardware, installed_versions, make_accelerator, require_launched
from ssmzoo.recipe import Recipe, load_recipe
from ssmzoo.rows import Rows
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
    from torch import nn
    from transformers import PreTrainedModel

logger = logging.getLogger("ssmzoo")
T = TypeVar("T")

# what a run that was killed before it began may have left
_DONT_COUNT = re.compile(r"\.lock|cache|\..+\.(unfinished|replaced)")
_DRAW_SECONDS = 30  # at least, between two pictures of one run
_PACKAGES = ("ssmzoo", "torch", "transformers", "accelerate", "datasets", "numpy")
_MAY_CHANGE = {"train.steps", "train.tokens"}
_DATA_FACTS = ("source", "dataset", "config", "revision", "documents", "tokens", "digest")


def train(
    recipe: str | Path | Recipe,
    *,
    output_dir: str | Path,
    resume: bool = False,
    overrides: Sequence[str] = (),
) -> Path:
    """Train the model of a recipe and return the run's folder.

    The folder holds ``recipe.yaml``, ``run.json``, ``data.json``, ``metrics.jsonl``, ``loss.png``,
    ``checkpoints/`` and, at the end, ``model/``, which AutoModelForCausalLM and AutoTokenizer load.

    Args:
        recipe: A YAML file, the name of a shipped recipe, or a recipe.
        output_dir: The run's folder.
        resume: Continue the run that is there from its newest checkpoint; begin it where there is
            none. Only ``train.steps`` or ``train.tokens``, ``eval``, ``checkpoint`` and ``log``
            may differ from the recipe that it began with.
        overrides: ``section.field=value``; they win over the recipe.

    Raises:
        LookupError: A recipe, field, family, data set or tokenizer that does not exist.
        ValueError: A wrong value in the recipe, or data that cannot be used.
        RuntimeError: The machine: a folder in use or not writable, a damaged checkpoint, a launcher
            that did not start what it should, a loss that is not finite.
    """
    chosen = load_recipe(recipe, overrides).with_absolute_paths()
    require_launched()
    try:
        from accelerate.state import AcceleratorState
    except ImportError as error:
        raise RuntimeError("training needs accelerate: pip install 'ssmzoo[train]'") from error
    ours = not AcceleratorState._shared_state
    accelerator = make_accelerator(chosen)
    folder = Path(output_dir).absolute()
    try:
        with locked(folder) if accelerator.is_main_process else nullcontext():
            _Run(accelerator, chosen, folder, resume=resume).go()
    finally:
        accelerator.free_memory()
        if ours:
            accelerator.end_training()
            AcceleratorState._reset_state(reset_partial_state=True)
    return folder


def param_groups(model: nn.Module, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Return optimizer groups: the model's own if it declares them, else by the usual rule.

    The usual rule: tensors of two dimensions or more decay, vectors and scalars (norms, biases)
    do not, nor does what is marked ``_no_weight_decay``; frozen parameters are left out.
    """
    declared: Callable[..., list[dict[str, Any]]] | None = getattr(model, "param_groups", None)
    if declared is not None:
        return declared(lr=lr, weight_decay=weight_decay)
    decay, others = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            spared = parameter.ndim < 2 or getattr(parameter, "_no_weight_decay", False)
            (others if spared else decay).append(parameter)
    groups = [
        {"params": decay, "lr": lr, "weight_decay": weight_decay},
        {"params": others, "lr": lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
) -> torch.optim.AdamW:
    """Return AdamW on :func:`param_groups`, e.g. for ``Trainer(optimizers=(optimizer, None))``."""
    import torch

    groups = param_groups(model, lr, weight_decay)
    kinds = {parameter.device.type for group in groups for parameter in group["params"]}
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=kinds <= {"cpu", "cuda"})


class _Step(NamedTuple):
    """What an optimizer step reads."""

    batches: list[dict[str, torch.Tensor]]
    targets: list[int]  # predicted tokens of each batch
    tokens: int
    position: dict[str, Any]  # of the data, after this step


class _Run:
    """A run's parts and its loop."""

    def __init__(
        self, accelerator: Accelerator, recipe: Recipe, folder: Path, *, resume: bool
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
        self.checkpoint = self._on_main(lambda: _starting_point(folder, recipe, resume=resume))
        self.tokenizer = recipe_tokenizer(recipe)
        self.config = build_config(recipe.model, self.tokenizer)
        manifest = self._on_main(self._prepare)
        self.data = open_data(
            recipe,
            self.tokenizer,
            folder / "cache",
            manifest,
            rank=accelerator.process_index,
            world=world,
        )
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.window: list[tuple[float, float]] = []  # loss and gradient norm since the last line
        self._build()
        self._on_main(lambda: self._describe(manifest))

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

    def _prepare(self) -> dict[str, Any]:
        """Check the data, the same as before when resuming; in the main process only."""
        described = self.folder / "data.json"
        before = json.loads(described.read_text(encoding="utf-8")) if described.exists() else None
        return prepare_data(self.recipe, self.tokenizer, self.folder / "cache", before)

    def _describe(self, manifest: dict[str, Any]) -> None:
        """Write what describes the run; in the main process only, and not before all is checked."""
        write_text(self.folder / "recipe.yaml", self.recipe.to_yaml())
        write_json(self.folder / "data.json", manifest)
        facts = {
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "data": {key: manifest[key] for key in _DATA_FACTS if key in manifest},
            "model_type": self.config.model_type,
            "hardware": hardware(self.accelerator.device),
            "processes": self.accelerator.num_processes,
            "dtype": "bfloat16" if self.accelerator.mixed_precision == "bf16" else "float32",
            "versions": installed_versions(*_PACKAGES),
        }
        write_json(self.folder / "run.json", facts)

    def _build(self) -> None:
        """Make model, optimizer and schedule, anew or from the checkpoint."""
        from transformers import get_cosine_with_min_lr_schedule_with_warmup_lr_rate

        from ssmzoo.compat import enable_gradient_checkpointing

        options = self.recipe.train
        seed_all(options.seed)
        if self.checkpoint is None:
            model = build_model(self.recipe.model, self.config)
        else:
            model = load_model(str(self.checkpoint))
        model.train()
        if options.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        self.packed = _takes_boundaries(model) and self.recipe.data.task is None
        if not self.packed and self.recipe.data.task is None:
            logger.warning(
                "%s takes no cu_seqlens: documents that share a row see each other",
                type(model).__name__,
            )
        beta1, beta2 = options.betas
        optimizer = make_optimizer(
            model, lr=options.lr, weight_decay=options.weight_decay, betas=(beta1, beta2)
        )
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.raw_optimizer: torch.optim.Optimizer = self.optimizer.optimizer
        self.bare: PreTrainedModel = self.accelerator.unwrap_model(self.model)
        # not prepared: Accelerate's wrapper steps once for every process
        self.schedule = get_cosine_with_min_lr_schedule_with_warmup_lr_rate(
            self.raw_optimizer,
            num_warmup_steps=options.warmup_steps,
            num_training_steps=options.total_steps,
            min_lr_rate=options.min_lr_ratio,
        )
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.pending: list[torch.Tensor] = []
        if self.checkpoint is not None:
            self._restore(self.checkpoint)

    def _restore(self, checkpoint: Path) -> None:
        """Continue from what :meth:`_save` wrote; the weights are loaded already."""
        from safetensors.torch import load_file

        state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.window = [(loss, norm) for loss, norm in state["window"]]
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
        self.schedule.last_epoch = self.step
        rates = zip(self.schedule.base_lrs, self.schedule.lr_lambdas, strict=True)
        self.schedule._last_lr = [base * rate(self.step) for base, rate in rates]
        groups = zip(self.raw_optimizer.param_groups, self.schedule._last_lr, strict=True)
        for group, rate in groups:
            group["lr"] = rate
        if len(state["processes"]) == world:
            set_random_state(mine["random"])

    # -- running -----------------------------------------------------------------------------

    def go(self) -> None:
        """Train to the last step and write the model."""
        from tqdm import tqdm

        total = self.recipe.train.total_steps
        self.metrics = None
        if self.main:
            self.metrics = Metrics(self.folder / "metrics.jsonl", after_step=self.step)
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
        self.clock, self.clock_tokens = time.perf_counter(), self.tokens
        self.drawn = time.perf_counter()
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
            pause = time.perf_counter()
            if evaluates:
                self._evaluate()
            if saves:
                self._save(read.position)
            self.clock += time.perf_counter() - pause

    def _read(self) -> _Step:
        """Read one step's micro-batches; this runs in a thread, ahead of the training."""
        source = self.data.train
        parts = [source.take(self.micro) for _ in range(self.recipe.train.accumulate)]
        targets = [part.targets for part in parts]
        if not all(targets):
            raise ValueError(
                "a batch must have tokens to predict; documents of one token have none"
            )
        batches = [self._batch(part) for part in parts]
        tokens = sum(part.input_ids.size for part in parts)
        return _Step(batches, targets, tokens, source.position())

    def _batch(self, rows: Rows) -> dict[str, torch.Tensor]:
        """Return a model's arguments: packed into one row [1, n * L], or rows [n, L]."""
        import numpy as np
        import torch

        arrays = {"input_ids": rows.input_ids, "labels": rows.labels}
        if self.packed:
            arrays = {name: array.reshape(1, -1) for name, array in arrays.items()}
            ends = [*np.flatnonzero(rows.starts), rows.starts.size]
            arrays["cu_seqlens"] = np.array(ends, np.int32)
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self.accelerator.device.type == "cuda":
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        return batch

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
                good = checkpoints(self.folder / "checkpoints")
                way_out = f"the last good checkpoint is {good[-1]}" if good else "no checkpoint yet"
                raise RuntimeError(
                    f"the loss must be finite, got loss {loss} and gradient norm {norm} at step "
                    f"{step}; {way_out}; try a smaller train.lr or a longer train.warmup"
                )
        self.window += [(loss, norm) for loss, norm in pairs]

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes."""
        return cast("torch.Tensor", self.accelerator.reduce(values))

    def _log(self) -> None:
        now = time.perf_counter()
        spent = now - self.clock
        rate = (self.tokens - self.clock_tokens) / spent
        self.seconds += spent
        self.clock, self.clock_tokens = now, self.tokens
        losses, norms = zip(*self.window, strict=True)
        self.window = []
        line: dict[str, float | int] = {
            "step": self.step,
            "tokens": self.tokens,
            "loss": sum(losses) / len(losses),
            "grad_norm": sum(norms) / len(norms),
            "lr": self.rate,
            "tokens_per_second": round(rate, 1),
            "seconds": round(self.seconds, 3),
        }
        if self.data.epoch_rows is not None:
            row_tokens = self.recipe.train.seq_len * self.data.epoch_rows
            line["epoch"] = round(self.tokens / row_tokens, 6)
        self._write(line)
        self.bar.set_postfix({"loss": f"{line['loss']:.3f}", "tok/s": f"{rate:,.0f}"})

    def _evaluate(self) -> None:
        """Measure loss and next-token accuracy on what is held out."""
        import torch

        sums = torch.zeros(3, dtype=torch.float64, device=self.accelerator.device)
        self.model.eval()
        with torch.no_grad():
            for rows in self.data.validation:
                output = self._forward(batch := self._batch(rows))
                labels = batch["labels"][:, 1:].to(self.accelerator.device)
                right = (output.logits[:, :-1].argmax(-1) == labels).sum()
                sums += torch.stack(
                    [output.loss.double() * rows.targets, right, sums.new_tensor(rows.targets)]
                )
        self.model.train()
        loss, right, targets = self._sum(sums).tolist()
        line = {
            "step": self.step,
            "tokens": self.tokens,
            "validation_loss": loss / targets,
            "validation_accuracy": right / targets,
            "validation_targets": int(targets),
        }
        self._write(line)

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
        spent = self.seconds + time.perf_counter() - self.clock
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": spent,
            "window": self.window,
            "processes": processes,
        }

        def write(folder: Path) -> None:
            self._write_model(folder, weights)
            save_file(moments, folder / "optimizer.safetensors")
            (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")

        def save() -> None:
            assert self.metrics is not None
            self.metrics.sync()
            keep = self.recipe.checkpoint.keep
            save_checkpoint(self.folder / "checkpoints", self.step, write, keep=keep)
            if time.perf_counter() - self.drawn > _DRAW_SECONDS:
                self._draw()

        self._on_main(save)

    def _write_model(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        with without_bars():
            self.bare.save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)

    def _draw(self) -> None:
        title = f"{self.config.model_type}, {self.bare.num_parameters():,} parameters"
        draw_curves(self.folder / "metrics.jsonl", self.folder / "loss.png", title=title)
        self.drawn = time.perf_counter()

    def _finish(self) -> None:
        """Write ``model/`` from the last checkpoint, and what the run came to into ``run.json``."""
        final = newest_checkpoint(self.folder / "checkpoints")
        assert final is not None
        ours = {CONTENTS, "optimizer.safetensors", "state.json"}

        def write(folder: Path) -> None:
            for path in final.iterdir():
                if path.name not in ours:
                    shutil.copy2(path, folder)

        write_folder(self.folder / "model", write)
        self._draw()
        path = self.folder / "run.json"
        facts = json.loads(path.read_text(encoding="utf-8"))
        lines = read_metrics(self.folder / "metrics.jsonl")
        facts["finished"] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": self.step,
            "tokens": self.tokens,
            "parameters": self.bare.num_parameters(),
            "seconds": round(self.seconds, 1),
            **{
                key: next((line[key] for line in reversed(lines) if key in line), None)
                for key in ("loss", "validation_loss", "validation_accuracy")
            },
        }
        write_json(path, facts)
        shutil.rmtree(self.folder / "cache", ignore_errors=True)


def _starting_point(folder: Path, recipe: Recipe, *, resume: bool) -> Path | None:
    """Return the checkpoint to continue from, None to begin; nothing is written.

    Raises:
        ValueError: The folder holds something else than a run that may be continued.
        RuntimeError: The newest checkpoint is damaged.
    """
    if all(_DONT_COUNT.fullmatch(path.name) for path in folder.iterdir()):
        return None
    if not resume:
        raise ValueError(
            f"output_dir must be empty or new, got {folder}, which is not; resume the run that is "
            "there, or choose another folder"
        )
    begun = folder / "recipe.yaml"
    if not begun.exists():
        raise ValueError(f"output_dir must hold a run to resume, got {folder} without recipe.yaml")
    _require_same(load_recipe(begun), recipe)
    return newest_checkpoint(folder / "checkpoints")


def _require_same(begun: Recipe, now: Recipe) -> None:
    for section in ("model", "data", "train"):
        before, after = getattr(begun, section).model_dump(), getattr(now, section).model_dump()
        for field, value in after.items():
            name = f"{section}.{field}"
            if value != before[field] and name not in _MAY_CHANGE:
                raise ValueError(
                    f"{name} must stay as the run began to resume it, {before[field]!r}, "
                    f"got {value!r}; start a new run to change it"
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


def _takes_boundaries(model: nn.Module) -> bool:
    return "cu_seqlens" in inspect.signature(model.forward).parameters
