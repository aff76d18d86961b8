"""SpaceTime: time series with simple discrete state spaces (arXiv 2303.09489).

What surprises: a forward pass makes each kernel anew, from a transfer function in float64, and only
decoding has a state. B batch, L length, H features, K state spaces, order d.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ssmzoo.modeling import (
    DerivedValue,
    Dropout,
    Dynamics,
    LayerState,
    Linear,
    ModuleParts,
    Sequences,
    SSMDecoder,
    SSMForCausalLM,
    SSMForForecasting,
    SSMForImageClassification,
    SSMForPairClassification,
    SSMForSequenceClassification,
    SSMForTokenClassification,
    SSMMixer,
    SSMModel,
    SSMPreTrainedModel,
    State,
    UnservedError,
    recurrent,
)
from ssmzoo_kernels import (
    causal_conv1d,
    companion_response,
    companion_scan,
    companion_state,
    companion_step,
    double,
    fft_conv,
    rational_kernel,
)
from ssmzoo_kernels.companion_step import newest_first
from ssmzoo_kernels.token_step import Program, Value

from .companion import fixed_filters, transfer_function, unit
from .configuration_spacetime import SpaceTimeConfig


class SpaceTimeMixer(SSMMixer):
    """Filter each feature by a companion state space, then mix features.

    ``y[t] = sum_l C A^l B u[t-l] + D u[t]``, then ``y + out_proj(GELU(y))`` or its GLU alone.
    """

    param_group_names: ClassVar[Mapping[str, str]] = dict.fromkeys("aBCD", "ssm")
    written_in_place = frozenset({"ring"})  # a step fills its free place
    config: SpaceTimeConfig
    fixed: Tensor

    def __init__(self, config: SpaceTimeConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width = config.hidden_size
        kernels = width if config.n_kernels is None else config.n_kernels
        self.heads = width // kernels
        shape = (kernels, config.d_state)
        self.a, self.B, self.C = (nn.Parameter(torch.empty(shape)) for _ in "aBC")
        self.D = nn.Parameter(torch.empty(width))
        self.dropout = Dropout(config.mixer_dropout, config.tie_dropout)
        self.out_proj = Linear(width, 2 * width if config.block == "glu" else width)
        self.preprocesses = config.preprocess and layer_idx == 0
        if self.preprocesses:
            self.register_buffer("fixed", fixed_filters(width))
        self._table: DerivedValue[list[Tensor]] = DerivedValue()

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        """Map ``[B, L, H]`` to ``[B, L, H]``.

        The state is ``ring [B, d + 1, H]`` and ``position [B]``, and of fixed filters ``past``.
        """
        self._table.refresh(hidden_states, state)
        u = x = hidden_states.to(torch.promote_types(torch.float32, hidden_states.dtype))
        if self.preprocesses:
            u, past = causal_conv1d(x, self.fixed, None, state.get("past"), cu_seqlens=packing)
            state.put("past", past)
        y = self._filtered(u, state, packing)
        mixed = self.out_proj(self.dropout(F.gelu(y).to(hidden_states.dtype), packing))
        if self.config.block == "glu":
            mixed, y = F.glu(mixed, dim=-1), 0
        # the block adds its input, the paper the output of the fixed filters
        return (mixed + y + (u - x) if self.preprocesses else mixed + y).to(hidden_states.dtype)

    def write_token(
        self, program: Program, parts: ModuleParts, x: Value, states: Mapping[str, State]
    ) -> Value:
        """Write one token of :meth:`forward`, of layers without fixed filters."""
        if self.preprocesses or parts.setting(parts.layer("dropout"), "training"):
            raise UnservedError
        a, b, gain = parts.derived(self.tables)
        ring, position = recurrent(program, states["ring"]), states["position"].number
        y = program.companion(x, a.T, b.T, gain, ring, position)
        program.count(position, -1)
        mixed = parts.linear(program, program.map(y, "gelu"), "out_proj")
        if self.config.block == "mlp":
            return program.add(mixed, y)
        value, gate = mixed.chunk(2)
        return program.gated(gate, value, by="sigmoid")

    def filters(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return denominators and numerators ``[K, d]`` and direct gains ``[H]``; float64."""
        alpha, beta = transfer_function(unit(self.a), double(self.B), double(self.C))
        now = beta[
            :, :1
        ]  # C B, a token's effect on its own output; the rest is read before the update
        b = F.pad(beta[:, 1:], (0, 1)) - now * alpha
        return alpha, b, double(self.D) + now[:, 0].repeat_interleave(self.heads)

    def tables(self) -> list[Tensor]:
        """Return the factors of a step: every feature's a and b, ``[H, d]``, and gains."""

        def make() -> list[Tensor]:
            exact = torch.promote_types(torch.float32, self.a.dtype)
            *pair, gain = (x.to(self.a.device, exact) for x in self.filters())
            own = (x.repeat_interleave(self.heads, dim=0).T.contiguous().T for x in pair)
            return [*own, gain]

        return self._table.get(self, None, make)

    def dynamics(self, hidden_states: Tensor) -> Dynamics:
        """Return kernels without direct terms and, up to order 128, the eigenvalues of A."""
        alpha, b, _ = self.filters()
        kernel = rational_kernel(alpha, b, hidden_states.shape[1])
        kernel = kernel.repeat_interleave(self.heads, dim=0).to(hidden_states)
        if self.config.d_state > 128:
            return Dynamics(kernel)
        A = torch.diag_embed(torch.ones_like(alpha[:, 1:]), offset=-1)
        A[:, 0] = -alpha
        return Dynamics(kernel, poles=torch.linalg.eigvals(A))

    def _filtered(self, u: Tensor, state: LayerState, packing: Sequences | None) -> Tensor:
        """Filter ``[B, L, H]`` from the cached state; cache the final state."""
        ring, position, past = state.get("ring"), state.get("position"), None
        goes_on = packing is None and not torch.is_grad_enabled()
        if goes_on and u.shape[1] == 1 and ring is not None and position is not None:
            inplace = not torch.compiler.is_compiling()
            step = companion_step(u[:, 0], ring, position, *self.tables(), inplace=inplace)
            y, ring, position = step[0][:, None], *step[1:]
        else:
            a, b, gain = (x.to(u) for x in self.filters())
            taps = u.shape[1] if packing is None else packing.kernel_length()
            kernel = rational_kernel(a, b, taps).repeat_interleave(self.heads, dim=0)
            if not state.keep:
                return fft_conv(u, kernel, gain, cu_seqlens=packing)[0]
            if ring is not None and position is not None:
                past = newest_first(ring, position)
            b = b.repeat_interleave(self.heads, dim=0)
            y, last = companion_scan(u, a, b, gain, past, kernel=kernel, cu_seqlens=packing)
            ring = F.pad(last, (0, 0, 0, 1))
            position = torch.zeros(ring.shape[0], dtype=torch.int64, device=u.device)
        state.put("ring", ring)
        state.put("position", position)
        return y


class SpaceTimeDecoder(SSMDecoder):
    """Forecast by a closed loop, ``K x[t-1]`` for ``u[t]``; all vectors have 1-norms of 1."""

    param_group_names: ClassVar[Mapping[str, str]] = dict.fromkeys("aBCK", "ssm")

    def __init__(self, config: SpaceTimeConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.warm_up, shape = config.d_state, (config.hidden_size, config.d_state)
        self.raw_start = config.raw_start
        self.a, self.B, self.C, self.K = (nn.Parameter(torch.empty(shape)) for _ in "aBCK")

    def filters(self) -> list[Tensor]:
        """Return the denominators, and the numerators of C and K, ``[H, d]`` float64."""
        return transfer_function(*(unit(x) for x in (self.a, self.B, self.C, self.K)))

    def forecast(self, hidden_states: Tensor, packing: Sequences | None, horizon: int) -> Tensor:
        """Map ``[B, L, H]`` to ``C (A + B K)^h x[L-1]`` for h from 0, ``[B, horizon, H]``."""
        alpha, c, k = self.filters()
        last = companion_state(hidden_states, alpha.to(hidden_states), cu_seqlens=packing)
        # 1 - k / alpha is a quotient of denominators: closing the loop subtracts k from alpha; it
        # may grow, and float32 would bury its first steps under the rounding of its last
        later = companion_response(double(last), alpha - k, c, horizon)
        return later * double(self.B).abs().sum(-1) if self.raw_start else later

    def open_loop(self, hidden_states: Tensor, packing: Sequences | None) -> list[Tensor]:
        """Return ``C x[t]`` and ``K x[t]``, ``[B, L, H]`` each."""
        u = hidden_states
        alpha, *readouts = (x.to(u) for x in self.filters())
        kernels = (rational_kernel(alpha, b, u.shape[1] + 1)[:, 1:] for b in readouts)
        return [fft_conv(u, kernel.contiguous(), cu_seqlens=packing)[0] for kernel in kernels]


class SpaceTimePreTrainedModel(SSMPreTrainedModel):
    """Loading and initialisation of SpaceTime models."""

    config: SpaceTimeConfig

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw a, B, C and K by ``kernel_init``, D from N(0, 1), and ``preprocess``'s windows."""
        super()._init_weights(module)
        if isinstance(module, SpaceTimeMixer | SpaceTimeDecoder):
            bound = self.config.d_state**-0.5
            for name in module.param_group_names:
                init.normal_(getattr(module, name))
                if self.config.kernel_init == "xavier" and name != "D":
                    init.uniform_(getattr(module, name), -bound, bound)
        if isinstance(module, SpaceTimeMixer) and module.preprocesses:
            init.copy_(module.fixed, fixed_filters(self.config.hidden_size))


class SpaceTimeModel(SpaceTimePreTrainedModel, SSMModel):
    """SpaceTime's backbone."""

    mixer_class = SpaceTimeMixer


SpaceTimeForCausalLM = SSMForCausalLM.of(SpaceTimeModel)
SpaceTimeForImageClassification = SSMForImageClassification.of(SpaceTimeModel)
SpaceTimeForSequenceClassification = SSMForSequenceClassification.of(SpaceTimeModel)
SpaceTimeForPairClassification = SSMForPairClassification.of(SpaceTimeModel)
SpaceTimeForTokenClassification = SSMForTokenClassification.of(SpaceTimeModel)
SpaceTimeForForecasting = SSMForForecasting.of(SpaceTimeModel, decoder_class=SpaceTimeDecoder)
