"""The optimizer and its parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    groups: Mapping[str, Mapping[str, float]] | None = None,
) -> list[dict[str, Any]]:
    """Return optimizer groups: the model's own if it declares them, else by the usual rule.

    The usual rule: tensors of two dimensions or more decay, vectors and scalars (norms, biases)
    do not, nor do parameters marked ``_no_weight_decay``; frozen parameters are left out.

    Args:
        model: The model.
        lr: Of all groups.
        weight_decay: Of the parameters that decay.
        groups: By the name of a group, the settings that differ in it.

    Raises:
        LookupError: ``groups`` names a group that the model does not declare.
    """
    declared: Callable[..., list[dict[str, Any]]] | None = getattr(model, "param_groups", None)
    if declared is not None:
        own = {"groups": groups} if groups else {}
        return declared(lr=lr, weight_decay=weight_decay, **own)
    if groups:
        raise LookupError(
            f"{type(model).__name__} has no parameter group {next(iter(groups))!r}; it has none"
        )
    decay, others = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            spared = parameter.ndim < 2 or getattr(parameter, "_no_weight_decay", False)
            (others if spared else decay).append(parameter)
    found = [
        {"params": decay, "lr": lr, "weight_decay": weight_decay},
        {"params": others, "lr": lr, "weight_decay": 0.0},
    ]
    return [group for group in found if group["params"]]


def make_optimizer(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    groups: Mapping[str, Mapping[str, float]] | None = None,
) -> torch.optim.AdamW:
    """Return AdamW on :func:`param_groups`, e.g. for ``Trainer(optimizers=(optimizer, None))``.

    Without weight decay it is Adam.
    """
    import torch

    found = param_groups(model, lr, weight_decay, groups)
    kinds = {parameter.device.type for group in found for parameter in group["params"]}
    return torch.optim.AdamW(found, lr=lr, betas=betas, fused=kinds <= {"cpu", "cuda"})
