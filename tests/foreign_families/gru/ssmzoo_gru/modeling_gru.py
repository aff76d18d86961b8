"""GRU: a recurrence that no scan computes, so its mixer loops over the columns of a batch."""

from collections.abc import Sequence

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from ssmzoo.modeling import (
    LayerState,
    Sequences,
    SSMConfig,
    SSMForCausalLM,
    SSMForSequenceClassification,
    SSMMixer,
    SSMModel,
    SSMPreTrainedModel,
    scan,
)


@strict
class GRUConfig(SSMConfig):
    """No fields but those that every family has."""

    model_type = "ssmzoo_gru"


class GRUMixer(SSMMixer):
    """``h = (1 - z) n + z h`` with gates r and z, and ``n = tanh(a + r (U h))``."""

    def __init__(self, config: GRUConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width = config.hidden_size
        self.in_proj = nn.Linear(width, 3 * width)
        self.recurrent = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        x = self.in_proj(hidden_states)  # [B, L, 3 D]
        # packed sequences become rows of a batch; behind their ends stand zeros
        rows = None if packing is None else packing.aligned()
        columns = (x if rows is None else rows.gather(x)).transpose(0, 1)  # [L, B, 3 D]
        exact = torch.promote_types(torch.float32, x.dtype)
        h = state.get_row("h")  # [B, D]
        if h is None:
            h = x.new_zeros(columns.shape[1], hidden_states.shape[2], dtype=exact)

        def step(
            carried: Sequence[Tensor], given: Sequence[Tensor]
        ) -> tuple[list[Tensor], list[Tensor]]:
            (h,), (column, t) = carried, given
            r, z, n = column.to(exact).chunk(3, dim=-1)
            ur, uz, un = self.recurrent(h.to(x.dtype)).to(exact).chunk(3, dim=-1)
            z = torch.sigmoid(z + uz)
            new = (1 - z) * torch.tanh(n + torch.sigmoid(r + ur) * un) + z * h
            h = new if rows is None else torch.where(t < rows.lengths[:, None], new, h)
            return [h], [h]

        times = torch.arange(columns.shape[0], device=x.device)
        (h,), (outputs,) = scan(step, [h], [columns, times])
        state.put_row("h", h)
        y = outputs.transpose(0, 1).to(x.dtype)
        return self.out_proj(y if rows is None else rows.scatter(y, x.shape[1]))


class GRUPreTrainedModel(SSMPreTrainedModel):
    config: GRUConfig


class GRUModel(GRUPreTrainedModel, SSMModel):
    mixer_class = GRUMixer


class GRUForCausalLM(GRUPreTrainedModel, SSMForCausalLM):
    model_class = GRUModel


class GRUForSequenceClassification(GRUPreTrainedModel, SSMForSequenceClassification):
    model_class = GRUModel
