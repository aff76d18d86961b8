"""A step of training: what learns, what a step reads, and how it is taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from ssmzoo.checkpoints.weights import is_sharded
from ssmzoo.recipe import Recipe
from ssmzoo.training.distributed import Processes, gathered, seed_all, settle_buckets
from ssmzoo.training.metrics import read_gauges
from ssmzoo.training.model import build_model, load_for_task
from ssmzoo.training.objectives import CausalLM, Objective, labelled, most_positions
from ssmzoo.training.optimizer import Plan, Schedule, make_optimizer
from ssmzoo.training.segments import SegmentedLM, SequenceParallelLM

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from ssmzoo.data.rows import RowSource
    from ssmzoo.modeling import StateAdapter
    from ssmzoo.tasks import Supervised


NOTHING_TO_PREDICT = (
    "a step must have something to predict, got none: labels that count, or documents of two "
    "tokens and more; raise train.batch_size"
)


class Step(NamedTuple):
    """What an optimizer step reads."""

    parts: list[list[Any]]  # the pieces of each micro-batch
    targets: list[int]  # what each micro-batch's loss is a mean over
    tokens: int  # of this process
    position: dict[str, Any]  # of the data, after this step


class Learner:
    """A model with what trains it: objective, optimizer and learning rates.

    Args:
        processes: The processes that train it together.
        recipe: The run's recipe.
        config: The model's configuration.
        plan: The run in steps.
        task: The supervised task; None for rows of tokens.
        checkpoint: Whose weights it begins with; None for the recipe's.
        stock: Leave transformers' recurrent models without our kernels.

    Attributes:
        model: The model as Accelerate prepared it.
        bare: The model itself.
        architecture: The name of its class, which sharding changes.
        adapter: The states that the model starts from, where these are trained.
        recurrent: By name, what each recurrent layer of a transformers model runs on.
        rate: The learning rate of the last step, of the first group.

    Raises:
        LookupError: No such weights, or parameter group.
        ValueError: ``train.stop_at`` names a metric that is not measured.
    """

    def __init__(
        self,
        processes: Processes,
        recipe: Recipe,
        config: PreTrainedConfig,
        plan: Plan,
        task: Supervised | None,
        checkpoint: Path | None,
        *,
        stock: bool = False,
    ) -> None:
        from torch.nn.parallel import DistributedDataParallel

        from ssmzoo.modeling import add_state_adapter
        from ssmzoo.modeling.stock import accelerated, choose_kernels

        self.processes, self.task, options = processes, task, recipe.train
        self.micro_batch, self.accumulate = (
            options.micro_batch(processes.readers),
            options.accumulate,
        )
        seed_all(options.seed)
        if checkpoint is None:
            model = build_model(recipe.model, config, task)
        elif is_sharded(checkpoint):  # whose weights are read where the model is sharded
            fresh = recipe.model.model_copy(update={"init_from": None})
            model = build_model(fresh, config, task)
        else:
            model = load_for_task(str(checkpoint), task=task, what="the checkpoint")
        self.architecture = type(model).__name__
        self.adapter: StateAdapter | None = None
        if recipe.adapter is not None:
            choose_kernels(model, stock)  # without which transformers' models start from zeros
            self.adapter = add_state_adapter(model)
            if checkpoint is not None:
                self.adapter.read(checkpoint)
        if rank := processes.rank:  # the first one's weights, but its own dropout
            seed_all(int(np.random.SeedSequence([options.seed, rank]).generate_state(1)[0]))
        model.train()
        if options.gradient_checkpointing:
            from ssmzoo.modeling.compat import enable_gradient_checkpointing

            enable_gradient_checkpointing(model)
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
        accelerator = self._accelerator = processes.accelerator
        if not accelerator.is_fsdp2:  # a model may be too large for a device until it is sharded
            cast("torch.nn.Module", model).to(accelerator.device)
        if self.adapter is None:
            choose_kernels(model, stock)
        self.recurrent = accelerated(model)
        self.objective = _objective(model, recipe, task, processes.row)  # of what it runs on
        self.model, prepared = accelerator.prepare(model, optimizer)
        # not through the wrapper, which looks for a package at every step
        self.optimizer: torch.optim.Optimizer = prepared.optimizer
        self.bare: PreTrainedModel = accelerator.unwrap_model(self.model)
        if isinstance(self.model, DistributedDataParallel):
            settle_buckets(self.model)
            self.optimizer.zero_grad()
        self._project: Callable[[], None] | None = getattr(self.bare, "project_parameters", None)
        # not prepared: Accelerate's wrapper steps once for every process
        self.schedule = Schedule(self.optimizer, options, plan, higher=self.objective.higher)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._largest_norm = options.clip or math.inf
        self._pending: list[torch.Tensor] = []

    def read(self, source: RowSource[Any]) -> Step:
        """Read one step's micro-batches; this runs in a thread, ahead of the training.

        Raises:
            ValueError: Nothing to predict, where there is no mean.
        """
        parts = [source.next_batch(self.micro_batch) for _ in range(self.accumulate)]
        targets = [self.objective.targets(part) for part in parts]
        if self.processes.count == 1 and not sum(targets):  # others may have some
            raise ValueError(NOTHING_TO_PREDICT)
        pieces = [self.objective.pieces(part) for part in parts]
        if self._accelerator.device.type == "cuda":
            pieces = _pinned(pieces)
        return Step(
            pieces,
            targets,
            sum(part.tokens for part in parts) // self.processes.pieces,
            source.position(),
        )

    def take(self, step: Step, total: torch.Tensor | int) -> float:
        """Take a step: forward, backward, clip, update, project.

        Args:
            step: What :meth:`read` gave.
            total: The step's targets over all processes.

        Returns:
            Its learning rate.
        """
        import torch

        accelerator, world = self._accelerator, self.processes.count
        loss_of_step: torch.Tensor | float = 0.0
        forward = partial(self.forward, self.model)
        work = [(i, piece) for i, pieces in enumerate(step.parts) for piece in pieces]
        for number, (i, piece) in enumerate(work, 1):
            with nullcontext() if number == len(work) else accelerator.no_sync(self.model):
                # the mean over a micro-batch's targets, weighted to a mean over the whole step's;
                # gradients are averaged over processes, hence `world`
                loss = self.objective.loss_of(forward, piece, i, step.targets[i])
                count = total if isinstance(total, int) else total.to(loss.dtype)
                loss = loss * (step.targets[i] / count)
                accelerator.backward(loss * world)
            loss_of_step = loss_of_step + loss.detach()
        norm = cast(
            "torch.Tensor", accelerator.clip_grad_norm_(self.parameters, self._largest_norm)
        )
        self.optimizer.step()
        if self._project is not None:
            self._project()
        rate: float = self.optimizer.param_groups[0]["lr"]
        self.schedule.step()
        self.optimizer.zero_grad()
        self._pending.append(torch.stack([torch.as_tensor(loss_of_step), gathered(norm)]))
        return rate

    def collect(self) -> list[tuple[float, float]]:
        """Bring loss and gradient norm of each step since the last call from the device."""
        import torch

        if not self._pending:
            return []
        values = torch.stack(self._pending).double()
        self._pending.clear()
        values[:, 0] = self.processes.sum(values[:, 0].clone())
        pairs = [(loss, norm) for loss, norm in values.tolist()]
        self.schedule.saw(loss for loss, _ in pairs)
        return pairs

    def gauges(self, step: Step) -> dict[str, list[float]]:
        """Return the layers' gauges at a few tokens of this process's step."""
        piece: Any = step.parts
        while isinstance(piece, list):
            piece = piece[0]
        with self._accelerator.autocast():
            return read_gauges(self.bare, piece)

    def forward(
        self, model: torch.nn.Module, batch: dict[str, torch.Tensor], **options: Any
    ) -> Any:
        """Return what a model makes of a batch, moved to the device, in the run's precision."""
        device = self._accelerator.device
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        with self._accelerator.autocast():  # which Accelerate leaves to us where it shards
            return model(**moved, **{**self.objective.options, **options})


def _objective(
    model: PreTrainedModel, recipe: Recipe, task: Supervised | None, row: Any
) -> Objective:
    packs, segments, stop = recipe.data.task is None, recipe.train.segments, recipe.train.stop_at
    longest = max([recipe.train.seq_len or 0, *(recipe.eval.lengths if task is None else ())])
    positions = most_positions(model)
    if positions is not None and longest > positions:
        raise ValueError(
            "model.config.max_position_embeddings must be at least train.seq_len and all of "
            f"eval.lengths, got {positions} and {longest}"
        )
    if segments is not None:
        objective = SegmentedLM(model, segments, packs=packs)
    elif row is not None:
        objective = SequenceParallelLM(model, row, packs=packs)
    elif task is None:
        objective = CausalLM(model, packs=packs)
    else:
        objective = labelled(model, task)
    if stop is not None and stop.metric not in objective.measured:
        raise ValueError(
            f"train.stop_at.metric must be one of {', '.join(objective.measured)}, which this run "
            f"measures, got {stop.metric!r}"
        )
    return objective


def _pinned(batch: Any) -> Any:
    """Return a batch, or lists of batches, in memory that a GPU reads without waiting."""
    if isinstance(batch, list):
        return [_pinned(part) for part in batch]
    return {name: tensor.pin_memory() for name, tensor in batch.items()}
