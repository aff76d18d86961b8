"""Gated linear attention: Linear Transformer, RetNet, GLA, DeltaNet, gated DeltaNet, KDA, Mamba2.

One mixer, whose configuration says which. What surprises: ``in_proj`` gives queries, keys and
values in this order, then the inputs of decay, write strength and gate. Decays and states are
always float32.

Dimensions: B batch, L length, D hidden, H heads, G key heads, K key size, V value size.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ssmzoo.modeling import (
    CausalConv1d,
    Dynamics,
    GroupRMSNorm,
    LayerState,
    Linear,
    ModuleParts,
    RMSNorm,
    Sequences,
    SSMForCausalLM,
    SSMForImageClassification,
    SSMForSequenceClassification,
    SSMMixer,
    SSMModel,
    SSMPreTrainedModel,
    State,
    UnservedError,
    recurrent,
    rotary_angles,
    rotary_turns,
    rotated,
    split_heads,
    token_positions,
)
from ssmzoo_kernels import gated_linear_attention
from ssmzoo_kernels.token_step import Program, Value

from .configuration_linear_attention import LinearAttentionConfig

_EPS = 1e-6  # added to squared lengths, and to sums of weights


class LinearAttentionMixer(SSMMixer):
    """Decay a matrix of states, write a value under its key, read with a query; norm and gate.

    ``out_proj(gate(norm(S^T q)))`` with ``S <- diag(a) S``, ``S <- S + k (beta (v - S^T k))^T``, or
    ``S <- S + k (beta v)^T`` without the delta rule.
    """

    param_group_names: ClassVar[Mapping[str, str]] = dict.fromkeys(("A_log", "dt_bias", "D"), "ssm")
    config: LinearAttentionConfig

    def __init__(self, config: LinearAttentionConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads, both = config.num_heads, config.key_heads * config.head_k_dim
        inner = heads * config.head_v_dim
        decays = {"scalar": heads, "channel": heads * config.head_k_dim}.get(config.decay, 0)
        betas = heads if config.beta == "sigmoid" else 0
        gates = 0 if config.out_gate == "none" else inner
        low, gate_low = config.decay_rank, config.gate_rank
        self.widths = [both, both, inner]  # of q, k and v
        self.splits = [sum(self.widths), low or decays, betas, gate_low or gates]
        self.in_proj = Linear(config.hidden_size, sum(self.splits), bias=False)
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_k_dim, config.rms_norm_eps) if config.qk_norm else None
            for _ in range(2)
        )
        self.activation = "silu" if config.feature_map.startswith("silu") else None
        taps, bias = config.d_conv, config.conv_bias
        self.conv1d = CausalConv1d(self.splits[0], taps, bias, self.activation) if taps else None
        self.decay_proj = Linear(low, decays, bias=False) if low else None
        self.gate_proj = Linear(gate_low, gates, config.gate_bias) if gate_low else None
        rates = heads if decays and config.gate_logit_normalizer is None else 0
        self.A_log = nn.Parameter(torch.empty(rates)) if rates else None
        self.dt_bias = nn.Parameter(torch.empty(decays)) if decays else None
        self.D = nn.Parameter(torch.empty(heads)) if config.skip else None
        groups = {"head": config.head_v_dim, "gated": inner}
        groups["gated_group"] = inner // config.key_heads
        group, normed = groups.get(config.out_norm), inner if config.norms_gated else groups["head"]
        self.norms_gated = config.norms_gated
        eps = config.rms_norm_eps if config.out_norm_eps is None else config.out_norm_eps
        self.out_norm = GroupRMSNorm(normed, eps, group) if group else None
        self.out_proj = Linear(inner, config.hidden_size, bias=False)

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        """Map ``[B, L, D]`` to ``[B, L, D]``.

        The state is ``ssm [B, H, K, V]``, of "elu" with one value more, the sum of weights, and of
        Mamba2 ``[B, H, V, K]``; ``conv``; with rotary positions the tokens seen, ``position [B]``.
        """
        config, start = self.config, state.get("ssm")
        mixed, decay, beta, gate = self.in_proj(hidden_states).split(self.splits, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            mixed = self._normed(mixed, self.q_norm, self.k_norm)
        if self.conv1d is not None:
            mixed, final = self.conv1d(mixed, state.get("conv"), packing)
            state.put("conv", final)
        elif self.activation is not None:
            mixed = F.silu(mixed)
        q, k, v = mixed.split(self.widths, dim=-1)
        q, k = (self._feature(split_heads(x, config.key_heads)) for x in (q, k))
        if config.rotary:
            turns = self._turns(hidden_states, state, packing)
            q, k = (rotated(x, turns) for x in (q, k))
        v = split_heads(v, config.num_heads)
        exact, sums = torch.promote_types(torch.float32, v.dtype), config.feature_map == "elu"
        by_value = config.beta == "dt"  # as the instruction of Mamba2's token has the state
        log_decay, beta = self._decay(decay, beta)
        y, final = gated_linear_attention(
            q,
            k,
            F.pad(v.to(exact), (0, 1), value=1.0) if sums else v,
            log_decay,
            beta,
            start.transpose(2, 3) if by_value and start is not None else start,
            cu_seqlens=packing,
            rule="delta" if config.delta_rule else "additive",
            scale=1.0 if by_value or sums else None,
        )
        state.put("ssm", final.transpose(2, 3).contiguous() if by_value else final)
        if sums:
            y = (y[..., :-1] / (y[..., -1:] + _EPS)).to(v.dtype)
        if self.D is not None:
            y = (y.to(exact) + self.D.to(exact)[:, None] * v).to(v.dtype)
        if self.out_norm is not None and not self.norms_gated:
            y = self.out_norm(y)
        y = y.flatten(2)
        if config.out_gate != "none":
            gate = gate if self.gate_proj is None else self.gate_proj(gate)
            if config.out_norm == "gated_group":  # in float32, as Mamba2's code has it
                gate = gate.to(exact)
            y = y * (F.silu(gate) if config.out_gate == "silu" else torch.sigmoid(gate))
        if self.out_norm is not None and self.norms_gated:
            y = self.out_norm(y)
        return self.out_proj(y)

    def write_token(
        self, program: Program, parts: ModuleParts, x: Value, states: Mapping[str, State]
    ) -> Value:
        """Write one token of :meth:`forward`: Mamba2's step, or the delta rule's."""
        config, ssd = self.config, self.config.beta == "dt"
        softplus = config.decay != "fixed" and config.gate_logit_normalizer is None
        delta = config.delta_rule and config.beta == "sigmoid" and softplus and not config.skip
        served = (ssd and config.feature_map == "silu") or delta
        if not served or self.conv1d is None or self.out_norm is None:
            raise UnservedError
        if config.rotary or config.qk_norm:
            raise UnservedError
        mixed, decay, beta, gate = parts.linear(program, x, "in_proj").split(*self.splits)
        conv = parts.within("conv1d", CausalConv1d)
        mixed = conv.root.write_token(program, conv, mixed, states["conv"])
        q, k, v = mixed.split(*self.widths)
        if self.decay_proj is not None:
            decay = parts.linear(program, decay, "decay_proj")
        names = ("A_log", "dt_bias", "D")
        A_log, dt_bias, D = (parts.weight(self, name, optional=True) for name in names)
        rest = (config.key_heads, recurrent(program, states["ssm"]))
        if ssd:
            y = program.ssd(v, decay, k, q, A_log, D, dt_bias, *rest)
        else:
            if A_log is None:  # a rate that leaves exactly 1
                decay, A_log = beta, torch.full((config.num_heads,), -200.0, dtype=program.dtype)
            given = (q, k, v, decay, beta, A_log, dt_bias, *rest)
            y = program.delta_rule(*given, beta_factor=config.beta_scale)
        gating = {}
        if config.out_gate != "none":
            gate = gate if self.gate_proj is None else parts.linear(program, gate, "gate_proj")
            when = "before" if config.norms_gated else "after"
            gating = {"gate": gate, "gating": f"{config.out_gate} {when}"}
        y = parts.norm(program, y, "out_norm", group=self.out_norm.group, **gating)
        return parts.linear(program, y, "out_proj")

    def dynamics(self, hidden_states: Tensor) -> Dynamics | None:
        """Return the poles of decays that are fixed, or the mean decay of those that are not.

        Poles are ``a``, or ``a e^(i theta)`` with rotary positions. The delta rule's erasing of
        keys is in neither; without a decay there is nothing else, and kernels are measured.
        """
        _, decay, beta, _ = self.in_proj(hidden_states).split(self.splits, dim=-1)
        log_decay, _ = self._decay(decay, beta)
        if log_decay is None:
            log_decay = decay.new_zeros(1, 1, self.config.num_heads)
        kept = log_decay.to(torch.float64).mean(dim=(0, 1)).exp().view(self.config.num_heads, -1)
        if self.dt_bias is not None:
            return Dynamics(decay=kept, depends_on_input=True)
        if self.config.delta_rule:
            return None
        angle = 0 * kept
        if self.config.rotary:
            angle = rotary_angles(self.config.head_k_dim, kept.device)
        return Dynamics(poles=torch.polar(*torch.broadcast_tensors(kept, angle)))

    def _normed(self, mixed: Tensor, q_norm: RMSNorm, k_norm: RMSNorm) -> Tensor:
        """Norm queries and keys of each head of ``[B, L, G K + G K + H V]``."""
        q, k, v = mixed.split(self.widths, dim=-1)
        heads = self.config.key_heads
        q, k = q_norm(split_heads(q, heads)), k_norm(split_heads(k, heads))
        return torch.cat([q.flatten(2).to(v.dtype), k.flatten(2).to(v.dtype), v], dim=-1)

    def _feature(self, x: Tensor) -> Tensor:
        """Return keys or queries ``[B, L, G, K]`` as the recurrence takes them."""
        wide = x.to(torch.promote_types(torch.float32, x.dtype))
        if self.config.feature_map == "elu":
            return F.elu(wide) + 1
        if self.config.feature_map == "silu_l2":
            return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPS)
        return x

    def _decay(self, decay: Tensor, beta: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the decays' logarithms ``[B, L, H]`` or ``[B, L, H, K]``, and betas."""
        config, log_decay, step = self.config, None, None
        exact = torch.promote_types(torch.float32, beta.dtype)
        if config.decay == "fixed":
            powers = torch.arange(5, 5 + config.num_heads, device=beta.device, dtype=torch.float64)
            log_decay = torch.log1p(-torch.exp2(-powers)).to(exact).expand(*beta.shape[:2], -1)
        elif self.dt_bias is not None:
            decay = decay if self.decay_proj is None else self.decay_proj(decay)
            raw = split_heads(decay.to(exact) + self.dt_bias.to(exact), config.num_heads)
            if (tau := config.gate_logit_normalizer) is not None:
                log_decay = F.logsigmoid(raw) / tau
            elif self.A_log is not None:
                step = F.softplus(raw)
                log_decay = -self.A_log.to(exact).exp()[:, None] * step
        if config.beta == "sigmoid":
            return log_decay, config.beta_scale * torch.sigmoid(beta.to(exact))
        return log_decay, step[..., 0] if step is not None and config.beta == "dt" else None

    def _turns(
        self, x: Tensor, state: LayerState, packing: Sequences | None
    ) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the tokens' angles, ``[B or 1, L, 1, K / 2]``; count tokens."""
        seen = state.get("position")
        if packing is None:
            count = torch.full((x.shape[0],), x.shape[1], device=x.device)
        else:
            count = packing.offsets.diff()
        state.put("position", count if seen is None else seen + count)
        if "turns" not in state.shared:
            exact = torch.promote_types(torch.float32, x.dtype)
            place = token_positions(x, seen, packing)
            state.shared["turns"] = rotary_turns(place, self.config.head_k_dim, exact)
        return state.shared["turns"]


class LinearAttentionPreTrainedModel(SSMPreTrainedModel):
    """Loading and initialisation of linear attention."""

    config: LinearAttentionConfig

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the mixer's own parameters; others as in every family.

        ``exp(A_log)``: U(1, 16). ``softplus(dt_bias)``: between 0.001 and 0.1, its logarithm
        uniform. ``dt_bias`` with gate_logit_normalizer: 0. ``D``: 1. Logarithms are float64's,
        which round to the same float32 on every machine.
        """
        super()._init_weights(module)
        if isinstance(module, LinearAttentionMixer):
            if module.A_log is not None:
                rates = torch.empty_like(module.A_log).uniform_(1, 16)
                init.copy_(module.A_log, rates.double().log())
            if module.D is not None:
                init.ones_(module.D)
            if module.dt_bias is not None:
                low, high = math.log(0.001), math.log(0.1)
                dt = torch.empty_like(module.dt_bias).uniform_(low, high).double().exp()
                start = dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus
                init.copy_(module.dt_bias, 0 * dt if module.A_log is None else start)


class LinearAttentionModel(LinearAttentionPreTrainedModel, SSMModel):
    """Linear attention's backbone."""

    mixer_class = LinearAttentionMixer


LinearAttentionForCausalLM = SSMForCausalLM.of(LinearAttentionModel)
LinearAttentionForImageClassification = SSMForImageClassification.of(LinearAttentionModel)
LinearAttentionForSequenceClassification = SSMForSequenceClassification.of(LinearAttentionModel)
