"""What transformers must know of every model of the zoo."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from ssmzoo.modeling.configuration import SSMConfig


class SSMPreTrainedModel(PreTrainedModel):
    """Base of all models: loading, initialisation, optimizer groups.

    A family's subclass sets ``config`` and extends :meth:`_init_weights`. Its float32 parameters
    are listed in ``_keep_in_fp32_modules_strict`` for loading; casting a model in memory leaves
    them alone because :class:`~ssmzoo.modeling.SSMMixer` does.
    """

    config: SSMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SSMBlock"]
    _is_stateful = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the entries of shared modules: norms 1, embedding and heads N(0, range^2).

        Linear layers inside a mixer are the mixer's business.
        """
        heads = (getattr(self, "lm_head", None), getattr(self, "score", None))
        if isinstance(module, nn.Embedding) or any(module is head for head in heads):
            init.normal_(cast(Tensor, module.weight), std=self.config.initializer_range)
        elif "RMSNorm" in type(module).__name__:
            init.ones_(cast(Tensor, module.weight))

    def param_groups(self, *, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return optimizer groups: matrices decay, vectors (norms, biases, SSM scalars) do not.

        Args:
            lr: Learning rate of every group.
            weight_decay: Decay of the first group.

        Returns:
            Two groups for ``torch.optim`` optimizers, each with ``params``, ``lr``,
            ``weight_decay``; frozen parameters are in neither.
        """
        decayed, others = [], []
        for parameter in self.parameters():
            if parameter.requires_grad:
                (decayed if parameter.dim() >= 2 else others).append(parameter)
        return [
            {"params": decayed, "lr": lr, "weight_decay": weight_decay},
            {"params": others, "lr": lr, "weight_decay": 0.0},
        ]
