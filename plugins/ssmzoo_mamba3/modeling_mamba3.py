"""Mamba-3: a state space by the exponential-trapezoidal rule, whose complex states are rotations.

With ``a = exp(-rate dt)``, and keys and queries turned by all angles up to their token, a head does

    h[t] = a[t] (h[t-1] + (1 - m[t]) dt[t] k[t-1] v[t-1]^T) + m[t] dt[t] k[t] v[t]^T
    y[t] = h[t]^T q[t] + D v[t]

What surprises: the state is ``g[t] = h[t] - m[t] dt[t] k[t] v[t]^T``, to which a token writes what
the one before has left: ``g[t] = a[t] (g[t-1] + (m[t-1] dt[t-1] + (1 - m[t]) dt[t]) k[t-1]
v[t-1]^T)``. That is additive linear attention on keys and values a token late, in one call.

Dimensions: B batch, L length, D hidden, H heads, G groups, N state, P head, S angles.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ssmzoo.modeling import (
    GroupRMSNorm,
    LayerState,
    Linear,
    ModuleParts,
    RMSNorm,
    Sequences,
    SSMForCausalLM,
    SSMForSequenceClassification,
    SSMMixer,
    SSMModel,
    SSMPreTrainedModel,
    State,
    inverse_softplus,
    recurrent,
    split_heads,
    token_before,
)
from ssmzoo_kernels import double, gated_linear_attention, linear_scan
from ssmzoo_kernels.token_step import Program, Value

from .configuration_mamba3 import Mamba3Config

_OWN = ("dt_bias", "B_bias", "C_bias", "D")


class Mamba3Mixer(SSMMixer):
    """The module's recurrence between two linear maps, with a gate."""

    param_group_names: ClassVar[Mapping[str, str]] = dict.fromkeys(_OWN, "ssm")
    config: Mamba3Config

    def __init__(self, config: Mamba3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads, size = config.num_heads, config.d_state
        inner, keys = heads * config.head_dim, config.n_groups * size
        # gate, values, keys, queries, then the inputs of dt, rate, m and angles
        self.splits = [inner, inner, keys, keys, heads, heads, heads, config.num_angles]
        self.in_proj = Linear(config.hidden_size, sum(self.splits), bias=False)
        self.B_norm = RMSNorm(size, eps=config.rms_norm_eps)
        self.C_norm = RMSNorm(size, eps=config.rms_norm_eps)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.B_bias = nn.Parameter(torch.empty(heads, size))
        self.C_bias = nn.Parameter(torch.empty(heads, size))
        self.D = nn.Parameter(torch.empty(heads))
        self.norm = None
        if config.out_norm:
            self.norm = GroupRMSNorm(inner, config.rms_norm_eps, config.head_dim)
        self.out_proj = Linear(inner, config.hidden_size, bias=False)

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        """Map ``[B, L, D]`` to ``[B, L, D]``.

        The state is ``ssm [B, H, N, P]``, ``angle [B, H S]`` and ``last [B, 1, H (N + P + 1)]``,
        the last token's keys, values and ``m dt``.
        """
        config, heads = self.config, self.config.num_heads
        z, x, B, C, dt, rate, m, angle = self.in_proj(hidden_states).split(self.splits, dim=-1)
        exact = torch.promote_types(torch.float32, x.dtype)
        dt = F.softplus(dt.to(exact) + self.dt_bias.to(exact))  # [B, L, H]
        log_decay = -self._rate(rate.to(exact)).clamp(min=config.rate_floor) * dt
        m = torch.sigmoid(m.to(exact))
        turns = self._turns(angle, dt, state, packing)
        k, q = (
            turned(norm(split_heads(y, config.n_groups)), bias.to(exact), turns)
            for y, norm, bias in ((B, self.B_norm, self.B_bias), (C, self.C_norm, self.C_bias))
        )
        v, now = split_heads(x.to(exact), heads), m * dt
        kept = torch.cat([k.flatten(2), v.flatten(2), now], dim=2)
        late = token_before(kept, "last", state, packing)
        widths = [k.shape[2] * k.shape[3], v.shape[2] * v.shape[3], heads]
        k_late, v_late, left = late.split(widths, dim=2)
        y, final = gated_linear_attention(
            q,
            split_heads(k_late, heads),
            split_heads(v_late, heads),
            log_decay,
            torch.exp(log_decay) * (left + (1 - m) * dt),
            state.get("ssm"),
            cu_seqlens=packing,
            scale=1.0,
        )
        state.put("ssm", final)
        own = now * (q * k).sum(dim=-1) + self.D.to(exact)
        y = (y + own.unsqueeze(-1) * v).flatten(2).to(x.dtype)
        y = y if self.norm is None else self.norm(y)
        return self.out_proj(y * F.silu(z))

    def write_token(
        self, program: Program, parts: ModuleParts, x: Value, states: Mapping[str, State]
    ) -> Value:
        """Write one token of :meth:`forward`."""
        config, heads, groups = self.config, self.config.num_heads, self.config.n_groups
        z, v, B, C, dt, rate, m, angle = parts.linear(program, x, "in_proj").split(*self.splits)
        dt = program.map(dt, "softplus", bias=parts.weight(self, "dt_bias"))
        kind, least = (parts.setting(config, name) for name in ("rate", "rate_floor"))
        rate = program.map(rate, kind, least=least)
        decay = program.map(program.gated(rate, dt, by="itself"), "exp", factor=-1.0)
        now = program.gated(program.map(m, "sigmoid"), dt, by="itself")
        turns = program.angles(angle, dt, recurrent(program, states["angle"]))
        k, q = (
            program.turn(
                parts.norm(program, y, name + "_norm", group=config.d_state),
                parts.weight(self, name + "_bias"),
                turns,
                groups,
            )
            for y, name in ((B, "B"), (C, "C"))
        )
        last = recurrent(program, states["last"])
        columns, values = k.width + v.width + heads, k.width + v.width
        k_late, v_late, left = (
            program.delay(y, last, columns, first)
            for y, first in ((k, 0), (v, k.width), (now, values))
        )
        written = program.add(left, program.add(dt, program.map(now, factor=-1.0)))
        written = program.gated(decay, written, by="itself")
        v_late = program.gated(written, v_late, by="itself")
        ssm = recurrent(program, states["ssm"])
        y = program.linear_attention(q, k_late, v_late, decay, ssm, heads=heads)
        own = program.gated(now, program.dots(q, k, heads), by="itself")
        own = program.map(own, bias=parts.weight(self, "D"))
        y = program.add(y, program.gated(own, v, by="itself"))
        if self.norm is not None:
            y = parts.norm(program, y, "norm", group=self.norm.group)
        return parts.linear(program, program.gated(z, y), "out_proj")

    def _rate(self, x: Tensor) -> Tensor:
        if self.config.rate == "softplus":
            return F.softplus(x)
        return x.clamp(min=0) + 1 / (1 - x.clamp(max=0))

    def _turns(
        self, angle: Tensor, dt: Tensor, state: LayerState, packing: Sequences | None
    ) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the sums of ``pi tanh(angle) dt``, ``[B, L, H, S]``.

        Sums are float64; what a cache holds is less than a whole turn.
        """
        steps = math.pi * torch.tanh(double(angle)).unsqueeze(2) * double(dt).unsqueeze(3)
        steps, start = steps.flatten(2), state.get("angle")
        start = None if start is None else double(start)
        ones = torch.ones_like(steps)
        total, final = linear_scan(ones, steps, start, cu_seqlens=packing)
        state.put("angle", torch.remainder(final, 2 * math.pi).to(dt))
        total = split_heads(total, dt.shape[2])
        return total.cos().to(dt), total.sin().to(dt)


def turned(x: Tensor, bias: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Give each head of ``[B, L, G, N]`` its bias ``[H, N]``; turn the first pairs of neighbours.

    Returns:
        ``[B, L, H, N]`` in the bias' dtype.
    """
    x = x.to(bias.dtype).repeat_interleave(len(bias) // x.shape[2], dim=2) + bias
    cos, sin = turns
    turning, rest = x.tensor_split((2 * cos.shape[-1],), dim=-1)
    pairs = turning.reshape(*turning.shape[:-1], cos.shape[-1], 2)
    first, second = pairs.unbind(-1)
    pairs = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return torch.cat([pairs.flatten(-2), rest], dim=-1)


class Mamba3PreTrainedModel(SSMPreTrainedModel):
    """Loading and initialisation of Mamba-3."""

    config: Mamba3Config

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the mixer's own parameters as the authors' code does.

        ``softplus(dt_bias)``: between 0.001 and 0.1, its logarithm uniform. Other biases and D: 1.
        """
        super()._init_weights(module)
        if isinstance(module, Mamba3Mixer):
            low, high = math.log(0.001), math.log(0.1)
            dt = double(torch.empty_like(module.dt_bias).uniform_(low, high)).exp()
            init.copy_(module.dt_bias, inverse_softplus(dt))
            for parameter in (module.B_bias, module.C_bias, module.D):
                init.ones_(parameter)


class Mamba3Model(Mamba3PreTrainedModel, SSMModel):
    """Mamba-3's backbone."""

    mixer_class = Mamba3Mixer


Mamba3ForCausalLM = SSMForCausalLM.of(Mamba3Model)
Mamba3ForSequenceClassification = SSMForSequenceClassification.of(Mamba3Model)
