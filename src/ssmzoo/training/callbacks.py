"""Callbacks for transformers' ``Trainer``."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ssmzoo.modeling import SSMPreTrainedModel


class ProjectParameters(TrainerCallback):
    """Project parameters into their allowed range after every step of the optimizer.

    ::

        Trainer(model, arguments, callbacks=[ProjectParameters()])

    Some families need it, such as COFFEE with ``lambda_param="clamp"``; for the others it does
    nothing. ``ssmzoo train`` projects by itself. The model may be wrapped, by PEFT or for several
    processes.
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Fail before the first step if there is no model of the zoo.

        Raises:
            TypeError: There is none.
        """
        _zoo_model(model)

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Project the parameters."""
        _zoo_model(model).project_parameters()


def _zoo_model(model: nn.Module | None) -> SSMPreTrainedModel:
    if model is not None:
        for module in model.modules():
            if isinstance(module, SSMPreTrainedModel):
                return module
    raise TypeError(
        "ProjectParameters needs a model of the zoo, an ssmzoo.modeling.SSMPreTrainedModel, got "
        f"{type(model).__name__}; leave the callback out"
    )


__all__ = ["ProjectParameters"]
