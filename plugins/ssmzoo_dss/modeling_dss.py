"""DSS: diagonal state spaces are as effective as structured ones (arXiv 2203.14343).

What surprises: in training a layer is one long convolution per feature, whose kernel is computed
anew in every forward pass; only decoding has a state. SSM parameters, their gradients, the
convolution and the state are always float32. The mathematics is in ``kernel.py``.

Dimensions: B batch, L length, H hidden, N modes, C channels, K taps, S sequences, G growing modes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

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
    recurrent,
)
from ssmzoo_kernels import beside, diagonal_step, double, fft_conv, powers
from ssmzoo_kernels.token_step import Program, Value

from .configuration_dss import DSSConfig
from .kernel import CLIP, Modes, exponents, initial_eigenvalues, modes_of

_SSM_PARAMETERS = ("log_dt", "Lambda", "Lambda_log_neg_re", "Lambda_im", "W")


@dataclass(frozen=True)
class _Tables:
    """Values that decoding a token needs, computed from a layer's parameters.

    Attributes:
        modes: The modes that they were computed from.
        decay: ``e^c``, ``[H, N]``; 1 for growing modes. None of a cut kernel.
        growing: The numbers ``[G]`` of the growing modes, None if there are none.
        low: ``e^{c' k}`` of these for small k, ``[count, H, G]``.
        high: ``e^{c' k}`` for multiples of ``count``.
        taps: A cut kernel, its first tap last, ``[C, K, H]``.
    """

    modes: Modes
    decay: Tensor | None = None
    growing: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None
    taps: Tensor | None = None

    def power(self, k: int) -> Tensor:
        """Return ``e^{c' k}`` of the growing modes, ``[H, G]``."""
        assert self.low is not None
        assert self.high is not None
        count = self.low.shape[0]
        return self.low[k % count] * self.high[k // count]


class DSSMixer(SSMMixer):
    """Filter each feature by a sum of exponentials (the paper's Proposition 1), then mix features.

    ``y[t] = sum_j K[j] u[t-j] + D u[t]`` with ``K[l] = Re sum_n rho_n e^{c_n l}``, then
    ``out_proj(dropout(GELU(y)))`` or its GLU.
    """

    param_group_names: ClassVar[Mapping[str, str]] = {
        name: "dt" if name == "log_dt" else "ssm" for name in _SSM_PARAMETERS
    }
    config: DSSConfig

    def __init__(self, config: DSSConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width, modes, channels = config.hidden_size, config.d_state, config.channels
        steps = (width, 2) if config.separate_dt_re_im else (width,)
        self.log_dt = nn.Parameter(torch.empty(steps))
        if config.kernel_variant in ("softmax", "clip"):
            self.Lambda = nn.Parameter(torch.empty(modes, 2))
        else:
            self.Lambda_log_neg_re = nn.Parameter(torch.empty(modes))
            self.Lambda_im = nn.Parameter(torch.empty(modes))
        kernels = channels * (2 if config.bidirectional else 1)
        self.W = nn.Parameter(torch.empty(kernels, width, modes, 2))
        self.D = nn.Parameter(torch.empty(channels, width))
        self.dropout = Dropout(config.dropout, config.tie_dropout)
        self.out_proj = Linear(channels * width, width * (2 if config.block == "glu" else 1))
        self._tables: DerivedValue[_Tables] = DerivedValue()

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        """Map ``[B, L, H]`` to ``[B, L, H]``.

        The state is ``ssm [B, H, N, 2]`` and, for "softmax", ``position [B]``; or, for a cut
        kernel, the last ``inputs [B, K - 1, H]``.
        """
        if state.keep and not self.config.decodable:
            raise ValueError(
                "kernel_norm_length must be set where a cache is used: without it the kernel "
                "depends on the whole input's length, got None; set config.kernel_norm_length to "
                "the longest total length, or pass use_cache=False"
            )
        self._tables.refresh(hidden_states, state)
        u = hidden_states.to(torch.promote_types(torch.float32, hidden_states.dtype))
        continues = len(state.initial) > 0
        if continues and u.shape[1] == 1 and packing is None and not torch.is_grad_enabled():
            y = self._step(u[:, 0], state)
        elif state.keep and self.config.max_kernel_length is not None:
            y = self._convolve_with_inputs(u, state, packing)
        elif packing is None or (packing.rows is None and not continues):
            y = self._convolve(u, state, None, packing)
        else:
            # a kernel that depends on the longest must not see padding that all rows share
            rows = packing.aligned(tight=not self.config.decodable)
            y = self._convolve(rows.gather(u), state, rows.lengths, None)
            y = rows.scatter(y, u.shape[1])
        y = self.out_proj(self.dropout(F.gelu(y).to(hidden_states.dtype), packing))
        return F.glu(y, dim=-1) if self.config.block == "glu" else y

    def write_token(
        self, program: Program, parts: ModuleParts, x: Value, states: Mapping[str, State]
    ) -> Value:
        """Write one token of :meth:`forward`, of layers without cut kernels and growing modes."""
        tables = self._decode_tables()
        if tables.decay is None or tables.growing is not None or "ssm" not in states:
            raise UnservedError
        parts.derived(self._decode_tables)  # not before: growing ones often change
        if parts.setting(parts.layer("dropout"), "training"):
            raise UnservedError
        decay, readout = (
            torch.view_as_real(table.resolve_conj()).contiguous()
            for table in (tables.decay, tables.modes.readout)
        )
        state = recurrent(program, states["ssm"])
        y = program.diagonal(x, decay, readout, parts.weight(self, "D"), state)
        if "position" in states:
            program.count(states["position"].number, 1)
        y = parts.linear(program, program.map(y, "gelu"), "out_proj")
        if self.config.block == "linear":
            return y
        value, gate = y.chunk(2)
        return program.gated(gate, value, by="sigmoid")

    def eigenvalues(self) -> Tensor:
        """Return lambda, the diagonal state matrix, ``[N]`` complex128."""
        variant = self.config.kernel_variant
        if variant in ("softmax", "clip"):
            real, imag = double(self.Lambda).unbind(-1)
            return torch.complex(real.clamp(max=CLIP) if variant == "clip" else real, imag)
        real = -double(self.Lambda_log_neg_re).exp()
        imag = double(self.Lambda_im)
        return torch.complex(real, imag.exp() if variant == "exp_re_im" else imag)

    def modes(self, length: int) -> Modes:
        """Return the modes of the kernel for an input of some length.

        Raises:
            ValueError: A parameter is not finite; the message names layer, feature and mode.
        """
        config = self.config
        modes = modes_of(
            self.eigenvalues(),
            self.log_dt,
            self.W,
            variant=config.kernel_variant,
            norm_length=config.max_kernel_length or config.kernel_norm_length or length,
            eps=config.softmax_eps,
            conjugate_pairs=config.conjugate_pairs,
            legacy_detached_shift=config.legacy_detached_shift,
        )
        # on a GPU this check would synchronise
        if not torch.compiler.is_compiling() and self.W.device.type == "cpu":
            _check_finite(modes, self)
        return modes

    def kernel(self, length: int) -> Tensor:
        """Return the filters for an input of some length, ``[C, H, K]``; backward ones last."""
        cap = self.config.max_kernel_length
        return self.modes(length).kernel(length if cap is None else min(length, cap))

    def dynamics(self, hidden_states: Tensor) -> Dynamics:
        """Return kernels, ``exp(dt lambda)`` and time steps; all channels of a feature in a row."""
        length = hidden_states.shape[1]
        modes = self.modes(length)
        kernel = modes.kernel(self._taps(modes, length, None, None)).transpose(0, 1)  # [H, C, K]
        channels = self.config.channels
        future = None
        if self.config.bidirectional:
            future = kernel[:, channels:].flatten(0, 1)
        poles = torch.exp(exponents(self.eigenvalues(), self.log_dt))
        return Dynamics(
            kernel=kernel[:, :channels].flatten(0, 1),
            future_kernel=future,
            poles=poles,
            time_steps=self.log_dt.exp(),
        )

    def _convolve(
        self, u: Tensor, state: LayerState, lengths: Tensor | None, packing: Sequences | None
    ) -> Tensor:
        """Filter whole sequences, or tokens behind a state; ``[B, L, C * H]``."""
        batch, length, _ = u.shape
        start = state.get_row("ssm")
        z = None if start is None else torch.view_as_complex(start)
        position = state.get_row("position")
        longest = length if packing is None else _longest(packing, self.config)
        modes = self.modes(longest)
        ends = lengths if packing is None else packing.offsets.diff()
        taps = self._taps(modes, longest, ends, position)
        y = self._filtered(u, modes.kernel(taps), packing)
        if z is not None:
            y = y + modes.response(z, position, length, lengths)
        if state.keep:
            z = modes.state(u, z, position, lengths, packing)
            state.put_row("ssm", torch.view_as_real(z))
            if modes.grows is not None:
                seen = torch.full((batch,), length, device=u.device) if ends is None else ends
                seen = seen.to(torch.int64)
                state.put_row("position", seen if position is None else position + seen)
        return y

    def _convolve_with_inputs(
        self, u: Tensor, state: LayerState, packing: Sequences | None
    ) -> Tensor:
        """Filter with a cut kernel, whose state is the last inputs; ``[B, L, C * H]``."""
        cap = cast(int, self.config.max_kernel_length)
        start = state.get("inputs")
        kernel, channels = self.kernel(cap), self.config.channels
        taps = kernel.flatten(0, 1)  # [C * H, K]
        before = None if start is None else start.repeat(1, 1, channels)
        y, last = fft_conv(
            u.repeat(1, 1, channels) if channels > 1 else u,
            taps,
            self.D.flatten(),
            before,
            cu_seqlens=packing,
            output_final_state=True,
        )
        assert last is not None
        state.put("inputs", last[..., : u.shape[2]].contiguous())
        return y

    def _filtered(self, u: Tensor, kernel: Tensor, packing: Sequences | None) -> Tensor:
        channels = self.config.channels
        past, future = kernel[:channels].flatten(0, 1), None
        if self.config.bidirectional:
            future = kernel[channels:].flatten(0, 1)
        repeated = u if channels == 1 else u.repeat(1, 1, channels)
        y, _ = fft_conv(repeated, past, self.D.flatten(), future_kernel=future, cu_seqlens=packing)
        return y

    def _taps(
        self, modes: Modes, length: int, lengths: Tensor | None, position: Tensor | None
    ) -> int:
        """Return how many taps meet an input; fail where a growing mode has not so many."""
        cap = self.config.max_kernel_length
        if cap is not None:
            return min(length, cap)
        if modes.norm_length is None or (position is None and length <= modes.norm_length):
            return length
        assert modes.grows is not None
        if modes.grows.is_meta:  # whatever grows, these taps suffice
            return min(length, modes.norm_length)
        compiling = torch.compiler.is_compiling()
        if not compiling and not bool(modes.grows.any()):
            return length
        reached = (
            torch.full((1,), length, device=modes.grows.device) if lengths is None else lengths
        )
        reached = reached if position is None else position + reached
        if compiling:
            _check_reach_in_graph(reached, modes)
            return length
        end = int(reached.max()) if reached.numel() else 0  # a batch may have no rows
        _check_reach(end, modes, self)
        return min(length, modes.norm_length)

    def _step(self, u: Tensor, state: LayerState) -> Tensor:
        """Advance by one token ``[B, H]`` without gradients; ``[B, 1, C * H]``."""
        tables = self._decode_tables()
        if tables.taps is not None:
            window = torch.cat([state.initial["inputs"].to(u.dtype), u[:, None]], dim=1)
            y = (window.unsqueeze(1) * tables.taps).sum(2) + self.D * u[:, None]  # [B, C, H]
            state.put("inputs", window[:, 1:])
            return y.flatten(1).unsqueeze(1)
        assert tables.decay is not None
        z = torch.view_as_complex(state.initial["ssm"])
        position = state.initial.get("position")
        decay, drive, readout = tables.decay, None, tables.modes.readout
        if position is not None:
            unknown = torch.compiler.is_compiling() and not self._tables.is_constant
            if tables.growing is not None or unknown:
                drive, readout = self._growing_step(tables, position)
        y, z = _diagonal_step(u, z, decay, drive, readout, self.D)
        state.put("ssm", torch.view_as_real(z))
        if position is not None:
            state.put("position", position + 1)  # in the order of a prompt: graphs look at it
        return y.flatten(1).unsqueeze(1)

    def _growing_step(self, tables: _Tables, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return drive ``[R, H, N]`` and read-out ``[C, R, H, N]``; R is B, or 1 if rows agree."""
        modes = tables.modes
        assert modes.norm_length is not None
        if torch.compiler.is_compiling():  # a graph has no values to look at
            if not torch.compiler.is_exporting():  # ONNX has no assertions
                _check_reach_in_graph(position + 1, modes)
            grows = beside(cast(Tensor, modes.grows), modes.exponent)
            exponent = torch.where(grows, modes.exponent, 0)  # [H, N]
            if tables.growing is not None:  # an index error says that there are no such positions
                position = torch.arange(modes.norm_length, device=position.device)[position]
            k = position[:, None, None]
            left = powers(exponent, modes.norm_length - 1 - k, modes.readout)
            return powers(exponent, k, modes.readout), modes.readout[:, None] * left
        assert tables.decay is not None
        assert tables.growing is not None
        positions = cast(list[int], position.tolist())
        _check_reach(max(positions, default=-1) + 1, modes, self)
        if len(set(positions)) == 1:
            positions = positions[:1]
        drive = torch.ones_like(tables.decay).repeat(len(positions), 1, 1)
        readout = modes.readout[:, None].repeat(1, len(positions), 1, 1)
        for row, k in enumerate(positions):
            drive[row, :, tables.growing] = tables.power(k)
            readout[:, row, :, tables.growing] *= tables.power(modes.norm_length - 1 - k)
        return drive, readout

    def _decode_tables(self) -> _Tables:
        """Return the tables of a step, computed once until parameters change."""
        config = self.config
        settings = (config.kernel_norm_length, config.max_kernel_length, config.softmax_eps)
        return self._tables.get(self, settings, self._make_tables)

    @torch.no_grad()
    def _make_tables(self) -> _Tables:
        cap = self.config.max_kernel_length
        modes = self.modes(0)
        meta = modes.readout.is_meta  # values that nobody can look at
        if not meta and not torch.compiler.is_compiling():
            _check_finite(modes, self)
        if cap is not None:
            taps = modes.kernel(cap).flip(-1).transpose(1, 2).contiguous()  # [C, K, H]
            return _Tables(modes, taps=taps)
        decay = torch.exp(modes.exponent).to(modes.readout)
        if torch.compiler.is_compiling() and modes.grows is not None:
            return _Tables(modes, torch.where(modes.grows, 1.0, decay))
        if modes.grows is None or meta or not bool(modes.grows.any()):
            return _Tables(modes, decay)
        assert modes.norm_length is not None
        growing = modes.grows.nonzero().flatten()
        decay = torch.where(modes.grows, 1.0, decay)
        c = modes.exponent[:, beside(growing, modes.exponent)]
        # e^{c k} for every k as a product of two: k = high * count + low
        count = 1 << (modes.norm_length.bit_length() + 1) // 2
        steps = torch.arange(count, device=c.device)[:, None, None]
        low = powers(c, steps, decay)  # [count, H, G]
        high = powers(c, steps[: -(-modes.norm_length // count)] * count, decay)
        return _Tables(modes, decay, growing, low, high)


def _longest(packing: Sequences, config: DSSConfig) -> int:
    """Return the length of the longest packed sequence, as if they were padded.

    In a graph, which cannot look it up, it is the row's, unless the kernel depends on it.
    """
    if config.decodable and torch.compiler.is_compiling():
        return packing.length
    return packing.longest()


def _check_reach(end: int, modes: Modes, mixer: DSSMixer) -> None:
    assert modes.grows is not None
    assert modes.norm_length is not None
    if end > modes.norm_length:
        worst = int(mixer.eigenvalues().real.argmax())
        raise ValueError(
            f"kernel_norm_length must cover all tokens, {end}, where a mode grows: got "
            f"{modes.norm_length}, and {int(modes.grows.sum())} modes of layer "
            f"{mixer.layer_idx} grow, mode {worst} fastest; set a longer kernel_norm_length "
            "and train on, or use the variant 'exp'"
        )


def _check_reach_in_graph(reached: Tensor, modes: Modes) -> None:
    """Fail like :func:`_check_reach` as a graph runs, on a GPU after it."""
    assert modes.grows is not None
    assert modes.norm_length is not None
    torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
        (reached <= modes.norm_length).all() | ~modes.grows.any(),
        "kernel_norm_length must cover all tokens where a mode grows, and a layer read more; "
        "set a longer kernel_norm_length and train on, or use the variant 'exp'",
    )


def _check_finite(modes: Modes, mixer: DSSMixer) -> None:
    for name, tensor in (("log_dt * Lambda", modes.exponent), ("W", modes.readout)):
        wrong = ~tensor.isfinite()
        if bool(wrong.any()):
            place = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"{name} must be finite, got {tensor[tuple(place)].item()} in layer "
                f"{mixer.layer_idx}, feature {place[-2]}, mode {place[-1]}"
            )
    wrong = ~mixer.D.isfinite()
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"D must be finite, got {float(mixer.D[tuple(place)])} in layer {mixer.layer_idx}, "
            f"feature {place[-1]}"
        )


def _diagonal_step(
    u: Tensor,  # [B, H]
    z: Tensor,  # [B, H, N]
    decay: Tensor,  # [H, N]
    drive: Tensor | None,  # [R, H, N], R is 1 or B
    readout: Tensor,  # [C, H, N] or [C, R, H, N]
    D: Tensor,  # [C, H]
) -> tuple[Tensor, Tensor]:
    """Step and read every channel: ``[B, C, H]`` and the new state."""
    if drive is None or (not torch.compiler.is_compiling() and drive.shape[0] == 1):
        own = None if drive is None else drive[0]
        readout = readout if drive is None else readout[:, 0]
        y, z = diagonal_step(u, z, decay, own, readout[0], D[0])
        if len(D) == 1:
            return y.unsqueeze(1), z
        others = torch.einsum("chn,bhn->bch", readout[1:], z).real + D[1:] * u.unsqueeze(1)
        return torch.cat([y.unsqueeze(1), others], dim=1), z
    z = decay * z + drive * u.unsqueeze(-1)
    return (readout * z).real.sum(-1).transpose(0, 1) + D * u.unsqueeze(1), z


class DSSPreTrainedModel(SSMPreTrainedModel):
    """Loading and initialisation of DSS models."""

    config: DSSConfig

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the initial parameters.

        =================== ===================================================
        embedding           N(0, initializer_range^2)
        norms               1, biases 0
        ``log_dt``          U(ln dt_min, ln dt_max), one draw for both columns
        eigenvalues         lambda_init
        ``W``               real and imaginary parts N(0, 1)
        ``D``               N(0, 1)
        ``out_proj``        U(+-1/sqrt(C * H)), bias 0
        classifier          U(+-1/sqrt(H)), bias 0
        =================== ===================================================
        """
        super()._init_weights(module)
        if isinstance(module, DSSMixer):
            self._init_mixer(module)

    def _init_mixer(self, mixer: DSSMixer) -> None:
        config, variant = self.config, self.config.kernel_variant
        steps = torch.empty(config.hidden_size, device="cpu")
        steps.uniform_(math.log(config.dt_min), math.log(config.dt_max))
        init.copy_(mixer.log_dt, steps if mixer.log_dt.dim() == 1 else steps[:, None].expand(-1, 2))
        free = variant in ("softmax", "clip")
        real, imag = initial_eigenvalues(config.d_state, config.lambda_init, not free)
        if free:
            init.copy_(mixer.Lambda, torch.stack([real, imag], dim=-1))
        else:
            init.copy_(mixer.Lambda_log_neg_re, real.neg().log())
            init.copy_(mixer.Lambda_im, imag.log() if variant == "exp_re_im" else imag)
        init.normal_(mixer.W)
        init.normal_(mixer.D)


class DSSModel(DSSPreTrainedModel, SSMModel):
    """DSS's backbone."""

    mixer_class = DSSMixer


DSSForCausalLM = SSMForCausalLM.of(DSSModel)
DSSForImageClassification = SSMForImageClassification.of(DSSModel)
DSSForSequenceClassification = SSMForSequenceClassification.of(DSSModel)
DSSForTokenClassification = SSMForTokenClassification.of(DSSModel)
DSSForPairClassification = SSMForPairClassification.of(DSSModel)
