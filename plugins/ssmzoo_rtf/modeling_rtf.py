"""RTF: state-free inference of state-space models by rational transfer functions (2405.06147).

What surprises: in training a layer is one long convolution per feature, whose kernel comes from the
filter's coefficients by FFT at a cost that does not depend on the order; only decoding has a state.
Filter parameters, convolution and state are float32 always. The mathematics is in ``filters.py``.

Dimensions: B batch, L length, D hidden, n order, A denominators, M taps, S sequences.
"""

import math
from collections.abc import Mapping
from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ssmzoo.modeling import (
    CausalConv1d,
    DerivedValue,
    Dropout,
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
    SSMModel,
    SSMPreTrainedModel,
    State,
    UnservedError,
    recurrent,
)
from ssmzoo_kernels import (
    fft_conv,
)
from ssmzoo_kernels.dispatch import is_traced
from ssmzoo_kernels.token_step import Program, Value

from .configuration_rtf import RTFConfig
from .decoding import (
    Deployment,
    Oscillations,
    Recurrence,
    by_modes,
    by_recurrence,
    by_window,
)
from .filter_bank import FilterBank
from .filters import deployed_numerator, ends_within, initial_coefficients
from .stability import poles_outside

FILTER_NORM_EPS = 1e-6
# tokens after which the slowest initial mode has fallen to 1 / e
LONGEST_MODE = 1000

# settings that a model may be given after it was built
_DEPLOYED_BY = itemgetter(
    "decode_mode", "trunc_len", "kernel_mode", "constraint_margin", "legacy_double_h0"
)


class RTFMixer(FilterBank):
    """Filter each feature by a rational transfer function (the paper's Eq. 4), mix around it.

    ``y[t] = sum_j k[j] u[t-j] + D u[t]`` with k the impulse response of ``b(z) / a(z)``, or another
    filter (``config.filter``), and

    - "hyena": ``[x0 | x1 | v] = short_conv(in_proj(h))``, u = v x1, and from ``g = y x0`` comes
      ``out_proj(GELU(down_proj(norm(g))))``, or without ``mixer_rank`` ``out_proj(g)``;
    - "s4": u = h, ``GLU(out_proj(GELU(y)))``;
    - "filter": u = h, y.
    """

    written_in_place = frozenset({"ring"})  # a step fills its free place
    # not ``owed``, which follows from the modes
    startable_states = frozenset({"ring", "position", "modes", "inputs", "conv"})
    decaying_states = frozenset({"modes"})

    def __init__(self, config: RTFConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width = config.hidden_size
        self.dropout = Dropout(config.mixer_dropout, config.tie_dropout)
        self.filter_norm = None
        if config.block == "hyena":
            self.in_proj = Linear(width, 3 * width)
            self.short_conv = CausalConv1d(3 * width, config.d_conv, bias=True, activation=None)
            rank = config.mixer_rank
            if rank is not None:
                self.filter_norm = RMSNorm(width, FILTER_NORM_EPS)
                self.down_proj = Linear(width, rank)
            self.out_proj = Linear(width if rank is None else rank, width, role="mixer_end")
        elif config.block == "s4":
            self.out_proj = Linear(width, 2 * width)
        self.block = config.block
        self._kept: DerivedValue[Deployment] = DerivedValue()

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        """Map ``[B, L, D]`` to ``[B, L, D]``.

        The state is, of filters that decode by recurrence, ``ring [B, n + 1, D]`` and
        ``position [B]``; of modal ones ``modes [B, D, N, 2]`` and their part of the next output,
        ``owed [B, D]``; of others the last ``inputs [B, M - 1, D]``; and for "hyena" ``conv``.
        """
        dtype = hidden_states.dtype
        exact = torch.promote_types(torch.float32, dtype)
        if self.block == "hyena":
            wide, conv = self.short_conv(self.in_proj(hidden_states), state.get("conv"), packing)
            state.put("conv", conv)
            x0, x1, v = wide.to(exact).chunk(3, dim=-1)  # [B, L, D] each
            u = self.dropout(v * x1, packing)
            y = self.filtered(u, state, packing) * x0
            if self.filter_norm is None:
                return self.out_proj(y.to(dtype))
            return self.out_proj(F.gelu(self.down_proj(self.filter_norm(y))))
        y = self.filtered(hidden_states.to(exact), state, packing)
        if self.block == "filter":
            return y.to(dtype)
        y = self.dropout(F.gelu(y), packing).to(dtype)
        return F.glu(self.out_proj(y), dim=-1)

    def write_token(
        self, program: Program, parts: ModuleParts, x: Value, states: Mapping[str, State]
    ) -> Value:
        """Write one token of :meth:`forward`, of layers whose filters are all recurrences."""
        filters = parts.derived(self.deployment)
        recurrence = filters.recurrence
        if recurrence is None or filters.taps is not None:
            raise UnservedError
        if parts.setting(parts.layer("dropout"), "training"):
            raise UnservedError
        a, b = (table.T.contiguous() for table in recurrence.step_coefficients())
        ring, position = recurrent(program, states["ring"]), states["position"].number
        x0 = None
        if self.block == "hyena":
            wide = parts.linear(program, x, "in_proj")
            conv = parts.within("short_conv", CausalConv1d)
            wide = conv.root.write_token(program, conv, wide, states["conv"])
            x0, x1, v = wide.chunk(3)
            x = program.gated(x1, v, by="itself")
        y = program.companion(x, a, b, recurrence.gain.detach(), ring, position)
        program.count(position, -1)
        if x0 is not None:
            y = program.gated(x0, y, by="itself")
            if self.filter_norm is not None:
                y = parts.norm(program, y, "filter_norm")
                y = program.map(parts.linear(program, y, "down_proj"), "gelu")
            return parts.linear(program, y, "out_proj")
        if self.block == "filter":
            return y
        value, gate = parts.linear(program, program.map(y, "gelu"), "out_proj").chunk(2)
        return program.gated(gate, value, by="sigmoid")

    def filtered(self, u: Tensor, state: LayerState, packing: Sequences | None) -> Tensor:
        """Filter ``[B, L, D]`` from the cached state; cache the final state."""
        self._kept.refresh(u, state)
        kind = u.device.type
        known = kind != "meta"  # which has no autocast
        if known and (torch.compiler.is_compiling() or torch.is_autocast_enabled(kind)):
            with torch.autocast(kind, enabled=False):
                return self._filtered(u, state, packing)
        return self._filtered(u, state, packing)

    def _filtered(self, u: Tensor, state: LayerState, packing: Sequences | None) -> Tensor:
        if not state.keep:
            return self._whole(u, state, packing)
        parts = self.deployment()
        if parts.oscillations is not None:
            return by_modes(u, parts.oscillations, state, packing)
        recurrence = parts.recurrence
        if recurrence is None:
            return by_window(u, parts, state, packing)
        if parts.taps is None:
            return by_recurrence(u, recurrence, state, packing)
        return parts.merge(
            by_recurrence(u[..., parts.recurrent], recurrence, state, packing),
            by_window(u[..., parts.windowed], parts, state, packing),
        )

    def deployment(self) -> Deployment:
        """Return the filters in decoding form, recomputed only when a parameter has changed.

        A graph of ``torch.compile`` recomputes them in every call. It looks at the parameters'
        values once, when it is traced, for errors, warnings and ``decode_mode="auto"``; an exported
        program never does.

        Raises:
            ValueError: A parameter is not finite; the message names layer and row.

        Warns:
            RuntimeWarning: A filter of the exact mode, or one that ``decode_mode="recurrent"``
                makes a recurrence, has poles outside the unit disc.
        """
        if is_traced() and not self._kept.is_constant:
            return self._deploy()
        # every step asks, and a configuration's own attribute access is slow
        settings = _DEPLOYED_BY(vars(self.config))
        kept = self._kept.get(self, settings, self._deploy)
        own = self._parameters.values()
        if torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in own):
            return self._deployed(kept.recurrent, kept.windowed, kept.recurrence is None)
        return kept

    def _deploy(self) -> Deployment:
        return self._deployed(*self._layout())

    @torch.compiler.assume_constant_result  # a graph has no values to look at
    def _layout(self) -> tuple[Tensor | None, Tensor | None, bool]:
        """Check the parameters; return the channels of :meth:`_split`, and whether all window.

        Not under ``no_grad``: the filters use a parametrization's cached tensors again.
        """
        if not torch.compiler.is_exporting():
            self._check_parameters()
        if self.config.filter == "implicit":
            return None, None, True
        if self.config.filter == "modal":
            return None, None, False
        recurrent, windowed = self._split()
        return recurrent, windowed, recurrent is None and windowed is not None

    def _split(self) -> tuple[Tensor | None, Tensor | None]:
        """Return which channels decode by recurrence and which not; (None, all) if none does."""
        config, width = self.config, self.config.hidden_size
        a = self.denominators().detach()
        channels = torch.arange(width, device=a.device)
        if config.decode_mode == "fir":
            return None, channels
        # without values, poles are unknown
        if a.is_meta or (config.taps is None and torch.compiler.is_exporting()):
            return None, None
        outside = a.new_zeros(len(a), dtype=torch.int64)
        if config.denominator_constraint == "none":
            outside = poles_outside(a)
        if config.taps is None:
            self._warn_of_growth(a, outside)
            return None, None
        # a recurrence goes on behind the window: only responses that have ended there may use one
        b, _ = deployed_numerator(a, self.b.detach(), config.taps)
        within = (outside == 0) & ends_within(a, b, config.taps)
        if bool(within.all()):
            return None, None
        if not bool(within.any()):
            return None, channels
        of_channel = within.repeat_interleave(width // len(a))
        return channels[of_channel], channels[~of_channel]

    def _deployed(
        self, recurrent: Tensor | None, windowed: Tensor | None, all_windowed: bool
    ) -> Deployment:
        gain, taps = self.gain(), self.config.taps
        if self.config.filter == "modal":
            residues, exponent = self._residues(), self.exponents()
            sharing = len(residues) // len(exponent)
            own = exponent.repeat_interleave(sharing, dim=0)
            return Deployment(oscillations=Oscillations(own, residues, gain))
        if all_windowed:
            assert taps is not None
            return Deployment(taps=self.kernel(taps), gain=gain)
        if windowed is None:
            return Deployment(self._recurrence(self.denominators(), self.b, gain))
        assert recurrent is not None
        assert taps is not None
        a = self.denominators()
        sharing = self.config.hidden_size // len(a)
        rows = recurrent[::sharing] // sharing
        return Deployment(
            self._recurrence(a[rows], self.b[recurrent], gain[recurrent]),
            self.kernel(taps)[windowed],
            gain[windowed],
            recurrent,
            windowed,
        )

    def _recurrence(self, a: Tensor, b: Tensor, gain: Tensor) -> Recurrence:
        if self.config.grid is not None:
            b, wrapped = deployed_numerator(a, b, self.config.grid)
            gain = gain + wrapped
        return Recurrence(a, b, gain)

    def _whole(self, u: Tensor, state: LayerState, packing: Sequences | None) -> Tensor:
        """Filter whole sequences; a padded batch as one of rows that begin at column 0."""
        tokens = u.shape[1]
        rows = None
        if packing is not None and packing.rows is not None:
            rows = packing.aligned()
            u, packing = rows.gather(u), None
        taps = max(1, u.shape[1]) if packing is None else packing.kernel_length()
        kernel, gain = self.kernel(taps), self.gain()
        # on a GPU this check would synchronise
        if u.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check_finite(kernel, gain)
        future = None
        if self.config.bidirectional:
            kernel, future = kernel.chunk(2)
            gain, ahead = gain.chunk(2)
            # the future's direct gain meets the next token
            future = future + F.pad(ahead[:, None], (0, future.shape[1] - 1))
        y, _ = fft_conv(u, kernel, gain, future_kernel=future, cu_seqlens=packing)
        return y if rows is None else rows.scatter(y, tokens)


class RTFPreTrainedModel(SSMPreTrainedModel):
    """Loading and initialisation of RTF models."""

    config: RTFConfig

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the initial parameters.

        ======================= =====================================================
        embedding, "hyena" head N(0, initializer_range^2)
        norms                   1, biases 0
        ``a``, ``b``            coefficient_init
        ``D``                   h0_init
        ``modal_log_decay``     U(ln 1/1000, 0): modes last from 1 to 1000 tokens
        ``modal_angle``         U(0, pi)
        ``modal_residues``      coefficient_init
        ``montel_slack``        U(0, 1)
        linear layers, "hyena"  N(0, initializer_range^2), biases 0; the last of a
                                branch divided by sqrt(2 num_hidden_layers)
        other linear layers     U(+-1/sqrt(inputs)), biases 0
        ``short_conv``          U(+-1/sqrt(d_conv)), bias too
        ``implicit_*``          U(+-1/sqrt(inputs)), biases too; frequencies
                                implicit_frequency
        ======================= =====================================================
        """
        super()._init_weights(module)
        if isinstance(module, RTFMixer):
            self._init_mixer(module)
        elif not isinstance(module, nn.Linear) or module is getattr(self, "lm_head", None):
            return
        elif self.config.block == "hyena":
            std = self.config.initializer_range
            if getattr(module, "role", "") in ("mixer_end", "mlp_end"):
                std /= (2 * self.config.num_hidden_layers) ** 0.5
            init.normal_(module.weight, std=std)
        elif module is getattr(self, "score", None):
            # not as wide as an embedding of N(0, 1)
            bound = module.in_features**-0.5
            init.uniform_(module.weight, -bound, bound)
            if module.bias is not None:
                init.zeros_(module.bias)

    def _init_mixer(self, mixer: RTFMixer) -> None:
        config = self.config
        if config.h0_init == "ones":
            init.ones_(mixer.D)
        else:
            init.normal_(mixer.D)
        if config.filter == "rational":
            for parameter in (mixer.a, mixer.b):
                drawn = initial_coefficients(config.coefficient_init, *parameter.shape)
                init.copy_(parameter, drawn)
            if config.denominator_constraint == "l1_montel":
                init.uniform_(mixer.montel_slack)
            return
        if config.filter == "modal":
            init.uniform_(mixer.modal_log_decay, -math.log(LONGEST_MODE), 0)
            init.uniform_(mixer.modal_angle, 0, math.pi)
            width, modes, _ = mixer.modal_residues.shape
            drawn = initial_coefficients(config.coefficient_init, width, 2 * modes)
            init.copy_(mixer.modal_residues, drawn.view(width, modes, 2))
            return
        for weight, bias in (
            (mixer.implicit_in, mixer.implicit_in_bias),
            (mixer.implicit_hidden, mixer.implicit_hidden_bias),
            (mixer.implicit_out, None),
        ):
            bound = weight.shape[-1] ** -0.5
            init.uniform_(weight, -bound, bound)
            if bias is not None:
                init.uniform_(bias, -bound, bound)
        init.constant_(mixer.implicit_frequency, config.implicit_frequency)


class RTFModel(RTFPreTrainedModel, SSMModel):
    """RTF's backbone."""

    mixer_class = RTFMixer


RTFForCausalLM = SSMForCausalLM.of(RTFModel)
RTFForImageClassification = SSMForImageClassification.of(RTFModel)
RTFForSequenceClassification = SSMForSequenceClassification.of(RTFModel)
RTFForTokenClassification = SSMForTokenClassification.of(RTFModel)
RTFForPairClassification = SSMForPairClassification.of(RTFModel)
