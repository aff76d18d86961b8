"""Longhorn: state-space models as amortized online learners (arXiv 2407.14207).

What surprises: ``x_proj`` returns the key (Mamba's ``B``) before the query; there is no ``A``,
because a token's decay follows from its key and write strength; write strength, state and skip are
always float32.

Dimensions: B batch, L length, D hidden, E inner, N state, K conv width, R write rank, S sequences.
"""

from collections.abc import Mapping
from typing import Literal, cast

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ssmzoo.modeling import (
    CausalConv1d,
    Dynamics,
    LayerState,
    Linear,
    ModuleParts,
    RMSNorm,
    Sequences,
    SSMForCausalLM,
    SSMForImageClassification,
    SSMForPairClassification,
    SSMForSequenceClassification,
    SSMForTokenClassification,
    SSMMixer,
    SSMModel,
    SSMPreTrainedModel,
    State,
    flip,
    recurrent,
)
from ssmzoo_kernels import double, longhorn_scan
from ssmzoo_kernels.token_step import Program, Value

from .configuration_longhorn import LonghornConfig


class LonghornScan(SSMMixer):
    """One direction: ``u = SiLU(conv1d(x))``, ``[dt | k | q] = x_proj(u)``, and their scan."""

    def __init__(self, config: LonghornConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.make_scan(config)

    def make_scan(self, config: LonghornConfig) -> None:
        """Make the layers of a direction."""
        inner = config.d_inner
        self.conv1d = CausalConv1d(inner, config.d_conv, config.conv_bias)
        rank, states = config.step_rank, config.d_state
        self.x_proj = Linear(inner, rank + 2 * states, bias=False, role="keys_and_queries")
        self.dt_proj = Linear(rank, inner, bias=False)
        self.dt_bias = nn.Parameter(torch.full((inner,), config.dt_bias_init))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_norm = RMSNorm(inner, config.rms_norm_eps) if config.out_norm else None
        self.splits = [rank, states, states]
        self.transition: Literal["diagonal", "exact"] = config.transition

    def forward(  # a call, before which offloaded parameters are fetched
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None, *, z: Tensor
    ) -> Tensor:
        """Return the gated scan of the input, ``scan(x) * SiLU(z)``, all ``[B, L, E]``."""
        inputs = self.scan_inputs(hidden_states, state, packing)
        return self.scan(inputs, z, self.out_norm, state, packing)

    def scan_inputs(
        self, x: Tensor, state: LayerState, packing: Sequences | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Map ``x [B, L, E]`` to ``u [B, L, E]``, ``q`` and ``k [B, L, N]``, ``dt [B, L, E]``."""
        u, conv_state = self.conv1d(x, state.get("conv"), packing)
        state.put("conv", conv_state)
        dt, k, q = self.x_proj(u).split(self.splits, dim=-1)  # [B, L, R], [B, L, N], [B, L, N]
        return u, q, k, self.dt_proj(dt)

    def scan(
        self,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor],
        z: Tensor,
        norm: RMSNorm | None,
        state: LayerState,
        packing: Sequences | None,
    ) -> Tensor:
        """Return the gated scan, ``norm(scan) * SiLU(z)``, all ``[B, L, E]``."""
        o, ssm_state = longhorn_scan(
            *inputs,
            self.dt_bias,
            self.D,
            z if norm is None else None,
            state.get("ssm"),
            cu_seqlens=packing,
            transition=self.transition,
        )
        state.put("ssm", ssm_state)
        return o if norm is None else norm(o) * nn.functional.silu(z)


class LonghornMixer(LonghornScan):
    """Mix tokens by Longhorn's scan (the paper's Eq. 7, Algorithm 1) in Mamba's block.

    ``[x | z] = in_proj(h)``, ``u = SiLU(conv1d(x))``, ``[dt | k | q] = x_proj(u)``,
    ``out_proj(longhorn_scan(u, q, k, dt_proj(dt)) * SiLU(z))``.

    In both directions the projections ``in_proj`` and ``out_proj`` are shared. ``"both-shared"``
    scans the same ``u, q, k, dt`` once more from their end; ``"both-separate"`` has a
    :class:`LonghornScan`, ``reverse``, for the reversed ``x``. With ``out_norm`` each direction has
    its own norm.
    """

    reads_both_ways = True

    def __init__(self, config: LonghornConfig, layer_idx: int) -> None:
        SSMMixer.__init__(self, config, layer_idx)
        width, inner = config.hidden_size, config.d_inner
        self.in_proj = Linear(width, 2 * inner, bias=config.use_bias)
        self.make_scan(config)
        self.out_proj = Linear(inner, width, bias=config.use_bias, role="mixer_end")
        self.reverse = self.reverse_norm = None
        if config.directions == "both-separate":
            self.reverse = LonghornScan(config, layer_idx)
        elif config.directions == "both-shared" and config.out_norm:
            self.reverse_norm = RMSNorm(inner, config.rms_norm_eps)

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        """Map ``[B, L, D]`` to ``[B, L, D]``; the state is ``conv`` and ``ssm [B, E, N]``."""
        x, z = self.in_proj(hidden_states).chunk(2, dim=-1)  # [B, L, E] each
        inputs = self.scan_inputs(x, state, packing)
        o = self.scan(inputs, z, self.out_norm, state, packing)
        if self.config.directions != "forward":
            fresh, z = LayerState(packing=packing), flip(z, packing)
            if self.reverse is None:
                u, q, k, dt = (flip(given, packing) for given in inputs)
                back = self.scan((u, q, k, dt), z, self.reverse_norm, fresh, packing)
            else:
                back = self.reverse(flip(x, packing), fresh, packing, z=z)
            o = o + flip(back, packing)
        return self.out_proj(o)

    def write_token(
        self, program: Program, parts: ModuleParts, x: Value, states: Mapping[str, State]
    ) -> Value:
        """Write one token of :meth:`forward`."""
        x, z = parts.linear(program, x, "in_proj").chunk(2)
        conv = parts.within("conv1d", CausalConv1d)
        u = conv.root.write_token(program, conv, x, states["conv"])
        dt, k, q = parts.linear(program, u, "x_proj").split(*self.splits)
        o = program.longhorn(
            u,
            parts.linear(program, dt, "dt_proj"),
            k,
            q,
            z if self.out_norm is None else None,
            parts.weight(self, "dt_bias"),
            parts.weight(self, "D"),
            recurrent(program, states["ssm"]),
            exact=parts.setting(self, "transition") == "exact",
        )
        if self.out_norm is not None:
            o = parts.norm(program, o, "out_norm", gate=z, gating="silu after")
        return parts.linear(program, o, "out_proj")

    def dynamics(self, hidden_states: Tensor) -> Dynamics | None:
        """Return the scan's kernel as seen from the last token, and its mean decay.

        A mixer of both directions is measured instead.

        The kernel at lag l is ``d o[L-1] / d u[L-1-l]`` with keys, queries and write strengths
        fixed, without skip and gate; the root mean square over the batch.
        """
        if self.config.directions != "forward":
            return None
        x, _ = self.in_proj(hidden_states).chunk(2, dim=-1)
        exact = torch.promote_types(torch.float32, x.dtype)
        u, q, k, dt = (t.detach().to(exact) for t in self.scan_inputs(x, LayerState(), None))
        with torch.enable_grad():
            u.requires_grad_()
            o, _ = longhorn_scan(u, q, k, dt, self.dt_bias.detach(), transition=self.transition)
            (slope,) = torch.autograd.grad(o[:, -1].sum(), u)  # [B, L, E]
        kernel = slope.square().mean(dim=0).sqrt().flip(0).T
        return Dynamics(kernel=kernel, decay=self._mean_decay(k, dt), depends_on_input=True)

    def _mean_decay(self, k: Tensor, dt: Tensor) -> Tensor:
        """Return the geometric mean of ``1 - eps k^2`` over all tokens, ``[E, N]``."""
        k, dt = k.flatten(0, 1), dt.flatten(0, 1)
        energy = k.square().sum(dim=-1, keepdim=True)
        eps = 1 / (1 + torch.exp(-(dt + self.dt_bias).clamp(min=-80)) + energy)
        tokens, logs = k.shape[0], double(k.new_zeros(eps.shape[1], k.shape[1]))
        # a few tokens at a time: all decays at once are too many
        for some_eps, some_k in zip(eps.split(16), k.split(16), strict=True):
            decay = 1 - some_eps.unsqueeze(2) * some_k.square().unsqueeze(1)
            logs += decay.clamp(min=torch.finfo(decay.dtype).tiny).log().sum(dim=0).to(logs)
        return torch.exp(logs / tokens)


class LonghornPreTrainedModel(SSMPreTrainedModel):
    """Loading and initialisation of Longhorn models."""

    config: LonghornConfig

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the initial parameters.

        ==================== =======================================
        embedding            N(0, initializer_range^2)
        norms, ``D``         1
        ``in_proj``          U(+-1/sqrt(D))
        ``conv1d`` and bias  U(+-1/sqrt(K))
        ``x_proj``           U(+-1/sqrt(E)), keys and queries times
                             key_init_scale and query_init_scale
        ``dt_proj``          U(+-1/sqrt(R))
        ``dt_bias``          dt_bias_init
        ``out_proj``         U(+-1/sqrt(E)), with
                             rescale_prenorm_residual divided by
                             sqrt(num_hidden_layers)
        other biases         0
        ==================== =======================================
        """
        super()._init_weights(module)
        config, role = self.config, getattr(module, "role", "")
        if isinstance(module, LonghornScan):
            init.constant_(module.dt_bias, config.dt_bias_init)
            init.ones_(module.D)
        elif role == "keys_and_queries":
            weight = cast(nn.Linear, module).weight
            scale = torch.ones(len(weight), 1, device=weight.device, dtype=weight.dtype)
            scale[-2 * config.d_state : -config.d_state] = config.key_init_scale
            scale[-config.d_state :] = config.query_init_scale
            init.copy_(weight, weight * scale)
        elif role == "mixer_end" and config.rescale_prenorm_residual:
            weight = cast(nn.Linear, module).weight
            bound = (weight.shape[1] * config.num_hidden_layers) ** -0.5
            init.uniform_(weight, -bound, bound)


class LonghornModel(LonghornPreTrainedModel, SSMModel):
    """Longhorn's backbone."""

    mixer_class = LonghornMixer


LonghornForCausalLM = SSMForCausalLM.of(LonghornModel)
LonghornForSequenceClassification = SSMForSequenceClassification.of(LonghornModel)
LonghornForTokenClassification = SSMForTokenClassification.of(LonghornModel)
LonghornForImageClassification = SSMForImageClassification.of(LonghornModel)
LonghornForPairClassification = SSMForPairClassification.of(LonghornModel)
