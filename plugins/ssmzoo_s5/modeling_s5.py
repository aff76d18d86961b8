"""S5 (arXiv 2208.04933) and the LRU (arXiv 2303.06349): one diagonal state for all features.

What surprises: SSM parameters, the matrices B and C among them, are always float32. Poles and gains
are computed in float64, but for those of irregular steps, which each token has of its own.

Dimensions: B batch, L length, H features, N stored modes, R readouts (1, or 2 looking both ways).
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
    flip,
    flip_steps,
    hippo_legs,
    recurrent,
)
from ssmzoo_kernels import beside, double, linear_scan
from ssmzoo_kernels.token_step import Program, Value

from .configuration_s5 import S5Config

_S5 = ("Lambda_re", "Lambda_im", "log_dt")
_LRU = ("nu_log", "theta_log", "gamma_log")


class S5Mixer(SSMMixer):
    """Filter all features by one state space, then gate each.

    ``x[t] = Lbar x[t-1] + Bbar u[t]``, ``y[t] = 2 Re(C x[t]) + D u[t]`` (S5: one of each pair), or
    ``x[t] = lambda x[t-1] + gamma B u[t]``, ``y[t] = Re(C x[t]) + D u[t]`` (the LRU); then
    ``config.activation``.
    """

    param_group_names: ClassVar[Mapping[str, str]] = {
        name: "dt" if name == "log_dt" else "ssm" for name in (*_S5, *_LRU, "B")
    }
    config: S5Config

    def __init__(self, config: S5Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width, pairs = config.hidden_size, config.variant == "s5"
        modes = config.d_state // 2 if pairs else config.d_state
        vectors = [nn.Parameter(torch.empty(modes)) for _ in range(3)]
        if pairs:
            self.Lambda_re, self.Lambda_im, self.log_dt = vectors
        else:
            self.nu_log, self.theta_log, self.gamma_log = vectors
        self.B = nn.Parameter(torch.empty(modes, width, 2))
        self.C = nn.Parameter(torch.empty(width, (1 + config.bidirectional) * modes, 2))
        self.D = nn.Parameter(torch.empty(width))
        if config.activation != "gelu":
            self.dropout = Dropout(config.dropout, config.tie_dropout)
            self.out_proj = Linear(width, 2 * width if config.activation == "full_glu" else width)
        self._derived: DerivedValue[tuple[Tensor, Tensor, Tensor]] = DerivedValue()

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        """Map ``[B, L, H]`` to ``[B, L, H]``; the state is ``ssm [B, N, 2]``."""
        dtype, kind = hidden_states.dtype, self.config.activation
        u = hidden_states.to(torch.promote_types(torch.float32, dtype))
        device = "cpu" if u.is_meta else u.device.type  # meta has no autocast
        with torch.autocast(device, enabled=False):
            y = self._filtered(u, state, packing)
        x = F.gelu(y, approximate="tanh").to(dtype)
        if kind == "gelu":
            return x
        x = self.dropout(x, packing)
        gate = self.out_proj(x)
        if kind == "full_glu":
            return F.glu(gate, dim=-1)
        return (x if kind == "half_glu1" else y.to(dtype)) * torch.sigmoid(gate)

    def write_token(
        self, program: Program, parts: ModuleParts, x: Value, states: Mapping[str, State]
    ) -> Value:
        """Write one token of :meth:`forward`, of regular time steps."""
        kind = self.config.activation
        if self.config.irregular_steps:
            raise UnservedError
        pole, read_in, readout = parts.derived(self._decode_tables)
        drive, pole = program.linear(x, read_in), torch.view_as_real(pole).contiguous()
        states_now = program.poles(drive, pole, recurrent(program, states["ssm"]))
        skipped = program.map(x, weight=parts.weight(self, "D"))
        y = program.add(program.linear(states_now, readout), skipped)
        x = program.map(y, "gelu_tanh")
        if kind == "gelu":
            return x
        if parts.setting(parts.layer("dropout"), "training"):
            raise UnservedError
        gate = parts.linear(program, x, "out_proj")
        if kind == "full_glu":
            value, gate = gate.chunk(2)
        else:
            value = x if kind == "half_glu1" else y
        return program.gated(gate, value, by="sigmoid")

    def _decode_tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._derived.get(self, None, self._matrices)

    def poles(self) -> tuple[Tensor, Tensor]:
        """Return logarithms of the stored poles of a step, and the gains of the inputs, [N]."""
        if self.config.variant == "lru":
            log_pole = torch.complex(-double(self.nu_log).exp(), double(self.theta_log).exp())
            return log_pole, double(self.gamma_log).exp()
        eigenvalues = self.eigenvalues()
        log_pole = eigenvalues * double(self.log_dt).exp()
        return log_pole, torch.expm1(log_pole) / eigenvalues

    def dynamics(self, hidden_states: Tensor) -> Dynamics:
        """Return the poles of a step, of pairs both, and the time steps."""
        poles = self.poles()[0].exp()
        if self.config.variant == "lru":
            return Dynamics(poles=poles[None])
        return Dynamics(poles=torch.cat([poles, poles.conj()])[None], time_steps=self.log_dt.exp())

    def eigenvalues(self) -> Tensor:
        """Return Lambda of S5, ``[N]`` complex128."""
        real, imag = double(self.Lambda_re), double(self.Lambda_im)
        return torch.complex(real.clamp(max=-1e-4) if self.config.clip_eigs else real, imag)

    def _filtered(self, u: Tensor, state: LayerState, packing: Sequences | None) -> Tensor:
        """Run the state space over ``[B, L, H]``."""
        self._derived.refresh(u, state)
        if torch.is_grad_enabled():
            pole, read_in, readout = self._matrices()
        else:
            pole, read_in, readout = self._derived.get(self, None, self._matrices)
        drive = F.linear(u, read_in).view(*u.shape[:2], len(read_in) // 2, 2)
        drive = torch.view_as_complex(beside(drive, pole))  # [B, L, N]
        steps = state.shared["time_steps"].to(u.dtype) if self.config.irregular_steps else None
        start = state.get("ssm")
        start = None if start is None else torch.view_as_complex(beside(start, pole))
        x, final = linear_scan(*self._held(pole, drive, steps), start, cu_seqlens=packing)
        state.put("ssm", torch.view_as_real(final).to(u.device))
        if self.config.bidirectional:
            steps = None if steps is None else flip_steps(steps, packing)
            turned = self._held(pole, flip(drive, packing), steps)
            later, _ = linear_scan(*turned, cu_seqlens=packing)
            x = torch.cat([x, flip(later, packing)], dim=-1)
        return F.linear(torch.view_as_real(x).flatten(-2).to(u.device), readout) + self.D * u

    def _held(self, pole: Tensor, drive: Tensor, steps: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return every token's poles and inputs, [B, L, N], held for its step if it has one."""
        if steps is None:
            return pole.expand_as(drive), drive
        log_pole = pole * beside(steps.unsqueeze(-1) * self.log_dt.exp(), pole)
        return log_pole.exp(), drive * (torch.expm1(log_pole) / pole)

    def _matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return Lbar [N] and Bbar [2 N, H], for irregular steps Lambda and B; C, [H, 2 R N].

        Lbar stays where :func:`double` put it, and the scan of complex numbers with it.
        """
        pole, gain = self.poles()
        B, twice = torch.view_as_complex(self.B), 2.0 if self.config.variant == "s5" else 1.0
        if self.config.irregular_steps:
            pole = self.eigenvalues()
        else:
            pole, B = pole.exp(), (gain[:, None] * beside(B, gain)).to(B)
        read_in = torch.view_as_real(B).transpose(1, 2).flatten(0, 1)
        readout = self.C * self.C.new_tensor([twice, -twice])
        return pole.to(B.dtype), read_in, readout.flatten(1)


class S5PreTrainedModel(SSMPreTrainedModel):
    """Loading and initialisation of S5 and LRU models."""

    config: S5Config

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the initial parameters; V are the eigenvectors of HiPPO-N of order d_state / blocks.

        ============= ======================================================================
        ``D``         N(0, 1)
        "s5":
        ``Lambda``    ``blocks`` equal copies of HiPPO-N's eigenvalues, ``-1/2 + i frequency``
        ``log_dt``    U(ln dt_min, ln dt_max)
        ``B``         ``V* B'``, B' real with variance 1 / d_state
        ``C``         ``C' V``, each part of C' with variance 1 / d_state ("rows") or
                      1 / (d_state hidden_size) ("lecun_normal"); or C itself with 1
        "lru":
        ``nu_log``    poles uniform over the ring ``r_min < |lambda| < r_max``
        ``theta_log`` U(0, max_phase)
        ``gamma_log`` ``gamma = sqrt(1 - |lambda|^2)``
        ``B``, ``C``  parts with variance 1 / (2 hidden_size) and 1 / d_state
        ============= ======================================================================
        """
        super()._init_weights(module)
        if isinstance(module, S5Mixer):
            init.normal_(module.D)
            (_init_s5 if self.config.variant == "s5" else _init_lru)(module)


def _init_s5(mixer: S5Mixer) -> None:
    """Lambda of J blocks of HiPPO-N; ``V* B`` and ``C V`` of a random real B and complex C."""
    config = mixer.config
    order, blocks, width = config.d_state, config.blocks, config.hidden_size
    frequencies, V, _ = hippo_legs(order // blocks)  # V: [P / J, P / 2 J]
    init.constant_(mixer.Lambda_re, -0.5)
    init.copy_(mixer.Lambda_im, frequencies.repeat(blocks))
    init.uniform_(mixer.log_dt, math.log(config.dt_min), math.log(config.dt_max))
    drawn = torch.randn(blocks, len(V), width, dtype=V.dtype.to_real(), device="cpu")
    init.copy_(mixer.B, torch.view_as_real(V.mH @ drawn.to(V.dtype) / order**0.5).flatten(0, 1))
    if config.c_init == "complex_normal":
        init.normal_(mixer.C, std=0.5**0.5)
        return
    rows = (1 + config.bidirectional) * blocks
    drawn = torch.randn(width, rows, len(V), dtype=V.dtype, device="cpu")
    variance = 2 / (order * width if config.c_init == "lecun_normal" else order)
    init.copy_(mixer.C, torch.view_as_real(drawn @ V * variance**0.5).flatten(1, 2))


def _init_lru(mixer: S5Mixer) -> None:
    """Poles uniform in a ring; gamma such that white noise keeps its size; B and C Glorot's."""
    config = mixer.config
    drawn = torch.rand(2, config.d_state, dtype=torch.float64, device="cpu")
    area, turn = drawn.clamp(1e-7, 1 - 1e-7)  # the logarithms of the ends may not be finite
    nu = -0.5 * torch.log(area * (config.r_max**2 - config.r_min**2) + config.r_min**2)
    init.copy_(mixer.nu_log, nu.log())
    init.copy_(mixer.theta_log, (config.max_phase * turn).log())
    init.copy_(mixer.gamma_log, 0.5 * torch.log(-torch.expm1(-2 * nu)))
    init.normal_(mixer.B, std=(2 * config.hidden_size) ** -0.5)
    init.normal_(mixer.C, std=config.d_state**-0.5)


class S5Model(S5PreTrainedModel, SSMModel):
    """S5's backbone; with ``config.irregular_steps`` it takes ``time_steps [B, L]``."""

    mixer_class = S5Mixer

    def __init__(self, config: S5Config) -> None:
        super().__init__(config)
        if not config.final_norm:
            self.norm = None


S5ForCausalLM = SSMForCausalLM.of(S5Model)
S5ForSequenceClassification = SSMForSequenceClassification.of(S5Model)
S5ForImageClassification = SSMForImageClassification.of(S5Model)
S5ForTokenClassification = SSMForTokenClassification.of(S5Model)
S5ForPairClassification = SSMForPairClassification.of(S5Model)
