"""Spiral: ``h = lambda h + B u`` with complex poles, whose parameters and states are real pairs."""

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import initialization as init

from ssmzoo.modeling import (
    LayerState,
    Sequences,
    SSMConfig,
    SSMForCausalLM,
    SSMForSequenceClassification,
    SSMMixer,
    SSMModel,
    SSMPreTrainedModel,
)
from ssmzoo_kernels import linear_scan


@strict
class SpiralConfig(SSMConfig):
    """Fields beyond those that every family has.

    Attributes:
        d_state: Complex numbers in the state.
    """

    model_type = "ssmzoo_spiral"
    d_state: int = 16


class SpiralMixer(SSMMixer):
    """``out_proj(h)`` where ``lambda = exp(-exp(log_decay) + i angle)``."""

    param_group_names = {"log_decay": "ssm", "angle": "ssm"}

    def __init__(self, config: SpiralConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.in_proj = nn.Linear(config.hidden_size, 2 * config.d_state)
        self.log_decay = nn.Parameter(torch.empty(config.d_state))
        self.angle = nn.Parameter(torch.empty(config.d_state))
        self.out_proj = nn.Linear(2 * config.d_state, config.hidden_size, bias=False)

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        x = self.in_proj(hidden_states)  # [B, L, 2 N]
        exact = torch.promote_types(torch.float32, x.dtype)
        u = torch.view_as_complex(x.to(exact).reshape(*x.shape[:-1], -1, 2))  # [B, L, N]
        decay = -self.log_decay.to(exact).exp()
        pole = torch.polar(decay.exp(), self.angle.to(exact))  # [N]
        start = state.get("h")  # [B, N, 2]
        h, final = linear_scan(
            pole.expand_as(u),
            u,
            None if start is None else torch.view_as_complex(start),
            cu_seqlens=packing,
        )
        state.put("h", torch.view_as_real(final))
        return self.out_proj(torch.view_as_real(h).flatten(-2).to(x.dtype))


class SpiralPreTrainedModel(SSMPreTrainedModel):
    config: SpiralConfig

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SpiralMixer):
            init.uniform_(module.log_decay, -4.0, 0.0)
            init.uniform_(module.angle, 0.0, 3.0)


class SpiralModel(SpiralPreTrainedModel, SSMModel):
    mixer_class = SpiralMixer


class SpiralForCausalLM(SpiralPreTrainedModel, SSMForCausalLM):
    model_class = SpiralModel


class SpiralForSequenceClassification(SpiralPreTrainedModel, SSMForSequenceClassification):
    model_class = SpiralModel
