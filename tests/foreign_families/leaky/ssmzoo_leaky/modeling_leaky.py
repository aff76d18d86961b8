"""Leaky: ``out_proj(leaky_sum(x) * SiLU(z))`` by an op of this package."""

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import initialization as init

from ssmzoo.modeling import (
    LayerState,
    Linear,
    Sequences,
    SSMConfig,
    SSMForCausalLM,
    SSMForSequenceClassification,
    SSMMixer,
    SSMModel,
    SSMPreTrainedModel,
)

from .leaky_sum import leaky_sum


@strict
class LeakyConfig(SSMConfig):
    """The fields that every family has."""

    model_type = "ssmzoo_leaky"


class LeakyMixer(SSMMixer):
    """A gated sum of all tokens, of which each feature forgets a share a token."""

    param_group_names = {"logit": "ssm"}

    def __init__(self, config: LeakyConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width = config.hidden_size
        self.in_proj = Linear(width, 2 * width, bias=False)
        self.logit = nn.Parameter(torch.empty(width))
        self.out_proj = Linear(width, width, bias=False)

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        x, z = self.in_proj(hidden_states).chunk(2, dim=-1)  # [B, L, D] each
        decay = torch.sigmoid(self.logit)
        h, final = leaky_sum(x, decay, state.get("sum"), cu_seqlens=packing)
        state.put("sum", final)
        return self.out_proj(h * F.silu(z))


class LeakyPreTrainedModel(SSMPreTrainedModel):
    config: LeakyConfig

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LeakyMixer):
            logits = torch.linspace(0, 4, module.logit.shape[0], device=module.logit.device)
            init.copy_(module.logit, logits)


class LeakyModel(LeakyPreTrainedModel, SSMModel):
    mixer_class = LeakyMixer


LeakyForCausalLM = SSMForCausalLM.of(LeakyModel)
LeakyForSequenceClassification = SSMForSequenceClassification.of(LeakyModel)
