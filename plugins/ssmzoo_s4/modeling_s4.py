"""S4: efficiently modeling long sequences with structured state spaces (arXiv 2111.00396).

What surprises: training convolves with a kernel that each forward pass computes anew, in float64;
only decoding has a state. The parameter is C itself: no length is part of the model. The
mathematics is in ``dplr.py``. Dimensions: B batch, L length, H features, N conjugate pairs.
"""

import math
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
    SSMForCausalLM,
    SSMForImageClassification,
    SSMForPairClassification,
    SSMForSequenceClassification,
    SSMForTokenClassification,
    SSMMixer,
    SSMModel,
    SSMPreTrainedModel,
    State,
    UnservedError,
    hippo_legs,
    recurrent,
    right_aligned,
)
from ssmzoo_kernels import (
    diagonal_step,
    double,
    fft_conv,
    powers,
    rational_kernel,
    vandermonde_state,
)
from ssmzoo_kernels.token_step import Program, Value

from .configuration_s4 import S4Config
from .dplr import System

SPAN = 4096  # tokens that follow a state are read by so many at once

_SLOW = ("log_dt", "A_log", "A_imag", "P", "B")


class S4Mixer(SSMMixer):
    """Filter each feature by a state space whose matrix is ``Lambda - P P*``, then mix features.

    ``x[t] = Abar x[t-1] + Bbar u[t]``, ``y[t] = C x[t] + D u[t]`` (the paper's Eq. 3); then, by
    ``config.block``, ``out_proj(dropout(GELU(y)))``, its GLU, or y itself. ``bidirectional`` adds
    ``sum_l K'[l] u[t+1+l]`` to y, where K' is the kernel with the second half of C.
    """

    param_group_names: ClassVar[Mapping[str, str]] = dict.fromkeys(_SLOW, "ssm")
    config: S4Config

    def __init__(self, config: S4Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width, pairs = config.hidden_size, config.d_state // 2
        sets = width if config.n_ssm is None else config.n_ssm
        self.log_dt = nn.Parameter(torch.empty(width))
        self.A_log, self.A_imag = (nn.Parameter(torch.empty(sets, pairs)) for _ in range(2))
        self.P, self.B = (nn.Parameter(torch.empty(sets, pairs, 2)) for _ in range(2))
        self.C = nn.Parameter(torch.empty(width * (1 + config.bidirectional), pairs, 2))
        self.D = nn.Parameter(torch.empty(width))
        if config.block != "filter":
            self.dropout = Dropout(config.dropout, config.tie_dropout)
            self.out_proj = Linear(width, 2 * width if config.block == "glu" else width)
        self._table: DerivedValue[list[Tensor]] = DerivedValue()

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        """Map ``[B, L, H]`` to ``[B, L, H]``; the state is ``ssm [B, H, N, 2]``."""
        self._table.refresh(hidden_states, state)
        u = hidden_states.to(torch.promote_types(torch.float32, hidden_states.dtype))
        one = u.shape[1] == 1 and packing is None and not torch.is_grad_enabled()
        y = self._step(u[:, 0], state) if one and state.initial else self._filter(u, state, packing)
        if self.config.block == "filter":
            return y.to(hidden_states.dtype)
        y = self.out_proj(self.dropout(F.gelu(y).to(hidden_states.dtype), packing))
        return F.glu(y, dim=-1) if self.config.block == "glu" else y

    def write_token(
        self, program: Program, parts: ModuleParts, x: Value, states: Mapping[str, State]
    ) -> Value:
        """Write one token of :meth:`forward`."""
        tables = [_pairs(table) for table in parts.derived(self._decode_tables)[:-1]]
        decay, drive, feedback, probe, readout = tables
        D, state = parts.weight(self, "D"), recurrent(program, states["ssm"])
        more = {"drive": drive, "feedback": (probe, feedback)}
        y = program.diagonal(x, decay, readout[None], D, state, **more)
        if self.config.block == "filter":
            return y
        if parts.setting(parts.layer("dropout"), "training"):
            raise UnservedError
        y = parts.linear(program, program.map(y, "gelu"), "out_proj")
        if self.config.block != "glu":
            return y
        value, gate = y.chunk(2)
        return program.gated(gate, value, by="sigmoid")

    def system(self) -> System:
        """Return the discretised state space of every row of C."""
        A = torch.complex(-double(self.A_log).exp(), double(self.A_imag))
        P, B, C = (torch.view_as_complex(double(x)) for x in (self.P, self.B, self.C))
        dt = double(self.log_dt).exp()[:, None]
        # feature h has set h % n_ssm, in both directions
        dt, A, P, B = (x.repeat(len(C) // len(x), 1) for x in (dt, A, P, B))
        return System.of(dt, A, P, B, C)

    def dynamics(self, hidden_states: Tensor) -> Dynamics:
        """Return kernels, eigenvalues of ``Abar`` and time steps."""
        system, width = self.system(), self.config.hidden_size
        kernel = system.filters(hidden_states.shape[1])[0].to(hidden_states)
        poles = torch.linalg.eigvals(system.transition()[:width])
        future = kernel[width:] if self.config.bidirectional else None
        return Dynamics(kernel[:width], future, poles=poles, time_steps=self.log_dt.exp())

    def _filter(self, u: Tensor, state: LayerState, packing: Sequences | None) -> Tensor:
        """Filter whole sequences, or tokens behind a state; leave the state after them."""
        tokens, rows, start = u.shape[1], None, state.get_row("ssm")
        keeps = state.keep or start is not None
        if packing is not None and (keeps or packing.rows is not None):
            rows = packing.aligned()
            u, packing = rows.gather(u), None
        if keeps:
            x = None if start is None else torch.view_as_complex(start)
            y, x = self._march(u, x, None if rows is None else rows.lengths)
            state.put_row("ssm", torch.view_as_real(x))
        else:
            taps = max(1, u.shape[1]) if packing is None else packing.kernel_length()
            kernel = self.system().filters(taps)[0]
            past, *later = kernel.to(u).split(u.shape[2])
            future = later[0] if later else None
            y, _ = fft_conv(u, past, self.D, future_kernel=future, cu_seqlens=packing)
        return y if rows is None else rows.scatter(y, tokens)

    def _march(self, u: Tensor, x: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Filter ``[B, L, H]`` from a state ``[B, H, N]``, and return the state after it, too.

        Span by span: to continue from a state and leave one takes further filters, which are then
        no longer than a span. Rows may have other lengths ``[B]``.
        """
        spans = [u] if torch.compiler.is_compiling() else u.split(SPAN, dim=1)
        taps = max(1, spans[0].shape[1])
        system, outputs, begin, again = self.system(), [], 0, None
        *filters, loop = system.filters(taps)
        kernel, heard, echo = (f.to(u) for f in filters)
        for tokens in spans:
            y, w = fft_conv(tokens, kernel, self.D)[0], fft_conv(tokens, heard)[0]
            count, kept = tokens.shape[1], 0
            ends = None if lengths is None else (lengths - begin).clamp(0, count)
            if x is not None:
                if again is None:
                    again = rational_kernel(loop, loop, taps).to(u)
                rest, more = system.response(x, echo, again, count)
                y, w = y + rest, w + more
                steps = count if ends is None else ends[:, None, None]
                kept = powers(system.exponent, steps, x) * x
            if ends is not None:
                tokens, w = (right_aligned(v, ends) for v in (tokens, w))
            driven, fed = (vandermonde_state(v, system.exponent) for v in (tokens, w))
            new = system.drive.to(driven) * driven - system.feedback.to(fed) * fed
            x, begin = kept + new, begin + count
            outputs.append(y)
        assert x is not None
        return torch.cat(outputs, dim=1), x

    def _step(self, u: Tensor, state: LayerState) -> Tensor:
        """Advance by one token ``[B, H]`` without gradients; ``[B, 1, H]``."""
        decay, drive, feedback, probe, readout, echo = self._decode_tables()
        x = torch.view_as_complex(state.initial["ssm"])
        w = (probe * x).real.sum(-1)
        y, x = diagonal_step(u, x, decay, drive, readout, self.D)
        state.put("ssm", torch.view_as_real(x - feedback * w[..., None]))
        return (y - echo * w)[:, None]

    def _decode_tables(self) -> list[Tensor]:
        return self._table.get(self, None, self._tables)

    def _tables(self) -> list[Tensor]:
        """Return the factors of a step: decay, the rest of the system, and echo's tap 0, [H]."""
        exponent, *rest = self.system()
        exact = torch.promote_types(torch.complex64, self.C.dtype)
        decay, drive, feedback, probe, readout = (
            x.to(self.C.device, exact) for x in (exponent.exp(), *rest)
        )
        return [decay, drive, feedback, probe, readout, (readout * feedback).real.sum(-1)]


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()).contiguous()


class S4PreTrainedModel(SSMPreTrainedModel):
    """Loading and initialisation of S4 models."""

    config: S4Config

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the initial parameters.

        ``log_dt`` U(ln dt_min, ln dt_max); Lambda, P and B those of HiPPO-LegS; both parts of C
        N(0, 1/2); D N(0, 1); ``out_proj`` U(+-1/sqrt(H)) with bias 0.
        """
        super()._init_weights(module)
        if isinstance(module, S4Mixer):
            init.uniform_(module.log_dt, math.log(self.config.dt_min), math.log(self.config.dt_max))
            frequencies, _, P = hippo_legs(self.config.d_state)
            init.constant_(module.A_log, math.log(0.5))
            init.copy_(module.A_imag, frequencies.expand_as(module.A_imag))
            for parameter, size in ((module.P, 1.0), (module.B, 2**0.5)):
                init.copy_(parameter, torch.stack([size * P, 0 * P], -1).expand_as(parameter))
            init.normal_(module.C, std=0.5**0.5)
            init.normal_(module.D)


class S4Model(S4PreTrainedModel, SSMModel):
    """S4's backbone."""

    mixer_class = S4Mixer


S4ForCausalLM = SSMForCausalLM.of(S4Model)
S4ForImageClassification = SSMForImageClassification.of(S4Model)
S4ForSequenceClassification = SSMForSequenceClassification.of(S4Model)
S4ForTokenClassification = SSMForTokenClassification.of(S4Model)
S4ForPairClassification = SSMForPairClassification.of(S4Model)
