"""Toy: ``out_proj(SiLU(conv1d(x)) * z)``, whose state is the last inputs of the convolution."""

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from ssmzoo.modeling import (
    CausalConv1d,
    LayerState,
    Sequences,
    SSMConfig,
    SSMForCausalLM,
    SSMForSequenceClassification,
    SSMMixer,
    SSMModel,
    SSMPreTrainedModel,
)


@strict
class ToyConfig(SSMConfig):
    """Fields beyond those that every family has.

    Attributes:
        d_conv: Taps of the convolution.
    """

    model_type = "ssmzoo_toy"
    d_conv: int = 4


class ToyMixer(SSMMixer):
    """What a family writes itself: one sequence mixer, with its state."""

    def __init__(self, config: ToyConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width = config.hidden_size
        self.in_proj = nn.Linear(width, 2 * width, bias=False)
        self.conv1d = CausalConv1d(width, config.d_conv, bias=True)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        x, z = self.in_proj(hidden_states).chunk(2, dim=-1)  # [B, L, D] each
        y, final = self.conv1d(x, state.get("conv"), packing)
        state.put("conv", final)
        return self.out_proj(y * z)


class ToyPreTrainedModel(SSMPreTrainedModel):
    config: ToyConfig


class ToyModel(ToyPreTrainedModel, SSMModel):
    mixer_class = ToyMixer


ToyForCausalLM = SSMForCausalLM.of(ToyModel)
ToyForSequenceClassification = SSMForSequenceClassification.of(ToyModel)
