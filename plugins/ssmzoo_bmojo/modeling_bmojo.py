"""B'MOJO: hybrid state-space realizations with eidetic and fading memory (arXiv 2407.06324).

What surprises: one softmax covers three memories: the window, outputs of a state-space model
(fading), and tokens that it predicted badly (eidetic). Memories are fixed for a chunk of ``window``
tokens, counted from a sequence's first token. The choice of tokens has no gradient. Without rotary
positions the state-space model must be in the residual stream; else a layer does not see order.

Dimensions: B batch, L length, D hidden, E inner, N state, S sequences, T tokens of a call,
w window, m_f fading and m_e eidetic tokens, n chunks, H heads, G key heads, d of a head.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ssmzoo.modeling import (
    CausalConv1d,
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
    inverse_softplus,
    is_token,
    recurrent,
    token_of_layer,
)
from ssmzoo_kernels import double, selective_scan
from ssmzoo_kernels.token_step import Program, Value

from .attention import BMojoAttention
from .configuration_bmojo import BMojoConfig

_INNER = "ssm_"  # names of another family's states begin so in a layer's cache
_T = TypeVar("_T")


class BMojoSSM(SSMMixer):
    """Mix tokens by Mamba's selective scan: the fading branch.

    ``[x | z] = in_proj(u)``, ``x = SiLU(conv1d(x))``, ``[dt | B | C] = x_proj(x)``,
    ``out_proj(selective_scan(x, dt_proj(dt), -exp(A_log), B, C) * SiLU(z))``.
    """

    param_group_names: ClassVar[dict[str, str]] = {"A_log": "ssm", "D": "ssm", "dt_bias": "ssm"}
    param_branch = "ssm"

    def __init__(self, config: BMojoConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width, inner, states = config.hidden_size, config.d_inner, config.d_state
        self.in_proj = Linear(width, 2 * inner, bias=False)
        self.conv1d = CausalConv1d(inner, config.d_conv, bias=True)
        self.x_proj = Linear(inner, config.step_rank + 2 * states, bias=False)
        self.dt_proj = Linear(config.step_rank, inner, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.A_log = nn.Parameter(torch.empty(inner, states))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = Linear(inner, width, bias=False, role="mixer_end")
        self.splits = [config.step_rank, states, states]

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        """Map ``[B, L, D]`` to ``[B, L, D]``; the state is ``conv`` and ``ssm [B, E, N]``."""
        if self.writes_tokens and state.initial and is_token(self, hidden_states, packing):
            return token_of_layer(
                self,
                self.write_token,
                hidden_states,
                state,
                lambda: self._scanned(hidden_states, state, None),
                self.in_proj.weight.dtype,
                names=("conv", "ssm"),
            )
        return self._scanned(hidden_states, state, packing)

    def write_token(
        self, program: Program, parts: ModuleParts, x: Value, states: Mapping[str, State]
    ) -> Value:
        """Write one token of :meth:`forward`."""
        x, z = parts.linear(program, x, "in_proj").chunk(2)
        conv = parts.within("conv1d", CausalConv1d)
        u = conv.root.write_token(program, conv, x, states["conv"])
        dt, B, C = parts.linear(program, u, "x_proj").split(*self.splits)
        y = program.selective(
            u,
            parts.linear(program, dt, "dt_proj"),
            B,
            C,
            z,
            parts.weight(self, "A_log"),
            parts.weight(self, "D"),
            parts.weight(self, "dt_bias"),
            recurrent(program, states["ssm"]),
        )
        return parts.linear(program, y, "out_proj")

    def _scanned(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None
    ) -> Tensor:
        x, z = self.in_proj(hidden_states).chunk(2, dim=-1)  # [B, L, E] each
        u, conv_state = self.conv1d(x, state.get("conv"), packing)
        dt, B, C = self.x_proj(u).split(self.splits, dim=-1)
        y, ssm_state = selective_scan(
            u,
            self.dt_proj(dt),
            -torch.exp(self.A_log),
            B,
            C,
            self.D,
            z,
            self.dt_bias,
            state.get("ssm"),
            cu_seqlens=packing,
        )
        state.put("conv", conv_state)
        state.put("ssm", ssm_state)
        return self.out_proj(y)


class BMojoMixer(SSMMixer):
    """Mix tokens by a state-space model, by attention, or by both.

    ``"serial"``: ``y + attention(norm(x + y), y)`` with ``y = ssm(u)``, x the residual stream and
    ``u = norm(x)`` the input; ``"parallel"``: ``attention(u, y)``.

    With ``config.ssm`` the state-space model is another family's mixer.
    """

    reads_residual = True
    # of the open chunk's memories a step writes nothing, of the others a row that nobody reads
    written_in_place = frozenset(
        {"keys_ring", "values_ring", "scores", "fading_keys", "fading_values"}
        | {f"eidetic_{name}" for name in ("keys", "values", "positions", "scores")}
    )
    startable_states = frozenset({"conv", "ssm"})  # attention and memories hold tokens

    def __init__(self, config: BMojoConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        kind = config.mixer_types[layer_idx]
        self.ssm, self.owns_ssm = None, not config.ssm
        if kind not in ("swa", "attention"):
            self.ssm = BMojoSSM(config, layer_idx) if self.owns_ssm else self._foreign(config)
        self.attention = None if kind == "mamba" else BMojoAttention(config, kind)
        self.attn_norm = None
        if self.ssm is not None and self.attention is not None and config.wiring == "serial":
            self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def _foreign(self, config: BMojoConfig) -> SSMMixer:
        """Return a mixer of another family, marked for those who draw its parameters."""
        kind = config.ssm_kind
        ssm = kind.model_class.mixer_class(kind.config, self.layer_idx)
        ssm.param_branch = BMojoSSM.param_branch
        for module in ssm.modules():
            vars(module)["is_foreign"] = True
        self.written_in_place |= {_INNER + name for name in ssm.written_in_place}
        self.decaying_states = frozenset(_INNER + name for name in ssm.decaying_states)
        if ssm.startable_states is not None:
            self.startable_states = frozenset(_INNER + name for name in ssm.startable_states)
        return ssm

    def forward(
        self,
        hidden_states: Tensor,
        state: LayerState,
        packing: Sequences | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Map ``[B, L, D]`` to ``[B, L, D]``; ``residual`` is the residual stream.

        The state is that of attention and that of the state-space model, whose names begin with
        ``ssm_`` where it is another family's.
        """
        y = None
        if self.ssm is not None and self.owns_ssm:
            y = self.ssm(hidden_states, state, packing)
        elif self.ssm is not None:
            inner = replace(state, initial=_inner(state.initial), final={})
            y = self.ssm(hidden_states, inner, packing)
            state.final.update({_INNER + name: final for name, final in inner.final.items()})
        if self.attention is None:
            return cast(Tensor, y)
        if y is None or self.attn_norm is None:
            return self.attention(hidden_states, y, state, packing)
        return y + self.attention(self.attn_norm(cast(Tensor, residual) + y), y, state, packing)

    def write_token(
        self,
        program: Program,
        parts: ModuleParts,
        x: Value,
        states: Mapping[str, State],
        residual: Value | None = None,
    ) -> Value:
        """Write one token of :meth:`forward`."""
        y = None
        if self.ssm is not None:
            ssm = parts.within("ssm", BMojoSSM if self.owns_ssm else type(self.ssm))
            own = states if self.owns_ssm else _inner(states)
            y = ssm.root.write_token(program, ssm, x, own)
        if self.attention is None:
            return cast(Value, y)
        attention = parts.within("attention", BMojoAttention)
        if y is None or self.attn_norm is None:
            return attention.root.write_token(program, attention, x, y, states)
        tokens = parts.norm(program, program.add(residual or x, y), "attn_norm")
        return program.add(y, attention.root.write_token(program, attention, tokens, y, states))

    def next_is_written(self, state: LayerState) -> bool:
        """Tell whether the next token ends no chunk, after which memories are others."""
        if self.ssm is not None and not self.owns_ssm:
            # not so if something wraps it, as PEFT does
            if not getattr(self.ssm, "writes_tokens", False) or self.ssm.hands_on:
                return False
            if not self.ssm.next_is_written(replace(state, initial=_inner(state.initial))):
                return False
        attention = self.attention
        if attention is None or attention.window is None:
            return True
        if not (attention.fading or attention.eidetic):
            return True
        return all((seen + 1) % attention.window for seen in state.initial["seen"].tolist())


def _inner(states: Mapping[str, _T]) -> dict[str, _T]:
    """Return the states of a layer that another family's mixer in it has, by their own names."""
    return {n.removeprefix(_INNER): s for n, s in states.items() if n.startswith(_INNER)}


class BMojoPreTrainedModel(SSMPreTrainedModel):
    """Loading and initialisation of B'MOJO models."""

    config: BMojoConfig

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the initial parameters.

        ================================= =========================================
        embedding                         N(0, initializer_range^2)
        norms, ``D``                      1
        ``in_proj``, ``x_proj``, MLP      U(+-1/sqrt(inputs))
        ``conv1d`` and bias               U(+-1/sqrt(taps))
        ``dt_proj``                       U(+-1/sqrt(rank))
        ``dt_bias``                       softplus^-1 of log-uniform time steps
        ``A_log``                         log(1 .. N)
        q, k, v                           N(0, initializer_range^2)
        ``memory_k_proj``, ``_v_proj``    copies of k and v
        ends of branches                  theirs over sqrt(all branches)
        ``ssm`` of another family         as that family draws it
        ================================= =========================================
        """
        if getattr(module, "is_foreign", False):
            self.config.ssm_kind.drawer._init_weights(module)
            return
        super()._init_weights(module)
        config = self.config
        if isinstance(module, BMojoSSM):
            low, high = math.log(config.dt_min), math.log(config.dt_max)
            step = double(torch.empty_like(module.dt_bias))
            step = step.uniform_(low, high).exp().clamp(min=1e-4)
            init.copy_(module.dt_bias, inverse_softplus(step))
            columns = torch.arange(1, config.d_state + 1, device=module.A_log.device)
            init.copy_(module.A_log, columns.log().expand_as(module.A_log))
            init.ones_(module.D)
        elif isinstance(module, nn.Linear):
            role = getattr(module, "role", "")
            ends = role in ("attention_end", "mixer_end", "mlp_end")
            scale = self._branches() ** -0.5 if ends else 1.0
            if hasattr(module, "copy_of"):
                init.copy_(module.weight, cast(list[Linear], module.copy_of)[0].weight)
            elif role.startswith("attention"):
                init.normal_(module.weight, std=config.initializer_range * scale)
            elif ends:
                bound = module.in_features**-0.5 * scale
                init.uniform_(module.weight, -bound, bound)

    def _branches(self) -> int:
        """Return how many branches add to the residual stream."""
        each = {"bmojo": 2, "bmojo_f": 2}
        if self.config.wiring == "parallel":
            each = {}
        mlps = 0 if self.config.intermediate_size is None else self.config.num_hidden_layers
        return mlps + sum(each.get(kind, 1) for kind in self.config.mixer_types)


class BMojoModel(BMojoPreTrainedModel, SSMModel):
    """B'MOJO's backbone."""

    mixer_class = BMojoMixer


BMojoForCausalLM = SSMForCausalLM.of(BMojoModel)
BMojoForImageClassification = SSMForImageClassification.of(BMojoModel)
BMojoForSequenceClassification = SSMForSequenceClassification.of(BMojoModel)
BMojoForTokenClassification = SSMForTokenClassification.of(BMojoModel)
BMojoForPairClassification = SSMForPairClassification.of(BMojoModel)
