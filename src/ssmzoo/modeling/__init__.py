"""What all families share: configuration, backbone, heads, cache.

A family writes a mixer and names it in its model class; everything else comes from here.
"""

from ssmzoo.modeling.backbone import CausalConv1d, Linear, RMSNorm, SSMBlock, SSMMixer, SSMModel
from ssmzoo.modeling.cache import LayerState, StateCache
from ssmzoo.modeling.configuration import SSMConfig
from ssmzoo.modeling.heads import SSMForCausalLM, SSMForSequenceClassification
from ssmzoo.modeling.pretrained import SSMPreTrainedModel

__all__ = [
    "CausalConv1d",
    "LayerState",
    "Linear",
    "RMSNorm",
    "SSMBlock",
    "SSMConfig",
    "SSMForCausalLM",
    "SSMForSequenceClassification",
    "SSMMixer",
    "SSMModel",
    "SSMPreTrainedModel",
    "StateCache",
]
