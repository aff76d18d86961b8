"""RWKV-7 "Goose": a matrix state under the generalised delta rule, then channel mixing.

What surprises: a block of RWKV-7 has two branches, and both look at the token before. A block of
the zoo has one mixer, so this one computes both and returns their sum; for the second branch it
reads the residual stream. Values of the first layer reach the others through ``state.shared``.
A norm follows the embedding; ``inputs_embeds`` come before it.

Dimensions: B batch, L length, D hidden, H heads, N head.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ssmzoo.modeling import (
    LayerNorm,
    LayerState,
    Linear,
    ModuleParts,
    Sequences,
    SSMForCausalLM,
    SSMForSequenceClassification,
    SSMMixer,
    SSMModel,
    SSMPreTrainedModel,
    State,
    UnservedError,
    recurrent,
    split_heads,
    token_before,
)
from ssmzoo_kernels import generalized_delta_rule
from ssmzoo_kernels.token_step import Program, Value

from .configuration_rwkv7 import RWKV7Config

# what time mixing makes of a token, and the power of its initial weight of the token before
_SHIFTS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
_OWN = ("time_shift", "channel_shift", "decay_bias", "rate_bias", "value_bias", "removal_scale")
_OWN += ("rate_scale", "bonus", "norm_weight", "norm_bias")
_FUNCTIONS: dict[Any, str] = {torch.tanh: "tanh", torch.sigmoid: "sigmoid"}


class LowRank(nn.Module):
    """``up(activation(down(x)))``."""

    def __init__(self, width: int, rank: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.down = Linear(width, rank, bias=False)
        self.up = Linear(rank, width, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, L, D]`` to ``[B, L, D]``."""
        return self.up(self.activation(self.down(x)))


class RWKV7Mixer(SSMMixer):
    """Time mixing and channel mixing: the two branches of a block of RWKV-7."""

    param_group_names: ClassVar[Mapping[str, str]] = dict.fromkeys(_OWN, "ssm")
    reads_residual: ClassVar[bool] = True
    hands_on: ClassVar[tuple[str, ...]] = ("first_values",)
    decaying_states = frozenset({"delta_rule"})
    config: RWKV7Config

    def __init__(self, config: RWKV7Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width, inner = config.hidden_size, config.d_channel or 4 * config.hidden_size
        self.size, self.heads = config.head_dim, width // config.head_dim
        self.r_proj = Linear(width, width, bias=False)
        self.k_proj = Linear(width, width, bias=False)
        self.v_proj = Linear(width, width, bias=False)
        self.decay = LowRank(width, config.decay_rank, torch.tanh)
        self.rate = LowRank(width, config.rate_rank, nn.Identity())
        self.value = LowRank(width, config.value_rank, nn.Identity()) if layer_idx else None
        self.gate = LowRank(width, config.gate_rank, torch.sigmoid)
        self.out_proj = Linear(width, width, bias=False)
        self.channel_norm = LayerNorm(width, eps=config.rms_norm_eps)
        self.up_proj = Linear(width, inner, bias=False)
        self.down_proj = Linear(inner, width, bias=False)

        def own(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*size))

        self.time_shift, self.channel_shift = own(len(_SHIFTS), width), own(width)
        self.decay_bias, self.rate_bias = own(width), own(width)
        self.value_bias = own(width) if layer_idx else None
        self.removal_scale, self.rate_scale, self.bonus = own(width), own(width), own(width)
        self.norm_weight, self.norm_bias = own(width), own(width)

    def forward(
        self,
        hidden_states: Tensor,
        state: LayerState,
        packing: Sequences | None = None,
        *,
        residual: Tensor,
    ) -> Tensor:
        """Map ``[B, L, D]`` to ``[B, L, D]``."""
        y = self.mix_time(hidden_states, state, packing)
        return y + self.mix_channels(self.channel_norm(residual + y), state, packing)

    def mix_time(self, x: Tensor, state: LayerState, packing: Sequences | None) -> Tensor:
        """Return the first branch; the state is ``delta_rule [B, H, N, N]``, transposed."""
        before = token_before(x, "time_shift", state, packing)
        exact = torch.promote_types(torch.float32, x.dtype)
        shifts = self.time_shift.to(exact).unbind()
        xr, xw, xk, xv, xa, xg = (torch.lerp(x.to(exact), before, s).to(x.dtype) for s in shifts)
        r, k, v = (y.to(exact) for y in (self.r_proj(xr), self.k_proj(xk), self.v_proj(xv)))
        decay = torch.sigmoid(self.decay_bias.to(exact) + self.decay(xw))
        rate = torch.sigmoid(self.rate_bias.to(exact) + self.rate(xa))
        if self.value is None or self.value_bias is None:
            state.shared["first_values"] = v
        else:
            mixture = torch.sigmoid(self.value_bias.to(exact) + self.value(xv))
            v = torch.lerp(v, state.shared.get("first_values", v), mixture)
        removal = split_heads(k * self.removal_scale.to(exact), self.heads)
        removal = F.normalize(removal, dim=-1)
        k = k * (1 + (rate - 1) * self.rate_scale.to(exact))
        r, w, k, v, rate = (split_heads(y, self.heads) for y in (r, decay, k, v, rate))
        w = torch.exp(-math.exp(-0.5) * w)
        tensors = (r, w, k, v, -removal, removal * rate, state.get("delta_rule"))
        y, final = generalized_delta_rule(*tensors, cu_seqlens=packing)
        state.put("delta_rule", final)

        y = F.layer_norm(y, (self.size,), eps=self.size * self.config.rms_norm_eps)
        y = y.flatten(2) * self.norm_weight.to(exact) + self.norm_bias.to(exact)
        bonus = split_heads(self.bonus.to(exact).expand_as(y), self.heads)
        y = y + ((r * k * bonus).sum(-1, keepdim=True) * v).flatten(2)
        return self.out_proj(y.to(x.dtype) * self.gate(xg))

    def mix_channels(self, x: Tensor, state: LayerState, packing: Sequences | None) -> Tensor:
        """Return the second branch."""
        before = token_before(x, "channel_shift", state, packing)
        exact = torch.promote_types(torch.float32, x.dtype)
        mixed = torch.lerp(x.to(exact), before, self.channel_shift.to(exact)).to(x.dtype)
        return self.down_proj(F.relu(self.up_proj(mixed)).square())

    def write_token(
        self,
        program: Program,
        parts: ModuleParts,
        x: Value,
        states: Mapping[str, State],
        *,
        residual: Value,
    ) -> Value:
        """Write one token of :meth:`forward`."""
        y = self._write_time(program, parts, x, states)
        x = parts.layer_norm(program, program.add(residual, y), "channel_norm")
        before = program.delay(x, recurrent(program, states["channel_shift"]))
        mixed = program.blend(x, before, parts.weight(self, "channel_shift"))
        wide = program.map(parts.linear(program, mixed, "up_proj"), "squared_relu")
        return program.add(y, parts.linear(program, wide, "down_proj"))

    def _write_time(
        self, program: Program, parts: ModuleParts, x: Value, states: Mapping[str, State]
    ) -> Value:
        """Write :meth:`mix_time`."""

        def own(name: str) -> Tensor:
            return parts.weight(self, name)

        def low_rank(x: Value, name: str) -> Value:
            inner = parts.linear(program, x, name + ".down")
            function = parts.setting(parts.layer(name), "activation")
            if type(function) is not nn.Identity:
                if function not in _FUNCTIONS:
                    raise UnservedError
                inner = program.map(inner, _FUNCTIONS[function])
            return parts.linear(program, inner, name + ".up")

        before = program.delay(x, recurrent(program, states["time_shift"]))
        xr, xw, xk, xv, xa, xg = program.blend(x, before, own("time_shift")).chunk(6)
        r, k, v = (
            parts.linear(program, y, name)
            for y, name in ((xr, "r_proj"), (xk, "k_proj"), (xv, "v_proj"))
        )
        decay = program.map(low_rank(xw, "decay"), "sigmoid", bias=own("decay_bias"))
        decay = program.map(decay, "exp", factor=-math.exp(-0.5))
        rate = program.map(low_rank(xa, "rate"), "sigmoid", bias=own("rate_bias"))
        first = states.get("first_values")  # None: no layer before has left any
        if self.value is None and first is not None:
            program.output(v, first.number, program.dtype)
        elif first is not None:
            mixture = program.map(low_rank(xv, "value"), "sigmoid", bias=own("value_bias"))
            v = program.blend(v, program.input(first.number, program.dtype, v.width), mixture)
        removal = program.map(k, weight=own("removal_scale"))
        shrink = torch.full((self.size,), self.size**-0.5, dtype=program.dtype)
        removal = program.rms_norm(removal, shrink, 1e-24 / self.size, group=self.size)
        k = program.blend(k, program.gated(rate, k, by="itself"), own("rate_scale"))
        y = program.linear_attention(
            r,
            k,
            v,
            decay,
            recurrent(program, states["delta_rule"]),
            heads=self.heads,
            erase=(program.map(removal, factor=-1.0), program.gated(rate, removal, by="itself")),
        )
        eps = self.size * parts.setting(self.config, "rms_norm_eps")
        y = program.layer_norm(y, own("norm_weight"), own("norm_bias"), eps, group=self.size)
        bonus = program.dots(r, program.map(k, weight=own("bonus")), self.heads)
        y = program.add(y, program.gated(bonus, v, by="itself"))
        gate = low_rank(xg, "gate")
        return parts.linear(program, program.gated(gate, y, by="itself"), "out_proj")


class RWKV7PreTrainedModel(SSMPreTrainedModel):
    """Loading and initialisation of RWKV-7."""

    config: RWKV7Config

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the mixer's own parameters as the authors' code does; matrices as in every family.

        Later features and earlier layers begin with less of the token before; decays are spread
        over the features, and over those of a head.
        """
        super()._init_weights(module)
        if not isinstance(module, RWKV7Mixer):
            return
        like, size, layers = module.bonus, module.size, self.config.num_hidden_layers
        count = torch.arange(like.shape[0], device="cpu", dtype=torch.float64)
        place, line = count / len(count), count / max(1, len(count) - 1)
        depth, left = module.layer_idx / max(1, layers - 1), 1 - module.layer_idx / layers
        within = 2 * (count % size) / max(1, size - 1) - 1  # -1 to 1 in every head
        bow = within * within.abs()
        shifts = [1 - place ** (power * left) for power in _SHIFTS.values()]
        init.copy_(module.time_shift, torch.stack(shifts))
        init.copy_(module.channel_shift, 1 - place ** (left**4))
        decay = 6 * line ** (1 + depth**0.3) - 5.5 + 2.5 * bow
        init.copy_(module.decay_bias, decay)
        init.copy_(module.rate_bias, 0.4 * (line - 0.5) + 0.3 * bow - 0.19)
        init.copy_(module.removal_scale, 0.71 - 0.1 * (line - 0.5))
        if module.value_bias is not None:
            init.copy_(module.value_bias, 0.73 - 0.4 * (line - 0.5))
        init.constant_(module.rate_scale, 1.02)
        init.constant_(module.bonus, -0.04)
        init.constant_(module.norm_weight, ((module.layer_idx + 1) / layers) ** 0.7)
        init.zeros_(module.norm_bias)


class RWKV7Model(RWKV7PreTrainedModel, SSMModel):
    """RWKV-7's backbone."""

    mixer_class = RWKV7Mixer

    def __init__(self, config: RWKV7Config) -> None:
        super().__init__(config)
        self.embed_norm = LayerNorm(config.hidden_size, eps=config.rms_norm_eps)

    # not in `_embed`: a rollback reads its result again, and would norm it twice
    def _read(self, hidden_states: Tensor, *given: Any) -> Any:
        return super()._read(self.embed_norm(hidden_states), *given)


RWKV7ForCausalLM = SSMForCausalLM.of(RWKV7Model)
RWKV7ForSequenceClassification = SSMForSequenceClassification.of(RWKV7Model)
