"""Gated linear attention: the models of ten papers, from the Linear Transformer to mLSTM.

One mixer, whose configuration says which. What surprises: ``in_proj`` gives queries, keys and
values in this order, then the inputs of decay, write strength and gate. Decays and states are
always float32.

Dimensions: B batch, L length, D hidden, H heads, G key heads, K key size, V value size, W writes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ssmzoo.modeling import (
    CausalConv1d,
    DerivedValue,
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
    inverse_softplus,
    recurrent,
    rotary_angles,
    rotary_turns,
    rotated,
    split_heads,
    token_positions,
)
from ssmzoo_kernels import double, gated_linear_attention
from ssmzoo_kernels.token_step import Program, Value
from ssmzoo_kernels.validation import Packing

from .configuration_linear_attention import LinearAttentionConfig

_EPS = 1e-6  # added to squared lengths, and to sums of weights
_GATE_CAP = 15.0  # of mLSTM's gates: exp(15) times the tokens is far from float32's end


class LowerBounds(nn.Module):
    """HGRN2's lower bounds of the decays, which rise from layer to layer.

    ``b[l] = p[1] + ... + p[l]`` in layer l, where p is the softmax of ``weight`` over all layers;
    the first layer, 0, has none.
    """

    param_group_names: ClassVar[Mapping[str, str]] = {"weight": "ssm"}

    def __init__(self, config: LinearAttentionConfig) -> None:
        super().__init__()
        width = config.num_heads * config.head_k_dim
        self.weight = nn.Parameter(torch.zeros(config.num_hidden_layers, width))

    def forward(self, layer: int) -> Tensor:
        """Return a layer's bounds ``[H K]``, in float32."""
        exact = torch.promote_types(torch.float32, self.weight.dtype)
        return self.weight.softmax(dim=0, dtype=exact)[1 : layer + 1].sum(dim=0)


class LinearAttentionMixer(SSMMixer):
    """Decay a matrix of states, write a value under its key, read with a query; norm and gate.

    ``out_proj(gate(norm(S^T q)))`` with ``S <- diag(a) S``, ``S <- S + k (beta (v - S^T k))^T``, or
    ``S <- S + k (beta v)^T`` without the delta rule.

    Attributes:
        owner: HGRN2's model, which has the lower bounds, in a tuple: it is no part of this module.
    """

    param_group_names: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("A_log", "dt_bias", "beta_bias", "D"), "ssm"
    )
    owner: "tuple[LinearAttentionModel, ...]" = ()
    config: LinearAttentionConfig

    def __init__(self, config: LinearAttentionConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads, both = config.num_heads, config.key_heads * config.head_k_dim
        inner = heads * config.head_v_dim
        decays = {"scalar": heads, "channel": heads * config.head_k_dim}.get(config.decay, 0)
        writes, own_keys = config.num_writes, config.feature_map == "complement"
        betas = heads * writes if config.beta in ("sigmoid", "exp") else 0
        gates = 0 if config.out_gate == "none" else inner
        low, gate_low = config.decay_rank, config.gate_rank
        self.widths = [both, 0 if own_keys else both * writes, inner * writes]  # of q, k and v
        self.splits = [sum(self.widths), low or decays, betas, gate_low or gates]
        self.in_proj = Linear(config.hidden_size, sum(self.splits), bias=False)
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_k_dim, config.rms_norm_eps) if config.qk_norm else None
            for _ in range(2)
        )
        self.activation = "silu" if config.feature_map in ("silu", "silu_l2") else None
        taps, bias = config.d_conv, config.conv_bias
        self.conv1d = CausalConv1d(self.splits[0], taps, bias, self.activation) if taps else None
        self.decay_proj = Linear(low, decays, bias=False) if low else None
        self.gate_proj = Linear(gate_low, gates, config.gate_bias) if gate_low else None
        rates = heads if decays and config.gate_logit_normalizer is None else 0
        self.A_log = nn.Parameter(torch.empty(rates)) if rates else None
        self.dt_bias = nn.Parameter(torch.empty(decays)) if decays and not own_keys else None
        self.beta_bias = nn.Parameter(torch.empty(heads)) if config.beta == "exp" else None
        self.D = nn.Parameter(torch.empty(heads)) if config.skip else None
        groups = {"head": config.head_v_dim, "head_layer": config.head_v_dim, "gated": inner}
        groups["gated_group"] = inner // config.key_heads
        group, self.norms_gated = groups.get(config.out_norm), config.norms_gated
        normed = config.head_v_dim if config.out_norm == "head" else inner
        eps = config.rms_norm_eps if config.out_norm_eps is None else config.out_norm_eps
        self.out_norm = GroupRMSNorm(normed, eps, group) if group else None
        self.out_proj = Linear(inner, config.hidden_size, bias=False)
        self._room: DerivedValue[Tensor] = DerivedValue()

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        """Map ``[B, L, D]`` to ``[B, L, D]``.

        The state is ``ssm [B, H, K, V]``, of "elu" and mLSTM with one value more, the sum of
        weights, and of Mamba2 ``[B, H, V, K]``; ``conv``; with rotary positions the tokens seen,
        ``position [B]``.
        """
        config = self.config
        mixed, decay, beta, gate = self.in_proj(hidden_states).split(self.splits, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            mixed = self._normed_keys(mixed, self.q_norm, self.k_norm)
        if self.conv1d is not None:
            mixed, final = self.conv1d(mixed, state.get("conv"), packing)
            state.put("conv", final)
        elif self.activation is not None:
            mixed = F.silu(mixed)
        q, k, v = mixed.split(self.widths, dim=-1)
        log_decay, beta = self._decay(decay, beta)
        q = self._feature(split_heads(q, config.key_heads))
        if config.feature_map == "complement":
            self._room.refresh(hidden_states, state)
            assert log_decay is not None
            k = -torch.expm1(log_decay).to(v.dtype)
        else:
            k = self._feature(split_heads(k, config.key_heads * config.num_writes))
        if config.rotary:
            turns = self._turns(hidden_states, state, packing)
            q, k = (rotated(x, turns) for x in (q, k))
        v = split_heads(v, config.num_heads * config.num_writes)
        y = self._recurrence(q, k, v, log_decay, beta, state, packing).to(v.dtype)
        exact = torch.promote_types(torch.float32, v.dtype)
        if self.D is not None:
            y = (y.to(exact) + self.D.to(exact)[:, None] * v).to(v.dtype)
        return self.out_proj(self._normed(y, gate))

    def _recurrence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        state: LayerState,
        packing: Packing | None,
    ) -> Tensor:
        """Return the heads' outputs ``[B, L, H, V]``; keys and values are ``[B, L, W heads, .]``.

        W writes are W tokens: the first decays the state, the last reads it.
        """
        config, start, writes = self.config, state.get("ssm"), self.config.num_writes
        exact = torch.promote_types(torch.float32, v.dtype)
        sums, by_value = config.sums_weights, config.beta == "dt"  # as Mamba2's instruction has it
        if sums:
            v = F.pad(v.to(exact), (0, 1), value=1.0)
        if writes > 1:
            k, v = (x.reshape(x.shape[0], -1, x.shape[2] // writes, x.shape[3]) for x in (k, v))
            beta = beta if beta is None else beta.reshape(*v.shape[:3])
            q = _among(q, writes, -1)
            log_decay = log_decay if log_decay is None else _among(log_decay, writes, 0)
            if packing is not None:
                packing = Packing(packing.offsets * writes, packing.length * writes)
        y, final = gated_linear_attention(
            q,
            k,
            v,
            log_decay,
            beta,
            start.transpose(2, 3) if by_value and start is not None else start,
            cu_seqlens=packing,
            rule="delta" if config.delta_rule else "additive",
            scale=1.0 if by_value or config.feature_map == "elu" else None,
        )
        state.put("ssm", final.transpose(2, 3).contiguous() if by_value else final)
        y = y[:, writes - 1 :: writes]
        if not sums:
            return y
        y, weight = y[..., :-1], y[..., -1:]
        return y / (weight + _EPS if config.feature_map == "elu" else weight.abs().clamp(min=1))

    def _normed(self, y: Tensor, gate: Tensor) -> Tensor:
        """Norm and gate outputs ``[B, L, H, V]``, in the configuration's order; join the heads."""
        config, exact = self.config, torch.promote_types(torch.float32, y.dtype)
        if config.out_norm == "head_layer":
            y = y.to(exact)
            y = (y - y.mean(dim=-1, keepdim=True)).flatten(2)
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
        return y

    def write_token(
        self, program: Program, parts: ModuleParts, x: Value, states: Mapping[str, State]
    ) -> Value:
        """Write one token of :meth:`forward`: Mamba2's step, the delta rule's, or a plain sum's."""
        config, ssd = self.config, self.config.beta == "dt"
        softplus = config.decay != "fixed" and config.gate_logit_normalizer is None
        delta = config.delta_rule and config.beta == "sigmoid" and softplus and not config.skip
        plain = config.feature_map in ("identity", "complement") and config.beta == "none"
        plain = plain and not config.skip and (config.decay == "none" or not softplus)
        served = (plain or self.conv1d is not None) and (plain or not config.rotary)
        served = served and ((ssd and config.feature_map == "silu") or delta or plain)
        if not served or config.out_norm == "head_layer" or config.qk_norm or not self.out_norm:
            raise UnservedError
        mixed, decay, beta, gate = parts.linear(program, x, "in_proj").split(*self.splits)
        if self.conv1d is not None:
            conv = parts.within("conv1d", CausalConv1d)
            mixed = conv.root.write_token(program, conv, mixed, states["conv"])
        q, k, v = mixed.split(*self.widths)
        if self.decay_proj is not None:
            decay = parts.linear(program, decay, "decay_proj")
        names = ("A_log", "dt_bias", "D")
        A_log, dt_bias, D = (parts.weight(self, name, optional=True) for name in names)
        rest = (config.key_heads, recurrent(program, states["ssm"]))
        if plain:
            y = self._write_sum(program, parts, (q, k, v, decay), states)
        elif ssd:
            y = program.ssd(v, decay, k, q, A_log, D, dt_bias, *rest)
        else:
            count, y = config.num_writes, v  # y is the last write's
            scale = parts.setting(config, "beta_scale")
            still = torch.full((config.num_heads,), -200.0, dtype=program.dtype)  # leaves exactly 1
            pieces = (x.split(*[x.width // count] * count) for x in (k, v, beta))
            for place, (k_w, v_w, beta_w) in enumerate(zip(*pieces, strict=True)):
                if A_log is None or place:
                    gates = (beta_w, beta_w, still, None)
                else:
                    gates = (decay, beta_w, A_log, dt_bias)
                y = program.delta_rule(q, k_w, v_w, *gates, *rest, beta_factor=scale)
        gating = {}
        if config.out_gate != "none":
            gate = gate if self.gate_proj is None else parts.linear(program, gate, "gate_proj")
            when = "before" if config.norms_gated else "after"
            gating = {"gate": gate, "gating": f"{config.out_gate} {when}"}
        y = parts.norm(program, y, "out_norm", group=self.out_norm.group, **gating)
        return parts.linear(program, y, "out_proj")

    def _write_sum(
        self, program: Program, parts: ModuleParts, x: Sequence[Value], states: Mapping[str, State]
    ) -> Value:
        """Write linear attention as it is in GLA, RetNet and HGRN2.

        ``x``: queries, keys, values and the decays' input.
        """
        config, (q, k, v, decay) = self.config, x
        tau = parts.setting(config, "gate_logit_normalizer")
        shrink: Value | Tensor | None = None
        if config.decay == "fixed":
            shrink = fixed_decays(config.num_heads).exp().to(program.dtype)
        elif config.feature_map == "complement":
            q = program.gated(q, q, by="sigmoid")
            k = program.map(decay, "sigmoid", factor=-1.0)
            if self.layer_idx:  # (1 - b) sigmoid(-x), of which the decay is the complement
                k = program.map(k, weight=parts.derived(self._headroom))
            shrink = program.map(k, factor=-1.0, bias=torch.ones(k.width, dtype=program.dtype))
        elif tau is not None:
            dt_bias = parts.weight(self, "dt_bias", optional=True)
            # logsigmoid(x) = -softplus(-x)
            away = program.map(program.map(decay, bias=dt_bias), "softplus", factor=-1.0)
            shrink = program.map(away, "exp", factor=-1 / tau)
        if config.rotary:
            seen = states["position"].number
            q, k = (program.rotate(y, config.head_k_dim, 10_000.0, seen) for y in (q, k))
            program.count(seen, 1)
        sizes: dict[str, Any] = {"heads": config.num_heads, "groups": config.key_heads}
        sizes["scale"] = config.head_k_dim**-0.5
        return program.linear_attention(q, k, v, shrink, recurrent(program, states["ssm"]), **sizes)

    def dynamics(self, hidden_states: Tensor) -> Dynamics | None:
        """Return the poles of decays that are fixed, or the mean decay of those that are not.

        Poles are ``a``, or ``a e^(i theta)`` with rotary positions. The delta rule's erasing of
        keys is in neither; without a decay there is nothing else, and kernels are measured.
        """
        _, decay, beta, _ = self.in_proj(hidden_states).split(self.splits, dim=-1)
        log_decay, _ = self._decay(decay, beta)
        if log_decay is None:
            log_decay = decay.new_zeros(1, 1, self.config.num_heads)
        kept = double(log_decay).mean(dim=(0, 1)).exp().view(self.config.num_heads, -1)
        if self.config.decay in ("scalar", "channel"):
            return Dynamics(decay=kept, depends_on_input=True)
        if self.config.delta_rule:
            return None
        angle = 0 * kept
        if self.config.rotary:
            angle = rotary_angles(self.config.head_k_dim, kept.device)
        return Dynamics(poles=torch.polar(*torch.broadcast_tensors(kept, angle)))

    def _normed_keys(self, mixed: Tensor, q_norm: RMSNorm, k_norm: RMSNorm) -> Tensor:
        """Norm queries and keys of each head of ``[B, L, G K + W G K + W H V]``."""
        q, k, v = mixed.split(self.widths, dim=-1)
        heads = self.config.key_heads
        q, k = q_norm(split_heads(q, heads)), k_norm(split_heads(k, heads * self.config.num_writes))
        return torch.cat([q.flatten(2).to(v.dtype), k.flatten(2).to(v.dtype), v], dim=-1)

    def _feature(self, x: Tensor) -> Tensor:
        """Return keys or queries ``[B, L, G, K]`` as the recurrence takes them."""
        wide = x.to(torch.promote_types(torch.float32, x.dtype))
        if self.config.feature_map == "elu":
            return F.elu(wide) + 1
        if self.config.feature_map == "complement":
            return F.silu(x)
        if self.config.feature_map == "silu_l2":
            return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPS)
        return x

    def _decay(self, decay: Tensor, beta: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the decays' logarithms ``[B, L, H]`` or ``[B, L, H, K]``, and betas."""
        config, log_decay, step = self.config, None, None
        exact = torch.promote_types(torch.float32, beta.dtype)
        if config.decay == "fixed":
            log_decay = fixed_decays(config.num_heads, beta.device).to(beta.device, exact)
            log_decay = log_decay.expand(*beta.shape[:2], -1)
        elif config.decay != "none":
            decay = decay if self.decay_proj is None else self.decay_proj(decay)
            bias = 0.0 if self.dt_bias is None else self.dt_bias.to(exact)
            raw = split_heads(decay.to(exact) + bias, config.num_heads)
            if (tau := config.gate_logit_normalizer) is not None:
                log_decay = F.logsigmoid(_capped(raw) if config.beta == "exp" else raw) / tau
                if config.feature_map == "complement" and self.layer_idx:
                    log_decay = log_decay - F.logsigmoid(raw - self._bound(raw).log())
            elif self.A_log is not None:
                step = F.softplus(raw)
                log_decay = -self.A_log.to(exact).exp()[:, None] * step
        if self.beta_bias is not None:
            return log_decay, _capped(beta.to(exact) + self.beta_bias.to(exact)).exp()
        if config.beta == "sigmoid":
            return log_decay, config.beta_scale * torch.sigmoid(beta.to(exact))
        return log_decay, step[..., 0] if step is not None and config.beta == "dt" else None

    def _bound(self, like: Tensor) -> Tensor:
        """Return b ``[H, K]``: decays are ``b + (1 - b) sigmoid(x)``."""
        if not self.owner:
            raise ValueError(
                f"layer {self.layer_idx} of HGRN2 needs the lower bounds of a model; take "
                "layer_idx=0, which has none, or the layer of a LinearAttentionModel"
            )
        return self.owner[0].lower_bounds(self.layer_idx).to(like).view(like.shape[2:])

    def _headroom(self) -> Tensor:
        """Return ``1 - b`` ``[H K]``, the same object until the lower bounds change."""
        bounds = self.owner[0].lower_bounds
        return self._room.get(bounds, self.layer_idx, lambda: 1 - bounds(self.layer_idx))

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


def fixed_decays(heads: int, device: torch.device | None = None) -> Tensor:
    """Return ``log(1 - 2^(-5 - h))`` of each head, in float64."""
    powers = double(torch.arange(5, 5 + heads, device=device))
    return torch.log1p(-torch.exp2(-powers))


def _capped(x: Tensor) -> Tensor:
    """Return mLSTM's soft-capped input of a gate."""
    return _GATE_CAP * torch.tanh(x / _GATE_CAP)


def _among(x: Tensor, writes: int, place: int) -> Tensor:
    """Return ``[B, W L, ...]``: ``x [B, L, ...]`` at tokens' first or last writes, 0 elsewhere."""
    others = x.new_zeros(*x.shape[:2], writes - 1, *x.shape[2:])
    own = x.unsqueeze(2)
    return torch.cat([others, own] if place else [own, others], dim=2).flatten(1, 2)


class LinearAttentionPreTrainedModel(SSMPreTrainedModel):
    """Loading and initialisation of linear attention."""

    config: LinearAttentionConfig

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the mixer's own parameters; others as in every family.

        ``exp(A_log)``: U(1, 16). ``softplus(dt_bias)``: between 0.001 and 0.1, its logarithm
        uniform. ``dt_bias`` with gate_logit_normalizer: 0, but of mLSTM from 3 to 6, rising from
        head to head, and its ``beta_bias``: -10. ``D``: 1. Lower bounds: evenly rising. Logarithms
        are float64's, which round to the same float32 on every machine.
        """
        super()._init_weights(module)
        if isinstance(module, LowerBounds):
            init.zeros_(module.weight)
        if isinstance(module, LinearAttentionMixer):
            if module.A_log is not None:
                rates = torch.empty_like(module.A_log).uniform_(1, 16)
                init.copy_(module.A_log, double(rates).log())
            if module.D is not None:
                init.ones_(module.D)
            if module.dt_bias is not None:
                low, high = math.log(0.001), math.log(0.1)
                dt = double(torch.empty_like(module.dt_bias).uniform_(low, high)).exp()
                start = inverse_softplus(dt)
                init.copy_(module.dt_bias, 0 * dt if module.A_log is None else start)
            if module.beta_bias is not None and module.dt_bias is not None:
                init.constant_(module.beta_bias, -10.0)
                init.copy_(module.dt_bias, torch.linspace(3, 6, module.dt_bias.numel()))


class LinearAttentionModel(LinearAttentionPreTrainedModel, SSMModel):
    """Linear attention's backbone. HGRN2's holds the lower bounds of its layers' decays."""

    mixer_class = LinearAttentionMixer

    def __init__(self, config: LinearAttentionConfig) -> None:
        super().__init__(config)
        if config.feature_map == "complement":
            self.lower_bounds = LowerBounds(config)
            for module in self.modules():
                if isinstance(module, LinearAttentionMixer):
                    module.owner = (self,)


class SoftCappedHead(Linear):
    """A language model's head with logits ``c tanh(x / c)``."""

    def __init__(self, width: int, classes: int, cap: float) -> None:
        super().__init__(width, classes, bias=False)
        self.cap = cap

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[..., D]`` to logits ``[..., V]``."""
        logits = super().forward(input)
        exact = torch.promote_types(torch.float32, logits.dtype)
        return (self.cap * torch.tanh(logits.to(exact) / self.cap)).to(logits.dtype)


def _make_head(model: SSMForCausalLM, config: LinearAttentionConfig) -> nn.Module:
    """Return a language model's head; see :meth:`SSMForCausalLM.make_head`."""
    if (cap := config.logit_soft_cap) is None:
        return SSMForCausalLM.make_head(model, config)
    return SoftCappedHead(config.hidden_size, config.vocab_size, cap)


def _set_head(model: SSMForCausalLM, head: nn.Module) -> None:
    """Take another head; a plain linear one, as of a resized vocabulary, is capped as before."""
    cap = model.config.logit_soft_cap
    if cap is not None and type(head) is nn.Linear:
        with torch.device("meta"):
            capped = SoftCappedHead(head.in_features, head.out_features, cap)
        capped.weight, head = head.weight, capped
    model.lm_head = head


LinearAttentionForCausalLM = SSMForCausalLM.of(
    LinearAttentionModel, make_head=_make_head, set_output_embeddings=_set_head
)
LinearAttentionForImageClassification = SSMForImageClassification.of(LinearAttentionModel)
LinearAttentionForSequenceClassification = SSMForSequenceClassification.of(LinearAttentionModel)
