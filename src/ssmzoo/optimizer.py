"""The optimizer and the learning rate over a run's steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ssmzoo.recipe import TrainSection

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LambdaLR


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


def make_schedule(optimizer: torch.optim.Optimizer, options: TrainSection) -> LambdaLR:
    """Return the recipe's schedule, a linear warm-up and a cosine, over every group's own rate."""
    from transformers import get_cosine_with_min_lr_schedule_with_warmup_lr_rate

    return get_cosine_with_min_lr_schedule_with_warmup_lr_rate(
        optimizer,
        num_warmup_steps=options.warmup_steps,
        num_training_steps=options.total_steps,
        min_lr_rate=options.min_lr_ratio,
    )


def resume_schedule(schedule: LambdaLR, step: int) -> None:
    """Set a new schedule, and the rates of its optimizer, to where they stand after a step."""
    schedule.last_epoch = step
    rates = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    schedule._last_lr = [base * rate(step) for base, rate in rates]
    for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
        group["lr"] = rate
