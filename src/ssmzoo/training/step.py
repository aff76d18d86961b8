"""A step of training: the learner, the batch that a step reads, and the update."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from ssmzoo.recipe import Recipe
from ssmzoo.training.align import Align, load_teachers
from ssmzoo.training.distributed import Processes, gathered, seed_all, settle_buckets
from ssmzoo.training.metrics import read_gauges
from ssmzoo.training.model import build_model
from ssmzoo.training.objectives import CausalLM, Objective, labelled, most_positions
from ssmzoo.training.optimizer import make_optimizer
from ssmzoo.training.schedule import Plan, Schedule
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
    """The batch of an optimizer step, in micro-batches."""

    parts: list[list[Any]]  # the pieces of each micro-batch
    targets: list[int]  # of each micro-batch; its loss is their mean
    tokens: int  # of this process
    position: dict[str, Any]  # of the data, after this step


class Learner:
    """A model with its objective, optimizer and learning rates.

    Args:
        processes: The processes that train it together.
        recipe: The run's recipe.
        config: The model's configuration.
        plan: The run in steps.
        task: The supervised task; None for rows of tokens.
        resumes: Whether the weights are read from a checkpoint afterwards.

    Attributes:
        model: The model as Accelerate prepared it.
        bare: The model itself.
        architecture: The name of its class, which sharding changes.
        adapter: The states that the model starts from, where these are trained.
        recurrent: By name, the kernels of each recurrent layer of a transformers model.

    Raises:
        LookupError: No such weights, or parameter group.
        ValueError: ``train.stop_at`` names a metric that the objective does not have.
    """

    def __init__(
        self,
        processes: Processes,
        recipe: Recipe,
        config: PreTrainedConfig,
        plan: Plan,
        task: Supervised | None,
        *,
        resumes: bool,
    ) -> None:
        from ssmzoo.modeling.stock import accelerated

        options = recipe.train
        self.processes, self._accelerator = processes, processes.accelerator
        self.accumulate = options.accumulate
        self.micro_batch = options.micro_batch(processes.readers)
        model = self._build(recipe, config, task, resumes=resumes)
        self.architecture = type(model).__name__
        self.adapter = self._add_adapter(model, recipe)
        teachers = _freeze(model, recipe, resumes=resumes)
        optimizer = _optimizer(model, recipe)
        self._place(model, recipe)
        self.recurrent = accelerated(model)
        self.objective = _objective(model, recipe, task, processes.row, teachers)
        self._prepare(model, optimizer)
        # not prepared: Accelerate's wrapper steps once for every process
        self.schedule = Schedule(self.optimizer, options, plan, higher=self.objective.higher)
        self._largest_norm = options.clip or math.inf
        self._pending: list[torch.Tensor] = []

    def _build(
        self, recipe: Recipe, config: PreTrainedConfig, task: Supervised | None, *, resumes: bool
    ) -> PreTrainedModel:
        """Return the model in training mode: the same weights in all processes, then own seeds."""
        seed, rank = recipe.train.seed, self.processes.rank
        section = recipe.model
        if resumes:  # do not load weights that the checkpoint's replace
            section = section.model_copy(update={"init_from": None})
        seed_all(seed)
        model = build_model(section, config, task)
        if rank:
            seed_all(int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]))
        model.train()
        if kind := recipe.train.gradient_checkpointing:
            from ssmzoo.modeling.compat import enable_gradient_checkpointing

            enable_gradient_checkpointing(model, selective=kind == "selective")
        return model

    def _add_adapter(self, model: PreTrainedModel, recipe: Recipe) -> StateAdapter | None:
        """Let a model start from trained states, if the recipe asks for them."""
        from ssmzoo.modeling import add_state_adapter
        from ssmzoo.modeling.stock import choose_kernels

        if recipe.adapter is None:
            return None
        # stock models start from zeros
        choose_kernels(model, bool(recipe.model.stock))
        return add_state_adapter(model)

    def _place(self, model: PreTrainedModel, recipe: Recipe) -> None:
        """Move a model to the device and let it run on our kernels, which depend on the device."""
        from ssmzoo.modeling.stock import choose_kernels

        if not self._accelerator.is_fsdp2:  # it may be too large for a device until it is sharded
            cast("torch.nn.Module", model).to(self._accelerator.device)
        if self.adapter is None:
            choose_kernels(model, bool(recipe.model.stock))

    def _prepare(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
        """Let Accelerate wrap model and optimizer."""
        from torch.nn.parallel import DistributedDataParallel

        self.model, prepared = self._accelerator.prepare(model, optimizer)
        # not through the wrapper, which looks for a package at every step
        self.optimizer: torch.optim.Optimizer = prepared.optimizer
        self.bare: PreTrainedModel = self._accelerator.unwrap_model(self.model)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._project: Callable[[], None] | None = getattr(self.bare, "project_parameters", None)
        if isinstance(self.model, DistributedDataParallel):
            settle_buckets(self.model)
            self.optimizer.zero_grad()

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

    def update(self, step: Step, total: torch.Tensor | int) -> None:
        """Update the model by a step: forward, backward, clip, optimizer, projection, rates.

        Args:
            step: The result of :meth:`read`.
            total: The step's targets over all processes.
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
        self.schedule.step()
        self.optimizer.zero_grad()
        self._pending.append(torch.stack([torch.as_tensor(loss_of_step), gathered(norm)]))

    def collect(self) -> list[tuple[float, float]]:
        """Bring loss and gradient norm of each step since the last call from the device."""
        import torch

        if not self._pending:
            return []
        values = torch.stack(self._pending).double()
        self._pending.clear()
        values[:, 0] = self.processes.sum(values[:, 0].clone())
        pairs = [(loss, norm) for loss, norm in values.tolist()]
        self.schedule.observe_losses(loss for loss, _ in pairs)
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
        """Return a model's output for a batch, moved to the device, in the run's precision."""
        device = self._accelerator.device
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        with self._accelerator.autocast():  # which Accelerate leaves to us where it shards
            return model(**moved, **{**self.objective.options, **options})


def _freeze(model: Any, recipe: Recipe, *, resumes: bool) -> dict[int, torch.nn.Module]:
    """Freeze what a recipe does not train; return the teacher's mixers where it aligns new ones.

    Raises:
        LookupError: A pattern of ``train.only`` fits no parameter.
    """
    only, teachers = recipe.train.only, {}
    if recipe.align is not None:
        teachers = load_teachers(model, recipe.align.teacher, check=not resumes)
        only = [f"model.layers.{index}.mixer.*" for index in teachers]
    if only is not None:
        parameters = dict(model.named_parameters())
        model.requires_grad_(False)
        for pattern in only:
            fitting = fnmatch.filter(parameters, pattern)
            if not fitting:
                first = next(iter(parameters))
                raise LookupError(
                    f"train.only: no parameter fits {pattern!r}; the first is {first!r}"
                )
            for name in fitting:
                parameters[name].requires_grad_()
    return teachers


def _optimizer(model: PreTrainedModel, recipe: Recipe) -> torch.optim.Optimizer:
    options = recipe.train
    beta1, beta2 = options.betas
    groups = {name: group.model_dump(exclude_none=True) for name, group in options.groups.items()}
    return make_optimizer(
        model,
        lr=options.lr,
        weight_decay=options.weight_decay,
        betas=(beta1, beta2),
        groups=groups,
    )


def _objective(
    model: PreTrainedModel,
    recipe: Recipe,
    task: Supervised | None,
    row: Any,
    teachers: dict[int, torch.nn.Module],
) -> Objective:
    packs, segments, stop = recipe.data.task is None, recipe.train.segments, recipe.train.stop_at
    longest = max([recipe.train.seq_len or 0, *(recipe.eval.lengths if task is None else ())])
    positions = most_positions(model)
    if positions is not None and longest > positions:
        raise ValueError(
            "model.config.max_position_embeddings must be at least train.seq_len and all of "
            f"eval.lengths, got {positions} and {longest}"
        )
    if recipe.align is not None:
        objective = Align(model, recipe.align, teachers, packs=packs)
    elif segments is not None:
        objective = SegmentedLM(model, segments, packs=packs)
    elif row is not None:
        objective = SequenceParallelLM(model, row, packs=packs)
    elif task is None:
        objective = CausalLM(model, packs=packs)
    else:
        objective = labelled(model, task)
    if stop is not None and stop.metric not in objective.metric_names:
        raise ValueError(
            f"train.stop_at.metric must be one of {', '.join(objective.metric_names)}, which this "
            f"run measures, got {stop.metric!r}"
        )
    return objective


def _pinned(batch: Any) -> Any:
    """Return a batch, or lists of batches, in memory that a GPU reads without waiting."""
    if isinstance(batch, list):
        return [_pinned(part) for part in batch]
    return {name: tensor.pin_memory() for name, tensor in batch.items()}
