"""Sabotaged families again: what the kit must say of them, so that the cause need not be sought."""

import torch
from tests.plugins.sabotage import Sabotage
from torch import nn

from ssmzoo.modeling import LayerState, backbone
from ssmzoo_longhorn.configuration_longhorn import LonghornConfig
from ssmzoo_longhorn.modeling_longhorn import LonghornMixer


class NeverDrawsItsGain(LonghornMixer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.gain = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, hidden_states, state, packing=None):
        return super().forward(hidden_states * self.gain, state, packing)


class LeavesNoConvState(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        out = super().forward(hidden_states, state, packing)
        state.final.pop("conv", None)
        return out


class LeavesAViewAfterAPrompt(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        out = super().forward(hidden_states, state, packing)
        if hidden_states.shape[1] > 1:
            state.final = {name: x.mT.contiguous().mT for name, x in state.final.items()}
        return out


class RoundsSingleTokensOtherwise(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        out = super().forward(hidden_states, state, packing)
        coarse = out.dtype == torch.float32 and hidden_states.shape[1] == 1
        return out * (1 + 5e-5) if coarse else out


class SumsInFloat32Roundly(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        if packing is None:
            seen, added = state.get("sum"), hidden_states.sum(dim=1, keepdim=True).float()
            state.put("sum", (added if seen is None else seen + added).bfloat16().float())
        return super().forward(hidden_states, state, packing)


class ForeignConfig(LonghornConfig):
    model_type = "broken_foreign"


def one_dictionary(*given, shared, reversed_shared=None, **named):
    """Return a layer's state whose reversed call shares what the other does, as it once was."""
    return LayerState(*given, shared=shared, reversed_shared=shared, **named)


# by check: what fails it, and what the check must then say
CAUSES = {
    "initialization": Sabotage("layers.0.mixer.gain", {"mixer": NeverDrawsItsGain}),
    "chunks": Sabotage("reads the state 'conv' and leaves none", {"mixer": LeavesNoConvState}),
    "tokens": Sabotage("rounding only", {"mixer": RoundsSingleTokensOtherwise}),
    "fullgraph": Sabotage("strides", {"mixer": LeavesAViewAfterAPrompt}),
    "closed_config": Sabotage("model_type must be", {"config": ForeignConfig}),
    "cache_precision": Sabotage("rounded to bfloat16", {"mixer": SumsInFloat32Roundly}),
}
ONE_DICTIONARY = (backbone, "LayerState", one_dictionary)
