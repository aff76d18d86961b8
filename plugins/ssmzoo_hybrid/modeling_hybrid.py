"""Hybrids: the mixer of each layer from any installed family.

What surprises: every kind of layer has a configuration of its own family's class, and its
parameters are drawn as that family draws them. What layers of a kind share in a call, others do
not see.
"""

from typing import Any, cast

import torch
from torch import nn

from ssmzoo.modeling import (
    LayerState,
    SSMForCausalLM,
    SSMForImageClassification,
    SSMForSequenceClassification,
    SSMForTokenClassification,
    SSMMixer,
    SSMModel,
    SSMPreTrainedModel,
)

from .configuration_hybrid import HybridConfig


class HybridPreTrainedModel(SSMPreTrainedModel):
    """Loading and initialisation of hybrids."""

    config: HybridConfig

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw a mixer's parameters as its family does, all others as in every family."""
        kind = getattr(module, "hybrid_kind", None)
        if kind is None:
            super()._init_weights(module)
        else:
            self.config.kind(kind).drawer._init_weights(module)


class HybridModel(HybridPreTrainedModel, SSMModel):
    """A hybrid's backbone."""

    @classmethod
    def make_mixer(cls, config: HybridConfig, index: int) -> SSMMixer:
        """Return the mixer of a layer, of its kind."""
        kind = config.kind(config.mixers[index])
        return kind.model_class.make_mixer(kind.config, index)

    def post_init(self) -> None:
        """Mark every module of a mixer with its kind, by which its parameters are drawn."""
        for kind, layer in zip(self.config.mixers, cast(Any, self.layers), strict=True):
            for mixer in (layer.mixer, layer.reverse):  # the second one in both directions
                for module in () if mixer is None else mixer.modules():
                    vars(module)["hybrid_kind"] = kind
        super().post_init()

    def _states(self, *args: Any) -> list[LayerState]:
        """Return what each layer starts from, and what all layers of a kind share."""
        states = super()._states(*args)
        shared: dict[str, tuple[dict[Any, Any], dict[Any, Any]]] = {}
        for name, state in zip(self.config.mixers, states, strict=False):
            if name not in shared:
                shared[name] = dict(state.shared), dict(state.reversed_shared)
            state.shared, state.reversed_shared = shared[name]
        return states


HybridForCausalLM = SSMForCausalLM.of(HybridModel)
HybridForImageClassification = SSMForImageClassification.of(HybridModel)
HybridForSequenceClassification = SSMForSequenceClassification.of(HybridModel)
HybridForTokenClassification = SSMForTokenClassification.of(HybridModel)
