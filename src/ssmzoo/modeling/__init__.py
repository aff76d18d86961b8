"""What all families share: configuration, backbone, heads, cache, padding and packing, prompts.

A family writes a mixer and names it in its model class; everything else comes from here.
From outside: every name in ``__all__``; families import nothing else of ``ssmzoo`` but ``Family``.
"""

from ssmzoo.environment.messages import suggestion
from ssmzoo.modeling.attention import Attention, AttentionConfig, attend
from ssmzoo.modeling.attention_parts import (
    attention_parts,
    expansion_of,
    require_width,
    start_as_identity,
    start_gated_block,
)
from ssmzoo.modeling.backbone import SSMModel
from ssmzoo.modeling.block import SSMBlock
from ssmzoo.modeling.cache import StateCache
from ssmzoo.modeling.causal_lm import SSMForCausalLM
from ssmzoo.modeling.checkpointing import selective_checkpointing
from ssmzoo.modeling.classifiers import (
    SSMForImageClassification,
    SSMForPairClassification,
    SSMForSequenceClassification,
    SSMForTokenClassification,
)
from ssmzoo.modeling.configuration import SSMConfig, stateless
from ssmzoo.modeling.decoding import is_token, token_of_layer
from ssmzoo.modeling.derived import DerivedValue
from ssmzoo.modeling.dynamics import Dynamics, Trajectories
from ssmzoo.modeling.forecasting import SSMDecoder, SSMForecastingConfig, SSMForForecasting
from ssmzoo.modeling.head import SSMHead
from ssmzoo.modeling.hippo import hippo_legs
from ssmzoo.modeling.kinds import Kind, kind_of
from ssmzoo.modeling.layer_state import LayerState
from ssmzoo.modeling.layers import (
    MLP,
    CausalConv1d,
    Dropout,
    Linear,
    inverse_softplus,
    rotary_angles,
    rotary_turns,
    rotated,
    split_heads,
    token_before,
)
from ssmzoo.modeling.loops import scan
from ssmzoo.modeling.mixer import SSMMixer
from ssmzoo.modeling.module_parts import ModuleParts, State, UnservedError, recurrent
from ssmzoo.modeling.norms import BatchNorm, GroupRMSNorm, LayerNorm, RMSNorm
from ssmzoo.modeling.packing import (
    AlignedRows,
    Sequences,
    flip,
    flip_steps,
    right_aligned,
    token_positions,
)
from ssmzoo.modeling.pretrained import SSMPreTrainedModel, check_weights, require_fields
from ssmzoo.modeling.prompt import PromptState, load_state, prefill
from ssmzoo.modeling.quantized_cache import QuantizedStateCache
from ssmzoo.modeling.sequence_parallel import packed_piece, sequence_cache, sequence_piece
from ssmzoo.modeling.ssm_layer import SSMLayer
from ssmzoo.modeling.state_adapter import (
    StateAdapter,
    add_state_adapter,
    load_state_adapter,
    remove_state_adapter,
)
from ssmzoo.modeling.state_passing import CutRows
from ssmzoo.modeling.static_cache import StaticStateCache

__all__ = [
    "MLP",
    "AlignedRows",
    "Attention",
    "AttentionConfig",
    "BatchNorm",
    "CausalConv1d",
    "CutRows",
    "DerivedValue",
    "Dropout",
    "Dynamics",
    "GroupRMSNorm",
    "Kind",
    "LayerNorm",
    "LayerState",
    "Linear",
    "ModuleParts",
    "PromptState",
    "QuantizedStateCache",
    "RMSNorm",
    "SSMBlock",
    "SSMConfig",
    "SSMDecoder",
    "SSMForCausalLM",
    "SSMForForecasting",
    "SSMForImageClassification",
    "SSMForPairClassification",
    "SSMForSequenceClassification",
    "SSMForTokenClassification",
    "SSMForecastingConfig",
    "SSMHead",
    "SSMLayer",
    "SSMMixer",
    "SSMModel",
    "SSMPreTrainedModel",
    "Sequences",
    "State",
    "StateAdapter",
    "StateCache",
    "StaticStateCache",
    "Trajectories",
    "UnservedError",
    "add_state_adapter",
    "attend",
    "attention_parts",
    "check_weights",
    "expansion_of",
    "flip",
    "flip_steps",
    "hippo_legs",
    "inverse_softplus",
    "is_token",
    "kind_of",
    "load_state",
    "load_state_adapter",
    "packed_piece",
    "prefill",
    "recurrent",
    "remove_state_adapter",
    "require_fields",
    "require_width",
    "right_aligned",
    "rotary_angles",
    "rotary_turns",
    "rotated",
    "scan",
    "selective_checkpointing",
    "sequence_cache",
    "sequence_piece",
    "split_heads",
    "start_as_identity",
    "start_gated_block",
    "stateless",
    "suggestion",
    "token_before",
    "token_of_layer",
    "token_positions",
]
