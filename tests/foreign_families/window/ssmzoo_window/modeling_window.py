"""Window: even layers attend to the last tokens, odd ones are a gated linear recurrence."""

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
)
from ssmzoo_kernels import linear_scan


@strict
class WindowConfig(SSMConfig):
    """Fields beyond those that every family has.

    Attributes:
        window: How many tokens a token attends to, itself included.
        num_heads: Of the attention; they share the hidden size.
    """

    model_type = "ssmzoo_window"
    window: int = 8
    num_heads: int = 2

    def check(self) -> None:
        super().check()
        if self.window < 2:
            raise ValueError(f"window must be at least 2, got {self.window}")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads must divide hidden_size, got {self.num_heads} and {self.hidden_size}"
            )


class WindowMixer(SSMMixer):
    """Attention of a layer with an even number, recurrence of one with an odd number."""

    def __init__(self, config: WindowConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width = config.hidden_size
        self.attends = layer_idx % 2 == 0
        self.window, self.heads = config.window, config.num_heads
        self.in_proj = nn.Linear(width, 3 * width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        inputs = self.in_proj(hidden_states)
        mix = self.attend if self.attends else self.recur
        return self.out_proj(mix(inputs, state, packing))

    def attend(self, inputs: Tensor, state: LayerState, packing: Sequences | None) -> Tensor:
        """Map queries, keys and values ``[B, L, 3 D]`` to ``[B, L, D]``."""
        tokens, past = inputs.shape[1], self.window - 1
        # the ones mark keys: a row's end and a fresh start leave zeros instead, which are none
        marked = torch.cat([inputs, torch.ones_like(inputs[..., :1])], dim=-1)
        rows = None if packing is None else packing.aligned()
        if rows is not None:  # a batch of the sequences, [S, longest, 3 D + 1]
            marked = rows.gather(marked)
        (batch, length), width = marked.shape[:2], inputs.shape[2] // 3
        query, fresh = marked.split([width, 2 * width + 1], dim=-1)
        kept = state.get_row("past")  # [S, W - 1, 2 D + 1]
        if kept is None:
            kept = fresh.new_zeros(batch, past, fresh.shape[2])
        seen = torch.cat([kept.to(fresh.dtype), fresh], dim=1)
        # of each row the last W - 1 columns before its end go on
        ends = marked.new_full((batch,), length, dtype=torch.long) if rows is None else rows.lengths
        columns = ends[:, None] + torch.arange(past, device=ends.device)
        columns = columns[:, :, None].expand(-1, -1, seen.shape[2])
        state.put_row("past", seen.gather(1, columns))

        key, value, mark = seen.split([width, width, 1], dim=-1)
        behind = torch.arange(length, device=ends.device)[:, None] + past
        behind = behind - torch.arange(past + length, device=ends.device)  # [L, W - 1 + L]
        visible = (behind >= 0) & (behind <= past) & (mark.transpose(1, 2) > 0)
        visible = visible | (behind == 0)  # behind a row's end, too, so that no softmax is empty
        heads = (x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2) for x in (query, key, value))
        y = nn.functional.scaled_dot_product_attention(*heads, attn_mask=visible[:, None])
        y = y.transpose(1, 2).flatten(2)
        return y if rows is None else rows.scatter(y, tokens)

    def recur(self, inputs: Tensor, state: LayerState, packing: Sequences | None) -> Tensor:
        """Map keep gates, values and output gates ``[B, L, 3 D]`` to ``[B, L, D]``."""
        keep, value, gate = inputs.chunk(3, dim=-1)
        keep = keep.to(torch.promote_types(torch.float32, keep.dtype)).sigmoid()
        h, final = linear_scan(keep, (1 - keep) * value, state.get("h"), cu_seqlens=packing)
        state.put("h", final)
        return h.to(value.dtype) * nn.functional.silu(gate)


class WindowPreTrainedModel(SSMPreTrainedModel):
    config: WindowConfig


class WindowModel(WindowPreTrainedModel, SSMModel):
    mixer_class = WindowMixer


class WindowForCausalLM(WindowPreTrainedModel, SSMForCausalLM):
    model_class = WindowModel


class WindowForSequenceClassification(WindowPreTrainedModel, SSMForSequenceClassification):
    model_class = WindowModel
