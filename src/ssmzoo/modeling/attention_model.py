"""Attention as a kind of layers: a backbone that makes its mixers and draws their parameters."""

import torch
from torch import nn
from transformers import initialization as init

from ssmzoo.modeling.attention import Attention, AttentionConfig
from ssmzoo.modeling.backbone import SSMModel
from ssmzoo.modeling.pretrained import SSMPreTrainedModel


class AttentionPreTrainedModel(SSMPreTrainedModel):
    """Initialisation of attention."""

    config: AttentionConfig

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the initial parameters.

        Linear layers N(0, initializer_range^2), the last one over ``sqrt(2 num_hidden_layers)``;
        biases 0, norms 1.
        """
        super()._init_weights(module)
        if isinstance(module, nn.Linear):
            ends = getattr(module, "role", "") == "attention_end"
            scale = (2 * self.config.num_hidden_layers) ** -0.5 if ends else 1.0
            init.normal_(module.weight, std=self.config.initializer_range * scale)


class AttentionModel(AttentionPreTrainedModel, SSMModel):
    """The backbone of attention alone."""

    mixer_class = Attention
